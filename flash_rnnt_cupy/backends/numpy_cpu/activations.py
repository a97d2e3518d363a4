"""Activations and their derivatives, in place on float32 or float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Activation(NamedTuple):
    """``apply(x)``: x becomes f(x). ``derive(x)``: x becomes f'(x); None where that is 1 for every active unit."""

    apply: Callable[[Array], None]
    derive: Callable[[Array], None] | None


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _tanh(x: Array) -> None:
    np.tanh(x, out=x)


def _tanh_derivative(x: Array) -> None:
    _tanh(x)
    np.multiply(x, x, out=x)
    np.subtract(1, x, out=x)


def _sigmoid(x: Array) -> None:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        np.negative(x, out=x)
        np.exp(x, out=x)
    x += 1
    np.reciprocal(x, out=x)


def _sigmoid_derivative(x: Array) -> None:
    _sigmoid(x)
    x *= 1 - x


def _normal_cdf(x: Array) -> Array:
    """Phi(x) = (1 + erf(x / sqrt 2)) / 2."""
    scaled = (x.ravel() / math.sqrt(2)).tolist()
    return (0.5 + 0.5 * np.fromiter(map(math.erf, scaled), x.dtype, x.size)).reshape(x.shape)


def _gelu(x: Array) -> None:
    x *= _normal_cdf(x)


def _gelu_derivative(x: Array) -> None:
    x[...] = _normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _silu(x: Array) -> None:
    gate = x.copy()
    _sigmoid(gate)
    x *= gate


def _silu_derivative(x: Array) -> None:
    gate = x.copy()
    _sigmoid(gate)
    x[...] = gate * (1 + x * (1 - gate))


def _identity(x: Array) -> None:
    del x


TABLE = {
    "relu": Activation(_relu, None),
    "tanh": Activation(_tanh, _tanh_derivative),
    "sigmoid": Activation(_sigmoid, _sigmoid_derivative),
    "gelu": Activation(_gelu, _gelu_derivative),
    "silu": Activation(_silu, _silu_derivative),
    "identity": Activation(_identity, None),
}
