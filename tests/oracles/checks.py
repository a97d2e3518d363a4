"""Comparisons that name the worst element; NaN and infinities must match in place first."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def assert_close(
    actual: npt.ArrayLike,
    expected: npt.ArrayLike,
    *,
    rtol: float,
    atol: float,
    names: str = "array",
    equal_nan: bool = False,
) -> None:
    """|actual - expected| <= atol + rtol |expected| for every element."""
    ours, truth = matching(actual, expected, names, equal_nan)
    within(ours, truth, atol + rtol * np.abs(truth), names)


def assert_within_budget(
    actual: npt.ArrayLike,
    truth: npt.ArrayLike,
    plain: npt.ArrayLike,
    factor: float,
    floor: npt.ArrayLike,
    *,
    names: str = "array",
    equal_nan: bool = False,
) -> None:
    """|actual - truth| <= factor |plain - truth| + floor for every element.

    plain is a straightforward computation in the precision under test; floor is a number or an array.
    """
    reference, exact = matching(plain, truth, f"plain {names}", equal_nan)
    ours, _ = matching(actual, truth, names, equal_nan)
    within(ours, exact, factor * np.abs(reference - exact) + np.asarray(floor, np.float64), names)


def matching(actual: npt.ArrayLike, expected: npt.ArrayLike, names: str, equal_nan: bool) -> tuple[Array, Array]:
    """Both as float64, of one shape, with zeros where both hold the same infinity (or, if asked for, NaN)."""
    ours, truth = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if ours.shape != truth.shape:
        raise AssertionError(f"{names}: shape {ours.shape}, expected {truth.shape}")
    nan = np.isnan(ours) | np.isnan(truth)
    wrong_nan = np.isnan(ours) != np.isnan(truth) if equal_nan else nan
    wrong_infinity = ~nan & (np.isinf(ours) | np.isinf(truth)) & (ours != truth)
    for what, wrong in (("NaN", wrong_nan), ("infinity", wrong_infinity)):
        if wrong.any():
            found = described(int(np.argmax(wrong)), wrong, ours, truth)
            raise AssertionError(f"{names}: {what} out of place {found}")
    finite = np.isfinite(truth)
    return np.where(finite, ours, 0.0), np.where(finite, truth, 0.0)


def within(ours: Array, truth: Array, budget: Array, names: str) -> None:
    """Fail unless |ours - truth| <= budget for every element."""
    error, limit = np.abs(ours - truth), np.broadcast_to(budget, ours.shape)
    outside = ~(error <= limit)
    if outside.any():
        worst = int(np.argmax(np.where(outside, error - limit, -np.inf)))
        found = described(worst, outside, ours, truth)
        raise AssertionError(f"{names}: off by {error.flat[worst]:.3g}, budget {limit.flat[worst]:.3g} {found}")


def described(worst: int, wrong: npt.NDArray[np.bool_], ours: Array, truth: Array) -> str:
    """Where the worst element is, both its values, and how many elements are wrong."""
    index = tuple(int(i) for i in np.unravel_index(worst, wrong.shape))
    values = f"got {ours[index]:.17g}, expected {truth[index]:.17g}"
    return f"at {index}: {values}; {int(wrong.sum())} of {wrong.size} elements are wrong"
