"""What the stages need of a device, as five functions; here they are CuPy's, in tests the CPU's.

Everything runs on CuPy's current device and stream, which the caller sets.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec, load
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, contiguous_strides
from flash_rnnt_cupy.backends.cuda.tables import whole_words
from flash_rnnt_cupy.dtypes import numpy_dtype
from flash_rnnt_cupy.errors import LaunchError, OutOfMemoryError
from flash_rnnt_cupy.plan import Part

DEFAULT_SHARED_BYTES = 48 << 10  # what a kernel may have without asking
CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType
COMPUTE_32F, COMPUTE_64F = 68, 70  # cublasComputeType_t

Grid = tuple[int, ...]
Record = npt.NDArray[Any]
Kernel = Callable[[Grid, Grid], None]  # grid, block


@dataclass(frozen=True)
class Driver:
    """The device's functions.

    kernel(spec, entry, record, shared_bytes, early) -> kernel   compiled, loaded, and tied to the current stream, to
                                                      so much dynamic shared memory and to its parameter record, whose
                                                      fields may change between launches; ``early``: it may begin
                                                      while the kernel in front of it ends, and waits for that itself
    gemm(a, b, c, transpose_a, transpose_b, add, alpha)   c = alpha op(a) op(b), row-major; + c if ``add``
    upload(arrays, device)                            copies them one behind another, each from a whole 64-bit word
    download(device) -> wait                          begins to copy; wait() -> the array on the host
    zero(device)                                      fills with zero bytes
    """

    kernel: Callable[[ModuleSpec, str, Record, int, bool], Kernel]
    gemm: Callable[[DeviceArray, DeviceArray, DeviceArray, bool, bool, bool, float], None]
    upload: Callable[[Sequence[npt.NDArray[Any]], DeviceArray], None]
    download: Callable[[DeviceArray], Callable[[], npt.NDArray[Any]]]
    zero: Callable[[DeviceArray], None]


@functools.cache
def _function(spec: ModuleSpec, entry: str, device: int, shared_bytes: int) -> int:
    """Handle of a kernel on a device, allowed so much dynamic shared memory."""
    del device  # the current one
    raw = load(spec).get(entry)
    if shared_bytes > DEFAULT_SHARED_BYTES:
        raw.max_dynamic_shared_size_bytes = max(shared_bytes, raw.max_dynamic_shared_size_bytes)
    handle: int = raw.kernel.ptr
    return handle


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of those whose value is an int."""

    _fields_ = (("id", ctypes.c_int64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),  # of grid and block
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


EARLY = ctypes.pointer(_Attribute(6, 1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def _launch_kernel() -> Callable[..., int]:
    """The driver's cuLaunchKernelEx: CuPy's launch has no attributes, and its RawKernel packs the record anew."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    function = library.cuLaunchKernelEx
    function.argtypes = [ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return function


def _kernel(spec: ModuleSpec, entry: str, record: Record, shared_bytes: int, early: bool) -> Kernel:
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    if not cupy.cuda.driver.ctxGetCurrent():  # no call of this thread has bound the device's context to it
        cupy.cuda.runtime.setDevice(device)
    function, launch_kernel = _function(spec, entry, device, shared_bytes), _launch_kernel()
    config = _Config((), shared_bytes, stream, EARLY, int(early))
    parameters = ctypes.c_void_p(record.ctypes.data)  # void*[1]
    arguments = ctypes.byref(config), function, ctypes.addressof(parameters), None

    def launch(grid: Grid, block: Grid) -> None:
        config.sizes[:] = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
        status = launch_kernel(*arguments)
        if status:
            described = f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory"
            error = cupy.cuda.driver.CUDADriverError(status)
            raise LaunchError(f"{spec.file}: {entry}", described, f"cuda:{device}", error) from error

    launch.keeps = record, parameters  # type: ignore[attr-defined]
    return launch


@functools.cache
def _scalar(value: float, dtype: str) -> tuple[int, npt.NDArray[Any]]:
    """Address of the number, where cuBLAS reads it, and its memory."""
    memory = np.array(value, dtype)
    return memory.ctypes.data, memory


def _gemm(
    a: DeviceArray, b: DeviceArray, c: DeviceArray, transpose_a: bool, transpose_b: bool, add: bool, alpha: float
) -> None:
    """CuBLAS is column-major: it sees the transposes of our arrays, and computes c^T = op(b)^T op(a)^T."""
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    wide = a.dtype == "float64"
    dtype = "float64" if wide else "float32"
    cupy.cuda.cublas.gemmEx(
        cupy.cuda.Device().cublas_handle,
        int(transpose_b),  # CUBLAS_OP_N is 0, CUBLAS_OP_T 1
        int(transpose_a),
        c.shape[1],
        c.shape[0],
        a.shape[0] if transpose_a else a.shape[1],
        _scalar(alpha, dtype)[0],
        b.pointer,
        CUDA_TYPES[b.dtype],
        b.pitch,
        a.pointer,
        CUDA_TYPES[a.dtype],
        a.pitch,
        _scalar(float(add), dtype)[0],
        c.pointer,
        CUDA_TYPES[c.dtype],
        c.pitch,
        COMPUTE_64F if wide else COMPUTE_32F,
        -1,  # the default algorithm
    )


_GAP = np.zeros(8, np.uint8)


class _Staging:
    """Page-locked host memory for copies, used again once the device is done with it.

    A copy from ordinary memory would wait for all work queued before it; one to ordinary memory is slower.
    """

    def __init__(self) -> None:
        self._in_flight: collections.deque[tuple[Any, Any]] = collections.deque()
        self._lock = threading.Lock()  # autograd runs backward in a thread of its own

    def upload(self, arrays: Sequence[npt.NDArray[Any]], device: DeviceArray) -> None:
        import cupy  # noqa: PLC0415  CuPy is imported on demand

        nbytes = sum(whole_words(array.nbytes) for array in arrays)
        memory = cupy.cuda.alloc_pinned_memory(nbytes)
        pieces = [piece for array in arrays for piece in (array.view(np.uint8), _GAP[: -array.nbytes % 8])]
        np.concatenate(pieces, out=np.frombuffer(memory, np.uint8, nbytes))
        self._copy(memory, device.pointer, memory.ptr, nbytes, cupy.cuda.runtime.memcpyHostToDevice)

    def download(self, device: DeviceArray) -> Callable[[], npt.NDArray[Any]]:
        import cupy  # noqa: PLC0415  CuPy is imported on demand

        memory = cupy.cuda.alloc_pinned_memory(device.nbytes)  # lives as long as the array that is returned
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        copied = self._copy(memory, memory.ptr, device.pointer, device.nbytes, kind)

        def wait() -> npt.NDArray[Any]:
            copied.synchronize()
            return np.frombuffer(memory, device.dtype, math.prod(device.shape)).reshape(device.shape)

        return wait

    def _copy(self, memory: Any, target: int, source: int, nbytes: int, kind: int) -> Any:
        """Begins to copy; the event of its end. Until then ``memory`` is held, even if an error ends the call."""
        import cupy  # noqa: PLC0415  CuPy is imported on demand

        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
        copied = stream.record()
        with self._lock:
            while self._in_flight and self._in_flight[0][0].done:
                self._in_flight.popleft()  # back to CuPy's pool
            self._in_flight.append((copied, memory))
        return copied


_staging = _Staging()


def _zero(device: DeviceArray) -> None:
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    if device.nbytes:
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memsetAsync(device.pointer, 0, device.nbytes, stream.ptr)


def allocate(part: Part) -> DeviceArray:
    """Memory from CuPy's pool."""
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    try:
        array = cupy.empty(part.shape, numpy_dtype(part.dtype))
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{part.name}, {part.shape} {part.dtype}: {error}") from error
    return DeviceArray(array.data.ptr, part.shape, part.dtype, contiguous_strides(part.shape), array)


CUPY = Driver(_kernel, _gemm, _staging.upload, _staging.download, _zero)
