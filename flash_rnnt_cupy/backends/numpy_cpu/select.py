"""Which nodes backward visits: of every frame the shortest run of states that holds all above min_occupancy."""

from __future__ import annotations

import numpy as np

from flash_rnnt_cupy.backends import Lattice
from flash_rnnt_cupy.backends.numpy_cpu.call import NumpyCall
from flash_rnnt_cupy.plan import Rows


def select_rows(call: NumpyCall, lattice: Lattice) -> tuple[Rows, float]:
    """Rows in work, and the posterior mass of the nodes left out. ``lattice`` holds posteriors.

    A NaN occupancy counts as large, so that a broken utterance shows in the gradients.
    """
    packing, smallest = call.packing, call.problem.options.min_occupancy
    if smallest == 0:
        return packing.all_rows(), 0.0
    lo_f = np.zeros(packing.n_frames, np.int32)
    hi_f = np.zeros(packing.n_frames, np.int32)
    dropped = 0.0
    columns = call.problem.topology.occupancy_columns
    assert columns is not None
    for b in range(call.problem.batch):
        nodes = slice(packing.node_start_b[b], packing.node_start_b[b + 1])
        occupancy = sum(lattice.column_cn[c, nodes] for c in columns)
        occupancy = np.asarray(occupancy, np.float64).reshape(packing.frames_b[b], packing.states_b[b])
        matters = ~(occupancy <= smallest)
        lo = matters.argmax(1)
        hi = np.where(matters.any(1), matters.shape[1] - matters[:, ::-1].argmax(1), lo)
        frames = slice(packing.frame_start_b[b], packing.frame_start_b[b + 1])
        lo_f[frames], hi_f[frames] = lo, hi
        state = np.arange(matters.shape[1])
        left_out = (state < lo[:, None]) | (state >= hi[:, None])
        dropped += float(occupancy[left_out].sum())
    return packing.band_rows(lo_f, hi_f), dropped
