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

    name           for people
    tile_bytes     hidden states and logits of a tile that "auto" aims at: what the caches hold
    half_products  float16 and bfloat16 are multiplied as they are; otherwise in float32
    shared_bytes   memory that the threads of a block share; 0 where there are no blocks
    alpha_shape    of what is kept of the forward variable, in float64
    sums_apart     gradients that are summed in a buffer of their own, if their dtype is not the accumulator's
    scratch        parts of the backend's own, beside those that every backend has
    """

    name: str
    tile_bytes: int
    half_products: bool
    shared_bytes: int
    alpha_shape: Callable[[Problem, Packing], tuple[int, ...]]
    sums_apart: frozenset[str]
    scratch: Callable[[Problem, Packing, frozenset[str]], tuple[Part, ...]]

    def workspace_dtype(self, dtype: str) -> str:
        """In which hidden states and logits of a tile are kept."""
        return dtype if self.half_products else accumulator_dtype(dtype)


def accumulator_dtype(dtype: str) -> str:
    """In which products and sums over ``dtype`` accumulate, and in which the lattice is kept."""
    return "float64" if dtype == "float64" else "float32"
