"""Throughput and peak memory of a training step through PyTorch: `python -m bench.steps [batch ...]`.

Joint network and loss, forward and backward, from projected states: float16 states, float32 parameters, dropout 0.1.
Throughput is B over the median of CUDA-event times, of the first 20 steps after a pause ("cool") and of later ones
("sustained"); memory is PyTorch's peak of allocated bytes, inputs and parameters included. The losses are compared
with those of the plain float64 recursion on a few utterances first: no time without a right result.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import environment, workloads
from flash_rnnt_cupy import reference
from flash_rnnt_cupy.adapters.pytorch import joint_rnnt_loss

RECORDS = Path(__file__).with_name("records")
COOL, WARM_UP, SUSTAINED = 20, 30, 100
SECONDS = 5.0  # at most, of each row's sustained part
CHECKED = 2  # utterances


def _tensors(name: str) -> dict[str, torch.Tensor]:
    arrays = workloads.load(name).arrays(np, "float16")
    tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}
    for key in ("encoder", "predictor", "weight", "bias"):
        tensors[key] = tensors[key].cuda().requires_grad_()
    return tensors


def _check(tensors: dict[str, torch.Tensor], frames: int = 40, labels: int = 12) -> float:
    """Largest relative error of a few short utterances' losses against float64, without dropout."""
    cut = {
        **tensors,
        "encoder": tensors["encoder"][:CHECKED, :frames],
        "predictor": tensors["predictor"][:CHECKED, : labels + 1],
        "targets": tensors["targets"][:CHECKED, :labels],
        "encoder_lengths": torch.full((CHECKED,), frames),
        "target_lengths": torch.full((CHECKED,), labels),
    }
    losses = joint_rnnt_loss(**cut, reduction="none").tolist()
    exact = {key: cut[key].detach().double().cpu().numpy() for key in ("encoder", "predictor", "weight", "bias")}
    truth = [
        reference.joint_rnnt_loss(
            exact["encoder"][b],
            exact["predictor"][b],
            exact["weight"],
            exact["bias"],
            cut["targets"][b].numpy(),
            workloads.VOCABULARY - 1,
        ).loss
        for b in range(CHECKED)
    ]
    return float(np.max(np.abs(np.array(losses) / np.array(truth) - 1)))


def measure(name: str, tile_rows: Any, min_occupancy: float) -> dict[str, Any]:
    """One row."""
    tensors = _tensors(name)
    parameters = [tensors[key] for key in ("encoder", "predictor", "weight", "bias")]
    options = {"dropout": workloads.DROPOUT, "tile_rows": tile_rows, "min_occupancy": min_occupancy}

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        joint_rnnt_loss(**tensors, seed=1, **options).backward()

    def times(n: int, seconds: float) -> list[float]:
        result, begin = [], time.monotonic()
        while len(result) < n and (len(result) < 3 or time.monotonic() - begin < seconds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            result.append(start.elapsed_time(end))
        return result

    error = _check(tensors)
    assert error < 2e-3, error
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    time.sleep(1)
    cool = times(COOL, SECONDS / 3)
    times(WARM_UP, SECONDS / 3)
    sustained = times(SUSTAINED, SECONDS)
    batch = len(tensors["encoder_lengths"])
    return {
        "workload": name,
        "nodes": workloads.load(name).nodes,
        "tile_rows": tile_rows,
        "min_occupancy": min_occupancy,
        "loss_error": error,
        "samples_per_s": batch / np.median(sustained) * 1e3,
        "samples_per_s_cool": batch / np.median(cool) * 1e3,
        "spread_ms": [float(np.percentile(sustained, q)) for q in (5, 50, 95)],
        "steps": len(sustained),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main(names: list[str]) -> None:
    """Measures the named batches, dense and default backward, and writes a record."""
    rows = []
    for name in names or workloads.NAMES:
        for min_occupancy in (0.0, 1e-8):
            row = measure(name, "auto", min_occupancy)
            rows.append(row)
            print(
                f"{name:<7} min_occupancy={min_occupancy:<6} {row['samples_per_s']:9.0f} samples/s "
                f"(cool {row['samples_per_s_cool']:.0f}) @ {row['peak_gib']:.2f} GiB"
            )
    record = {"environment": environment.describe(), "steps": rows}
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"steps-{record['environment']['date'][:10]}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
