"""Device memory as the CUDA backend sees it: a pointer with a shape, kept alive by whoever owns it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from flash_rnnt_cupy.problem import ITEMSIZE


class DeviceArray(NamedTuple):
    """Raw device memory.

    pointer   address of the first element
    shape     sizes
    dtype     name, as NumPy writes it
    strides   steps of each axis, in elements
    owner     the tensor or array whose memory this is; kept alive by this reference
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    owner: Any

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous array of this shape."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def pitch(self) -> int:
        """Elements from a row of a two-dimensional array to the next; a single row may come with any stride."""
        return max(self.strides[0], self.shape[1])

    def rows(self, n_rows: int) -> DeviceArray:
        """The first rows of a two-dimensional array."""
        return DeviceArray(self.pointer, (n_rows, *self.shape[1:]), self.dtype, self.strides, self.owner)

    def columns(self, n_columns: int) -> DeviceArray:
        """The first columns of an array."""
        return DeviceArray(self.pointer, (*self.shape[:-1], n_columns), self.dtype, self.strides, self.owner)


@functools.lru_cache(1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_aligned_or_odd(array: DeviceArray) -> bool:
    """Whether rows that are made of whole groups of 8 columns start on 16 bytes each."""
    return array.shape[-1] % 8 != 0 or is_aligned(array)


def is_aligned(array: DeviceArray) -> bool:
    """Whether every row starts on 16 bytes and is made of whole groups of 8 columns."""
    steps = (array.shape[-1], *array.strides[:-1])
    return array.pointer % 16 == 0 and array.strides[-1] == 1 and all(step % 8 == 0 for step in steps)
