"""The mathematics in float64, dense and plain, to be read beside the equations.

Slow and memory-hungry on purpose; no loss is computed with it. Arrays of one utterance:

    logits z [T, U1, V]     labels y [U]     log-probabilities log p [T, U1, V]

Source: Graves 2012 (arXiv:1211.3711), eq. 12-20.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class LossAndGradient(NamedTuple):
    """NLL of an utterance, and its gradient."""

    loss: float
    gradient: Array


class JointLossAndGradients(NamedTuple):
    """NLL of an utterance, and its gradients."""

    loss: float
    encoder: Array  # [T, H]
    predictor: Array  # [U1, H]
    weight: Array  # [V, H]
    bias: Array  # [V]


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def log_alpha(blank: Array, label: Array) -> Array:
    """Eq. 16: log alpha[t, u] from blank [T, U1] and label [T, U] log-probabilities."""
    T, U1 = blank.shape
    alpha = np.full((T, U1), -np.inf)
    alpha[0, 0] = 0
    for t in range(T):
        for u in range(U1):
            if t > 0:
                alpha[t, u] = np.logaddexp(alpha[t, u], alpha[t - 1, u] + blank[t - 1, u])
            if u > 0:
                alpha[t, u] = np.logaddexp(alpha[t, u], alpha[t, u - 1] + label[t, u - 1])
    return alpha


def log_beta(blank: Array, label: Array) -> Array:
    """Eq. 18: log beta[t, u]; the last step is a blank from (T - 1, U)."""
    T, U1 = blank.shape
    beta = np.full((T, U1), -np.inf)
    beta[T - 1, U1 - 1] = blank[T - 1, U1 - 1]
    for t in reversed(range(T)):
        for u in reversed(range(U1)):
            if t < T - 1:
                beta[t, u] = np.logaddexp(beta[t, u], beta[t + 1, u] + blank[t, u])
            if u < U1 - 1:
                beta[t, u] = np.logaddexp(beta[t, u], beta[t, u + 1] + label[t, u])
    return beta


def arc_posteriors(blank: Array, label: Array) -> tuple[float, Array, Array]:
    """NLL, and the probability that an alignment uses each blank arc [T, U1] and each label arc [T, U]."""
    alpha, beta = log_alpha(blank, label), log_beta(blank, label)
    total = beta[0, 0]
    T, U1 = blank.shape
    after_blank = np.full((T, U1), -np.inf)
    after_blank[:-1] = beta[1:]
    after_blank[T - 1, U1 - 1] = 0
    return (
        -float(total),
        np.exp(alpha + blank + after_blank - total),
        np.exp(alpha[:, :-1] + label + beta[:, 1:] - total),
    )


def rnnt_loss(
    logits: Array,
    labels: npt.ArrayLike,
    blank: int,
    *,
    fused_log_softmax: bool = True,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
) -> LossAndGradient:
    """NLL of one utterance and its gradient to ``logits`` [T, U1, V] (eq. 20, pushed through the softmax)."""
    y = np.asarray(labels, int)
    log_probs = log_softmax(logits) if fused_log_softmax else logits
    u = np.arange(len(y))
    loss, blank_posterior, label_posterior = arc_posteriors(log_probs[..., blank], log_probs[:, u, y])
    label_posterior = (1 + fastemit_lambda) * label_posterior

    gradient = np.zeros_like(logits)  # to the log-probabilities
    gradient[..., blank] -= blank_posterior
    gradient[:, u, y] -= label_posterior
    if fused_log_softmax:
        gradient -= np.exp(log_probs) * gradient.sum(-1, keepdims=True)
    if clamp is not None:
        gradient = np.clip(gradient, -clamp, clamp)
    return LossAndGradient(loss, gradient)


def activate(name: str, x: Array) -> tuple[Array, Array]:
    """f(x) and f'(x)."""
    sigmoid = 1 / (1 + np.exp(-x))
    if name == "relu":
        return np.where(x > 0, x, 0.0), np.where(x > 0, 1.0, 0.0)
    if name == "tanh":
        return np.tanh(x), 1 / np.cosh(x) ** 2
    if name == "sigmoid":
        return sigmoid, sigmoid * (1 - sigmoid)
    if name == "gelu":
        cdf = np.vectorize(lambda v: math.erfc(-v / math.sqrt(2)) / 2, otypes=[float])(x)
        return x * cdf, cdf + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    if name == "silu":
        return x * sigmoid, sigmoid + x * sigmoid * (1 - sigmoid)
    if name == "identity":
        return x, np.ones_like(x)
    raise ValueError(name)


def joint_rnnt_loss(
    encoder: Array,
    predictor: Array,
    weight: Array,
    bias: Array,
    labels: npt.ArrayLike,
    blank: int,
    *,
    activation: str = "relu",
    kept: Array | None = None,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
) -> JointLossAndGradients:
    """The same for z = weight h + bias, h = kept * activation(encoder[t] + predictor[u]).

    encoder [T, H], predictor [U1, H]; ``kept`` [T, U1, H] is the dropout mask over the keep probability.
    """
    value, slope = activate(activation, encoder[:, None] + predictor[None])
    factor = np.ones_like(value) if kept is None else kept
    hidden = value * factor  # [T, U1, H]
    loss, grad = rnnt_loss(hidden @ weight.T + bias, labels, blank, fastemit_lambda=fastemit_lambda, clamp=clamp)
    grad_pre = (grad @ weight) * factor * slope
    return JointLossAndGradients(
        loss,
        encoder=grad_pre.sum(1),
        predictor=grad_pre.sum(0),
        weight=np.einsum("tuv,tuh->vh", grad, hidden),
        bias=grad.sum((0, 1)),
    )
