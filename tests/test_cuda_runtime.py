"""Streams, devices, other libraries' arrays, and failures on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import backends
from tests.oracles.checks import assert_close
from tests.problems import draw_joint, draw_logits

if reason := backends.unavailable("cuda"):
    pytest.skip(reason, allow_module_level=True)

import cupy

from flash_rnnt_cupy.backends.cuda import specs
from flash_rnnt_cupy.backends.cuda.driver import CUPY

SLEEP_CYCLES = 200_000_000  # about a tenth of a second

_sleep = cupy.RawKernel(
    r"""extern "C" __global__ void sleep_for(long long cycles) {
      const long long begin = clock64();
      while (clock64() - begin < cycles) {}
    }""",
    "sleep_for",
)


def test_work_follows_the_callers_stream() -> None:
    problem = draw_joint((20, 30), (5, 9), dtype="float32")
    arrays = [cupy.asarray(array) for array in problem.args[:4]]
    expected_loss, expected = frc.joint_rnnt_loss_and_grad(*arrays, *problem.args[4:], blank=problem.blank)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    late = [cupy.full_like(array, np.nan) for array in arrays]
    cupy.cuda.Device().synchronize()
    with stream:
        _sleep((1,), (1,), (np.int64(SLEEP_CYCLES),))
        for target, source in zip(late, arrays, strict=True):
            cupy.copyto(target, source)
        loss, gradients = frc.joint_rnnt_loss_and_grad(*late, *problem.args[4:], blank=problem.blank, min_occupancy=0)
        assert cupy.cuda.get_current_stream() == stream
    stream.synchronize()
    assert_close(loss.get(), expected_loss.get(), rtol=0, atol=0)
    assert_close(gradients.weight.get(), expected.weight.get(), rtol=1e-5, atol=1e-6)
    assert cupy.cuda.get_current_stream().ptr == cupy.cuda.Stream.null.ptr


def test_a_call_with_lengths_on_the_host_does_not_wait_for_the_gpu() -> None:
    problem = draw_joint((20, 30), (5, 9), dtype="float16")
    arrays = [cupy.asarray(array) for array in problem.args[:4]]
    options = {"blank": problem.blank, "min_occupancy": 0}
    frc.joint_rnnt_loss_and_grad(*arrays, *problem.args[4:], **options)
    done = cupy.cuda.Event()
    _sleep((1,), (1,), (np.int64(20 * SLEEP_CYCLES),))
    done.record()
    frc.joint_rnnt_loss_and_grad(*arrays, *problem.args[4:], **options)
    assert not done.done, "the call returned after the work queued before it"
    cupy.cuda.Device().synchronize()


def test_lengths_and_targets_on_the_gpu() -> None:
    problem = draw_joint((20, 30), (5, 9))
    arrays = [cupy.asarray(array) for array in problem.args]
    on_device = frc.joint_rnnt_loss(*arrays, blank=problem.blank)
    on_host = frc.joint_rnnt_loss(*arrays[:4], *problem.args[4:], blank=problem.blank)
    assert on_device.get() == on_host.get()


def test_tensors_of_another_library_come_back_as_such() -> None:
    torch = pytest.importorskip("torch")
    problem = draw_joint((20, 30), (5, 9), dtype="float16")
    tensors = [torch.from_numpy(np.asarray(array)).cuda() for array in problem.args[:4]]
    loss, gradients = frc.joint_rnnt_loss_and_grad(*tensors, *problem.args[4:], blank=problem.blank)
    assert isinstance(loss, torch.Tensor)
    assert gradients.encoder.device == tensors[0].device
    expected, _ = frc.joint_rnnt_loss_and_grad(
        *(cupy.asarray(array) for array in problem.args[:4]), *problem.args[4:], blank=problem.blank
    )
    assert float(loss) == float(expected)


def test_arrays_in_host_and_device_memory_are_refused() -> None:
    problem = draw_joint((4, 3), (2, 1))
    arguments = list(problem.args)
    arguments[0] = cupy.asarray(arguments[0])
    with pytest.raises(frc.InputError, match="predictor: expected an array on cuda:0, as encoder, got cpu"):
        frc.joint_rnnt_loss(*arguments, blank=problem.blank)


@pytest.mark.parametrize(("backend", "on_gpu"), [("numpy", True), ("cuda", False)])
def test_a_backend_refuses_arrays_it_cannot_reach(backend: str, on_gpu: bool) -> None:
    problem = draw_logits((4, 3), (2, 1))
    logits = cupy.asarray(problem.logits) if on_gpu else problem.logits
    with pytest.raises(frc.BackendUnavailableError, match="the arrays are in"):
        frc.rnnt_loss(logits, *problem.args[1:], backend=backend)


def test_out_of_memory_is_said_and_survived() -> None:
    pool = cupy.get_default_memory_pool()
    B, T, U, H, V = 4, 200, 100, 64, 500
    states = cupy.zeros((B, T, H), np.float32), cupy.zeros((B, U + 1, H), np.float32), cupy.zeros((V, H), np.float32)
    arguments = (*states, None, np.zeros((B, U), np.int64), [T] * B, [U] * B)
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes() + (32 << 20))
    try:
        with pytest.raises(frc.OutOfMemoryError, match="float32") as caught:
            frc.joint_rnnt_loss_and_grad(*arguments, tile_rows=None)
        assert isinstance(caught.value, MemoryError)
        loss, _ = frc.joint_rnnt_loss_and_grad(*arguments, tile_rows=1000)
        assert bool(cupy.isfinite(loss))
    finally:
        pool.set_limit(size=0)


def test_a_failed_launch_names_kernel_sizes_and_device() -> None:
    record = np.zeros(1, specs.CONVERT_RECORD)
    kernel = CUPY.kernel(specs.convert_spec("float32", "float32", "float32", False), "convert", record, 0, False)
    with pytest.raises(frc.LaunchError, match=r"convert.*grid \(1,\), block \(5000,\).*cuda:0"):
        kernel((1,), (5000,))


def test_a_thread_s_first_call_to_the_device_may_be_a_launch() -> None:
    """As in autograd's thread, when all memory comes out of a pool."""
    source, target = cupy.full(4, 7, np.float32), cupy.zeros(4, np.float32)
    record = np.zeros(1, specs.CONVERT_RECORD)
    record["from"], record["to"], record["n"] = source.data.ptr, target.data.ptr, 4
    what = specs.convert_spec("float32", "float32", "float32", False), "convert", record, 0, False
    CUPY.kernel(*what)  # loads it here
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: CUPY.kernel(*what)((1,), (32,))).result()
    cupy.cuda.Device().synchronize()
    assert target.get().tolist() == [7] * 4


