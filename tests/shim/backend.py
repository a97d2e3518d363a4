"""The CUDA backend on the CPU: its stages and kernels unchanged, on NumPy memory, with NumPy's matrix products."""

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends import Backend, Lattice
from flash_rnnt_cupy.backends.cuda import make_backend
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec
from flash_rnnt_cupy.backends.cuda.driver import Driver, Grid, Kernel
from flash_rnnt_cupy.backends.cuda.facts import device_facts
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray
from flash_rnnt_cupy.plan import Part
from flash_rnnt_cupy.problem import Inputs
from tests import shim
from tests.problems import dtype_of

Array = npt.NDArray[Any]

SANITIZE = shim.SANITIZE_VARIABLE in os.environ
SHARED_BYTES = 48 << 10


def device_array(array: Array) -> DeviceArray:
    """NumPy memory, as the stages take it."""
    strides = tuple(step // array.itemsize for step in array.strides)
    return DeviceArray(array.ctypes.data, array.shape, array.dtype.name, strides, array)


def host_view(array: DeviceArray) -> Array:
    """The memory, as NumPy takes it."""
    dtype = dtype_of(array.dtype)
    strides = tuple(step * dtype.itemsize for step in array.strides)
    n_bytes = dtype.itemsize + sum((size - 1) * step for size, step in zip(array.shape, strides, strict=True))
    memory = (ctypes.c_char * (n_bytes if array.nbytes else 0)).from_address(array.pointer)
    return np.ndarray(array.shape, dtype, memory, strides=strides)


def make_driver(reverse: bool) -> Driver:
    """The five functions; ``reverse`` runs threads and blocks in the other order."""

    def kernel(spec: ModuleSpec, entry: str, record: Array, shared_bytes: int, early: bool) -> Kernel:
        del early  # kernels run one after another
        library = shim.load(spec, SANITIZE)

        def launch(grid: Grid, block: Grid) -> None:
            library.run(entry, grid, block, record, shared_bytes, reverse)

        return launch

    return Driver(kernel, _gemm, _upload, _download, _zero)


def _gemm(
    a: DeviceArray, b: DeviceArray, c: DeviceArray, transpose_a: bool, transpose_b: bool, add: bool, alpha: float
) -> None:
    wide = "float64" if a.dtype == "float64" else "float32"
    left, right = (host_view(x).astype(wide) for x in (a, b))
    target = host_view(c)
    with np.errstate(all="ignore"):
        product = alpha * np.matmul(left.T if transpose_a else left, right.T if transpose_b else right)
        target[...] = target + product if add else product


def _upload(arrays: Sequence[Array], device: DeviceArray) -> None:
    target = device.pointer
    for array in arrays:
        assert array.flags.c_contiguous, "the driver takes bytes as they lie"
        ctypes.memmove(target, array.ctypes.data, array.nbytes)
        target += -(-array.nbytes // 8) * 8


def _download(device: DeviceArray) -> Callable[[], Array]:
    return host_view(device).copy


def _zero(device: DeviceArray) -> None:
    ctypes.memset(device.pointer, 0, device.nbytes)


def _allocate(part: Part) -> DeviceArray:
    """Every byte 0xff: NaN, or -1. Freed memory goes back to the allocator, which NumPy defers below 1024 bytes."""
    array = np.full(1024 + part.nbytes, 0xFF, np.uint8)[1024:].view(dtype_of(part.dtype)).reshape(part.shape)
    return device_array(array)


def _lowered(value: Any) -> Any:
    """Arrays become device arrays, also those of a record; integers but bytes stay on the host.

    As for a GPU, an array whose last axis is not contiguous is copied.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind != "i":
        return device_array(value if value.strides[-1:] == (value.itemsize,) else np.ascontiguousarray(value))
    if isinstance(value, (Lattice, Inputs)):
        return replace(value, **{field.name: _lowered(getattr(value, field.name)) for field in fields(value)})
    return value


def _lifted(stage: Callable[..., Any]) -> Callable[..., Any]:
    """The stage on NumPy arrays."""

    @functools.wraps(stage)
    def lifted(*arguments: Any) -> Any:
        result = stage(*map(_lowered, arguments))
        return result.owner if isinstance(result, DeviceArray) else result

    return lifted


def make_numpy_backend(reverse: bool = False, shared_bytes: int = SHARED_BYTES) -> Backend:
    """The CUDA backend, taking and giving NumPy arrays; ``shared_bytes`` is what its planner believes to have."""
    facts = device_facts("CPU, as if CUDA", l2_bytes=0, shared_bytes=shared_bytes, multiprocessors=2, capability="80")
    inner = make_backend(make_driver(reverse), facts, 2, _allocate)
    plain = ("name", "facts", "supports", "begin")
    stages = {field.name: _lifted(getattr(inner, field.name)) for field in fields(inner) if field.name not in plain}

    def begin(plan: Any, inputs: Inputs, allocate: Any, kept: Mapping[str, Any]) -> Any:
        del allocate  # the stages' own memory stays device memory
        weight, bias = (None if x is None else np.ascontiguousarray(x) for x in (inputs.weight, inputs.bias))
        return inner.begin(plan, _lowered(replace(inputs, weight=weight, bias=bias)), _allocate, kept)

    return replace(inner, name="cuda-shim", begin=begin, **stages)
