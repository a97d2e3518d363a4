"""Large lattices in closed form, extreme scores, masked classes, and NaN kept to its utterance."""

from __future__ import annotations

import numpy as np
import pytest

from flash_rnnt_cupy import reference
from tests.conftest import BackendUnderTest
from tests.oracles.checks import assert_close
from tests.oracles.closed_forms import UNIFORM_RNNT_NLL, rnnt_nll, rnnt_posteriors
from tests.problems import Joint, Logits, draw_joint, draw_logits, epsilon, joint_of_logits, uniform_logits

# of sum over u of the blank's posterior in a frame, which is 1; plain float32 log-space is off by 2.5e-1
POSTERIOR_SUM_ATOL = {"float64": 1e-9, "float32": 1e-5}


def flat_joint(T: int, U: int, V: int) -> Joint:
    """All logits zero, with one hidden unit."""
    return Joint(
        encoder=np.zeros((1, T, 1), np.float32),
        predictor=np.zeros((1, U + 1, 1), np.float32),
        weight=np.zeros((V, 1), np.float32),
        bias=None,
        targets=np.zeros((1, U), np.int64),
        frames=np.array([T]),
        labels=np.array([U]),
    )


@pytest.mark.parametrize(("T", "U", "V", "expected"), UNIFORM_RNNT_NLL)
def test_the_table_of_uniform_losses(backend: BackendUnderTest, T: int, U: int, V: int, expected: float) -> None:
    loss = backend.joint_loss(flat_joint(T, U, V))
    assert_close(loss, [expected], rtol=1e-6, atol=5e-5)
    assert_close(loss, [rnnt_nll(T, U, V)], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("T", "U"), [(200, 50), (500, 100), (2000, 400)])
def test_posteriors_of_large_uniform_lattices(backend: BackendUnderTest, T: int, U: int, dtype: str) -> None:
    V = 2  # of log-probabilities of V = 1024 scores, only those of blank and label are looked at
    problem = uniform_logits(T, U, V, dtype=dtype)
    problem.logits[...] = -np.log(1024)
    losses, gradient = backend.logits(problem, fused_log_softmax=False)
    assert_close(losses, [rnnt_nll(T, U, 1024)], rtol=1e-6 if dtype == "float32" else 1e-12, atol=0)
    blank, label = -gradient[0, ..., 1].astype(np.float64), -gradient[0, :, :U, 0].astype(np.float64)
    atol = POSTERIOR_SUM_ATOL[dtype]
    assert_close(blank.sum(1), np.ones(T), rtol=0, atol=atol)
    assert_close(label.sum(0), np.ones(U), rtol=0, atol=atol)
    expected_blank, expected_label = rnnt_posteriors(T, U)
    assert_close(blank, expected_blank, rtol=0, atol=atol)
    assert_close(label, expected_label[:, :U], rtol=0, atol=atol)


