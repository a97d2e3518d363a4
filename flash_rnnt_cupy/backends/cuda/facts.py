"""What the planner must know of a CUDA device and of this backend. Imports no CuPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from flash_rnnt_cupy.backends.cuda.tables import band_words, index_words
from flash_rnnt_cupy.plan import DeviceFacts, Life, Packing, Part, accumulator_dtype
from flash_rnnt_cupy.problem import ITEMSIZE, Form, Problem
from flash_rnnt_cupy.topology import RNNT

BLOCKS_PER_MULTIPROCESSOR = 2  # of normalize_backward; each keeps partial sums of the bias gradient
MAX_THREADS = 1024
PERIOD = 16  # anti-diagonals; alpha is kept of one in so many, or of more where shared memory is short

# Of the fused kernels, see fused.cuh.
STRIP_ROWS, PANEL_COLUMNS, SLAB_COLUMNS = 128, 128, 64
CONSUMER_WARPS = 8  # of a block; each keeps partial sums of the bias gradient
FUSED_SHARED_BYTES = 227 << 10
FUSED_WIDTH = 768  # hidden states of a strip leave room for two slabs of the weight
FUSED_ACTIVATIONS = ("relu", "tanh", "sigmoid", "silu", "identity")
ITEM_PANELS = 16  # of the gradient kernel: more items than strips keep all busy where a large V makes tiles small


def panels(vocabulary: int) -> int:
    """How many panels of columns the scores have."""
    return -(-vocabulary // PANEL_COLUMNS)


def item_panels(entry: str, vocabulary: int) -> int:
    """Panels of a strip that a block works through at once; to normalise it must see all."""
    return ITEM_PANELS if entry == "grad_scores" else panels(vocabulary)


def _against_fused(capability: str, wanted: bool, problem: Problem) -> tuple[str, ...]:
    """Reasons against the fused kernels."""
    options, width = problem.options, problem.joint_width
    checks = (
        (wanted, "the generic kernels were asked for"),
        (capability == "90", f"the device has compute capability {capability[:-1]}.{capability[-1]}, not 9.0"),
        (problem.form is Form.JOINT, "the scores are given"),
        (problem.topology is RNNT, f"the loss is {problem.topology.name}, not {RNNT.name}"),
        (problem.dtype in ("float16", "bfloat16"), f"the states are {problem.dtype}, not float16 or bfloat16"),
        (0 < width <= FUSED_WIDTH and width % 8 == 0, f"H is {width}, not a multiple of 8 up to {FUSED_WIDTH}"),
        (options.activation in FUSED_ACTIVATIONS, f"the activation is {options.activation}"),
        (options.clamp is None, "gradients are clamped"),
    )
    return tuple(reason for holds, reason in checks if not holds)


class Diagonals(NamedTuple):
    """How the recursion keeps its sums.

    threads     of a block
    pitch       from a diagonal to the next: its states, at least as many as threads, and one on either side
    period      a power of two: alpha is kept of ``reach`` diagonals in every ``period``, and computed anew a period
                at a time
    words       of 8 bytes that a block needs: sums of a period and what is next to it, columns of two periods
    shared      whether they fit shared memory
    """

    threads: int
    pitch: int
    period: int
    words: int
    shared: bool


def diagonals(shared_bytes: int, problem: Problem, packing: Packing) -> Diagonals:
    """The longest period up to PERIOD that fits shared memory; where none does, global memory holds PERIOD.

    So it does where the period that fits would keep alpha of every diagonal: it is faster then, too.
    """
    columns = len(problem.topology.columns) * ITEMSIZE[accumulator_dtype(problem.dtype)]
    return _diagonals(shared_bytes, packing.max_states, problem.topology.reach, columns, PERIOD)


@functools.lru_cache(256)
def _diagonals(shared_bytes: int, max_states: int, reach: int, columns: int, longest: int) -> Diagonals:
    """``columns``: bytes of a node's; ``longest``: period."""
    all_kept = _power_of_two(reach)
    period = wanted = max(longest, all_kept)
    least = min(2 * all_kept, wanted)
    assert wanted <= MAX_THREADS, "a period divides the threads of a block"
    unit = max(wanted, 32)
    threads = min(-(-max_states // unit) * unit, MAX_THREADS)
    pitch = max(max_states, threads) + 2

    def words(period: int) -> int:
        return (period + 2 * reach + 2 * period * columns // 8) * pitch

    while period > least and 8 * words(period) > shared_bytes:
        period //= 2
    shared = 8 * words(period) <= shared_bytes
    period = period if shared else wanted
    return Diagonals(threads, pitch, period, words(period), shared)


def _power_of_two(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(n - 1, 0).bit_length()


def _alpha_shape(shared_bytes: int, problem: Problem, packing: Packing) -> tuple[int, ...]:
    """Of U1_b states one frame in `period`, rounded up: room for that without a table of where utterances begin."""
    period = diagonals(shared_bytes, problem, packing).period
    return (problem.topology.reach, packing.n_nodes // period + int(packing.state_start_b[-1]))


def _scratch(
    shared_bytes: int,
    multiprocessors: int,
    against_fused: Callable[[Problem], tuple[str, ...]],
    problem: Problem,
    packing: Packing,
    gradients: frozenset[str],
) -> tuple[Part, ...]:
    dtype, fused = accumulator_dtype(problem.dtype), not against_fused(problem)
    parts = [Part("index tables", (sum(index_words(problem, packing).values()),), "int64", Life.SAVED)]
    recursion = diagonals(shared_bytes, problem, packing)
    if not recursion.shared:
        parts.append(Part("recursion diagonals", (problem.batch, recursion.words), "float64", Life.TILE))
    if gradients:
        parts.append(Part("upstream", (problem.batch + 1,), dtype, Life.BACKWARD))
    if gradients and problem.form is Form.JOINT and problem.options.min_occupancy > 0:
        parts.append(Part("band tables", (sum(band_words(packing).values()),), "int64", Life.BACKWARD))
        parts.append(Part("dropped posteriors", (packing.n_frames,), "float64", Life.BACKWARD))
    width = problem.joint_width
    for name, carry in (("encoder", (2, width)), ("predictor", (2, packing.max_states, width))):
        if name in gradients and problem.form is Form.JOINT:
            parts.append(Part(f"{name} carry", carry, dtype, Life.BACKWARD))
    if "bias" in gradients and "bias" in problem.shapes:
        writers = (CONSUMER_WARPS if fused else BLOCKS_PER_MULTIPROCESSOR) * multiprocessors
        parts.append(Part("bias partial sums", (writers, problem.vocabulary), dtype, Life.BACKWARD))
    if fused:
        columns = panels(problem.vocabulary) * PANEL_COLUMNS
        slabs = (columns, -(-width // SLAB_COLUMNS) * SLAB_COLUMNS)
        parts.append(Part("weight in slabs", slabs, problem.dtype, Life.SAVED))
        parts.append(Part("bias in panels", (columns,), "float32", Life.SAVED))
    return tuple(parts)


def device_facts(
    name: str, l2_bytes: int, shared_bytes: int, multiprocessors: int, capability: str, fused: bool = True
) -> DeviceFacts:
    """Facts of a device with that second-level cache, shared memory a block, number of multiprocessors, capability.

    Without ``fused`` the generic kernels do all.
    """
    against_fused = functools.partial(_against_fused, capability, fused)
    return DeviceFacts(
        name=name,
        tile_bytes=max(l2_bytes * 37 // 10, 64 << 20),
        half_products=True,
        shared_bytes=shared_bytes,
        alpha_shape=functools.partial(_alpha_shape, shared_bytes),
        sums_apart=frozenset({"weight", "bias"}),
        logits_multiple=8,  # rows of 16 bytes each, for tensor cores and wide loads
        scratch=functools.partial(_scratch, shared_bytes, multiprocessors, against_fused),
        against_fused=against_fused,
        row_multiple=STRIP_ROWS * multiprocessors,
    )


H200 = device_facts("NVIDIA H200", l2_bytes=60 << 20, shared_bytes=227 << 10, multiprocessors=132, capability="90")
