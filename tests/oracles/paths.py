"""Transducer losses by enumeration of every alignment, for lattices of a few frames and labels.

An alignment is a string of symbols. A symbol consumes some frames and some labels; the state (t, u) in front
of it is what the string has consumed before. A loss is an alphabet, a rule for the last symbol, and the
probability of a symbol in a state:  NLL = -ln sum over alignments of prod P(symbol | t, u).
Rows of V count from 0, the blank too.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EndsBy = Literal["blank", "any"]


class Symbol(NamedTuple):
    """One letter of an alphabet; a blank is a symbol that consumes no label."""

    kind: str
    frames: int
    labels: int


class Step(NamedTuple):
    """A symbol in its state (t, u): ln P(symbol | t, u), and the derivative of that by logits[t, u]."""

    t: int
    u: int
    kind: str
    logprob: float
    slope: Array


Alignment = tuple[Symbol, ...]
Path = tuple[Step, ...]
Score = Callable[[int, int, Symbol], tuple[float, Array]]


def strings(alphabet: Sequence[Symbol], frames: int, labels: int) -> Iterator[Alignment]:
    """Every string over the alphabet that consumes exactly these frames and labels."""
    if frames == labels == 0:
        yield ()
    for symbol in alphabet:
        if symbol.frames <= frames and symbol.labels <= labels:
            for rest in strings(alphabet, frames - symbol.frames, labels - symbol.labels):
                yield (symbol, *rest)


def ending_with_blank(alignments: Iterable[Alignment]) -> Iterator[Alignment]:
    """The alignments whose last symbol is a blank."""
    return (alignment for alignment in alignments if alignment and alignment[-1].labels == 0)


def rnnt_alignments(T: int, U: int) -> Iterator[Alignment]:
    """Graves 2012: a blank moves to the next frame, a label stays; the last frame is left by a blank."""
    return ending_with_blank(strings([Symbol("blank", 1, 0), Symbol("label", 0, 1)], T, U))


def multi_blank_alignments(T: int, U: int, durations: Iterable[int]) -> Iterator[Alignment]:
    """Xu et al. 2022: a blank for each duration, a label stays at its frame; the last symbol is a blank."""
    blanks = [Symbol(f"blank_{d}", d, 0) for d in durations]
    return ending_with_blank(strings([*blanks, Symbol("label", 0, 1)], T, U))


def tdt_alignments(T: int, U: int, durations: Iterable[int]) -> Iterator[Alignment]:
    """Xu et al. 2023: every symbol has a duration, a blank's is not zero; the last symbol is a blank."""
    durations = list(durations)
    blanks = [Symbol(f"blank_{d}", d, 0) for d in durations if d > 0]
    return ending_with_blank(strings([*blanks, *(Symbol(f"label_{d}", d, 1) for d in durations)], T, U))


def monotonic_alignments(T: int, U: int, *, ends_by: EndsBy) -> Iterator[Alignment]:
    """Tripathi et al. 2019: one symbol a frame. The last is a blank, or any symbol: definitions differ."""
    alignments = strings([Symbol("blank", 1, 0), Symbol("label", 1, 1)], T, U)
    return ending_with_blank(alignments) if ends_by == "blank" else alignments


def count(alignments: Iterable[Alignment]) -> int:
    """How many alignments there are."""
    return sum(1 for _ in alignments)


def log_softmax(row: Array, v: int, group: Iterable[int]) -> tuple[float, Array]:
    """ln softmax(row over the group)[v], and its derivative by row: one at v, minus the softmax."""
    group, values = list(group), row.tolist()
    top = max(values[i] for i in group)
    weights = [math.exp(values[i] - top) for i in group]
    total = math.fsum(weights)
    slope = np.zeros(len(values))
    slope[group] = [-weight / total for weight in weights]
    slope[v] += 1.0
    return values[v] - top - math.log(total), slope


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)


def log_sigmoid(x: float) -> float:
    """ln(1 / (1 + exp(-x)))."""
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def scored(alignments: Iterable[Alignment], score: Score) -> list[Path]:
    """The alignments as paths through the states, every step with its score."""
    score = cache(score)
    paths = []
    for alignment in alignments:
        t = u = 0
        path = []
        for symbol in alignment:
            path.append(Step(t, u, symbol.kind, *score(t, u, symbol)))
            t, u = t + symbol.frames, u + symbol.labels
        paths.append(tuple(path))
    return paths


def rnnt(logits: Array, labels: Sequence[int], blank: int) -> list[Path]:
    """Graves 2012; logits [T, U1, V] of one utterance: P(symbol | t, u) = softmax(logits[t, u])."""

    def score(t: int, u: int, symbol: Symbol) -> tuple[float, Array]:
        return log_softmax(logits[t, u], labels[u] if symbol.labels else blank, range(logits.shape[2]))

    return scored(rnnt_alignments(len(logits), len(labels)), score)


