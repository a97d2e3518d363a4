"""Time of every stage of one training step, beside what it could take: `python -m bench.stages [batch ...]`.

Each stage function of the backend is wrapped in a pair of CUDA events; a row is the sum over the tiles of a
step, the median of several steps.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment, workloads
from flash_rnnt_cupy import backends, pipeline, validate
from flash_rnnt_cupy.adapters.arrays import buffer_of, open_array
from flash_rnnt_cupy.plan import GRADIENTS, make_plan
from flash_rnnt_cupy.problem import DEFAULT_MIN_OCCUPANCY, Inputs

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
    "normalize_backward",
    "grad_scores",
    "product_weight",
    "product_hidden",
    "joint_backward",
    "fill_zero",
    "finish",
)
# Milliseconds within reach on an H200 at the medium batch, dense, of each stage: bytes at 4.2 TB/s, products at 640
# TFLOP/s, and what a first version of the kernel measured, whichever is longer. joint_forward and product run twice.
WITHIN_REACH_MS = {
    "joint_forward": 1.8,
    "product": 9.0,
    "normalize_forward": 1.2,
    "normalize_backward": 2.2,
    "score": 4.7,
    "grad_scores": 5.3,
    "product_weight": 4.4,
    "product_hidden": 4.4,
}
STEPS = 7
CONFIGURATIONS = (  # tile_rows, min_occupancy, backend
    ("auto", 0.0, "cuda"),
    ("auto", DEFAULT_MIN_OCCUPANCY, "cuda"),
    (16_896, 0.0, "cuda"),
    ("auto", 0.0, "cuda-generic"),
)
RECORDS = Path(__file__).with_name("records")


class Clock:
    """CUDA events around calls, summed by name."""

    def __init__(self) -> None:
        self.events: dict[str, list[tuple[Any, Any]]] = collections.defaultdict(list)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its time on the device noted under ``name``."""
        import cupy  # noqa: PLC0415  CuPy is imported on demand

        def timed(*arguments: Any) -> Any:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            result = function(*arguments)
            end.record()
            self.events[name].append((begin, end))
            return result

        return timed

    def milliseconds(self) -> dict[str, float]:
        """Total of each name since the last call."""
        import cupy  # noqa: PLC0415

        cupy.cuda.Device().synchronize()
        totals = {name: sum(cupy.cuda.get_elapsed_time(*pair) for pair in pairs) for name, pairs in self.events.items()}
        self.events.clear()
        return totals


def measure(name: str, tile_rows: Any, min_occupancy: float, wanted_backend: str) -> dict[str, Any]:
    """Median milliseconds of each stage, and of the whole step without the clocks."""
    import cupy  # noqa: PLC0415

    given = workloads.load(name).arrays(cupy, "float16")
    arrays = {key: open_array(key, given[key]) for key in ("encoder", "predictor", "weight", "bias")}
    options = validate.check_options(dropout=workloads.DROPOUT, seed=1, min_occupancy=min_occupancy)
    problem = validate.joint_problem(
        {key: opened.facts for key, opened in arrays.items()},
        given["targets"],
        given["encoder_lengths"],
        given["target_lengths"],
        -1,
        options,
    )
    wanted = frozenset(GRADIENTS) - {"logits"}
    backend = backends.choose(wanted_backend, problem, "cuda:0")
    plan = make_plan(problem, backend.facts, tile_rows, None, wanted)
    inputs = Inputs(given["targets"], **{key: opened.buffer() for key, opened in arrays.items()})
    upstream = buffer_of(cupy.full(problem.batch, 1 / problem.batch))
    clock = Clock()
    timed = dataclasses.replace(backend, **{s: clock.around(s, getattr(backend, s)) for s in STAGES})

    def step(used: Any) -> pipeline.Gradients:
        _, saved = pipeline.forward(plan, inputs, used, backend.allocate)
        return pipeline.backward(saved, upstream, wanted)

    runs, steps = [], []
    for _ in range(STEPS + 2):
        gradients = step(timed)
        runs.append(clock.milliseconds())
    for _ in range(STEPS + 2):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        step(backend)
        end.record()
        end.synchronize()
        steps.append(cupy.cuda.get_elapsed_time(begin, end))
    return {
        "workload": name,
        "nodes": gradients.nodes,
        "rows": gradients.rows,
        "tile_rows": plan.tile_rows,
        "min_occupancy": min_occupancy,
        "backend": wanted_backend,
        "step_ms": float(np.median(steps[2:])),
        "stages_ms": {stage: float(np.median([run.get(stage, 0.0) for run in runs[2:]])) for stage in STAGES},
    }


def main(names: list[str]) -> None:
    """Measures the named batches, prints a table and writes a record."""
    rows = []
    for name in names or ["medium"]:
        for configuration in CONFIGURATIONS:
            row = measure(name, *configuration)
            rows.append(row)
            print(f"{name} {configuration}, {row['tile_rows']} rows a tile: {row['step_ms']:.2f} ms a step")
            for stage, milliseconds in row["stages_ms"].items():
                print(f"    {stage:<20}{milliseconds:9.3f} ms")
    record = {"environment": environment.describe(), "stages": rows}
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"stages-{record['environment']['date'][:10]}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
