"""Plain arrays: NumPy, and anything else that speaks DLPack.

An array of another library is taken as a view, never copied, and results go back to that library's type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.errors import InputError, InputTypeError

_DLPACK_CPU = 1


class Facts(NamedTuple):
    """What validation needs to know of an array."""

    shape: tuple[int, ...]
    dtype: str
    device: str


class Opened(NamedTuple):
    """An array as the backend takes it, and the way back to the caller's library."""

    array: Any
    facts: Facts
    restore: Callable[[Any], Any]


def _same(array: Any) -> Any:
    return array


def open_array(name: str, value: Any) -> Opened:
    """A view of the caller's array. Lists and scalars become NumPy arrays; objects become an InputTypeError."""
    if isinstance(value, (np.ndarray, np.generic, list, tuple, int, float)):
        return _numpy(name, value, _same)
    if not hasattr(value, "__dlpack__"):
        raise InputTypeError(name, "an array (NumPy, or any with __dlpack__)", type(value).__name__)
    kind = int(value.__dlpack_device__()[0])
    if kind != _DLPACK_CPU:
        raise InputError(name, "an array in host memory", f"DLPack device type {kind}")
    if getattr(value, "requires_grad", False):
        raise InputError(
            name,
            "an array that needs no gradient",
            "a tensor with requires_grad",
            remedy="use flash_rnnt_cupy.adapters.pytorch, or detach it",
        )
    library = sys.modules[type(value).__module__.partition(".")[0]]
    try:
        view = np.from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise InputTypeError(name, "a dtype that NumPy can hold", str(error)) from error
    return _numpy(name, view, getattr(library, "from_dlpack", _same))


def _numpy(name: str, value: Any, restore: Callable[[Any], Any]) -> Opened:
    try:
        array = np.asarray(value)
    except ValueError as error:  # a ragged list
        raise InputError(name, "rows of equal length", str(error)) from error
    return Opened(array, Facts(array.shape, array.dtype.name, "cpu"), restore)


def host_integers(name: str, value: Any) -> npt.NDArray[np.int64]:
    """An integer array in host memory as int64; int32 and int64 are lawful, as are lists of ints."""
    opened = open_array(name, value)
    empty_list = opened.array.size == 0 and isinstance(value, (list, tuple))  # NumPy makes it float64
    if opened.facts.dtype not in ("int32", "int64") and not empty_list:
        raise InputTypeError(name, "int32 or int64", opened.facts.dtype)
    return np.asarray(opened.array, np.int64)
