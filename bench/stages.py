"""Time of every stage of one training step, beside what it could take: `python -m bench stages`.

Each stage function of the backend is wrapped in a pair of marks on the device's stream; a row is the sum over the
tiles of a step, the median of several steps, gaps between launches included.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench import measure, workloads
from bench.records import Record
from bench.workloads import Workload
from flash_rnnt_cupy.adapters.torch_call import Call, Settings, prepare
from flash_rnnt_cupy.backends import GENERIC
from flash_rnnt_cupy.plan import TileRows
from flash_rnnt_cupy.problem import DEFAULT_MIN_OCCUPANCY, Form

STAGES = (
    "begin",
    "joint_forward",
    "product",
    "normalize_forward",
    "score",
    "sum_alignments",
    "losses",
    "posteriors",
    "select_rows",
    "start_backward",
    "rows_in_work",
    "normalize_backward",
    "grad_scores",
    "product_weight",
    "product_hidden",
    "joint_backward",
    "fill_zero",
    "finish",
)
# Milliseconds within reach on an H200 at the medium batch, dense, of each stage: bytes at 4.2 TB/s, products at 640
# TFLOP/s, and what a first version of the kernel measured, whichever is longer. joint_forward and product run twice,
# or not at all where score and grad_scores take their place.
WITHIN_REACH_MS = {
    "joint_forward": 1.8,
    "product": 9.0,
    "normalize_forward": 1.2,
    "score": 4.7,
    "normalize_backward": 2.2,
    "grad_scores": 5.3,
    "product_weight": 4.4,
    "product_hidden": 4.4,
}
DENSE = 0.0
CONFIGURATIONS: tuple[tuple[str, TileRows, float], ...] = (
    ("auto", "auto", DENSE),
    ("auto", "auto", DEFAULT_MIN_OCCUPANCY),
    ("auto", 16_896, DENSE),
    (GENERIC, "auto", DENSE),
)
STEPS = 7


class Clock:
    """Marks around calls, summed by name."""

    def __init__(self) -> None:
        self.marks: dict[str, list[tuple[Any, Any]]] = collections.defaultdict(list)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its time on the device noted under ``name``."""

        def timed(*arguments: Any) -> Any:
            begin = measure.mark()
            result = function(*arguments)
            self.marks[name].append((begin, measure.mark()))
            return result

        return timed

    def milliseconds(self) -> dict[str, float]:
        """Total of each name since the last call."""
        totals = {name: sum(measure.between(*pair) for pair in pairs) for name, pairs in self.marks.items()}
        self.marks.clear()
        return totals


def measured(workload: Workload, dtype: str, backend: str, tile_rows: TileRows, min_occupancy: float) -> dict[str, Any]:
    """Median milliseconds of each stage, and of the whole step without the clock."""
    batch = workload.batch(measure.device(), getattr(torch, dtype))
    settings = Settings(
        form=Form.JOINT.value,
        blank=batch.blank,
        dropout=batch.dropout,
        tile_rows=tile_rows,
        min_occupancy=min_occupancy,
        backend=backend,
    )
    tensors = [leaf.detach() for leaf in batch.leaves]
    wanted = [True] * len(tensors)
    call = prepare(settings, tensors, wanted, (batch.targets, batch.frames, batch.labels), seed=1)
    upstream = torch.full((len(batch.frames),), 1 / len(batch.frames), dtype=torch.float64, device=measure.device())
    clock = Clock()
    stages = {stage: getattr(call.backend, stage) for stage in STAGES}
    wrapped = {stage: clock.around(stage, function) for stage, function in stages.items() if function is not None}
    clocked = dataclasses.replace(call, backend=dataclasses.replace(call.backend, **wrapped))

    def step(used: Call) -> None:
        _, stash = used.forward(tensors)
        used.backward(tensors, stash, False, upstream, wanted)

    runs = []
    for _ in range(STEPS + 2):
        step(clocked)
        runs.append(clock.milliseconds())
    steps = measure.times(lambda: step(call), STEPS + 2, 0, STEPS + 2)
    return {
        "nodes": workload.nodes,
        "tile_rows": call.plan.tile_rows,
        "fused": call.plan.fused,
        "step_ms": float(np.median(steps[2:])),
        "stages_ms": {stage: float(np.median([run.get(stage, 0.0) for run in runs[2:]])) for stage in STAGES},
    }


def run(record: Record, chosen: Sequence[Workload], dtype: str = "float16") -> None:
    """Fills the record's section "stages"."""
    for workload in chosen:
        for backend, tile_rows, min_occupancy in CONFIGURATIONS:
            row: dict[str, Any] = {
                "workload": workload.name,
                "backend": backend,
                "tiles": tile_rows,
                "min_occupancy": min_occupancy,
                "dtype": dtype,
            }
            key = tuple(row)
            if record.done("stages", **row):
                continue
            try:
                row |= measured(workload, dtype, backend, tile_rows, min_occupancy)
            except Exception as error:
                row["failed"] = measure.reason(error)
            measure.release()
            record.add("stages", row, *key)
            print(" ".join(f"{name}={row[name]}" for name in key), row.get("failed") or f"{row['step_ms']:.2f} ms")
            for stage, milliseconds in row.get("stages_ms", {}).items():
                if milliseconds:
                    print(f"    {stage:<20}{milliseconds:9.3f} ms")


def main(arguments: list[str]) -> None:
    """Writes a record of the named batches."""
    parser = argparse.ArgumentParser(prog="bench stages", description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=["medium"], metavar="NAME")
    options = parser.parse_args(arguments)
    run(Record("stages"), [workloads.load(name) for name in options.workloads])
