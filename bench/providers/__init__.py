"""Ways to compute joint network and loss, ours and others', behind one signature.

A provider prepares a step on a batch: forward and backward of the mean loss, which leaves gradients in the batch's
leaves and gives back the losses. What a provider raises becomes a row of the record, not the end of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

Step = Callable[[], Tensor]  # -> losses [B], detached


@dataclass(frozen=True, eq=False)
class Batch:
    """Arguments of a step: leaves that require gradients, and what goes with them.

    encoder [B, T, H], predictor [B, U1, H] in the states' dtype; weight [V, H], bias [V] float32; targets [B, U],
    frames [B], labels [B] int64 on the CPU.
    """

    name: str
    encoder: Tensor
    predictor: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    frames: Tensor
    labels: Tensor
    blank: int
    dropout: float

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return self.encoder, self.predictor, self.weight, self.bias

    @property
    def nodes(self) -> int:
        """N."""
        return int((self.frames * (self.labels + 1)).sum())

    def cut(self, n: int, frames: int, labels: int) -> Batch:
        """The first n utterances, none longer than that, with leaves of their own and without dropout."""
        frames_b, labels_b = self.frames[:n].clamp(max=frames), self.labels[:n].clamp(max=labels)
        states = self.encoder[:n, : int(frames_b.max())], self.predictor[:n, : int(labels_b.max()) + 1]
        leaves = [x.detach().clone().requires_grad_() for x in (*states, self.weight, self.bias)]
        targets = self.targets[:n, : int(labels_b.max())]
        return Batch(f"cut of {self.name}", *leaves, targets, frames_b, labels_b, self.blank, 0.0)

    def to(self, device: str) -> Batch:
        """With leaves on that device."""
        names = ("encoder", "predictor", "weight", "bias")
        return replace(
            self, **{n: x.detach().to(device).requires_grad_() for n, x in zip(names, self.leaves, strict=True)}
        )


@dataclass(frozen=True)
class Provider:
    """One way to compute joint network and loss.

    missing   why it cannot run here; empty: it can
    prepare   the step on a batch; may compile
    """

    name: str
    missing: Callable[[], str]
    prepare: Callable[[Batch], Step]


def providers(peers: Path | None) -> tuple[Provider, ...]:
    """Ours, then others'."""
    from bench.providers.ours import OURS  # noqa: PLC0415  they import this module
    from bench.providers.peers import PEERS  # noqa: PLC0415

    return (*OURS, *PEERS(peers))


def clear_gradients(batch: Batch) -> None:
    """Of all leaves."""
    for leaf in batch.leaves:
        leaf.grad = None


def cuda_missing() -> str:
    """Why nothing can run on a GPU here; empty if it can."""
    return "" if torch.cuda.is_available() else "torch sees no GPU"
