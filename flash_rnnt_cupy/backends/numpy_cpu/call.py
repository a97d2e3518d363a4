"""The arrays of one call, as the NumPy stages read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.plan import Packing, Rectangle, Rows, Tile
from flash_rnnt_cupy.problem import Inputs, Problem

Array = npt.NDArray[Any]

SCRATCH_BYTES = 1 << 18  # one temporary: fits a core's second-level cache
TEMPORARIES = 12  # of them alive at once


@dataclass(frozen=True, eq=False)
class NumpyCall:
    """Problem, rows in work, and the caller's arrays.

    ``weight`` is in the workspace dtype, ``bias`` in the lattice dtype, both in ``kept`` where they are not the
    caller's; ``grad_losses_b`` [B] is there in backward, where nodes of ``dropped_posterior`` may be left out.
    """

    problem: Problem
    rows: Rows
    inputs: Inputs
    weight: Array | None
    bias: Array | None
    kept: Mapping[str, Array]
    grad_losses_b: Array | None = None
    dropped_posterior: float = 0.0

    @property
    def packing(self) -> Packing:
        """Where utterances begin."""
        return self.rows.packing

    def rectangles(self, tile: Tile, width: int, itemsize: int) -> Iterator[Rectangle]:
        """The tile's rows in pieces whose [rows, width] temporaries stay within SCRATCH_BYTES each."""
        max_rows = max(SCRATCH_BYTES // (width * itemsize), 1)
        return self.rows.rectangles(tile.row_begin, tile.row_end, max_rows)

    def runs(self, tile: Tile, row_bytes: int) -> Iterator[tuple[int, int]]:
        """The tile's rows as runs [begin, end) whose temporaries of so many bytes a row stay within SCRATCH_BYTES."""
        step = max(SCRATCH_BYTES // row_bytes, 1)
        for begin in range(tile.row_begin, tile.row_end, step):
            yield begin, min(begin + step, tile.row_end)

    def node_view(self, values_n: Array, rectangle: Rectangle) -> Array:
        """``values_n`` [..., N] at the rectangle's nodes, a view [..., frames, states]."""
        b, start = rectangle.b, self.packing.node_start_b
        grid = values_n[..., start[b] : start[b + 1]]
        grid = grid.reshape(*grid.shape[:-1], self.packing.frames_b[b], self.packing.states_b[b])
        return grid[..., rectangle.t_lo : rectangle.t_hi, rectangle.u_lo : rectangle.u_hi]

    def encoder_view(self, array: Array, rectangle: Rectangle) -> Array:
        """The rectangle's frames of a [B, T, H] or [sum T_b, H] array, [frames, H]."""
        grid = utterance(array, rectangle.b, self.packing.frame_start_b, packed_ndim=2)
        return grid[rectangle.t_lo : rectangle.t_hi]

    def predictor_view(self, array: Array, rectangle: Rectangle) -> Array:
        """The rectangle's states of a [B, U1, H] or [sum U1_b, H] array, [states, H]."""
        grid = utterance(array, rectangle.b, self.packing.state_start_b, packed_ndim=2)
        return grid[rectangle.u_lo : rectangle.u_hi]

    def rows_view(self, array: Array, tile: Tile, rectangle: Rectangle) -> Array:
        """The rectangle's rows of a tile's [R, width] array, [frames, states, width]."""
        rows = array[rectangle.row - tile.row_begin : rectangle.row_end - tile.row_begin]
        return rows.reshape(*rectangle.shape, array.shape[-1])

    def logits_view(self, array: Array, tile: Tile, rectangle: Rectangle) -> Array:
        """The rectangle's scores, [frames, states, V]: of a tile or packed logits [*, V], or of padded logits."""
        if array.ndim == 4:
            return array[rectangle.b, rectangle.t_lo : rectangle.t_hi, rectangle.u_lo : rectangle.u_hi]
        return self.rows_view(array, tile, rectangle)

    def labels(self, rectangle: Rectangle) -> npt.NDArray[np.int64]:
        """y[u] of the rectangle's states that have one (u < U_b)."""
        row = utterance(self.inputs.targets, rectangle.b, self.packing.label_start_b, packed_ndim=1)
        stop = min(rectangle.u_hi, int(self.packing.labels_b[rectangle.b]))
        return np.asarray(row[rectangle.u_lo : stop], np.int64)


def utterance(array: Array, b: int, start_b: npt.NDArray[np.int64], packed_ndim: int) -> Array:
    """What belongs to utterance b of a packed array, or its slice of a padded one."""
    return array[start_b[b] : start_b[b + 1]] if array.ndim == packed_ndim else array[b]
