"""What must hold for any input, without a reference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import BackendUnderTest
from tests.oracles.checks import assert_close
from tests.problems import FRAMES, LABELS, Joint, draw_joint, draw_logits, pack

GRADIENTS = ("encoder", "predictor", "weight", "bias")

batches = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=4)
seeds = st.integers(0, 1000)


def assert_same_bits(first: Any, second: Any) -> None:
    np.testing.assert_array_equal(first[0], second[0])
    for name in GRADIENTS:
        np.testing.assert_array_equal(getattr(first[1], name), getattr(second[1], name), err_msg=name)


@given(batch=batches, seed=seeds, tile_rows=st.one_of(st.none(), st.integers(1, 60)), dropout=st.sampled_from([0, 0.3]))
def test_tile_size(
    backend: BackendUnderTest, batch: list[tuple[int, int]], seed: int, tile_rows: int | None, dropout: float
) -> None:
    problem = draw_joint(*zip(*batch, strict=True), H=4, V=5, seed=seed)
    options = {"dropout": dropout, "seed": 3, "activation": "tanh"}
    losses, gradients = backend.joint(problem, tile_rows=tile_rows, **options)
    expected_losses, expected = backend.joint(problem, **options)
    backend.assert_near(losses, expected_losses, "float64")
    for name in GRADIENTS:
        backend.assert_near(getattr(gradients, name), getattr(expected, name), "float64", names=name)


@given(batch=batches, seed=seeds, padding=st.integers(1, 9), tile_rows=st.integers(1, 60))
def test_padding(
    backend: BackendUnderTest, batch: list[tuple[int, int]], seed: int, padding: int, tile_rows: int
) -> None:
    sizes = tuple(zip(*batch, strict=True))
    tight = draw_joint(*sizes, seed=seed)
    wide = poisoned(tight, padding)
    losses, gradients = backend.joint(wide, tile_rows=tile_rows)
    expected_losses, expected = backend.joint(tight, tile_rows=tile_rows)
    np.testing.assert_array_equal(losses, expected_losses)
    T, U1 = tight.encoder.shape[1], tight.predictor.shape[1]
    np.testing.assert_array_equal(gradients.encoder[:, :T], expected.encoder)
    np.testing.assert_array_equal(gradients.predictor[:, :U1], expected.predictor)
    assert not np.any(gradients.encoder[:, T:])
    assert not np.any(gradients.predictor[:, U1:])
    for b, (T, U) in enumerate(batch):
        assert not np.any(gradients.encoder[b, T:])
        assert not np.any(gradients.predictor[b, U + 1 :])


def poisoned(tight: Joint, padding: int) -> Joint:
    """The same with more padding, of +inf, NaN and labels that are none."""
    steps = ((0, 0), (0, padding), (0, 0))
    encoder = np.pad(tight.encoder, steps, constant_values=np.inf)
    predictor = np.pad(tight.predictor, steps, constant_values=-np.inf)
    encoder[np.isnan(encoder)] = np.inf
    return tight.replace(
        encoder=encoder, predictor=predictor, targets=np.pad(tight.targets, steps[:2], constant_values=2**40)
    )


def test_padding_of_logits(backend: BackendUnderTest) -> None:
    tight = draw_logits()
    expected_losses, expected = backend.logits(tight)
    for fill in (np.nan, np.inf, -np.inf, 0.0):
        wide = tight.replace(
            logits=np.pad(tight.logits, ((0, 0), (0, 3), (0, 2), (0, 0)), constant_values=fill),
            targets=np.pad(tight.targets, ((0, 0), (0, 2)), constant_values=-9),
        )
        wide.logits[~wide.valid()] = fill
        losses, gradient = backend.logits(wide)
        np.testing.assert_array_equal(losses, expected_losses)
        np.testing.assert_array_equal(gradient[:, : FRAMES[2], : LABELS[1] + 1], expected)
        assert not gradient[~wide.valid()].any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_batch_is_its_utterances_bit_for_bit(backend: BackendUnderTest, dtype: str) -> None:
    problem = draw_logits((5, 1, 8, 3, 40), (3, 4, 0, 2, 33), V=37, dtype=dtype)
    losses, gradient = backend.logits(problem)
    for b in range(5):
        alone_losses, alone = backend.logits(problem.pick([b]))
        np.testing.assert_array_equal(alone_losses, losses[b : b + 1])
        np.testing.assert_array_equal(alone[0], gradient[b, : problem.frames[b], : problem.labels[b] + 1])


@given(batch=batches, seed=seeds)
def test_a_batch_is_its_utterances(backend: BackendUnderTest, batch: list[tuple[int, int]], seed: int) -> None:
    problem = draw_joint(*zip(*batch, strict=True), seed=seed)
    losses, gradients = backend.joint(problem)
    weight, bias = np.zeros(problem.weight.shape), np.zeros(len(problem.weight))
    for b, (T, U) in enumerate(batch):
        alone_losses, alone = backend.joint(problem.pick([b]))
        backend.assert_near(alone_losses, losses[b : b + 1], "float64")
        backend.assert_near(alone.encoder[0], gradients.encoder[b, :T], "float64")
        backend.assert_near(alone.predictor[0], gradients.predictor[b, : U + 1], "float64")
        weight += alone.weight
        bias += alone.bias
    backend.assert_near(weight, gradients.weight, "float64")
    backend.assert_near(bias, gradients.bias, "float64")


@given(order=st.permutations(range(4)), tile_rows=st.integers(1, 60))
def test_permuted_utterances_give_permuted_results(backend: BackendUnderTest, order: list[int], tile_rows: int) -> None:
    problem = draw_joint()
    losses, gradients = backend.joint(problem.pick(order), tile_rows=tile_rows)
    expected_losses, expected = backend.joint(problem, tile_rows=tile_rows)
    backend.assert_near(losses, expected_losses[order], "float64")
    backend.assert_near(gradients.encoder, expected.encoder[order], "float64")
    backend.assert_near(gradients.predictor, expected.predictor[order], "float64")
    backend.assert_near(gradients.weight, expected.weight, "float64")
    backend.assert_near(gradients.bias, expected.bias, "float64")


def test_a_constant_added_to_a_cell_changes_nothing(backend: BackendUnderTest) -> None:
    problem = draw_logits()
    shift = 10 * np.random.default_rng(1).normal(size=(*problem.logits.shape[:3], 1))
    expected_losses, expected = backend.logits(problem)
    losses, gradient = backend.logits(problem.replace(logits=problem.logits + shift))
    assert_close(losses, expected_losses, rtol=1e-13, atol=1e-13)
    assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.5])
def test_the_gradient_of_each_cell_sums_to_zero(backend: BackendUnderTest, fastemit_lambda: float, dtype: str) -> None:
    problem = draw_logits(dtype=dtype)
    _, gradient = backend.logits(problem, fastemit_lambda=fastemit_lambda)
    sums = gradient.sum(-1)
    assert_close(sums, np.zeros(sums.shape), rtol=0, atol=8 * float(np.finfo(dtype).eps))


@given(batch=batches, seed=seeds, scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_posteriors_sum_to_one_in_every_frame_and_for_every_label(
    backend: BackendUnderTest, batch: list[tuple[int, int]], seed: int, scale: float
) -> None:
    problem = draw_logits(*zip(*batch, strict=True), seed=seed, scale=scale).as_log_probs()
    _, gradient = backend.logits(problem, fused_log_softmax=False)
    posterior = -gradient
    for b, (T, U) in enumerate(batch):
        blank = posterior[b, :T, : U + 1, -1]
        assert_close(blank.sum(1), np.ones(T), rtol=0, atol=1e-12)
        for u in range(U):
            assert_close(posterior[b, :T, u, problem.targets[b, u]].sum(), 1.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1, 10, 100])
def test_losses_are_never_negative(backend: BackendUnderTest, scale: float, dtype: str) -> None:
    for seed in range(5):
        assert (backend.logits_loss(draw_logits(dtype=dtype, scale=scale, seed=seed)) >= 0).all()
        assert (backend.joint_loss(draw_joint(dtype=dtype, scale=scale, seed=seed)) >= 0).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_repeated_calls_give_the_same_bits(backend: BackendUnderTest, dtype: str) -> None:
    problem = draw_joint((40, 17, 33), (12, 30, 5), H=33, V=50, dtype=dtype)
    options = {"tile_rows": 100, "dropout": 0.1, "seed": 1}
    first = backend.joint(problem, **options)
    for _ in range(5):
        assert_same_bits(backend.joint(problem, **options), first)


def test_inputs_are_not_modified(backend: BackendUnderTest) -> None:
    seen: list[Any] = []

    def watch(module: ModuleType, array: Any) -> Any:
        seen.append((array, module.array(array)))
        return array

    joint, logits = draw_joint(dtype="float32"), draw_logits(dtype="float32")
    targets, lengths = joint.targets.copy(), [joint.frames.copy(), joint.labels.copy()]
    backend.joint(joint, clamp=0.1, tile_rows=3, layout=watch)
    backend.logits(logits, clamp=0.1, layout=watch)
    backend.logits(logits, fused_log_softmax=False, layout=watch)
    assert len(seen) == 6
    for array, before in seen:
        assert array.tobytes() == before.tobytes()
    np.testing.assert_array_equal(joint.targets, targets)
    np.testing.assert_array_equal([joint.frames, joint.labels], lengths)


@given(batch=batches, seed=seeds, packed=st.sets(st.sampled_from(["encoder", "predictor", "targets"])))
def test_packing(backend: BackendUnderTest, batch: list[tuple[int, int]], seed: int, packed: set[str]) -> None:
    padded = draw_joint(*zip(*batch, strict=True), seed=seed, padding=1)
    losses, gradients = backend.joint(padded.packed(*packed))
    expected_losses, expected = backend.joint(padded)
    np.testing.assert_array_equal(losses, expected_losses)
    for name, count_b in (("encoder", padded.frames), ("predictor", padded.labels + 1)):
        wanted = getattr(expected, name)
        np.testing.assert_array_equal(getattr(gradients, name), pack(wanted, count_b) if name in packed else wanted)
