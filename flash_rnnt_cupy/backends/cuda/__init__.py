"""The CUDA backend: kernels of `kernels_cu/` and cuBLAS on raw device memory, driven through CuPy.

Everything runs on CuPy's current device and stream, which the caller sets. float16 and bfloat16 are multiplied
as they are with float32 accumulation; hidden states and logits of a tile are kept in the states' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flash_rnnt_cupy.backends import Allocate, Backend
from flash_rnnt_cupy.backends.cuda import fused as fused_stages
from flash_rnnt_cupy.backends.cuda import stages
from flash_rnnt_cupy.backends.cuda.driver import CUPY, Driver, allocate
from flash_rnnt_cupy.backends.cuda.facts import device_facts
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray
from flash_rnnt_cupy.plan import DeviceFacts, Plan
from flash_rnnt_cupy.problem import Inputs, Problem


def _supports(problem: Problem) -> tuple[str, ...]:
    if problem.vocabulary * max(problem.joint_width, 1) >= 2**31:
        return (f"weight has {problem.vocabulary} x {problem.joint_width} >= 2**31 elements",)
    return ()


def _begin(
    driver: Driver,
    multiprocessors: int,
    plan: Plan,
    inputs: Inputs,
    allocate: Allocate,
    kept: Mapping[str, DeviceArray],
) -> stages.CudaCall:
    call = stages.begin(driver, multiprocessors, plan, inputs, allocate, kept)
    return fused_stages.pack_parameters(call) if plan.fused else stages.convert_parameters(call)


def make_backend(driver: Driver, facts: DeviceFacts, multiprocessors: int, allocate: Allocate) -> Backend:
    """The record of stages over a device's functions."""
    return Backend(
        name="cuda",
        facts=facts,
        supports=_supports,
        allocate=allocate,
        begin=functools.partial(_begin, driver, multiprocessors),
        joint_forward=stages.joint_forward,
        product=stages.product,
        normalize_forward=stages.normalize_forward,
        sum_alignments=stages.sum_alignments,
        losses=stages.losses,
        posteriors=stages.posteriors,
        select_rows=stages.select_rows,
        start_backward=stages.start_backward,
        rows_in_work=stages.rows_in_work,
        normalize_backward=stages.normalize_backward,
        product_weight=stages.product_weight,
        product_hidden=stages.product_hidden,
        joint_backward=stages.joint_backward,
        fill_zero=stages.fill_zero,
        finish=stages.finish,
        score=fused_stages.score,
        grad_scores=fused_stages.grad_scores,
    )


def unavailable() -> str:
    """Why there is no CUDA here; empty if there is."""
    try:
        import cupy  # noqa: PLC0415  CuPy is imported on demand
    except ImportError as error:
        return f"CuPy is not installed ({error}); `pip install flash-rnnt-cupy[cuda13]`"
    if not cupy.cuda.is_available():
        has_driver = cupy.cuda.runtime.driverGetVersion() != 0
        return "there is an NVIDIA driver but no usable GPU" if has_driver else "there is no NVIDIA driver"
    try:
        cupy.cuda.nvrtc.getVersion()
        _ = cupy.cuda.cublas
    except (ImportError, RuntimeError) as error:
        return f"a CUDA library is missing ({error}); `pip install flash-rnnt-cupy[cuda13-ctk]`"
    return ""


@functools.cache
def backend(device: int, fused: bool) -> Backend:
    """The backend on a device, which must be CuPy's current one when it is used; with or without fused kernels."""
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    attributes = cupy.cuda.Device(device).attributes
    multiprocessors = attributes["MultiProcessorCount"]
    sizes = attributes["L2CacheSize"], attributes["MaxSharedMemoryPerBlockOptin"], multiprocessors
    facts = device_facts(name, *sizes, cupy.cuda.Device(device).compute_capability, fused)
    return make_backend(CUPY, facts, multiprocessors, allocate)
