"""Cutting rows into tiles of equal size.

A tile is a run of rows; it may cut a frame or span utterances. All tiles but the last have the same number of
rows, so that a matrix library sees one shape.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Tile(NamedTuple):
    """Rows [row_begin, row_end) and the frames [frame_begin, frame_end) they belong to."""

    row_begin: int
    row_end: int
    frame_begin: int
    frame_end: int

    @property
    def n_rows(self) -> int:
        """Rows of the tile."""
        return self.row_end - self.row_begin


def cut_tiles(row_start_f: npt.NDArray[np.int64], tile_rows: int) -> tuple[Tile, ...]:
    """Tiles of ``tile_rows`` rows, the last perhaps of fewer, over all rows of ``row_start_f`` [frames + 1]."""
    row_begin = np.arange(0, row_start_f[-1], tile_rows)
    row_end = np.minimum(row_begin + tile_rows, row_start_f[-1])
    frame_begin = np.searchsorted(row_start_f, row_begin, side="right") - 1
    frame_end = np.searchsorted(row_start_f, row_end, side="left")
    columns = (row_begin, row_end, frame_begin, frame_end)
    return tuple(map(Tile, *(column.tolist() for column in columns)))
