"""The NumPy backend beside plain PyTorch on the CPU: `python -m bench cpu`.

A step, forward and backward, of some utterances of the short batch in float32. Each way runs in a process of its own:
the time is the median of a few steps after the first, the memory is the process's largest resident size less what it
had before the first step (Linux counts it anew for each program).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import gate, measure, workloads
from bench.providers import Provider, torchaudio
from bench.providers.dense import diagonal_loss, in_sub_batches
from bench.providers.ours import OURS
from bench.records import Record

STEPS = 9
UTTERANCES = 16  # of the short batch: 3.7e4 nodes, seconds a step
PROVIDERS = (
    *(provider for provider in OURS if provider.name.startswith("ours, auto tiles")),
    Provider("PyTorch operations alone", str, in_sub_batches(diagonal_loss)),
    Provider("PyTorch operations alone, sub-batches of 1", str, in_sub_batches(diagonal_loss, 1)),
    Provider("torchaudio", torchaudio.missing, in_sub_batches(torchaudio.loss)),
    Provider("torchaudio, sub-batches of 1", torchaudio.missing, in_sub_batches(torchaudio.loss, 1)),
)


def _resident(kind: str) -> int:
    """Bytes: VmHWM, the largest so far, or VmRSS, now."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(f"{kind}:")).split()[1]) * 1024


def measured(name: str, workload: str, utterances: int) -> dict[str, Any]:
    """In this process."""
    provider = next(provider for provider in PROVIDERS if provider.name == name)
    if missing := provider.missing():
        return {"failed": missing}
    whole = workloads.load(workload)
    first = dataclasses.replace(whole, frames_b=whole.frames_b[:utterances], labels_b=whole.labels_b[:utterances])
    batch = first.batch("cpu", torch.float32)
    errors = gate.errors(provider, batch.cut(2, 12, 4), gate.exact(batch.cut(2, 12, 4)))
    before = _resident("VmRSS")
    run = provider.prepare(batch)
    milliseconds = measure.times(run, 1 + STEPS, 0, 1 + STEPS)[1:]
    return {
        "nodes": first.nodes,
        "errors": errors,
        "seconds": float(np.median(milliseconds)) / 1e3,
        "memory_bytes": _resident("VmHWM") - before,
        "threads": torch.get_num_threads(),
    }


def run(
    record: Record, workload: str = "short", utterances: int = UTTERANCES, used: Sequence[Provider] = PROVIDERS
) -> None:
    """Fills the record's section "cpu"."""
    for provider in used:
        key = {"provider": provider.name, "workload": workload, "utterances": utterances}
        if record.done("cpu", **key):
            continue
        command = [sys.executable, "-m", "bench", "cpu", "--one", provider.name, workload, str(utterances)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1] if done.returncode == 0 else ""
        row = key | (json.loads(last) if last else {"failed": (done.stderr.strip().splitlines() or ["ended"])[-1]})
        record.add("cpu", row, *key)
        figures = row.get("failed") or f"{row['seconds']:.2f} s, {row['memory_bytes'] / 2**20:.0f} MiB"
        print(f"{provider.name:<46} {figures}", flush=True)


def main(arguments: list[str]) -> None:
    """Writes a record; with --one prints one measurement of this process."""
    parser = argparse.ArgumentParser(prog="bench cpu", description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("PROVIDER", "WORKLOAD", "UTTERANCES"), help=argparse.SUPPRESS)
    one = parser.parse_args(arguments).one
    if one:
        print(json.dumps(measured(one[0], one[1], int(one[2]))))
    else:
        run(Record("cpu"))
