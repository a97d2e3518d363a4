"""Device memory as the CUDA backend sees it: a pointer with a shape, kept alive by whoever owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class DeviceArray:
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
