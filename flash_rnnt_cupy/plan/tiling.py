"""Cutting rows into tiles.

A tile is a run of rows; it may span utterances. It ends where a frame ends, so that the sum over the states
of a frame lies in one tile, unless that one frame is longer than a tile.
"""

from __future__ import annotations

from bisect import bisect_right
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
    """Tiles of at most ``tile_rows`` rows that cover all rows of ``row_start_f`` [frames + 1] in order."""
    tiles = []
    row, n_rows = 0, int(row_start_f[-1])
    while row < n_rows:
        frame_begin = bisect_right(row_start_f, row) - 1
        fits = bisect_right(row_start_f, row + tile_rows) - 1  # frames before it are whole
        row_end = int(row_start_f[fits]) if row_start_f[fits] > row else row + tile_rows
        tiles.append(Tile(row, row_end, frame_begin, max(fits, frame_begin + 1)))
        row = row_end
    return tuple(tiles)
