"""Checks on the user's own machine that need no second implementation to compare with.

Each holds for any correct transducer loss, whatever computes it: a closed form, and four invariants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy import backends
from flash_rnnt_cupy.api import joint_rnnt_loss, rnnt_loss, rnnt_loss_and_grad
from flash_rnnt_cupy.errors import BackendUnavailableError

Array = npt.NDArray[Any]

FRAMES, LABELS, VOCABULARY, WIDTH = np.array([37, 1, 60]), np.array([11, 0, 75]), 29, 16


class Check(NamedTuple):
    """One property, the largest error found, and what it may be."""

    name: str
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        """Within the budget; a NaN is not."""
        return self.error <= self.budget


def selfcheck(backend: str = "auto", verbose: bool = True) -> bool:
    """Runs every check on ``backend`` ("auto": the first one found); prints a table if ``verbose``.

    True if all pass. Raises BackendUnavailableError, with the reason, if the named backend is missing here.
    """
    reasons = {name: backends.unavailable(name) for name in backends.candidates(backend)}
    name = next((n for n, reason in reasons.items() if not reason), None)
    if name is None:
        raise BackendUnavailableError(f"{backend}: {reasons[backend]}")
    checks = list(_checks(_Library(name)))
    if verbose:
        print(f"{name}: {'all checks pass' if all(c.passed for c in checks) else 'FAILED'}")
        for check in checks:
            mark = "ok  " if check.passed else "FAIL"
            print(f"  {mark} {check.name:<58} error {check.error:8.1e}, allowed {check.budget:.0e}")
    return all(check.passed for check in checks)


class _Library:
    """The public calls on one backend, NumPy arrays in and out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module: Any = np
        if name != "numpy":
            import cupy  # noqa: PLC0415  CuPy is imported on demand

            self.module = cupy

    def host(self, array: Any) -> Array:
        return array if self.module is np else self.module.asnumpy(array)  # type: ignore[no-any-return]

    def losses(self, logits: Array, labels: Array) -> Array:
        given = self.module.asarray(logits)
        return self.host(rnnt_loss(given, labels, FRAMES, LABELS, reduction="none", backend=self.name))

    def gradient(self, logits: Array, labels: Array, fused_log_softmax: bool = True) -> Array:
        given = self.module.asarray(logits)
        _, gradient = rnnt_loss_and_grad(
            given,
            labels,
            FRAMES,
            LABELS,
            reduction="sum",
            fused_log_softmax=fused_log_softmax,
            backend=self.name,
        )
        return self.host(gradient)

    def joint_losses(self, states: tuple[Array, ...], labels: Array) -> Array:
        encoder, predictor, weight = (self.module.asarray(array) for array in states)
        losses = joint_rnnt_loss(
            encoder, predictor, weight, None, labels, FRAMES, LABELS, reduction="none", backend=self.name
        )
        return self.host(losses)


def _checks(library: _Library) -> Iterator[Check]:
    random = np.random.default_rng(0)
    shape = (len(FRAMES), FRAMES.max() + 2, LABELS.max() + 3, VOCABULARY)
    logits = random.normal(scale=2, size=shape).astype(np.float32)
    labels = random.integers(0, VOCABULARY - 1, (len(FRAMES), LABELS.max()))
    inside = np.zeros(shape[:3], bool)
    for b, (frames, n_labels) in enumerate(zip(FRAMES, LABELS, strict=True)):
        inside[b, :frames, : n_labels + 1] = True

    uniform = library.losses(np.zeros_like(logits), labels)
    expected = [_uniform_nll(int(T), int(U), VOCABULARY) for T, U in zip(FRAMES, LABELS, strict=True)]
    yield Check("equal scores give (T+U) ln V - ln C(T+U-1, U), relative", _relative(uniform, expected), 1e-6)

    log_probs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    posterior = -library.gradient(log_probs.astype(np.float32), labels, fused_log_softmax=False)
    blanks = [posterior[b, :T, :, -1].sum(1) - 1 for b, T in enumerate(FRAMES)]
    emitted = [posterior[b, :, u, labels[b, u]].sum() - 1 for b, U in enumerate(LABELS) for u in range(U)]
    yield Check("blank posteriors of every frame add up to 1", _largest(np.concatenate(blanks)), 1e-5)
    yield Check("posteriors of every label add up to 1", _largest(np.array(emitted)), 1e-5)

    gradient = library.gradient(logits, labels)
    yield Check("gradients of a node's scores add up to 0", _largest(gradient.sum(-1)), 1e-5)
    yield Check("gradients beyond an utterance are 0", _largest(gradient[~inside]), 0.0)

    losses = library.losses(logits, labels)
    shifted = library.losses(logits + random.normal(size=(*shape[:3], 1)).astype(np.float32), labels)
    yield Check("a constant added to a node's scores changes nothing, relative", _relative(shifted, losses), 1e-5)

    broken = np.where(inside[..., None], logits, np.nan)
    yield Check("what padding holds changes nothing", _largest(library.losses(broken, labels) - losses), 0.0)

    encoder = random.normal(size=(*shape[:2], WIDTH)).astype(np.float32)
    predictor = random.normal(size=(shape[0], shape[2], WIDTH)).astype(np.float32)
    weight = random.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    hidden = np.maximum(encoder[:, :, None] + predictor[:, None], 0)
    dense = library.losses(hidden @ weight.T, labels)
    joint = library.joint_losses((encoder, predictor, weight), labels)
    yield Check("the joint form equals the loss of its dense scores, relative", _relative(joint, dense), 1e-5)


def _uniform_nll(T: int, U: int, V: int) -> float:
    return (T + U) * math.log(V) - math.log(math.comb(T + U - 1, U))


def _largest(errors: Array) -> float:
    return float(np.abs(errors).max())


def _relative(actual: Array, expected: npt.ArrayLike) -> float:
    return _largest(np.asarray(actual, np.float64) / np.asarray(expected, np.float64) - 1)
