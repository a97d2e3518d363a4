"""Throughput, peak memory and accuracy of every provider on every batch: `python -m bench.run --help`.

A step is joint network and loss, forward and backward, from projected states: float16 states, float32 parameters,
dropout 0.1. Steps follow each other without waiting; throughput is B over the median time between CUDA events
around a step, of the first 20 after a pause ("cool") and of later ones ("sustained"); memory is PyTorch's peak of
allocated bytes, inputs and parameters included. A provider's result on a cut of the batch is compared with float64
first: no time without a right result. One that cannot run, or runs out of memory, becomes a row that says so.

Rows go to bench/records/run-DATE-COMMIT.json one by one; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import environment, gate, workloads
from bench.providers import Batch, Provider, providers

RECORDS = Path(__file__).with_name("records")
COOL, WARM_UP, SUSTAINED = 20, 30, 100
LEAST_STEPS = 4
Row = dict[str, Any]


class Stopwatch:
    """Milliseconds of each of several steps that follow each other."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"

    def times(self, step: Any, n: int, seconds: float) -> list[float]:
        """Of n steps, or of as many as fit into about that many seconds."""
        begin = time.perf_counter()
        marks = [self._mark()]
        while len(marks) <= n and (len(marks) <= LEAST_STEPS or time.perf_counter() - begin < seconds):
            step()
            marks.append(self._mark())
        if self._on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def measure(provider: Provider, batch: Batch, seconds: float) -> Row:
    """What one provider does on one batch."""
    device = batch.encoder.device.type
    row: Row = {"errors": gate.check(provider, batch)}
    begin = time.perf_counter()
    step = provider.prepare(batch)
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    row["first_step_s"] = time.perf_counter() - begin
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    watch = Stopwatch(device)
    time.sleep(1)
    cool = watch.times(step, COOL, seconds / 3)
    watch.times(step, WARM_UP, seconds / 3)
    sustained = watch.times(step, SUSTAINED, seconds)
    n_utterances = len(batch.frames)
    row["samples_per_s"] = n_utterances / float(np.median(sustained)) * 1e3
    row["samples_per_s_cool"] = n_utterances / float(np.median(cool)) * 1e3
    row["spread_ms"] = [float(np.percentile(sustained, q)) for q in (5, 50, 95)]
    row["steps"] = len(sustained)
    return row


def run(batches: Iterable[Batch], chosen: Iterable[Provider], seconds: float, path: Path) -> list[Row]:
    """All rows, those of the record at ``path`` and new ones, which are added to it one by one."""
    record = {"environment": environment.describe(), "run": []}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    rows: list[Row] = record["run"]
    chosen = list(chosen)
    for batch in batches:
        for provider in chosen:
            if any((row["batch"], row["provider"]) == (batch.name, provider.name) for row in rows):
                continue
            row: Row = {"batch": batch.name, "nodes": batch.nodes, "provider": provider.name}
            try:
                reason = provider.missing()
                row |= {"failed": reason} if reason else measure(provider, batch, seconds)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            for leaf in batch.leaves:
                leaf.grad = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            rows.append(row)
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(_line(row), flush=True)
    return rows


def _line(row: Row) -> str:
    name = f"{row['batch']:<8} {row['provider']:<36}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    peak = f"@ {row['peak_gib']:.3f} GiB" if "peak_gib" in row else ""
    rate = f"{row['samples_per_s']:9.0f} samples/s (cool {row['samples_per_s_cool']:.0f})"
    return f"{name} {rate} {peak} loss error {row['errors']['loss']:.1e}"


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", default=list(workloads.NAMES))
    parser.add_argument("--trained", type=Path, help="states of a trained model: adds the batch `trained`")
    parser.add_argument("--providers", nargs="+", default=[""], help="only those of these names, or that contain them")
    parser.add_argument("--peers", type=Path, help="a folder with other libraries' code")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each sustained measurement, at most")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = [lambda n=name: workloads.batch(n) for name in options.batches]
    if options.trained:
        made.append(lambda: workloads.trained_batch(options.trained))
    where = environment.describe()
    path = RECORDS / f"run-{where['date'][:10]}-{where['commit'][:9]}.json"
    RECORDS.mkdir(exist_ok=True)
    found = providers(options.peers)
    names = {p.name for p in found}
    chosen = [p for p in found if any(w == p.name if w in names else w in p.name for w in options.providers)]
    run((make().to(device) for make in made), chosen, options.seconds, path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
