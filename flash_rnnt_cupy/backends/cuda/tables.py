"""Index tables on the device: a few arrays of integers in one upload, and the records that point to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends.cuda.memory import DeviceArray
from flash_rnnt_cupy.plan import Packing, Rows
from flash_rnnt_cupy.problem import Form, Inputs, Problem

Words = Mapping[str, int]  # 64-bit words of each table; they lie one behind another in this order

ROWS = np.dtype(
    [
        (name, np.uint64)
        for name in ("row_start_f", "lo_f", "utterance_f", "node_start_b", "frame_start_b", "state_start_b")
    ]
)
TILE = np.dtype([(name, np.int64) for name in ("row_begin", "row_end", "frame_begin", "frame_end")])


def _rows_words(packing: Packing) -> dict[str, int]:
    """Of the tables that say which rows are in work."""
    return {"row_start_f": packing.n_frames + 1, "lo_f": half_words(packing.n_frames)}


def band_words(packing: Packing) -> dict[str, int]:
    """Of what the selection of rows writes: the tables of these rows, and the posterior mass of all others."""
    return {**_rows_words(packing), "dropped": 1}


def band_rows(packing: Packing, words: npt.NDArray[np.int64]) -> tuple[Rows, float]:
    """The same on the host."""
    n_frames = packing.n_frames
    lo_f = words[n_frames + 1 : -1].view(np.int32)[:n_frames]
    return Rows(packing, words[: n_frames + 1], lo_f), float(words[-1:].view(np.float64)[0])


def index_words(problem: Problem, packing: Packing) -> dict[str, int]:
    """Of all tables of a call: `index_tables`."""
    starts = ("node_start_b", "frame_start_b", "state_start_b", "label_start_b")
    offsets: tuple[str, ...] = ()
    if problem.form is Form.JOINT:
        offsets = ("encoder_offset_b", "encoder_grad_row_b", "predictor_offset_b", "predictor_grad_row_b")
    elif len(problem.shapes.get("logits", ())) == 4:
        offsets = ("logits_offset_b", "grad_offset_b")
    return {
        **dict.fromkeys(starts, packing.batch + 1),
        "utterance_f": half_words(packing.n_frames),
        **_rows_words(packing),
        **dict.fromkeys(offsets, packing.batch),
        "labels": half_words(int(packing.label_start_b[-1])),
    }


def index_tables(rows: Rows, inputs: Inputs) -> dict[str, npt.NDArray[Any]]:
    """Where utterances begin, the utterance of each frame, the rows in work, where arrays have them, and all labels."""
    packing = rows.packing
    arrays: dict[str, npt.NDArray[Any]] = {
        "node_start_b": packing.node_start_b,
        "frame_start_b": packing.frame_start_b,
        "state_start_b": packing.state_start_b,
        "label_start_b": packing.label_start_b,
        "utterance_f": packing.utterance_f,
        "row_start_f": rows.row_start_f,
        "lo_f": rows.lo_f,
    }
    if inputs.logits is None:
        for name, starts in (("encoder", packing.frame_start_b), ("predictor", packing.state_start_b)):
            given = getattr(inputs, name)
            arrays[f"{name}_offset_b"] = row_offsets(given, 3, starts)
            padded = len(given.shape) == 3
            arrays[f"{name}_grad_row_b"] = np.arange(packing.batch) * given.shape[1] if padded else starts[:-1]
    elif len(inputs.logits.shape) == 4:
        arrays["logits_offset_b"] = np.arange(packing.batch, dtype=np.int64) * inputs.logits.strides[0]
        arrays["grad_offset_b"] = np.arange(packing.batch, dtype=np.int64) * int(np.prod(inputs.logits.shape[1:]))
    arrays["labels"] = _packed_labels(inputs.targets, packing.labels_b)
    return arrays


def _packed_labels(targets: npt.NDArray[np.int64], labels_b: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Labels of all transcripts one after another."""
    if targets.ndim == 2:
        targets = targets[np.arange(targets.shape[1])[None] < labels_b[:, None]]
    return targets.astype(np.int32)


def row_offsets(array: DeviceArray, padded_ndim: int, start_b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Offset, in elements, of each utterance's first row in a padded or packed array of any strides; [B]."""
    index = np.arange(len(start_b) - 1) if len(array.shape) == padded_ndim else start_b[:-1]
    return index * array.strides[0]


def addresses(words: Words, begin: int) -> dict[str, int]:
    """Where each table lies from ``begin`` on."""
    found = {}
    for name, size in words.items():
        found[name] = begin
        begin += 8 * size
    return found


def half_words(n: int) -> int:
    """64-bit words of n 32-bit numbers."""
    return -(-n // 2)


def whole_words(nbytes: int) -> int:
    """As many bytes, rounded up to 64-bit words."""
    return nbytes + -nbytes % 8
