"""The joint network in plain PyTorch, with all its logits, over sub-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bench.providers import Batch, Step

# logits [b, T, U1, V], targets [b, U], frames [b], labels [b], all on the logits' device, blank -> losses [b]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def joint(encoder: Tensor, predictor: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Logits [B, T, U1, V] in the states' dtype."""
    hidden = functional.dropout(torch.relu(encoder[:, :, None] + predictor[:, None]), dropout)
    return functional.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))


def in_sub_batches(loss: Loss, size: int | None = None) -> Callable[[Batch], Step]:
    """A provider's ``prepare``: backward follows each sub-batch, which is cut to its longest utterance."""

    def prepare(batch: Batch) -> Step:
        total = len(batch.frames)

        def step() -> Tensor:
            losses = []
            for begin in range(0, total, size or total):
                part = slice(begin, begin + (size or total))
                frames, labels = batch.frames[part], batch.labels[part]
                T, U = int(frames.max()), int(labels.max())
                states = batch.encoder[part, :T], batch.predictor[part, : U + 1]
                logits = joint(*states, batch.weight, batch.bias, batch.dropout)
                integers = (there.to(logits.device) for there in (batch.targets[part, :U], frames, labels))
                found = loss(logits, *integers, batch.blank)
                del logits
                (found.sum() / total).backward()
                losses.append(found.detach())
            return torch.cat(losses)

        return step

    return prepare


def diagonal_loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """The loss in PyTorch's operations alone, one anti-diagonal d = t + u at a time."""
    scores = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    B, T, U1, _ = scores.shape
    low = -1e30  # log of zero, and with a gradient
    blanks = scores[..., blank]
    picked = scores[:, :, :-1].gather(3, targets[:, None, :, None].expand(B, T, U1 - 1, 1))[..., 0]
    marks = functional.pad(picked, (0, 1), value=low)
    d, u = torch.arange(T + U1 - 1, device=logits.device)[:, None], torch.arange(U1, device=logits.device)
    t = d - u  # [D, U1]
    inside, at = (t >= 0) & (t < T), t.clamp(0, T - 1)
    blank_bdu, mark_bdu = (torch.where(inside, x[:, at, u], low) for x in (blanks, marks))
    alpha = torch.where(u == 0, 0.0, low).expand(B, U1).to(scores)
    alphas = [alpha]
    for k in range(T + U1 - 2):
        marked = functional.pad((alpha + mark_bdu[:, k])[:, :-1], (1, 0), value=low)
        alpha = torch.logaddexp(alpha + blank_bdu[:, k], marked)
        alphas.append(alpha)
    b, last = torch.arange(B, device=logits.device), frames - 1
    return -(torch.stack(alphas, 1)[b, last + labels, labels] + blanks[b, last, labels])
