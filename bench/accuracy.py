"""Accuracy of the lattice alone on long utterances: `python -m bench accuracy`.

At every node all scores are equal. Every path crosses each frame by one blank, so the blank posteriors of a frame add
up to 1; the largest distance from it is what rounding in the recursion costs. The posterior is read off the gradient:
with o the posterior of the node, dz[blank] = o / V - posterior of blank, and dz[k] = o / V for a k that is neither
blank nor the label.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.providers import torchaudio
from bench.providers.dense import Loss
from bench.providers.ours import from_logits
from bench.records import Record

VOCABULARY = 16
LENGTHS = ((200, 50), (500, 100), (2000, 400), (6000, 1500))
LOSSES: dict[str, tuple[Callable[[], str], Loss]] = {
    "ours": (str, from_logits),
    "torchaudio": (torchaudio.missing, torchaudio.loss),
}


def error(loss: Loss, T: int, U: int) -> float:
    """Largest | sum over u of the blank posterior - 1 | over the frames."""
    device = measure.device()
    leaf = torch.zeros((1, T, U + 1, VOCABULARY), device=device, requires_grad=True)
    integers = (torch.tensor(given, device=device) for given in ([[1] * U], [T], [U]))
    loss(leaf * 1, *integers, VOCABULARY - 1).sum().backward()
    grad: Tensor = leaf.grad.double()
    sums = (grad[0, :, :, 2] - grad[0, :, :, VOCABULARY - 1]).sum(1)
    return float((sums - 1).abs().max())


def run(record: Record, lengths: Sequence[tuple[int, int]] = LENGTHS) -> None:
    """Fills the record's section "accuracy"."""
    for name, (missing, loss) in LOSSES.items():
        for T, U in lengths:
            row: dict[str, Any] = {"loss": name, "T": T, "U": U}
            if record.done("accuracy", **row):
                continue
            try:
                reason = missing()
                row |= {"failed": reason} if reason else {"error": error(loss, T, U)}
            except Exception as raised:
                row["failed"] = measure.reason(raised)
            measure.release()
            record.add("accuracy", row, "loss", "T", "U")
            print(f"{name:<12} T {T:>5} U {U:>5}  {row.get('failed') or format(row['error'], '.1e')}", flush=True)


def main(arguments: list[str]) -> None:
    """Adds to the record of `run`."""
    argparse.ArgumentParser(prog="bench accuracy", description=__doc__).parse_args(arguments)
    run(Record("run"))
