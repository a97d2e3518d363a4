"""Plain arrays: NumPy, CuPy, and any other library's that speak DLPack.

An array of another library is taken as a view, and results go back to that library's type.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, is_aligned_or_odd
from flash_rnnt_cupy.errors import InputError, InputTypeError

_DLPACK_CPU, _DLPACK_CUDA = 1, 2


class Facts(NamedTuple):
    """What validation needs to know of an array."""

    shape: tuple[int, ...]
    dtype: str
    device: str


class Opened(NamedTuple):
    """An array of NumPy or CuPy, and the way back to the caller's library."""

    array: Any
    facts: Facts
    library: ModuleType  # numpy or cupy
    restore: Callable[[Any], Any]

    def buffer(self, contiguous: bool = False, aligned: bool = False) -> Any:
        """The array as its backend takes it.

        Copied on a GPU if the last axis, or any that must be, has gaps, and if rows of whole groups of 8 columns
        must start on 16 bytes and do not.
        """
        if self.facts.device == "cpu":
            return buffer_of(self.array)
        gaps = contiguous or not self.has_contiguous_rows()
        buffer = buffer_of(self.library.ascontiguousarray(self.array) if gaps else self.array)
        return buffer_of(self.array.copy("C")) if aligned and not is_aligned_or_odd(buffer) else buffer

    def has_contiguous_rows(self) -> bool:
        """Whether the last axis has no gaps."""
        return bool(self.array.shape[-1] == 1 or self.array.strides[-1] == self.array.itemsize)

    def device_context(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the array's device the current one."""
        return contextlib.nullcontext() if self.facts.device == "cpu" else self.array.device

    def is_writeable(self) -> bool:
        """Whether the caller's own memory can be written through it."""
        return bool(self.array.flags.writeable) if self.facts.device == "cpu" else self.has_contiguous_rows()


def _same(array: Any) -> Any:
    return array


def open_array(name: str, value: Any) -> Opened:
    """A view of the caller's array; lists and scalars become NumPy arrays, other objects an InputTypeError."""
    if isinstance(value, (np.ndarray, np.generic, list, tuple, int, float)):
        return _numpy(name, value, _same)
    if not hasattr(value, "__dlpack__"):
        raise InputTypeError(name, "an array (NumPy, CuPy, or any with __dlpack__)", type(value).__name__)
    if getattr(value, "requires_grad", False):
        raise InputError(
            name,
            "an array that needs no gradient",
            "a tensor with requires_grad",
            remedy="use flash_rnnt_cupy.adapters.pytorch, or detach it",
        )
    kind = int(value.__dlpack_device__()[0])
    restore = getattr(sys.modules[type(value).__module__.partition(".")[0]], "from_dlpack", _same)
    if kind == _DLPACK_CUDA:
        return _cupy(name, value, restore)
    if kind != _DLPACK_CPU:
        raise InputError(name, "an array in host or CUDA memory", f"DLPack device type {kind}")
    try:
        view = np.from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise InputTypeError(name, "a dtype that NumPy can hold", str(error)) from error
    return _numpy(name, view, lambda result: restore(np.asarray(result)))  # NumPy scalars have no DLPack


def _numpy(name: str, value: Any, restore: Callable[[Any], Any]) -> Opened:
    try:
        array = np.asarray(value)
    except ValueError as error:  # a ragged list
        raise InputError(name, "rows of equal length", str(error)) from error
    return Opened(array, Facts(array.shape, array.dtype.name, "cpu"), np, restore)


def _cupy(name: str, value: Any, restore: Callable[[Any], Any]) -> Opened:
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    if isinstance(value, cupy.ndarray):
        array, restore = value, _same
    else:
        with cupy.cuda.Device(int(value.__dlpack_device__()[1])):
            try:
                array = cupy.from_dlpack(value)
            except (BufferError, NotImplementedError) as error:
                raise InputTypeError(name, "a dtype that CuPy can hold", str(error)) from error
    return Opened(array, Facts(array.shape, array.dtype.name, f"cuda:{array.device.id}"), cupy, restore)


def buffer_of(array: Any) -> Any:
    """What a backend works on: the NumPy array, or raw device memory."""
    if isinstance(array, np.ndarray):
        return array
    strides = tuple(step // array.itemsize for step in array.strides)
    return DeviceArray(array.data.ptr, array.shape, array.dtype.name, strides, array)


def array_of(buffer: Any) -> Any:
    """The array behind a buffer."""
    return buffer.owner if isinstance(buffer, DeviceArray) else buffer


def host_integers(name: str, value: Any) -> npt.NDArray[np.int64]:
    """An integer array in host memory as int64; int32 and int64 are lawful, as are lists of ints.

    From a GPU it is copied, which waits for the stream.
    """
    if isinstance(value, np.ndarray) and value.dtype in (np.int32, np.int64):  # what most calls give
        return np.asarray(value, np.int64)
    opened = open_array(name, value)
    empty_list = opened.array.size == 0 and isinstance(value, (list, tuple))  # NumPy makes it float64
    if opened.facts.dtype not in ("int32", "int64") and not empty_list:
        raise InputTypeError(name, "int32 or int64", opened.facts.dtype)
    host = opened.array if opened.library is np else opened.array.get()
    return np.asarray(host, np.int64)
