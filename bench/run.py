"""Every provider on every workload: `python -m bench run`.

A training step of joint network and loss, from projected states: float16 states, float32 parameters, dropout 0.1.
Throughput is B over the median time; memory is PyTorch's peak of allocated bytes, inputs and parameters included.
Other libraries are measured where they can be imported: a folder with their sources may stand in PYTHONPATH.
A right result comes first (`gate`); its errors against float64 stand in the row. A provider that raises becomes a
row with the reason. What was interrupted goes on where it stopped: rows that did not fail are not repeated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench import gate, measure, workloads
from bench.providers import Batch, Provider, providers
from bench.records import Record
from bench.workloads import Workload

KEY = ("workload", "provider", "dtype")


def shortened(batch: Batch) -> Batch:
    """What the gate sees of a batch."""
    return batch.cut(gate.UTTERANCES, gate.FRAMES, gate.LABELS)


def measured(provider: Provider, batch: Batch, truth: gate.Numbers, seconds: float) -> dict[str, Any]:
    """Errors, seconds of the first call, times and peak memory, of which none is the gate's."""
    errors = gate.errors(provider, shortened(batch), truth)
    measure.release()
    begin = time.perf_counter()
    run = provider.prepare(batch)

    def step() -> None:
        for leaf in batch.leaves:
            leaf.grad = None
        run()

    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    first = time.perf_counter() - begin
    times = measure.timed(step, seconds)
    size = len(batch.frames)
    throughput = {
        "samples_per_s": size / times["sustained_ms"][1] * 1e3,
        "samples_per_s_cool": size / times["cool_ms"][1] * 1e3,
    }
    return {"errors": errors, "first_call_s": first, **throughput, **times}


def run(
    chosen: Sequence[Workload], used: Sequence[Provider], record: Record, seconds: float, dtype: torch.dtype
) -> None:
    """Fills the record's section "run"."""
    name = str(dtype).removeprefix("torch.")
    for workload in chosen:
        left = [p for p in used if not record.done("run", workload=workload.name, provider=p.name, dtype=name)]
        if not left:
            continue
        batch = workload.batch(measure.device(), dtype)
        truth = gate.exact(shortened(batch))
        for provider in left:
            row = {"workload": workload.name, "provider": provider.name, "dtype": name, "nodes": workload.nodes}
            try:
                missing = provider.missing()
                row |= {"failed": missing} if missing else measured(provider, batch, truth, seconds)
            except Exception as error:
                row["failed"] = measure.reason(error)
            for leaf in batch.leaves:
                leaf.grad = None
            measure.release()
            record.add("run", row, *KEY)
            print(describe(row), flush=True)


def describe(row: dict[str, Any]) -> str:
    """A row in a line."""
    head = f"{row['workload']:<17} {row['provider']:<46}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    peak = "" if row["peak_gib"] is None else f" @ {row['peak_gib']:.2f} GiB"
    worst = max(row["errors"].values())
    return (
        f"{head} {row['samples_per_s']:9,.1f} samples/s (cool {row['samples_per_s_cool']:,.1f}){peak}, "
        f"error {worst:.1e}, first call {row['first_call_s']:.2f} s"
    )


def main(arguments: list[str]) -> None:
    """Runs what the arguments choose."""
    parser = argparse.ArgumentParser(prog="bench run", description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=workloads.NAMES, metavar="NAME")
    parser.add_argument("--providers", nargs="+", default=[""], metavar="SUBSTRING", help="of their names")
    parser.add_argument("--seconds", type=float, default=5.0, help="at most, of a row's sustained part")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="of the states")
    options = parser.parse_args(arguments)
    used = [p for p in providers() if any(part in p.name for part in options.providers)]
    chosen = []
    for name in options.workloads:
        try:
            chosen.append(workloads.load(name))
        except LookupError as error:
            print(f"{name}: skipped, {error}")
    record = Record("run")
    run(chosen, used, record, options.seconds, getattr(torch, options.dtype))
    print(f"in {record.path}")
