"""The joint form on every backend, against the float64 reference and against enumerated paths."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.conftest import BackendUnderTest
from tests.oracles import paths
from tests.problems import ACTIVATIONS, DTYPES, FRAMES, LABELS, REDUCTIONS, draw_joint

N_NODES = sum(T * (U + 1) for T, U in zip(FRAMES, LABELS, strict=True))
LONGEST = max(LABELS) + 1
# one row; a frame longer than a tile; a whole frame and its neighbours; all rows and their neighbours
TILE_ROWS = (1, 2, LONGEST - 1, LONGEST, LONGEST + 1, N_NODES - 1, N_NODES, N_NODES + 1, None, "auto")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_losses_and_gradients(backend: BackendUnderTest, activation: str, dtype: str) -> None:
    problem = draw_joint(dtype=dtype)
    truth = problem.truth(activation=activation)
    losses, gradients = backend.joint(problem, activation=activation)
    backend.assert_near(losses, truth.losses, dtype, names="losses")
    backend.assert_gradients(gradients, truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_rows", TILE_ROWS)
def test_tile_sizes(backend: BackendUnderTest, tile_rows: int | str | None, dtype: str) -> None:
    problem = draw_joint(dtype=dtype, seed=1)
    truth = problem.truth()
    losses, gradients = backend.joint(problem, tile_rows=tile_rows)
    backend.assert_near(losses, truth.losses, dtype, names="losses")
    backend.assert_gradients(gradients, truth, dtype)


@pytest.mark.parametrize(("dtype", "parameter_dtype"), list(product(DTYPES, DTYPES)))
def test_states_and_parameters_of_different_dtypes(backend: BackendUnderTest, dtype: str, parameter_dtype: str) -> None:
    problem = draw_joint(dtype=dtype, parameter_dtype=parameter_dtype)
    truth = problem.truth()
    losses, gradients = backend.joint(problem, tile_rows=4)
    assert losses.dtype == ("float64" if dtype == "float64" else "float32")
    assert gradients.encoder.dtype == gradients.predictor.dtype == problem.encoder.dtype
    assert gradients.weight.dtype == gradients.bias.dtype == problem.weight.dtype
    coarser = max((dtype, parameter_dtype), key=("float64", "float32", "float16", "bfloat16").index)
    backend.assert_near(losses, truth.losses, coarser, names="losses")
    backend.assert_gradients(gradients, truth, coarser)


@pytest.mark.parametrize("blank", [0, 3, 6, -1, -3, -7])
def test_blank_anywhere(backend: BackendUnderTest, blank: int) -> None:
    problem = draw_joint(blank=blank)
    truth = problem.truth()
    losses, gradients = backend.joint(problem)
    backend.assert_near(losses, truth.losses, "float64")
    backend.assert_gradients(gradients, truth, "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_bias(backend: BackendUnderTest, dtype: str) -> None:
    problem = draw_joint(dtype=dtype).replace(bias=None)
    truth = problem.truth()
    losses, gradients = backend.joint(problem, tile_rows=3)
    assert gradients.bias is None
    backend.assert_near(losses, truth.losses, dtype)
    backend.assert_gradients(gradients, truth, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_alone_is_the_loss_beside_gradients(backend: BackendUnderTest, reduction: str, dtype: str) -> None:
    problem = draw_joint(dtype=dtype)
    alone = backend.joint_loss(problem, reduction=reduction, tile_rows=4)
    beside, _ = backend.joint(problem, reduction=reduction, tile_rows=4)
    assert alone.dtype == beside.dtype == dtype
    np.testing.assert_array_equal(alone, beside)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_losses_are_those_of_the_paths(backend: BackendUnderTest, activation: str) -> None:
    problem = draw_joint((3, 2), (2, 3), H=3, V=4)
    expected = []
    for b, (T, U) in enumerate(zip(problem.frames, problem.labels, strict=True)):
        states = problem.encoder[b, :T], problem.predictor[b, : U + 1]
        logits = paths.joint_logits(*states, problem.weight, problem.bias, activation)
        expected.append(paths.nll(paths.rnnt(logits, problem.targets[b, :U].tolist(), 3)))
    losses = backend.joint_loss(problem, activation=activation)
    backend.assert_near(losses, expected, "float64")


@pytest.mark.parametrize("tile_rows", [1, 5, "auto"])
def test_a_workspace_budget_changes_nothing(backend: BackendUnderTest, tile_rows: int | str) -> None:
    problem = draw_joint()
    truth = problem.truth()
    row_bytes = (5 + 8) * 8 + 1  # with padded logits and active bits
    losses, gradients = backend.joint(problem, tile_rows=tile_rows, workspace_bytes=5 * row_bytes)
    backend.assert_near(losses, truth.losses, "float64")
    backend.assert_gradients(gradients, truth, "float64")


def test_untiled_and_dense_visit_every_node(backend: BackendUnderTest) -> None:
    problem = draw_joint(scale=5)
    for options in ({"tile_rows": None}, {"min_occupancy": 0}):
        _, gradients = backend.joint(problem, **options)
        assert (gradients.rows, gradients.nodes) == (N_NODES, N_NODES)
        assert gradients.dropped_posterior == 0


@pytest.mark.parametrize("packed", [["encoder"], ["predictor"], ["targets"], ["encoder", "predictor", "targets"]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_and_padded_in_any_mixture(backend: BackendUnderTest, packed: list[str], dtype: str) -> None:
    padded = draw_joint(dtype=dtype, padding=2)
    problem = padded.packed(*packed)
    losses, gradients = backend.joint(problem, tile_rows=4)
    expected_losses, expected = backend.joint(padded, tile_rows=4)
    np.testing.assert_array_equal(losses, expected_losses)
    packed_expected = padded.replace(encoder=expected.encoder, predictor=expected.predictor).packed(*packed)
    np.testing.assert_array_equal(gradients.encoder, packed_expected.encoder)
    np.testing.assert_array_equal(gradients.predictor, packed_expected.predictor)
    np.testing.assert_array_equal(gradients.weight, expected.weight)
    np.testing.assert_array_equal(gradients.bias, expected.bias)