def test_the_loss_of_a_very_large_lattice(backend: BackendUnderTest) -> None:
    losses = backend.logits_loss(uniform_logits(6000, 1500, 2, dtype="float32"))
    assert_close(losses, [rnnt_nll(6000, 1500, 2)], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_huge_scores_are_exact_to_their_rounding(backend: BackendUnderTest, dtype: str) -> None:
    problem, rng = draw_logits((6, 4), (3, 5), dtype=dtype), np.random.default_rng(4)
    huge = rng.choice([-60000, 0, 60000], problem.logits.shape, p=[0.2, 0.6, 0.2])
    problem = problem.replace(logits=np.where(huge, huge, problem.logits).astype(problem.logits.dtype))
    problem.logits[~problem.valid()] = np.nan
    truth = problem.truth()
    losses, gradient = backend.logits(problem)
    rounding = 2 * epsilon("float32") * 60000  # of one normalised score
    assert_close(losses, truth.losses, rtol=1e-6, atol=9 * rounding)
    assert_close(gradient, truth.gradients["logits"], rtol=0, atol=2 * 9 * rounding)


def test_large_differences_do_not_underflow(backend: BackendUnderTest) -> None:
    problem = draw_joint((5,), (3,), H=2, V=4, dtype="float32")
    encoder, predictor = np.zeros((1, 5, 2), np.float32), np.zeros((1, 4, 2), np.float32)
    encoder[..., 0], predictor[..., 1] = 200, 200  # peaks at different classes
    weight = np.eye(4, 2, dtype=np.float32)
    problem = problem.replace(encoder=encoder, predictor=predictor, weight=weight, bias=None)
    truth = problem.truth()
    losses, gradients = backend.joint(problem)
    backend.assert_near(losses, truth.losses, "float32")
    backend.assert_gradients(gradients, truth, "float32")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_masked_classes_are_absent(backend: BackendUnderTest, dtype: str) -> None:
    kept = draw_logits(V=5, blank=0, dtype=dtype)
    masked = kept.replace(
        logits=np.concatenate([kept.logits, np.full((*kept.logits.shape[:3], 3), -np.inf, kept.logits.dtype)], -1)
    )
    expected_losses, expected = backend.logits(kept)
    losses, gradient = backend.logits(masked)
    backend.assert_near(losses, expected_losses, "float64" if dtype == "float64" else "float32")
    backend.assert_near(gradient[..., :5], expected, dtype)
    np.testing.assert_array_equal(gradient[..., 5:], 0)


def test_masked_classes_through_the_bias(backend: BackendUnderTest) -> None:
    kept = draw_joint(V=5, blank=0)
    masked = kept.replace(
        weight=np.concatenate([kept.weight, np.ones((3, 5))]), bias=np.concatenate([kept.bias, np.full(3, -np.inf)])
    )
    expected_losses, expected = backend.joint(kept)
    losses, gradients = backend.joint(masked)
    backend.assert_near(losses, expected_losses, "float64")
    for name in ("encoder", "predictor"):
        backend.assert_near(getattr(gradients, name), getattr(expected, name), "float64")
    for name in ("weight", "bias"):
        backend.assert_near(getattr(gradients, name)[:5], getattr(expected, name), "float64")
        np.testing.assert_array_equal(getattr(gradients, name)[5:], 0)


def with_impossible_arcs(problem: Logits, cells: list[tuple[int, int, str]]) -> Logits:
    """-inf for the blank, the label or every class at (t, u) of utterance 0."""
    logits = problem.logits.copy()
    for t, u, what in cells:
        v = {"blank": problem.blank, "label": problem.targets[0, min(u, problem.labels[0] - 1)], "row": slice(None)}
        logits[0, t, u, v[what]] = -np.inf
    return problem.replace(logits=logits)


@pytest.mark.parametrize(
    "cells",
    [[(2, 1, "blank")], [(1, 2, "label")], [(2, 1, "blank"), (2, 1, "label"), (0, 0, "label")], [(2, 1, "row")]],
    ids=str,
)
def test_single_impossible_arcs_are_avoided(backend: BackendUnderTest, cells: list[tuple[int, int, str]]) -> None:
    whole = draw_logits((5, 3), (3, 2))
    problem = with_impossible_arcs(whole, cells)
    losses, gradient = backend.logits(problem)

    log_probs = reference.log_softmax(np.where(np.isfinite(problem.logits), problem.logits, -1e300)[0])
    log_probs[~np.isfinite(problem.logits[0])] = -np.inf
    unfused = reference.rnnt_loss(log_probs, problem.targets[0], 6, fused_log_softmax=False)
    to_log_probs = unfused.gradient
    expected = to_log_probs - np.exp(log_probs) * to_log_probs.sum(-1, keepdims=True)
    backend.assert_near(losses[0], unfused.loss, "float64")
    assert_close(gradient[0], expected, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(gradient[1], backend.logits(whole)[1][1])
    np.testing.assert_array_equal(gradient[0][~np.isfinite(problem.logits[0])], 0)


@pytest.mark.parametrize("cells", [[(0, 0, "row")], [(4, 3, "row")], [(4, 3, "blank")]], ids=str)
def test_an_unavoidable_impossible_arc_makes_the_loss_infinite(
    backend: BackendUnderTest, cells: list[tuple[int, int, str]]
) -> None:
    whole = draw_logits((5, 3), (3, 2))
    losses, gradient = backend.logits(with_impossible_arcs(whole, cells))
    assert losses[0] == np.inf
    np.testing.assert_array_equal(gradient[0], 0)
    np.testing.assert_array_equal(losses[1], backend.logits(whole)[0][1])
    np.testing.assert_array_equal(gradient[1], backend.logits(whole)[1][1])


@pytest.mark.parametrize("fused_log_softmax", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_broken_score_breaks_its_utterance_alone(
    backend: BackendUnderTest, dtype: str, value: float, fused_log_softmax: bool
) -> None:
    whole = draw_logits((5, 4, 3), (3, 2, 1), dtype=dtype)
    broken = whole.replace(logits=whole.logits.copy())
    broken.logits[1, 2, 1, -1] = value
    losses, gradient = backend.logits(broken, fused_log_softmax=fused_log_softmax)
    expected_losses, expected = backend.logits(whole, fused_log_softmax=fused_log_softmax)
    assert np.isnan(losses[1])
    assert np.isnan(gradient[1]).any()
    np.testing.assert_array_equal(losses[[0, 2]], expected_losses[[0, 2]])
    np.testing.assert_array_equal(gradient[[0, 2]], expected[[0, 2]])
    assert not gradient[~whole.valid()].any()


@pytest.mark.parametrize("where", ["encoder", "predictor"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_state_breaks_its_utterance_alone(backend: BackendUnderTest, value: float, where: str) -> None:
    whole = draw_joint((5, 4, 3), (3, 2, 1))
    states = getattr(whole, where).copy()
    states[1, 1, 2] = value
    losses, gradients = backend.joint(whole.replace(**{where: states}), tile_rows=6, min_occupancy=1e-8)
    expected_losses, expected = backend.joint(whole, tile_rows=6)
    assert np.isnan(losses[1])
    assert np.isnan(gradients.encoder[1]).any()
    backend.assert_near(losses[[0, 2]], expected_losses[[0, 2]], "float64")
    backend.assert_near(gradients.encoder[[0, 2]], expected.encoder[[0, 2]], "float64")
    backend.assert_near(gradients.predictor[[0, 2]], expected.predictor[[0, 2]], "float64")


def test_zero_infinity_leaves_nan_alone(backend: BackendUnderTest) -> None:
    problem = draw_logits((5, 3), (3, 2))
    problem.logits[0, 1, 1, 0] = np.nan
    assert np.isnan(backend.logits_loss(problem, zero_infinity=True)[0])


def test_half_precision_gradients_are_rounded_once(backend: BackendUnderTest) -> None:
    problem = draw_joint([60] * 8, [20] * 8, H=8, V=6, dtype="float16", scale=0.1)
    truth = problem.truth(upstream=20.0)
    _, gradients = backend.joint(problem, grad_losses=np.full(8, 20.0), tile_rows=21)  # a tile a frame
    backend.assert_gradients(gradients, truth, "float16", factor=4)


def test_a_gradient_beyond_the_range_of_its_dtype_is_infinite(backend: BackendUnderTest) -> None:
    problem = draw_joint(dtype="float16")
    _, gradients = backend.joint(problem, grad_losses=np.full(4, 1e6))
    assert np.isinf(np.asarray(gradients.bias)).any()
    assert not np.isnan(np.asarray(gradients.bias)).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_cell_of_a_medium_lattice(backend: BackendUnderTest, dtype: str) -> None:
    logits = draw_logits((37,), (23,), V=6, scale=1, dtype=dtype)
    truth = logits.truth()
    losses, gradients = backend.joint(joint_of_logits(logits), tile_rows=100)
    backend.assert_near(losses, truth.losses, dtype)
    expected = truth.gradients["logits"][0].reshape(-1, 6).T
    backend.assert_near(gradients.weight, expected, dtype)
