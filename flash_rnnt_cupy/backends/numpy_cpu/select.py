"""Which nodes backward visits: of every frame the shortest run of states that holds all above min_occupancy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from flash_rnnt_cupy.backends import Lattice
from flash_rnnt_cupy.backends.numpy_cpu.call import SCRATCH_BYTES, NumpyCall


def select_rows(call: NumpyCall, lattice: Lattice) -> NumpyCall:
    """The same call over these. ``lattice`` holds posteriors.

    A NaN occupancy counts as large, so that a broken utterance shows in the gradients.
    """
    packing, smallest = call.packing, call.problem.options.min_occupancy
    if smallest == 0:
        return call
    lo_f = np.zeros(packing.n_frames, np.int32)
    hi_f = np.zeros(packing.n_frames, np.int32)
    dropped = 0.0
    columns = call.problem.topology.occupancy_columns
    assert columns is not None
    for b, first, frames in _blocks(call):
        n_states = int(packing.states_b[b])
        begin = packing.node_start_b[b] + (first - packing.frame_start_b[b]) * n_states
        nodes = slice(begin, begin + frames * n_states)
        occupancy = sum(lattice.column_cn[c, nodes] for c in columns)
        occupancy = np.asarray(occupancy, np.float64).reshape(frames, n_states)
        matters = ~(occupancy <= smallest)
        lo = matters.argmax(1)
        hi = np.where(matters.any(1), matters.shape[1] - matters[:, ::-1].argmax(1), lo)
        lo_f[first : first + frames], hi_f[first : first + frames] = lo, hi
        state = np.arange(matters.shape[1])
        left_out = (state < lo[:, None]) | (state >= hi[:, None])
        dropped += float(occupancy[left_out].sum())
    return dataclasses.replace(call, rows=packing.band_rows(lo_f, hi_f), dropped_posterior=dropped)


def rows_in_work(call: NumpyCall) -> tuple[NumpyCall, float]:
    """The call, and the posterior mass of the nodes left out."""
    return call, call.dropped_posterior


def _blocks(call: NumpyCall) -> Iterator[tuple[int, int, int]]:
    """(utterance, first frame among all frames, frames), so that temporaries over their nodes stay small."""
    packing = call.packing
    for b, n_states in enumerate(packing.states_b.tolist()):
        step = max(SCRATCH_BYTES // (n_states * np.dtype(np.float64).itemsize), 1)
        end = int(packing.frame_start_b[b + 1])
        for first in range(int(packing.frame_start_b[b]), end, step):
            yield b, first, min(step, end - first)
