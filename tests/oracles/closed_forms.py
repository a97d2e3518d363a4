"""Transducer losses of equal logits in closed form: all symbols are equally likely, so only counts matter.

T >= 1 frames, U labels, V rows of the softmax with every blank among them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EndsBy = Literal["blank", "any"]

# (T, U, V, NLL to four decimals)
UNIFORM_RNNT_NLL = (
    (1, 0, 5, 1.6094),
    (1, 1, 2, 1.3863),
    (1, 3, 5, 6.4378),
    (2, 2, 5, 5.3391),
    (3, 2, 3, 3.7013),
    (2, 10, 8, 22.5554),
    (10, 14, 20, 58.2839),
    (4, 1023, 16, 2828.4430),
    (4, 1024, 16, 2831.2127),
    (1, 1500, 32, 5202.0696),
    (256, 63, 4096, 2497.9563),
    (272, 274, 500, 3018.7957),
    (2000, 1100, 128, 13029.7225),
    (9000, 0, 4096, 74859.8955),
)
# likewise; the last symbol may be a label
UNIFORM_MONOTONIC_NLL = ((4, 2, 3, 2.6027),)


def rnnt_paths(T: int, U: int) -> int:
    """C(T + U - 1, U): the labels fall anywhere before the last blank."""
    return math.comb(T + U - 1, U)


def monotonic_paths(T: int, U: int, *, ends_by: EndsBy) -> int:
    """C(T, U): the frames that emit a label; C(T - 1, U) if the last frame must not."""
    return math.comb(T - 1 if ends_by == "blank" else T, U)


def multi_blank_paths(T: int, U: int, durations: Iterable[int]) -> int:
    """sum over n of [x^T] (sum_d x^d)^n C(n + U - 1, U)."""
    return sum(counts_by_blanks(T, U, list(durations), [0]))


def tdt_paths(T: int, U: int, durations: Iterable[int]) -> int:
    """sum over n of [x^T] (sum_d x^d)^U (sum_{d > 0} x^d)^n C(n + U - 1, U)."""
    durations = list(durations)
    return sum(counts_by_blanks(T, U, [d for d in durations if d > 0], durations))


def counts_by_blanks(T: int, U: int, blank_durations: Sequence[int], label_durations: Sequence[int]) -> list[int]:
    """[n]: alignments with n blanks, the last symbol one of them, all durations together T frames."""
    coefficients = [1] + [0] * T
    for _ in range(U):
        coefficients = times_durations(coefficients, label_durations)
    counts = [0]
    for n in range(1, T + 1):
        coefficients = times_durations(coefficients, blank_durations)
        counts.append(coefficients[T] * math.comb(n + U - 1, U))
    return counts


def times_durations(coefficients: Sequence[int], durations: Sequence[int]) -> list[int]:
    """The polynomial times sum_d x^d, cut at its degree."""
    return [sum(coefficients[k - d] for d in durations if d <= k) for k in range(len(coefficients))]


def log_count(paths: int) -> float:
    """Logarithm of an exact count, -inf for none."""
    return math.log(paths) if paths else -math.inf


def rnnt_nll(T: int, U: int, V: int) -> float:
    """(T + U) ln V - ln C(T + U - 1, U)."""
    return (T + U) * math.log(V) - log_count(rnnt_paths(T, U))


def monotonic_nll(T: int, U: int, V: int, *, ends_by: EndsBy) -> float:
    """T ln V - ln C(T, U), or C(T - 1, U) if the last symbol must be a blank."""
    return T * math.log(V) - log_count(monotonic_paths(T, U, ends_by=ends_by))


def hat_nll(T: int, U: int, V: int) -> float:
    """T ln 2 + U ln(2 (V - 1)) - ln C(T + U - 1, U), for logits of zero and V >= 2."""
    return T * math.log(2) + U * math.log(2 * (V - 1)) - log_count(rnnt_paths(T, U))


def multi_blank_nll(T: int, U: int, V: int, durations: Iterable[int], sigma: float = 0.0) -> float:
    """-ln sum over n of counts[n] (V e^sigma)^-(n + U)."""
    counts = counts_by_blanks(T, U, list(durations), [0])
    return nll_of_counts(counts, U, math.log(V) + sigma)


def tdt_nll(T: int, U: int, V: int, durations: Iterable[int], sigma: float = 0.0) -> float:
    """-ln sum over n of counts[n] (V |durations| e^sigma)^-(n + U); V without the durations."""
    durations = list(durations)
    counts = counts_by_blanks(T, U, [d for d in durations if d > 0], durations)
    return nll_of_counts(counts, U, math.log(V) + math.log(len(durations)) + sigma)


def nll_of_counts(counts: Sequence[int], U: int, cost: float) -> float:
    """-ln sum over n of counts[n] exp(-(n + U) cost)."""
    logs = [math.log(paths) - (n + U) * cost for n, paths in enumerate(counts) if paths]
    top = max(logs, default=-math.inf)
    return -top - math.log(math.fsum(math.exp(log - top) for log in logs)) if logs else math.inf


def rnnt_posteriors(T: int, U: int) -> tuple[Array, Array]:
    """Posterior [T, U1] of the blank and of the label arc of each node, for equal logits of any size.

    A path visits (t, u) with probability C(t + u, u) C(k, U - u) / C(T + U - 1, U), k = T - 1 - t + U - u. It
    goes on with one of the k symbols left, U - u of them labels, or with the last blank if none is left.
    """
    log_factorial: Array = np.array([math.lgamma(n + 1) for n in range(T + U)])

    def log_binomial(n: npt.NDArray[np.int64], k: npt.NDArray[np.int64]) -> Array:
        log: Array = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
        return log

    t, u = np.arange(T)[:, None], np.arange(U + 1)
    left = T - 1 - t + U - u
    total = log_factorial[T + U - 1] - log_factorial[U] - log_factorial[T - 1]
    visited = np.exp(log_binomial(t + u, u) + log_binomial(left, U - u) - total)
    label = visited * (U - u) / np.maximum(left, 1)
    return visited - label, label
