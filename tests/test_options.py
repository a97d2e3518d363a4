"""FastEmit, clamp, reductions, upstream gradients and zero_infinity, in both forms."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flash_rnnt_cupy import validate
from tests.conftest import BackendUnderTest
from tests.oracles.checks import assert_close
from tests.problems import REDUCTIONS, Array, draw_joint, draw_logits

# what a loss of each utterance weighs in the reduced one, B = 4 utterances, U = 3, 4, 0, 2 labels
WEIGHTS = {
    "none": np.array([1, 1, 1, 1]),
    "sum": np.array([1, 1, 1, 1]),
    "mean": np.array([1, 1, 1, 1]) / 4,
    "mean_volume": np.array([1, 1, 1, 1]) / (3 + 4 + 0 + 2),
    "mean_per_label": np.array([1 / 3, 1 / 4, 1 / 1, 1 / 2]) / 4,
}


def reduced(losses: Array, reduction: str) -> Array:
    return losses if reduction == "none" else (WEIGHTS[reduction] * losses).sum()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(backend: BackendUnderTest, reduction: str) -> None:
    joint, logits = draw_joint(), draw_logits()
    truth = joint.truth(upstream=WEIGHTS[reduction])
    losses, gradients = backend.joint(joint, reduction=reduction)
    backend.assert_near(losses, reduced(truth.losses, reduction), "float64")
    backend.assert_gradients(gradients, truth, "float64")
    truth = logits.truth(upstream=WEIGHTS[reduction])
    losses, gradient = backend.logits(logits, reduction=reduction)
    backend.assert_near(losses, reduced(truth.losses, reduction), "float64")
    backend.assert_near(gradient, truth.gradients["logits"], "float64")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_docstring_of_the_reductions_is_what_is_computed(reduction: str) -> None:
    labels_b = np.array([3, 4, 1, 2])
    weights = validate.reduction_weights(reduction, labels_b)
    if reduction == "none":
        assert weights is None
        return
    lines = re.findall(r"^ +(\w+)  +(\S.*)$", str(validate.reduction_weights.__doc__), re.MULTILINE)
    formula = dict(lines)[reduction].replace("sum of U_b", "U_b.sum()").replace("B U_b", "B * U_b")
    expected = eval(formula, {"B": 4, "U_b": labels_b})
    np.testing.assert_array_equal(weights, np.broadcast_to(expected, 4))


@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_volume", "mean_per_label"])
@pytest.mark.parametrize("labels", [(3, 0), (0, 0)])
def test_reductions_of_empty_transcripts_are_finite(
    backend: BackendUnderTest, labels: tuple[int, ...], reduction: str
) -> None:
    problem = draw_joint((4, 2), labels)
    loss, gradients = backend.joint(problem, reduction=reduction)
    assert np.isfinite(loss)
    assert all(np.isfinite(getattr(gradients, name)).all() for name in ("encoder", "predictor", "weight", "bias"))


UPSTREAMS = [[1, 10, 0.1, 3], [0, 1, 0, -2], [0, 0, 0, 0], [-1, -1, -1, -1], [2.0**16] * 4]


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("clamp", [None, 0.05])
def test_upstream_gradients_of_each_loss(backend: BackendUnderTest, clamp: float | None, upstream: list[float]) -> None:
    joint, logits = draw_joint(), draw_logits()
    _, gradients = backend.joint(joint, grad_losses=np.array(upstream), clamp=clamp)
    backend.assert_gradients(gradients, joint.truth(upstream=upstream, clamp=clamp), "float64")
    _, gradient = backend.logits(logits, grad_losses=np.array(upstream), clamp=clamp)
    expected = logits.truth(upstream=upstream, clamp=clamp).gradients["logits"]
    backend.assert_near(gradient, expected, "float64")


@pytest.mark.parametrize("given", [2.5, 3, np.float32(-1.5), np.array(0.0)])
@pytest.mark.parametrize("reduction", ["sum", "mean_per_label"])
def test_a_scalar_upstream_gradient_scales_everything(backend: BackendUnderTest, reduction: str, given: object) -> None:
    joint = draw_joint()
    _, gradients = backend.joint(joint, reduction=reduction, grad_losses=given)
    truth = joint.truth(upstream=float(given) * WEIGHTS[reduction])  # type: ignore[arg-type]
    backend.assert_gradients(gradients, truth, "float64")


@pytest.mark.parametrize("scale", [1.0, 2.0**16, -1.0, 0.0])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clamp_clips_both_sides_at_unit_upstream(
    backend: BackendUnderTest, dtype: str, reduction: str, scale: float
) -> None:
    problem, clamp = draw_logits(dtype=dtype), 0.01
    upstream = np.full(4, scale) if reduction == "none" else np.array(scale)
    losses, gradient = backend.logits(problem, clamp=clamp, reduction=reduction, grad_losses=upstream)
    truth = problem.truth(upstream=scale * WEIGHTS[reduction], clamp=clamp)
    backend.assert_near(losses, reduced(truth.losses, reduction), dtype)
    backend.assert_near(gradient, truth.gradients["logits"], dtype)
    at_unit = np.sort([-clamp * scale * WEIGHTS[reduction][0], clamp * scale * WEIGHTS[reduction][0]])
    assert_close([gradient.min(), gradient.max()], at_unit, rtol=1e-6, atol=0)


@pytest.mark.parametrize("off", [None, 0, -1.0])
def test_clamp_is_off_at_none_and_below(backend: BackendUnderTest, off: float | None) -> None:
    problem = draw_logits(scale=5)
    _, expected = backend.logits(problem)
    _, gradient = backend.logits(problem, clamp=off)
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("fastemit_lambda", [0.01, 0.5, 3.0])
def test_fastemit_scales_label_posteriors_before_the_softmax(backend: BackendUnderTest, fastemit_lambda: float) -> None:
    joint, logits = draw_joint(), draw_logits()
    truth = joint.truth(fastemit_lambda=fastemit_lambda)
    losses, gradients = backend.joint(joint, fastemit_lambda=fastemit_lambda)
    backend.assert_near(losses, joint.truth().losses, "float64")  # the loss stays the plain NLL
    backend.assert_gradients(gradients, truth, "float64")
    for fused_log_softmax in (True, False):
        options = {"fastemit_lambda": fastemit_lambda, "fused_log_softmax": fused_log_softmax}
        _, gradient = backend.logits(logits, **options)
        backend.assert_near(gradient, logits.truth(**options).gradients["logits"], "float64")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_fastemit_of_zero_is_bitwise_the_plain_gradient(backend: BackendUnderTest, dtype: str) -> None:
    joint, logits = draw_joint(dtype=dtype), draw_logits(dtype=dtype)
    plain, given = backend.joint(joint)[1], backend.joint(joint, fastemit_lambda=0.0)[1]
    for name in ("encoder", "predictor", "weight", "bias"):
        np.testing.assert_array_equal(getattr(given, name), getattr(plain, name))
    np.testing.assert_array_equal(backend.logits(logits, fastemit_lambda=0)[1], backend.logits(logits)[1])


@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.5])
@pytest.mark.parametrize("clamp", [None, 0.02])
def test_fastemit_and_clamp_together(backend: BackendUnderTest, clamp: float | None, fastemit_lambda: float) -> None:
    joint = draw_joint()
    options = {"clamp": clamp, "fastemit_lambda": fastemit_lambda}
    _, gradients = backend.joint(joint, tile_rows=4, **options)
    backend.assert_gradients(gradients, joint.truth(**options), "float64")


@pytest.mark.parametrize("zero_infinity", [True, False])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_an_utterance_without_alignment(backend: BackendUnderTest, reduction: str, zero_infinity: bool) -> None:
    problem = draw_logits((4, 3), (2, 2), V=5)
    problem.logits[0, :, :, problem.targets[0, 1]] = -np.inf  # its last label, everywhere
    losses, gradient = backend.logits(problem, reduction=reduction, zero_infinity=zero_infinity)
    second = problem.pick([1]).truth()
    alone = 0.0 if zero_infinity else np.inf
    expected = np.array([alone, second.losses[0]])
    backend.assert_near(losses, expected if reduction == "none" else expected.sum(), "float64")
    np.testing.assert_array_equal(gradient[0], 0)
    backend.assert_near(gradient[1, :3], second.gradients["logits"][0], "float64")
