"""What the planner must know of a CUDA device and of this backend. Imports no CuPy."""

from __future__ import annotations

import functools

from flash_rnnt_cupy.plan import DeviceFacts, Life, Packing, Part, accumulator_dtype
from flash_rnnt_cupy.problem import Form, Problem

BLOCKS_PER_MULTIPROCESSOR = 2  # of normalize_backward; each keeps partial sums of the bias gradient


def index_words(packing: Packing) -> int:
    """64-bit words of the index tables: 8 tables an utterance, frame and label tables (see tables.py)."""
    batch, frames = packing.batch, packing.n_frames
    return 9 * (batch + 1) + frame_words(packing) + -(-frames // 2) + -(-int(packing.label_start_b[-1]) // 2)


def frame_words(packing: Packing) -> int:
    """64-bit words of the tables that change with the rows in work: row_start_f and lo_f."""
    return packing.n_frames + 1 + -(-packing.n_frames // 2)


def ring_shape(problem: Problem, packing: Packing) -> tuple[int, int, int]:
    """Running sums of the recursion, where shared memory cannot hold them: [B, reach + 1, max U1]."""
    longest = int(packing.states_b.max(initial=1))
    return problem.batch, problem.topology.reach + 1, longest


def _scratch(
    shared_bytes: int, multiprocessors: int, problem: Problem, packing: Packing, gradients: frozenset[str]
) -> tuple[Part, ...]:
    dtype = accumulator_dtype(problem.dtype)
    parts = [Part("index tables", (index_words(packing),), "int64", Life.SAVED)]
    ring = ring_shape(problem, packing)
    if 8 * ring[1] * ring[2] > shared_bytes:
        parts.append(Part("recursion ring", ring, "float64", Life.TILE))
    if gradients:
        parts.append(Part("upstream", (problem.batch + 1,), dtype, Life.BACKWARD))
    if gradients and problem.form is Form.JOINT and problem.options.min_occupancy > 0:
        parts.append(Part("band tables", (frame_words(packing),), "int64", Life.BACKWARD))
        parts.append(Part("band selection", (2, packing.n_frames), "int64", Life.BACKWARD))
    width, longest = problem.joint_width, ring[2]
    for name, carry in (("encoder", (2, width)), ("predictor", (2, longest, width))):
        if name in gradients and problem.form is Form.JOINT:
            parts.append(Part(f"{name} carry", carry, dtype, Life.BACKWARD))
    if "bias" in gradients and "bias" in problem.shapes:
        blocks = BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        parts.append(Part("bias partial sums", (blocks, problem.vocabulary), dtype, Life.BACKWARD))
    return tuple(parts)


def device_facts(name: str, l2_bytes: int, shared_bytes: int, multiprocessors: int) -> DeviceFacts:
    """Facts of a device with that second-level cache, shared memory a block, and number of multiprocessors."""
    return DeviceFacts(
        name=name,
        tile_bytes=max(l2_bytes * 7 // 2, 64 << 20),
        half_products=True,
        alpha_dtype="float64",
        sums_apart=frozenset({"weight", "bias"}),
        logits_multiple=8,  # rows of 16 bytes each, for tensor cores and wide loads
        active_bits=True,
        scratch=functools.partial(_scratch, shared_bytes, multiprocessors),
    )


H200 = device_facts("NVIDIA H200", l2_bytes=60 << 20, shared_bytes=227 << 10, multiprocessors=132)
