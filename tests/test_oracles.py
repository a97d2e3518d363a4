"""The oracles against one another: enumeration, closed forms, published values, finite differences."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from tests.oracles import checks, closed_forms, finite_differences, paths, published

Array = npt.NDArray[np.float64]
Loss = Callable[[Array, Sequence[int]], list[paths.Path]]

SIZES = [(T, U) for T in (1, 2, 3, 4) for U in (0, 1, 2, 3)]
DURATIONS = [(1,), (1, 2), (2,), (1, 3, 7), (2, 3)]
TDT_DURATIONS = [*DURATIONS, (0,), (0, 1), (0, 1, 2), (0, 2, 5)]
ENDS: list[Literal["blank", "any"]] = ["blank", "any"]

# each with V = 5 rows in all
LOSSES: dict[str, Loss] = {
    "rnnt": partial(paths.rnnt, blank=0),
    "rnnt, blank last": partial(paths.rnnt, blank=4),
    "multi-blank": partial(paths.multi_blank, blanks={1: 4, 2: 0}, sigma=0.1),
    "tdt": partial(paths.tdt, blank=0, durations=(1, 2)),
    "tdt with 0": partial(paths.tdt, blank=0, durations=(0, 1), sigma=0.05),
    "hat": partial(paths.hat, blank=0),
    "hat, blank last": partial(paths.hat, blank=4),
    "monotonic, blank": partial(paths.monotonic, blank=0, ends_by="blank"),
    "monotonic, any": partial(paths.monotonic, blank=0, ends_by="any"),
}
LABELS = (1, 2)
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
each_size = pytest.mark.parametrize(("T", "U"), SIZES)


def random_logits(T: int, U: int, V: int = 5, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(T, U + 1, V), scale=2.0)


@each_size
def test_counts_are_the_closed_forms(T: int, U: int) -> None:
    assert paths.count(paths.rnnt_alignments(T, U)) == closed_forms.rnnt_paths(T, U)
    for ends_by in ENDS:
        expected = closed_forms.monotonic_paths(T, U, ends_by=ends_by)
        assert paths.count(paths.monotonic_alignments(T, U, ends_by=ends_by)) == expected
    for durations in DURATIONS:
        expected = closed_forms.multi_blank_paths(T, U, durations)
        assert paths.count(paths.multi_blank_alignments(T, U, durations)) == expected
    for durations in TDT_DURATIONS:
        assert paths.count(paths.tdt_alignments(T, U, durations)) == closed_forms.tdt_paths(T, U, durations)


@each_size
def test_equal_logits_give_the_closed_form(T: int, U: int) -> None:
    labels, close = [1] * U, partial(checks.assert_close, rtol=1e-14, atol=1e-14)
    logits = np.full((T, U + 1, 4), 0.7)
    close(paths.nll(paths.rnnt(logits, labels, 2)), closed_forms.rnnt_nll(T, U, 4))
    close(paths.nll(paths.hat(0 * logits, labels, 3)), closed_forms.hat_nll(T, U, 4))
    for ends_by in ENDS:
        expected = closed_forms.monotonic_nll(T, U, 4, ends_by=ends_by)
        close(paths.nll(paths.monotonic(logits, labels, 0, ends_by=ends_by)), expected)
    for durations in DURATIONS:
        rows = {d: 3 - i for i, d in enumerate(durations)}
        expected = closed_forms.multi_blank_nll(T, U, 4, durations, 0.2)
        close(paths.nll(paths.multi_blank(logits, labels, rows, 0.2)), expected)
    for durations in TDT_DURATIONS:
        expected = closed_forms.tdt_nll(T, U, 4, durations, 0.2)
        padded = np.full((T, U + 1, 4 + len(durations)), 0.7)
        close(paths.nll(paths.tdt(padded, labels, 3, durations, 0.2)), expected)


def test_the_table_of_values() -> None:
    for T, U, V, expected in closed_forms.UNIFORM_RNNT_NLL:
        checks.assert_close(closed_forms.rnnt_nll(T, U, V), expected, rtol=0, atol=5.001e-5)
    for T, U, V, expected in closed_forms.UNIFORM_MONOTONIC_NLL:
        checks.assert_close(closed_forms.monotonic_nll(T, U, V, ends_by="any"), expected, rtol=0, atol=5e-5)


def test_special_cases_of_the_closed_forms_agree() -> None:
    for T, U in ((5, 3), (40, 17), (300, 60)):
        rnnt = closed_forms.rnnt_nll(T, U, 9)
        monotonic = closed_forms.monotonic_nll(T, U, 9, ends_by="blank")
        assert closed_forms.multi_blank_nll(T, U, 9, [1]) == pytest.approx(rnnt, rel=1e-13)
        assert closed_forms.tdt_nll(T, U, 9, [1]) == pytest.approx(monotonic, rel=1e-13)
    assert closed_forms.monotonic_nll(3, 4, 5, ends_by="any") == math.inf
    assert closed_forms.tdt_nll(3, 1, 5, [0]) == math.inf


@each_size
def test_uniform_posteriors_are_those_of_the_paths(T: int, U: int) -> None:
    posterior = paths.posteriors(paths.rnnt(np.zeros((T, U + 1, 3)), [1] * U, 0), (T, U + 1))
    blank, label = closed_forms.rnnt_posteriors(T, U)
    checks.assert_close(blank, posterior["blank"], rtol=1e-13, atol=1e-14)
    checks.assert_close(label, posterior["label"], rtol=1e-13, atol=1e-14)


def test_uniform_posteriors_of_a_large_lattice() -> None:
    T, U = 2000, 400
    blank, label = closed_forms.rnnt_posteriors(T, U)
    checks.assert_close(blank.sum(1), np.ones(T), rtol=0, atol=1e-10)
    checks.assert_close(label.sum(0)[:U], np.ones(U), rtol=0, atol=1e-10)
    for t, u in ((0, 0), (700, 150), (1999, 399), (1999, 400), (3, 17)):
        labels_left, frames_left = U - u, T - 1 - t
        visits = math.comb(t + u, u) * math.comb(frames_left + labels_left, labels_left)
        visited = Fraction(visits, math.comb(T + U - 1, U))
        checks.assert_close(blank[t, u] + label[t, u], float(visited), rtol=1e-10, atol=0)


@pytest.mark.parametrize("example", published.EXAMPLES, ids=lambda example: example.name)
def test_published_examples(example: published.Example) -> None:
    enumerate_paths: dict[str, Loss] = {
        "rnnt": partial(paths.rnnt, blank=example.blank),
        "tdt": partial(paths.tdt, blank=example.blank, durations=example.durations, sigma=example.sigma),
        "monotonic": partial(paths.monotonic, blank=example.blank, ends_by="any"),
    }
    losses = np.full(len(example.frames), np.nan)
    logit_gradient, logprob_gradient = np.zeros((2, *example.logits.shape))
    for b, (T, labels) in enumerate(zip(example.frames, example.labels, strict=True)):
        logits = example.logits[b, :T]
        found = enumerate_paths[example.loss](logits, labels)
        losses[b] = paths.nll(found)
        logit_gradient[b, :T] = paths.logit_gradient(found, logits.shape)
        posterior = paths.posteriors(found, logits.shape[:2])
        logprob_gradient[b, :T, :, example.blank] -= posterior["blank"]
        for u, y in enumerate(labels):
            logprob_gradient[b, :T, u, y] -= posterior["label"][:, u]
    checks.assert_close(losses, example.losses, rtol=0, atol=example.losses_atol)
    if example.logit_gradient is not None:
        atol = example.logit_gradient_atol
        checks.assert_close(logit_gradient, example.logit_gradient, rtol=0, atol=atol)
    if example.logprob_gradient is not None:
        atol = example.logprob_gradient_atol
        checks.assert_close(logprob_gradient, example.logprob_gradient, rtol=0, atol=atol)


def test_published_monotonic_paths() -> None:
    example = published.MONOTONIC
    found = paths.monotonic(example.logits[0], example.labels[0], example.blank, ends_by="any")
    probabilities = sorted(math.exp(paths.log_probability(path)) for path in found)
    expected = sorted(published.MONOTONIC_PATH_PROBABILITIES)
    checks.assert_close(probabilities, expected, rtol=1e-14, atol=0)


def test_published_hat_probabilities() -> None:
    logprobs = np.empty_like(published.HAT_LOGPROBS)
    for row, logits in enumerate(published.HAT_LOGITS):
        for label in (1, 2):
            ((emit, leave),) = paths.hat(np.array([[logits, logits]]), [label], 0)
            logprobs[row, 0], logprobs[row, label] = leave.logprob, emit.logprob
    checks.assert_close(logprobs, published.HAT_LOGPROBS, rtol=0, atol=published.HAT_LOGPROBS_ATOL)


@each_loss
def test_gradient_is_the_finite_difference(loss: Loss) -> None:
    logits = random_logits(3, 2)
    expected = finite_differences.gradient(lambda z: paths.nll(loss(z, LABELS)), logits)
    gradient = paths.logit_gradient(loss(logits, LABELS), logits.shape)
    checks.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


def test_gradient_rule_of_the_posteriors() -> None:
    """dz[v] = P(arcs) softmax(z)[v] - P(arcs of v), here with a label that equals the blank."""
    logits, labels, blank = random_logits(2, 2), (1, 2), 1
    posterior = paths.posteriors(paths.rnnt(logits, labels, blank), logits.shape[:2])
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    gradient = (posterior["blank"] + posterior["label"])[..., None] * softmax
    gradient[..., blank] -= posterior["blank"]
    for u, y in enumerate(labels):
        gradient[:, u, y] -= posterior["label"][:, u]
    expected = finite_differences.gradient(lambda z: paths.nll(paths.rnnt(z, labels, blank)), logits)
    checks.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


def test_fastemit_weighs_label_steps() -> None:
    logits = random_logits(3, 2)
    found = paths.rnnt(logits, LABELS, 0)
    steps = [paths.logit_gradient(found, logits.shape, fastemit_lambda) for fastemit_lambda in (-1, 0, 1)]
    checks.assert_close(steps[2] - steps[1], steps[1] - steps[0], rtol=1e-12, atol=1e-14)
    labels = np.abs(steps[1] - steps[0]).max(-1)
    assert (labels[:, :2] > 0).all()
    assert (labels[:, 2] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_sums_to_zero_over_each_softmax(name: str) -> None:
    logits = random_logits(4, 2)
    gradient = paths.logit_gradient(LOSSES[name](logits, LABELS), logits.shape)
    groups = {
        "tdt": [slice(0, 3), slice(3, 5)],
        "tdt with 0": [slice(0, 3), slice(3, 5)],
        "hat": [slice(1, 5)],
        "hat, blank last": [slice(0, 4)],
    }
    for group in groups.get(name, [slice(0, 5)]):
        checks.assert_close(gradient[..., group].sum(-1), np.zeros((4, 3)), rtol=0, atol=1e-13)


@each_loss
def test_posteriors_sum_to_one(loss: Loss) -> None:
    logits = random_logits(4, 2)
    found = loss(logits, LABELS)
    posterior = paths.posteriors(found, logits.shape[:2])
    start = sum(p[0, 0] for p in posterior.values())
    labels = sum(p.sum(0) for kind, p in posterior.items() if kind.startswith("label"))
    checks.assert_close(start, 1.0, rtol=0, atol=1e-13)
    checks.assert_close(labels, [1.0, 1.0, 0.0], rtol=0, atol=1e-13)


@each_loss
def test_large_logits_are_finite(loss: Loss) -> None:
    logits = 200.0 * np.sign(random_logits(3, 2))
    found = loss(logits, LABELS)
    assert math.isfinite(paths.nll(found))
    assert np.isfinite(paths.logit_gradient(found, logits.shape)).all()


@each_loss
def test_impossible_and_undefined_utterances(loss: Loss) -> None:
    impossible = random_logits(3, 2)
    impossible[..., LABELS[1]] = -np.inf
    found = loss(impossible, LABELS)
    assert paths.nll(found) == math.inf
    assert not paths.logit_gradient(found, impossible.shape).any()
    for undefined in (random_logits(3, 2), impossible):
        undefined[1, 1, 0] = np.nan
        assert math.isnan(paths.nll(loss(undefined, LABELS)))


def test_masked_rows_are_absent() -> None:
    logits = random_logits(3, 2, V=8)
    masked = logits.copy()
    masked[..., 5:] = -np.inf
    found, expected = paths.rnnt(masked, LABELS, 0), paths.rnnt(logits[..., :5], LABELS, 0)
    gradient = paths.logit_gradient(found, masked.shape)
    checks.assert_close(paths.nll(found), paths.nll(expected), rtol=1e-15, atol=0)
    checks.assert_close(gradient[..., :5], paths.logit_gradient(expected, (3, 3, 5)), rtol=1e-14, atol=1e-16)
    assert (gradient[..., 5:] == 0).all()


def test_losses_that_coincide() -> None:
    logits = random_logits(4, 2)
    close = partial(checks.assert_close, rtol=1e-13, atol=0)
    rnnt = paths.nll(paths.rnnt(logits, LABELS, 0))
    close(paths.nll(paths.multi_blank(logits, LABELS, {1: 0})), rnnt)
    one_duration = np.concatenate([logits, np.ones((4, 3, 1))], axis=-1)
    monotonic = paths.nll(paths.monotonic(logits, LABELS, 0, ends_by="blank"))
    close(paths.nll(paths.tdt(one_duration, LABELS, 0, [1])), monotonic)
    gate, tokens = logits[..., :1], logits[..., 1:]
    no_blank = tokens - np.log(np.exp(tokens).sum(-1, keepdims=True))
    close(
        paths.nll(paths.hat(logits, LABELS, 0)),
        paths.nll(paths.rnnt(np.concatenate([gate, no_blank], -1), LABELS, 0)),
    )


@pytest.mark.parametrize(
    ("activation", "at_minus_one", "at_two"),
    [
        ("identity", -1.0, 2.0),
        ("relu", 0.0, 2.0),
        ("tanh", -0.7615941559557649, 0.9640275800758169),
        ("sigmoid", 0.2689414213699951, 0.8807970779778823),
        ("gelu", -0.15865525393145707, 1.9544997361036416),
        ("silu", -0.2689414213699951, 1.7615941559557646),
    ],
)
def test_joint_logits(activation: str, at_minus_one: float, at_two: float) -> None:
    rng = np.random.default_rng(0)
    e, p = np.array([[0.5, -0.5, 1.0], [3.5, -3.5, -2.0]]), np.array([[-1.5, 2.5, 1.0], [1.5, -0.5, -2.0]])
    weight, bias = rng.normal(size=(4, 3)), rng.normal(size=4)
    logits = paths.joint_logits(e, p, weight, bias, activation)
    for t, u, h in (
        (0, 0, [at_minus_one, at_two, at_two]),
        (0, 1, [at_two, at_minus_one, at_minus_one]),
        (1, 0, [at_two, at_minus_one, at_minus_one]),
    ):
        checks.assert_close(logits[t, u], weight @ h + bias, rtol=1e-14, atol=1e-15)
    without_bias = paths.joint_logits(e, p, weight, None, activation)
    checks.assert_close(logits - without_bias, np.tile(bias, (2, 2, 1)), rtol=1e-13, atol=1e-15)


def test_finite_differences_of_known_functions() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))

    def f(y: Array) -> float:
        return float(np.sum(np.sin(y) * np.exp(y)))

    expected = np.exp(x) * (np.sin(x) + np.cos(x))
    checks.assert_close(finite_differences.gradient(f, x), expected, rtol=1e-10, atol=1e-11)
    measured, claimed = finite_differences.along_random_directions(f, x, expected)
    checks.assert_close(measured, claimed, rtol=1e-10, atol=1e-11)
    wrong = expected.copy()
    wrong[1, 2] += 1e-6
    measured, claimed = finite_differences.along_random_directions(f, x, wrong)
    checks.assert_close(np.abs(measured - claimed), np.full(4, 1e-6), rtol=1e-3, atol=0)


def test_assert_close() -> None:
    close = partial(checks.assert_close, rtol=1e-3, atol=0.1, names="loss[b]")
    close([1.0, np.inf, -np.inf], [1.1, np.inf, -np.inf])
    close(np.zeros((0, 3)), np.zeros((0, 3)))
    close([np.nan, 1.0], [np.nan, 1.0], equal_nan=True)
    with pytest.raises(AssertionError, match=r"loss\[b\]: off by 3, budget 0.102 at \(1,\): got 5, expected 2; 2 of 3"):
        close([1.0, 5.0, 1.0], [1.0, 2.0, 2.0])
    with pytest.raises(AssertionError, match=r"NaN out of place at \(1,\)"):
        close([1.0, np.nan], [1.0, np.nan])
    with pytest.raises(AssertionError, match="NaN out of place"):
        close([np.nan, 1.0], [1.0, np.nan], equal_nan=True)
    with pytest.raises(AssertionError, match="NaN out of place"):
        close([np.nan], [np.inf])
    for actual, expected in ((1.0, np.inf), (np.inf, 1.0), (-np.inf, np.inf)):
        with pytest.raises(AssertionError, match="infinity out of place"):
            close(actual, expected)
    with pytest.raises(AssertionError, match="shape"):
        close([1.0, 1.0], 1.0)
    with pytest.raises(AssertionError, match="off by"):
        checks.assert_close(1.0, 1.0, rtol=np.nan, atol=0.0)


def test_assert_within_budget() -> None:
    truth, plain = [1.0, 2.0, np.inf], [1.01, 2.0, np.inf]
    checks.assert_within_budget([1.02, 2.001, np.inf], truth, plain, 2.0, 1e-3 + 1e-12)
    checks.assert_within_budget([1.02, 2.001, np.inf], truth, plain, 2.0, [1e-9, 2e-3, 0.0])
    with pytest.raises(AssertionError, match=r"at \(0,\)"):
        checks.assert_within_budget([1.03, 2.0, np.inf], truth, plain, 2.0, 1e-3)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        checks.assert_within_budget([1.0, 2.01, np.inf], truth, plain, 2.0, 1e-3)
    with pytest.raises(AssertionError, match="plain array: infinity out of place"):
        checks.assert_within_budget([1.0, 2.0, np.inf], truth, [1.0, np.inf, np.inf], 2.0, 1e-3)
    with pytest.raises(AssertionError, match="NaN out of place"):
        checks.assert_within_budget([1.0, np.nan, np.inf], truth, plain, 2.0, 1e-3)
