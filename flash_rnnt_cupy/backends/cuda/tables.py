"""Index tables on the device: a few arrays of integers in one upload, and the records that point to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends.cuda.memory import DeviceArray
from flash_rnnt_cupy.plan import Packing, Rows

Tables = Mapping[str, npt.NDArray[Any]]

ROWS = np.dtype(
    [
        (name, np.uint64)
        for name in ("row_start_f", "lo_f", "utterance_f", "node_start_b", "frame_start_b", "state_start_b")
    ]
)
TILE = np.dtype([(name, np.int64) for name in ("row_begin", "row_end", "frame_begin", "frame_end")])


def packing_tables(packing: Packing) -> dict[str, npt.NDArray[Any]]:
    """Where utterances begin, and the utterance of each frame."""
    return {
        "node_start_b": packing.node_start_b,
        "frame_start_b": packing.frame_start_b,
        "state_start_b": packing.state_start_b,
        "label_start_b": packing.label_start_b,
        "utterance_f": packing.utterance_f,
    }


def rows_tables(rows: Rows) -> dict[str, npt.NDArray[Any]]:
    """The rows in work."""
    return {"row_start_f": rows.row_start_f, "lo_f": rows.lo_f}


def row_offsets(array: DeviceArray, padded_ndim: int, start_b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Offset, in elements, of each utterance's first row in a padded or packed array of any strides; [B]."""
    index = np.arange(len(start_b) - 1) if len(array.shape) == padded_ndim else start_b[:-1]
    return index * array.strides[0]


def addresses(tables: Tables, begin: int) -> dict[str, int]:
    """Where each table lies, one behind another from ``begin`` on, each from a whole 64-bit word."""
    found = {}
    for name, table in tables.items():
        found[name] = begin
        begin += whole_words(table.nbytes)
    return found


def whole_words(nbytes: int) -> int:
    """As many bytes, rounded up to 64-bit words."""
    return nbytes + -nbytes % 8
