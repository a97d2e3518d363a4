"""`flash_rnnt_cupy.reference` against enumeration, closed forms, published values and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flash_rnnt_cupy import reference
from tests.oracles import closed_forms, finite_differences, paths, published
from tests.oracles.checks import assert_close
from tests.problems import ACTIVATIONS, Array

RNNT_EXAMPLES = [example for example in published.EXAMPLES if example.loss == "rnnt"]
LABELS = (1, 2, 2, 3)


def draw(T: int, U: int, V: int = 5, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(T, U + 1, V), scale=2.0)


@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.3])
@pytest.mark.parametrize("blank", [0, 4])
@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 3), (4, 0), (3, 2), (2, 4), (4, 3)])
def test_loss_and_gradient_are_those_of_the_paths(T: int, U: int, blank: int, fastemit_lambda: float) -> None:
    logits, labels = draw(T, U), LABELS[:U]
    found = paths.rnnt(logits, labels, blank)
    result = reference.rnnt_loss(logits, labels, blank, fastemit_lambda=fastemit_lambda)
    assert_close(result.loss, paths.nll(found), rtol=1e-13, atol=0)
    expected = paths.logit_gradient(found, logits.shape, fastemit_lambda)
    assert_close(result.gradient, expected, rtol=1e-12, atol=1e-14)


def test_clamp_clips_the_gradient_on_both_sides() -> None:
    logits = draw(3, 2)
    expected = paths.logit_gradient(paths.rnnt(logits, (1, 2), 0), logits.shape)
    result = reference.rnnt_loss(logits, (1, 2), 0, clamp=0.05)
    assert_close(result.gradient, np.clip(expected, -0.05, 0.05), rtol=1e-12, atol=1e-14)
    assert (result.gradient.min(), result.gradient.max()) == (-0.05, 0.05)


@pytest.mark.parametrize(("T", "U"), [(1, 0), (5, 3), (40, 60), (200, 50)])
def test_equal_logits_give_the_closed_forms(T: int, U: int) -> None:
    log_prob = np.full((T, U + 1), -math.log(9))
    loss, blank, label = reference.arc_posteriors(log_prob, log_prob[:, :U])
    expected_blank, expected_label = closed_forms.rnnt_posteriors(T, U)
    assert_close(loss, closed_forms.rnnt_nll(T, U, 9), rtol=1e-12, atol=0)
    assert_close(blank, expected_blank, rtol=1e-10, atol=1e-13)
    assert_close(label, expected_label[:, :U], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("example", RNNT_EXAMPLES, ids=lambda example: example.name)
def test_published_examples(example: published.Example) -> None:
    to_logits, to_log_probs = np.zeros((2, *example.logits.shape))
    for b, (T, labels) in enumerate(zip(example.frames, example.labels, strict=True)):
        logits = example.logits[b, :T]
        result = reference.rnnt_loss(logits, labels, example.blank)
        unfused = reference.rnnt_loss(reference.log_softmax(logits), labels, example.blank, fused_log_softmax=False)
        assert_close([result.loss, unfused.loss], [example.losses[b]] * 2, rtol=0, atol=example.losses_atol)
        to_logits[b, :T], to_log_probs[b, :T] = result.gradient, unfused.gradient
    if example.logit_gradient is not None:
        assert_close(to_logits, example.logit_gradient, rtol=0, atol=example.logit_gradient_atol)
    if example.logprob_gradient is not None:
        assert_close(to_log_probs, example.logprob_gradient, rtol=0, atol=example.logprob_gradient_atol)


@pytest.mark.parametrize("fused_log_softmax", [True, False])
def test_logit_gradient_is_the_finite_difference(fused_log_softmax: bool) -> None:
    logits = draw(3, 2)

    def loss(z: Array) -> float:
        return reference.rnnt_loss(z, (1, 2), 0, fused_log_softmax=fused_log_softmax).loss

    expected = finite_differences.gradient(loss, logits)
    result = reference.rnnt_loss(logits, (1, 2), 0, fused_log_softmax=fused_log_softmax)
    assert_close(result.gradient, expected, rtol=1e-9, atol=1e-11)


def draw_states(T: int, U: int, H: int, V: int) -> dict[str, Array]:
    """Encoder states are at least 0.5 away from the kinks of relu."""
    rng = np.random.default_rng(1)
    return {
        "encoder": rng.choice([-1.0, 1.0], (T, H)) * rng.uniform(1, 2, (T, H)),
        "predictor": rng.uniform(-0.5, 0.5, (U + 1, H)),
        "weight": rng.normal(size=(V, H)),
        "bias": rng.normal(size=V),
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_joint_logits_are_those_of_the_plain_loops(activation: str) -> None:
    states = draw_states(3, 2, 4, 5)
    logits = paths.joint_logits(*states.values(), activation)
    result = reference.joint_rnnt_loss(**states, labels=(1, 2), blank=0, activation=activation)
    assert_close(result.loss, paths.nll(paths.rnnt(logits, (1, 2), 0)), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_joint_gradients_are_finite_differences(activation: str, dropout: bool) -> None:
    states = draw_states(2, 2, 3, 4)
    kept = np.random.default_rng(2).integers(0, 2, (2, 3, 3)) / 0.5 if dropout else None

    def result(**changed: Array) -> reference.JointLossAndGradients:
        return reference.joint_rnnt_loss(**states | changed, labels=(1, 2), blank=0, activation=activation, kept=kept)

    for name, array in states.items():
        expected = finite_differences.gradient(lambda x, name=name: result(**{name: x}).loss, array)
        assert_close(getattr(result(), name), expected, rtol=1e-8, atol=1e-10, names=name)


def test_an_unknown_activation_raises() -> None:
    with pytest.raises(ValueError, match="softplus"):
        reference.activate("softplus", np.zeros(1))
