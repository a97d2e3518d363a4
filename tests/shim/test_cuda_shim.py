"""The shim itself: what CUDA promises holds, and what CUDA leaves undefined is an error that says where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flash_rnnt_cupy.backends.cuda import compiler
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec
from tests import shim
from tests.problems import Array

pytestmark = pytest.mark.skipif(bool(shim.missing()), reason=shim.missing())

PARAMS = np.dtype([("out", np.uint64), ("n", np.int32)], align=True)
SPEC = ModuleSpec("probe.cu", (), (("Params", PARAMS),))
HEAD = """\
struct Params {
  int* out;
  int n;
};
extern "C" __global__ void __launch_bounds__(256) probe(const __grid_constant__ Params p) {
  const int thread = threadIdx.x, lane = thread % warpSize;
  int* out = p.out + blockIdx.x * blockDim.x + thread;
"""


class Probe:
    """Runs kernel bodies that write one int a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self, body: str, threads: int = 64, blocks: int = 1, *, shared_bytes: int = 0, reverse: bool = False, n: int = 0
    ) -> Array:
        (self.folder / "probe.cu").write_text(HEAD + body + "\n}\n")
        shim.load.cache_clear()
        out, record = np.full((blocks, threads), -7, np.int32), np.zeros(1, PARAMS)
        record["out"], record["n"] = out.ctypes.data, n
        shim.load(SPEC).run("probe", (blocks,), (threads,), record, shared_bytes, reverse)
        return out


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setattr(compiler, "kernels_folder", lambda: tmp_path)
    return Probe(tmp_path)


LANE = np.arange(64) % 32


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("__shfl_sync(~0u, lane, 5)", np.full(64, 5)),
        ("__shfl_sync(~0u, lane, lane + 1)", (LANE + 1) % 32),
        ("__shfl_sync(~0u, lane, 3, 8)", LANE // 8 * 8 + 3),
        ("__shfl_xor_sync(~0u, lane, 16)", LANE ^ 16),
        ("__shfl_xor_sync(~0u, lane, 9, 8)", np.where((LANE ^ 9) > (LANE | 7), LANE, LANE ^ 9)),
        ("__shfl_up_sync(~0u, lane, 3)", np.where(LANE < 3, LANE, LANE - 3)),
        ("__shfl_up_sync(~0u, lane, 3, 16)", np.where(LANE % 16 < 3, LANE, LANE - 3)),
        ("__shfl_down_sync(~0u, lane, 4)", np.where(LANE > 27, LANE, LANE + 4)),
        ("__shfl_down_sync(~0u, lane, 4, 8)", np.where(LANE % 8 > 3, LANE, LANE + 4)),
        ("(int)__shfl_xor_sync(~0u, (double)lane, 1)", LANE ^ 1),
        ("(int)__ballot_sync(~0u, lane % 3 == 0)", np.full(64, 0x49249249)),
        ("__any_sync(~0u, thread == 40)", np.arange(64) >= 32),
        ("__all_sync(~0u, thread != 40)", np.arange(64) < 32),
        ("__syncthreads_count(thread < 40)", np.full(64, 40)),
        ("__syncthreads_or(thread == 63)", np.ones(64)),
        ("__syncthreads_and(thread != 63)", np.zeros(64)),
        ("__popc(0xf0f0u) + __ffs(8) + __clz(1)", np.full(64, 8 + 4 + 31)),
        ("(int)__umulhi(1u << 31, 6u)", np.full(64, 3)),
        ("(int)__funnelshift_l(1u << 31, 2u, 1)", np.full(64, 5)),
        ("__float_as_int(__int_as_float(thread))", np.arange(64)),
        ("(int)(blockDim.x + gridDim.x + warpSize)", np.full(64, 64 + 1 + 32)),
    ],
)
def test_an_expression_of_every_thread(probe: Probe, expression: str, expected: Array) -> None:
    np.testing.assert_array_equal(probe.run(f"*out = {expression};")[0], expected)


def test_warps_in_part_and_in_turn(probe: Probe) -> None:
    body = """
      if (lane >= 20) { *out = -1; return; }
      const unsigned mask = lane < 10 ? 0x3ffu : 0xffc00u;
      int sum = 0;
      for (int i = 0; i <= thread / 32; ++i) sum += __shfl_sync(mask, lane + i, lane < 10 ? 9 : 10);
      __syncwarp();
      *out = sum;"""
    first = np.where(LANE < 10, 9, 10)
    expected = np.where(LANE >= 20, -1, np.where(np.arange(64) < 32, first, 2 * first + 1))
    np.testing.assert_array_equal(probe.run(body)[0], expected)


def test_a_block_smaller_than_a_warp_and_atomics(probe: Probe) -> None:
    body = "__shared__ int count; if (thread == 0) count = 0; __syncthreads(); atomicAdd(&count, 1); __syncthreads();"
    np.testing.assert_array_equal(
        probe.run(body + "*out = count + __shfl_xor_sync(~0u, thread, 1);", 10), [10 + (np.arange(10) ^ 1)]
    )


