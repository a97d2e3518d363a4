"""Accuracy of the lattice alone on long utterances: `python -m bench accuracy`.

At every node all scores are equal. Every path crosses each frame by one blank, so the blank posteriors of a frame add
up to 1; the largest distance from it is what rounding in the recursion costs. The posterior is read off the gradient;
of logits, with o the posterior of the node, dz[blank] = o / V - posterior of blank, and dz[k] = o / V for a k that is
neither blank nor the label.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.providers import peers, torchaudio
from bench.providers.dense import Loss
from bench.providers.ours import from_logits
from bench.records import Record

VOCABULARY = 16
LENGTHS = ((200, 50), (500, 100), (2000, 400), (6000, 1500))
Sums = Callable[[int, int], Tensor]  # T, U -> sums [T] over u of the blank's posteriors


def of_logits(loss: Loss) -> Sums:
    """A loss that takes logits."""

    def sums(T: int, U: int) -> Tensor:
        leaf = torch.zeros((1, T, U + 1, VOCABULARY), device=measure.device(), requires_grad=True)
        loss(leaf * 1, *_integers(T, U), VOCABULARY - 1).sum().backward()
        assert leaf.grad is not None
        grad = leaf.grad.double()
        return (grad[0, :, :, 2] - grad[0, :, :, VOCABULARY - 1]).sum(1)

    return sums


def of_scores(T: int, U: int) -> Tensor:
    """The original Flash RNN-T's recursion, which takes log-probabilities of labels and blanks."""
    module: Any = importlib.import_module("nemo.collections.asr.parts.triton.rnnt_loss")
    marks, blanks = (torch.full((1, T, U1), -math.log(VOCABULARY), device=measure.device()) for U1 in (U, U + 1))
    _, frames, labels = _integers(T, U)
    module.rnnt_loss_triton(marks, blanks.requires_grad_(), frames, labels).sum().backward()
    assert blanks.grad is not None
    return -blanks.grad[0].double().sum(1)


def _integers(T: int, U: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(given, device=measure.device()) for given in ([[1] * U], [T], [U]))


LOSSES: dict[str, tuple[Callable[[], str], Sums]] = {
    "ours": (str, of_logits(from_logits)),
    "original Flash RNN-T": (peers.FLASH_RNNT, of_scores),
    "torchaudio": (torchaudio.missing, of_logits(torchaudio.loss)),
    "NeMo Numba": (peers.NEMO, of_logits(peers.nemo)),
}


def error(sums: Sums, T: int, U: int) -> float:
    """Largest | sum over u of the blank posterior - 1 | over the frames."""
    return float((sums(T, U) - 1).abs().max())


def run(record: Record, lengths: Sequence[tuple[int, int]] = LENGTHS) -> None:
    """Fills the record's section "accuracy"."""
    for name, (missing, sums) in LOSSES.items():
        for T, U in lengths:
            row: dict[str, Any] = {"loss": name, "T": T, "U": U}
            if record.done("accuracy", **row):
                continue
            try:
                reason = missing()
                row |= {"failed": reason} if reason else {"error": error(sums, T, U)}
            except Exception as raised:
                row["failed"] = measure.reason(raised)
            measure.release()
            record.add("accuracy", row, "loss", "T", "U")
            print(f"{name:<12} T {T:>5} U {U:>5}  {row.get('failed') or format(row['error'], '.1e')}", flush=True)


def main(arguments: list[str]) -> None:
    """Adds to the record of `run`."""
    argparse.ArgumentParser(prog="bench accuracy", description=__doc__).parse_args(arguments)
    run(Record("run"))
