"""Derivatives of a scalar function by central differences in float64 with Richardson extrapolation."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def derivative(f: Callable[[float], float], *, step: float = 0.05, levels: int = 3) -> float:
    """f'(0) from (f(h) - f(-h)) / 2h, h = step, step / 2, ...; the error is O(step^(2 levels)) + rounding."""
    previous: list[float] = []
    for level in range(levels):
        h = step / 2**level
        estimates = [(f(h) - f(-h)) / (2 * h)]
        for order, coarser in enumerate(previous, start=1):
            estimates.append(estimates[-1] + (estimates[-1] - coarser) / (4**order - 1))
        previous = estimates
    return previous[-1]


def gradient(f: Callable[[Array], float], x: Array, *, step: float = 0.05, levels: int = 3) -> Array:
    """The full gradient of f at x, with 2 levels calls of f for each element."""

    def along(index: tuple[int, ...]) -> float:
        def shifted(h: float) -> float:
            y = x.copy()
            y[index] += h
            return f(y)

        return derivative(shifted, step=step, levels=levels)

    return np.array([along(index) for index in np.ndindex(x.shape)]).reshape(x.shape)


def along_random_directions(
    f: Callable[[Array], float],
    x: Array,
    claimed: Array,
    *,
    n_directions: int = 4,
    seed: int = 0,
    step: float = 0.05,
    levels: int = 3,
) -> tuple[Array, Array]:
    """Derivatives of f at x along random sign vectors, measured, and the same from a claimed gradient."""
    directions = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n_directions, *x.shape))
    measured = []
    for direction in directions:

        def along(h: float, direction: Array = direction) -> float:
            return f(x + h * direction)

        measured.append(derivative(along, step=step, levels=levels))
    return np.array(measured), np.array([math.fsum((claimed * d).flat) for d in directions])