def multi_blank(logits: Array, labels: Sequence[int], blanks: Mapping[int, int], sigma: float = 0.0) -> list[Path]:
    """Xu et al. 2022; logits [T, U1, V], blanks {duration: its row of V}; symbols pay sigma."""

    def score(t: int, u: int, symbol: Symbol) -> tuple[float, Array]:
        v = labels[u] if symbol.labels else blanks[symbol.frames]
        logprob, slope = log_softmax(logits[t, u], v, range(logits.shape[2]))
        return logprob - sigma, slope

    return scored(multi_blank_alignments(len(logits), len(labels), blanks), score)


def tdt(logits: Array, labels: Sequence[int], blank: int, durations: Sequence[int], sigma: float = 0.0) -> list[Path]:
    """Xu et al. 2023; logits [T, U1, V + durations]: a softmax each for tokens, durations; all pay sigma."""
    V = logits.shape[2] - len(durations)

    def score(t: int, u: int, symbol: Symbol) -> tuple[float, Array]:
        token, token_slope = log_softmax(logits[t, u], labels[u] if symbol.labels else blank, range(V))
        d = V + durations.index(symbol.frames)
        duration, duration_slope = log_softmax(logits[t, u], d, range(V, logits.shape[2]))
        return token + duration - sigma, token_slope + duration_slope

    return scored(tdt_alignments(len(logits), len(labels), durations), score)


def hat(logits: Array, labels: Sequence[int], blank: int) -> list[Path]:
    """Variani et al. 2020; logits [T, U1, V]: blank b = sigmoid(its logit), label (1 - b) softmax(others)."""
    others = [v for v in range(logits.shape[2]) if v != blank]

    def score(t: int, u: int, symbol: Symbol) -> tuple[float, Array]:
        gate = float(logits[t, u, blank])
        if symbol.labels:
            logprob, slope = log_softmax(logits[t, u], labels[u], others)
            slope[blank] = -sigmoid(gate)
            return log_sigmoid(-gate) + logprob, slope
        slope = np.zeros(logits.shape[2])
        slope[blank] = sigmoid(-gate)
        return log_sigmoid(gate), slope

    return scored(rnnt_alignments(len(logits), len(labels)), score)


def monotonic(logits: Array, labels: Sequence[int], blank: int, *, ends_by: EndsBy) -> list[Path]:
    """Tripathi et al. 2019; logits [T, U1, V]: P(symbol | t, u) = softmax(logits[t, u])."""

    def score(t: int, u: int, symbol: Symbol) -> tuple[float, Array]:
        return log_softmax(logits[t, u], labels[u] if symbol.labels else blank, range(logits.shape[2]))

    return scored(monotonic_alignments(len(logits), len(labels), ends_by=ends_by), score)


def log_probability(path: Path) -> float:
    """ln of the product of the path's step probabilities."""
    return math.fsum(step.logprob for step in path)


def nll(paths: Iterable[Path]) -> float:
    """-ln of the paths' total probability; +inf if no path is possible."""
    logprobs = [log_probability(path) for path in paths]
    if all(logprob == -math.inf for logprob in logprobs):
        return math.inf
    top = max(logprobs)
    return -top - math.log(math.fsum(math.exp(logprob - top) for logprob in logprobs))


def weighted_steps(paths: Sequence[Path]) -> Iterator[tuple[float, Step]]:
    """Every step of every path, with the path's share of the total probability (zero if the total is)."""
    loss = nll(paths)
    for path in paths:
        weight = 0.0 if loss == math.inf else math.exp(log_probability(path) + loss)
        yield from ((weight, step) for step in path)


def posteriors(paths: Sequence[Path], shape: tuple[int, int]) -> defaultdict[str, Array]:
    """P(step | labels) [T, U1] by kind of step; all zero for a kind that no path has."""
    posterior: defaultdict[str, Array] = defaultdict(lambda: np.zeros(shape))
    for weight, step in weighted_steps(paths):
        posterior[step.kind][step.t, step.u] += weight
    return posterior


def logit_gradient(paths: Sequence[Path], shape: tuple[int, ...], fastemit_lambda: float = 0.0) -> Array:
    """dNLL/dlogits [T, U1, V] = -sum over paths P(path | labels) sum over steps dlnP(step)/dlogits.

    FastEmit (Yu et al. 2021) weighs label steps by 1 + lambda.
    """
    gradient = np.zeros(shape)
    for weight, step in weighted_steps(paths):
        scale = 1.0 + fastemit_lambda if step.kind.startswith("label") else 1.0
        gradient[step.t, step.u] -= scale * weight * step.slope
    return gradient


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
    "sigmoid": sigmoid,
    "gelu": lambda x: 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0))),
    "silu": lambda x: x * sigmoid(x),
}


def joint_logits(e: Array, p: Array, weight: Array, bias: Array | None, activation: str) -> Array:
    """logits[t, u, v] = sum_h weight[v, h] activation(e[t, h] + p[u, h]) + bias[v]; e [T, H], p [U1, H]."""
    (T, H), U1, V = e.shape, len(p), len(weight)
    logits = np.empty((T, U1, V))
    for t, u in np.ndindex(T, U1):
        h = [ACTIVATIONS[activation](float(e[t, i]) + float(p[u, i])) for i in range(H)]
        for v in range(V):
            products = [float(weight[v, i]) * h[i] for i in range(H)]
            logits[t, u, v] = math.fsum([*products, 0.0 if bias is None else float(bias[v])])
    return logits
