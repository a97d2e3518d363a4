"""Numbering of lattice nodes and of the rows that are worked on.

Nodes of a batch stand in one list without padding, in order of (b, t, u):

    n(b, t, u) = node_start_b[b] + t (U_b + 1) + u                                          64-bit

*Rows* are a subset of the nodes in the same order: of every frame a run of states [lo, hi). All nodes are
the special case lo = 0, hi = U_b + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.problem import Lengths


def starts(counts: Lengths) -> Lengths:
    """Exclusive prefix sums with the total at the end: [n] -> [n + 1]."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


class Rectangle(NamedTuple):
    """Rows of one utterance, frames [t_lo, t_hi) x states [u_lo, u_hi); ``row`` is the first one's number."""

    b: int
    t_lo: int
    t_hi: int
    u_lo: int
    u_hi: int
    row: int

    @property
    def shape(self) -> tuple[int, int]:
        """(frames, states)."""
        return self.t_hi - self.t_lo, self.u_hi - self.u_lo

    @property
    def row_end(self) -> int:
        """First row behind the rectangle."""
        return self.row + (self.t_hi - self.t_lo) * (self.u_hi - self.u_lo)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where each utterance's nodes, frames, states and labels begin; every ``*_start_b`` is [B + 1]."""

    frames_b: Lengths
    labels_b: Lengths

    @cached_property
    def states_b(self) -> Lengths:
        """U1_b = U_b + 1."""
        return self.labels_b + 1

    @cached_property
    def max_states(self) -> int:
        """The largest U1_b; 1 for an empty batch."""
        return int(self.states_b.max(initial=1))

    @cached_property
    def node_start_b(self) -> Lengths:
        """First node of each utterance."""
        return starts(self.frames_b * self.states_b)

    @cached_property
    def frame_start_b(self) -> Lengths:
        """First frame of each utterance among all frames."""
        return starts(self.frames_b)

    @cached_property
    def state_start_b(self) -> Lengths:
        """First state of each utterance among all states."""
        return starts(self.states_b)

    @cached_property
    def label_start_b(self) -> Lengths:
        """First label of each utterance among all labels."""
        return starts(self.labels_b)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.frames_b)

    @property
    def n_nodes(self) -> int:
        """N."""
        return int(self.node_start_b[-1])

    @property
    def n_frames(self) -> int:
        """Sum of T_b."""
        return int(self.frame_start_b[-1])

    @cached_property
    def utterance_f(self) -> npt.NDArray[np.int32]:
        """The utterance of each frame, [sum T_b]."""
        return np.repeat(np.arange(len(self.frames_b), dtype=np.int32), self.frames_b)

    def all_rows(self) -> Rows:
        """Every node a row."""
        return Rows(self, starts(np.repeat(self.states_b, self.frames_b)), np.zeros(self.n_frames, np.int32))

    def band_rows(self, lo_f: npt.NDArray[np.int32], hi_f: npt.NDArray[np.int32]) -> Rows:
        """Of frame f the states [lo_f[f], hi_f[f]); lo == hi leaves the frame out."""
        return Rows(self, starts(hi_f - lo_f), lo_f)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows in work: frame f has rows [row_start_f[f], row_start_f[f + 1]), its states begin at lo_f[f]."""

    packing: Packing
    row_start_f: npt.NDArray[np.int64]  # [sum T_b + 1]
    lo_f: npt.NDArray[np.int32]  # [sum T_b]

    @property
    def n_rows(self) -> int:
        """How many rows there are, N at most."""
        return int(self.row_start_f[-1])

    def nodes(self, row_begin: int, row_end: int) -> Lengths:
        """Numbers of the nodes that rows [row_begin, row_end) are."""
        packing = self.packing
        first = int(np.searchsorted(self.row_start_f, row_begin, side="right")) - 1
        last = int(np.searchsorted(self.row_start_f, row_end, side="left"))
        starts_f, b = self.row_start_f[first : last + 1], packing.utterance_f[first:last]
        t = np.arange(first, last) - packing.frame_start_b[b]
        from_row = packing.node_start_b[b] + t * packing.states_b[b] + self.lo_f[first:last] - starts_f[:-1]
        edges = np.clip(starts_f, row_begin, row_end)
        return np.arange(row_begin, row_end) + np.repeat(from_row, edges[1:] - edges[:-1])

    @cached_property
    def _block_start(self) -> npt.NDArray[np.int64]:
        """Frames at which (utterance, lo, count) changes, and the end: frames between form one rectangle."""
        keys = (self.packing.utterance_f, self.lo_f, np.diff(self.row_start_f))
        changes = np.zeros(max(self.packing.n_frames - 1, 0), bool)
        for key in keys:
            changes |= key[1:] != key[:-1]
        inner = np.flatnonzero(changes) + 1
        ends = [0, self.packing.n_frames] if self.packing.n_frames else [0]
        return np.unique(np.concatenate([inner, np.array(ends, np.int64)]))

    def rectangles(self, row_begin: int, row_end: int, max_rows: int) -> Iterator[Rectangle]:
        """Rows [row_begin, row_end) in order, as rectangles of at most ``max_rows`` rows each."""
        row, packing = row_begin, self.packing
        while row < row_end:
            frame = int(np.searchsorted(self.row_start_f, row, side="right")) - 1
            count = int(self.row_start_f[frame + 1] - self.row_start_f[frame])
            b, lo = int(packing.utterance_f[frame]), int(self.lo_f[frame])
            t, skipped = frame - int(packing.frame_start_b[b]), row - int(self.row_start_f[frame])
            limit = min(row_end - row, max_rows)
            if skipped or limit < count:  # part of one frame
                width = min(count - skipped, limit)
                rectangle = Rectangle(b, t, t + 1, lo + skipped, lo + skipped + width, row)
            else:  # whole frames
                block = int(np.searchsorted(self._block_start, frame, side="right"))
                n_frames = min(int(self._block_start[block]) - frame, limit // count)
                rectangle = Rectangle(b, t, t + n_frames, lo, lo + count, row)
            yield rectangle
            row = rectangle.row_end
