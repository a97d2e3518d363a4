"""What the planner must know of a device; plain numbers, so that a laptop can plan for any GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of one device and of the backend that drives it.

    name             for people
    tile_bytes       hidden states and logits of a tile that "auto" aims at: what the caches hold
    half_products    float16 and bfloat16 are multiplied as they are; otherwise in float32
    adds_products    a product can be added to a buffer; otherwise it needs one of its own first
    alpha_dtype      in which the forward variable is kept
    scratch_bytes    temporaries of one stage beside the named buffers
    frontier_arrays  float64 arrays [B, max U1] that the recursion works in
    """

    name: str
    tile_bytes: int
    half_products: bool
    adds_products: bool
    alpha_dtype: str
    scratch_bytes: int
    frontier_arrays: int

    def workspace_dtype(self, dtype: str) -> str:
        """In which hidden states and logits of a tile are kept."""
        return dtype if self.half_products else accumulator_dtype(dtype)


def accumulator_dtype(dtype: str) -> str:
    """In which products and sums over ``dtype`` accumulate."""
    return "float64" if dtype == "float64" else "float32"
