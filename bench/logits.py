"""The loss of given logits beside what reading and writing them costs: `python -m bench logits`.

Forward must read the logits once, backward read and write them once; the floor of either is the time of a sum over,
and of an in-place product with one of, a tensor of that size. float16, B 128, T 300, U 60, V 1024, and ragged.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bench import measure
from bench.records import Record
from flash_rnnt_cupy.adapters.pytorch import rnnt_loss

SIZES = (128, 300, 61, 1024)  # B, T, U1, V


def measured(sizes: tuple[int, int, int, int], ragged: bool, seconds: float) -> dict[str, Any]:
    """Milliseconds of forward, of backward in place, and of their floors."""
    batch, T, U1, V = sizes
    device, random = measure.device(), torch.Generator().manual_seed(0)
    frames = torch.randint(T // 2, T + 1, (batch,), generator=random) if ragged else torch.full((batch,), T)
    labels = torch.randint(U1 // 2, U1, (batch,), generator=random) if ragged else torch.full((batch,), U1 - 1)
    frames[0], labels[0] = T, U1 - 1
    targets = torch.randint(0, V - 1, (batch, U1 - 1), generator=random)
    leaf = torch.randn(sizes, device=device, dtype=torch.float16).requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            rnnt_loss(leaf, targets, frames, labels)

    def both() -> None:
        logits = leaf.detach().requires_grad_()
        rnnt_loss(logits.clone(), targets, frames, labels, overwrite_logits=True).backward()

    plain = leaf.detach()
    timed = {
        "forward_ms": forward,
        "both_ms_with_a_copy": both,
        "copy_ms": plain.clone,
        "read_ms": lambda: plain.view(torch.int32).amax(),
        "read_write_ms": lambda: plain.mul_(1),
    }
    row = {name: measure.timed(step, seconds)["sustained_ms"][1] for name, step in timed.items()}
    row["backward_ms"] = row["both_ms_with_a_copy"] - row["copy_ms"] - row["forward_ms"]
    nodes = int((frames * (labels + 1)).sum())
    return {"sizes": list(sizes), "ragged": ragged, "nodes": nodes, **row}


def main(arguments: list[str]) -> None:
    """Adds to the record of `run`."""
    parser = argparse.ArgumentParser(prog="bench logits", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args(arguments).seconds
    record = Record("run")
    for ragged in (False, True):
        row = measured(SIZES, ragged, seconds)
        record.add("logits", row, "ragged")
        print(row, flush=True)
