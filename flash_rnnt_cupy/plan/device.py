"""What the planner must know of a device; plain numbers, so that a laptop can plan for any GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flash_rnnt_cupy.plan.memory import Part
from flash_rnnt_cupy.plan.packing import Packing
from flash_rnnt_cupy.problem import Problem


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of one device and of the backend that drives it.

    name             for people
    tile_bytes       buffers of a tile that "auto" aims at: what the caches hold
    half_products    float16 and bfloat16 are multiplied as they are; otherwise in float32
    shared_bytes     memory that the threads of a block share; 0 where there are no blocks
    alpha_shape      of what is kept of the forward variable, in float64
    sums_apart       gradients that are summed in a buffer of their own, if their dtype is not the accumulator's
    logits_multiple  columns of a tile's logits are padded to a multiple of it
    scratch          parts of the backend's own, beside those that every backend has
    against_fused    reasons why it cannot score a problem's rows, and differentiate their scores, in one kernel each;
                     empty: it can, and then keeps no tile in forward
    row_multiple     rows that keep the whole device busy then; "auto" takes multiples of it
    """

    name: str
    tile_bytes: int
    half_products: bool
    shared_bytes: int
    alpha_shape: Callable[[Problem, Packing], tuple[int, ...]]
    sums_apart: frozenset[str]
    logits_multiple: int
    scratch: Callable[[Problem, Packing, frozenset[str]], tuple[Part, ...]]
    against_fused: Callable[[Problem], tuple[str, ...]]
    row_multiple: int

    def workspace_dtype(self, dtype: str) -> str:
        """In which hidden states and logits of a tile are kept."""
        return dtype if self.half_products else accumulator_dtype(dtype)


def accumulator_dtype(dtype: str) -> str:
    """In which products and sums over ``dtype`` accumulate, and in which the lattice is kept."""
    return "float64" if dtype == "float64" else "float32"