def test_shared_memory_starts_as_nan_in_every_block(probe: Probe) -> None:
    body = """
      __shared__ float fixed[64];
      DYNAMIC_SHARED(float, dynamic);
      *out = (fixed[thread] != fixed[thread]) + 2 * (dynamic[thread] != dynamic[thread]);
      fixed[thread] = dynamic[thread] = 1;"""
    np.testing.assert_array_equal(probe.run(body, 64, 3, shared_bytes=256), np.full((3, 64), 3))


def test_a_missing_barrier_shows_in_one_of_the_two_orders(probe: Probe) -> None:
    body = "__shared__ int box[64]; box[thread] = thread; {} *out = box[(thread + {}) % 64];"
    for step in (1, 63):
        good = [probe.run(body.format("__syncthreads();", step).replace("{}", ""), reverse=r) for r in (False, True)]
        np.testing.assert_array_equal(good[0], good[1])
        bad = [probe.run(body.format("", step).replace("{}", ""), reverse=r) for r in (False, True)]
        assert (bad[0] != bad[1]).any()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if (thread < 40) __syncthreads(); else __syncwarp();", "(40, 0, 0) waits in __syncwarp at probe.cu:8"),
        ("if (thread < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "__syncthreads at probe.cu:11"),
        ("if (thread < 3) __shfl_sync(~0u, 1, 0);\n__syncthreads();", "(3, 0, 0) waits in __syncthreads at probe.cu:9"),
        (
            "if (lane < 3) __shfl_sync(7u, 1, 5);",
            "probe.cu:8: block (0, 0, 0) thread (0, 0, 0): __shfl_sync reads lane 5",
        ),
        ("if (lane == 4) __syncwarp(7u);", "calls __syncwarp for lanes 00000007, not its own"),
        ("assert(thread < 5);", "thread (5, 0, 0): assertion failed: thread < 5"),
        ("if (blockIdx.x == 1 && thread == 2) __trap();", "block (1, 0, 0) thread (2, 0, 0): trap"),
    ],
)
def test_what_cuda_leaves_undefined_is_an_error_with_its_place(probe: Probe, body: str, words: str) -> None:
    with pytest.raises(shim.ShimError) as caught:
        probe.run(body, 64, 2)
    assert words in str(caught.value)
    np.testing.assert_array_equal(probe.run("*out = 1;"), np.ones((1, 64)))  # the next launch is not disturbed


@pytest.mark.parametrize(("threads", "blocks"), [(1025, 1), (0, 1), (1, 0)])
def test_sizes_that_cannot_be_launched(probe: Probe, threads: int, blocks: int) -> None:
    with pytest.raises(shim.ShimError, match="no lawful grid and block"):
        probe.run("*out = 1;", threads, blocks)


def test_a_record_of_another_size(probe: Probe) -> None:
    probe.run("*out = 1;")
    with pytest.raises(shim.ShimError, match="size"):
        shim.load(SPEC).run("probe", (1,), (1,), np.zeros(2, PARAMS))


SANITIZED = """\
import sys
from pathlib import Path
import numpy as np
from flash_rnnt_cupy.backends.cuda import compiler
from tests import shim
from tests.shim.test_cuda_shim import PARAMS, SPEC

compiler.kernels_folder = lambda: Path(sys.argv[1])
out, record = np.zeros(1024, np.int32), np.zeros(1, PARAMS)
record["out"], record["n"] = out.ctypes.data, int(sys.argv[2])
for reverse in (False, True):
    shim.load(SPEC, True).run("probe", (1,), (64,), record, 256, reverse)
"""
BODY = """
  __shared__ int fixed[64];
  DYNAMIC_SHARED(int, dynamic);
  fixed[thread] = thread;
  __syncthreads();
  dynamic[thread] = __shfl_xor_sync(~0u, fixed[63 - thread], 1);
  __syncthreads();
  switch (p.n) {
    case 1: fixed[thread + 1] = 0; break;
    case 2: dynamic[thread + 1] = 0; break;
    case 3: out[1024] = 0; break;
    case 4: *reinterpret_cast<long long*>(out + 1 - lane % 2) = 0; break;
    case 5: *out = 0x7fffffff + thread; break;
    default: *out = dynamic[thread];
  }"""


@pytest.mark.parametrize(
    ("n", "complaint"),
    [
        (0, ""),
        (1, "out of bounds"),
        (2, "heap-buffer-overflow"),
        (3, "heap-buffer-overflow"),
        (4, "misaligned"),
        (5, "signed integer overflow"),
    ],
)
def test_the_sanitizers_see_shared_and_global_memory(probe: Probe, n: int, complaint: str) -> None:
    (probe.folder / "probe.cu").write_text(HEAD + BODY + "\n}\n")
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(probe.folder), str(n)],
        env=os.environ | shim.sanitizer_environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert complaint in done.stderr
    assert (done.returncode == 0) == (complaint == ""), done.stderr