def test_repeated_calls_give_the_same_bits() -> None:
    random = np.random.default_rng(0)
    frames, labels = random.integers(200, 400, 8), random.integers(100, 300, 8)
    states = [
        cupy.asarray(random.normal(size=shape).astype(np.float16))
        for shape in ((8, 400, 64), (8, 301, 64), (128, 64), (128,))
    ]
    targets = random.integers(0, 127, (8, 300))
    first = None
    for _ in range(20):
        losses, gradients = frc.joint_rnnt_loss_and_grad(
            *states, targets, frames, labels, reduction="none", dropout=0.1, seed=1
        )
        bits = [losses.get(), *(getattr(gradients, n).get() for n in ("encoder", "predictor", "weight", "bias"))]
        first = first or bits
        for actual, expected in zip(bits, first, strict=True):
            assert np.array_equal(actual, expected)


def test_tiles_of_any_size_agree() -> None:
    random = np.random.default_rng(1)
    states = [
        cupy.asarray(random.normal(size=shape).astype(np.float32))
        for shape in ((4, 100, 96), (4, 41, 96), (200, 96), (200,))
    ]
    arguments = (*states, random.integers(0, 199, (4, 40)), [100, 60, 1, 77], [40, 0, 13, 22])
    expected_losses, expected = frc.joint_rnnt_loss_and_grad(*arguments, reduction="none", tile_rows=None)
    for tile_rows in (30, 1000, 4096):
        losses, gradients = frc.joint_rnnt_loss_and_grad(*arguments, reduction="none", tile_rows=tile_rows)
        assert_close(losses.get(), expected_losses.get(), rtol=1e-6, atol=0)
        for name in ("encoder", "predictor", "weight", "bias"):
            actual, wanted = (getattr(g, name).get().astype(np.float64) for g in (gradients, expected))
            error = np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)
            assert error < 1e-6, (name, tile_rows, error)
