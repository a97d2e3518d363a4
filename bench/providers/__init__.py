"""Providers: the ways to compute joint network and loss that are measured beside one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Arguments of a step: leaves that require gradients, and what goes with them."""

    name: str
    encoder: Tensor  # [B, T, H]
    predictor: Tensor  # [B, U1, H]
    weight: Tensor  # [V, H] float32
    bias: Tensor  # [V] float32
    targets: Tensor  # [B, U] int64, on the CPU, as are the lengths
    frames: Tensor  # [B]
    labels: Tensor  # [B]
    blank: int
    dropout: float

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What requires gradients."""
        return self.encoder, self.predictor, self.weight, self.bias

    def cut(self, n: int, frames: int, labels: int) -> Batch:
        """The first n utterances, shortened to different lengths, without dropout: for the gate."""
        shorter = torch.arange(min(n, len(self.frames)))
        frames_b = (self.frames[:n].clamp(max=frames) - shorter).clamp(min=1)
        labels_b = (self.labels[:n].clamp(max=labels) - shorter).clamp(min=0)
        T, U = int(frames_b.max()), int(labels_b.max())
        cuts = self.encoder[:n, :T], self.predictor[:n, : U + 1], self.weight, self.bias
        names = "encoder", "predictor", "weight", "bias"
        leaves = {name: cut.detach().clone().requires_grad_() for name, cut in zip(names, cuts, strict=True)}
        targets = self.targets[:n, :U]
        return dataclasses.replace(self, **leaves, targets=targets, frames=frames_b, labels=labels_b, dropout=0.0)


# forward and backward of the mean loss: leaves' .grad; returns losses [B] or their mean, detached
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Provider:
    """One way to compute joint network and loss."""

    name: str
    missing: Callable[[], str]  # why it cannot run here; empty: it can
    prepare: Callable[[Batch], Step]  # may compile; what it raises becomes the row's reason


def providers() -> tuple[Provider, ...]:
    """Ours first, then the peers'."""
    from bench.providers.ours import OURS  # noqa: PLC0415  they import this module
    from bench.providers.peers import PEERS  # noqa: PLC0415

    return OURS + PEERS
