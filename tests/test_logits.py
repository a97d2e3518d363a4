"""The logits form on every backend, against the float64 reference, published values and enumerated paths."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import BackendUnderTest
from tests.oracles import paths, published
from tests.oracles.checks import assert_close
from tests.problems import DTYPES, Logits, draw_logits, pack

RNNT_EXAMPLES = [example for example in published.EXAMPLES if example.loss == "rnnt"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused_log_softmax", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_and_gradient(backend: BackendUnderTest, seed: int, fused_log_softmax: bool, dtype: str) -> None:
    problem = draw_logits(dtype=dtype, seed=seed)
    if not fused_log_softmax:
        problem = problem.as_log_probs()
    truth = problem.truth(fused_log_softmax=fused_log_softmax)
    losses, gradient = backend.logits(problem, fused_log_softmax=fused_log_softmax)
    assert gradient.dtype == problem.logits.dtype
    assert losses.dtype == ("float64" if dtype == "float64" else "float32")
    accumulator = "float64" if dtype == "float64" else "float32"  # of losses, whatever the scores are
    backend.assert_near(losses, truth.losses, accumulator, names="losses")
    backend.assert_near(gradient, truth.gradients["logits"], dtype, names="gradient")


@pytest.mark.parametrize("blank", [0, 3, 6, -1, -3, -7])
@pytest.mark.parametrize("fused_log_softmax", [True, False])
def test_blank_anywhere(backend: BackendUnderTest, fused_log_softmax: bool, blank: int) -> None:
    problem = draw_logits(blank=blank)
    truth = problem.truth(fused_log_softmax=fused_log_softmax)
    losses, gradient = backend.logits(problem, fused_log_softmax=fused_log_softmax)
    backend.assert_near(losses, truth.losses, "float64")
    backend.assert_near(gradient, truth.gradients["logits"], "float64")


@pytest.mark.parametrize("example", RNNT_EXAMPLES, ids=lambda example: example.name)
def test_published_examples(backend: BackendUnderTest, example: published.Example) -> None:
    lengths = np.array([len(labels) for labels in example.labels])
    targets = np.full((len(lengths), lengths.max()), -1)
    for b, labels in enumerate(example.labels):
        targets[b, : len(labels)] = labels
    problem = Logits(example.logits, targets, np.array(example.frames), lengths, example.blank)
    losses, gradient = backend.logits(problem)
    assert_close(losses, example.losses, rtol=0, atol=example.losses_atol)
    if example.logit_gradient is not None:
        assert_close(gradient, example.logit_gradient, rtol=0, atol=example.logit_gradient_atol)
    if example.logprob_gradient is not None:
        losses, gradient = backend.logits(problem.as_log_probs(), fused_log_softmax=False)
        assert_close(losses, example.losses, rtol=0, atol=example.losses_atol)
        assert_close(gradient, example.logprob_gradient, rtol=0, atol=example.logprob_gradient_atol)


@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.4])
@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 3), (3, 0), (3, 2), (2, 4)])
def test_losses_and_gradients_are_those_of_the_paths(
    backend: BackendUnderTest, T: int, U: int, fastemit_lambda: float
) -> None:
    problem = draw_logits((T,), (U,), V=4)
    found = paths.rnnt(problem.logits[0], problem.targets[0].tolist(), 3)
    losses, gradient = backend.logits(problem, fastemit_lambda=fastemit_lambda)
    backend.assert_near(losses, [paths.nll(found)], "float64")
    expected = paths.logit_gradient(found, (T, U + 1, 4), fastemit_lambda)
    backend.assert_near(gradient[0], expected, "float64")


def test_log_softmax_of_log_probabilities_changes_nothing(backend: BackendUnderTest) -> None:
    problem = draw_logits()
    expected_losses, expected = backend.logits(problem)
    losses, gradient = backend.logits(problem.as_log_probs())
    backend.assert_near(losses, expected_losses, "float64")
    backend.assert_near(gradient, expected, "float64")


def test_the_loss_alone_is_the_loss_beside_the_gradient(backend: BackendUnderTest) -> None:
    problem = draw_logits(dtype="float32")
    for fused_log_softmax in (True, False):
        alone = backend.logits_loss(problem, fused_log_softmax=fused_log_softmax)
        beside, _ = backend.logits(problem, fused_log_softmax=fused_log_softmax)
        np.testing.assert_array_equal(alone, beside)


@pytest.mark.parametrize("fused_log_softmax", [True, False])
@pytest.mark.parametrize("packed_targets", [True, False])
@pytest.mark.parametrize("packed_logits", [True, False])
def test_packed_is_padded(
    backend: BackendUnderTest, packed_logits: bool, packed_targets: bool, fused_log_softmax: bool
) -> None:
    padded = draw_logits(padding=2, dtype="float32")
    problem = padded.replace(
        logits=padded.nodes() if packed_logits else padded.logits,
        targets=pack(padded.targets, padded.labels) if packed_targets else padded.targets,
    )
    losses, gradient = backend.logits(problem, fused_log_softmax=fused_log_softmax)
    expected_losses, expected = backend.logits(padded, fused_log_softmax=fused_log_softmax)
    np.testing.assert_array_equal(losses, expected_losses)
    np.testing.assert_array_equal(gradient, padded.nodes(expected) if packed_logits else expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["padded", "packed", "log_probs"])
def test_overwrite_logits_leaves_the_gradient_in_their_place(backend: BackendUnderTest, form: str, dtype: str) -> None:
    problem = draw_logits(dtype=dtype, padding=1)
    problem = problem.replace(logits=problem.nodes()) if form == "packed" else problem
    fused_log_softmax = form != "log_probs"
    expected_losses, expected = backend.logits(problem, fused_log_softmax=fused_log_softmax)
    losses, gradient, left = backend.logits_overwritten(problem, fused_log_softmax=fused_log_softmax)
    np.testing.assert_array_equal(losses, expected_losses)
    np.testing.assert_array_equal(gradient, expected)
    np.testing.assert_array_equal(left, expected)


def test_two_utterances_two_frames_three_labels_blank_one(backend: BackendUnderTest) -> None:
    problem = draw_logits((2, 2), (2, 2), V=5, blank=1, dtype="float32").replace(targets=np.array([[2, 2], [2, 2]]))
    truth = problem.truth(upstream=1 / 2)
    loss, gradient = backend.logits(problem, reduction="mean")
    backend.assert_near(loss, truth.losses.mean(), "float32")
    backend.assert_near(gradient, truth.gradients["logits"], "float32")
