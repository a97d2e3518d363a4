"""The joint network in plain PyTorch, with all its logits, over sub-batches of utterances.

A sub-batch is cut to its longest T and U. "Retain" is one backward after all sub-batches, "release" a backward after
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bench.providers import Batch, Step

LOW = -1e30  # log of zero, and with a gradient


@dataclass(frozen=True, eq=False)
class Part:
    """A sub-batch of b utterances, its states leaves of their own."""

    rows: slice  # of the batch
    encoder: Tensor  # [b, T, H]
    predictor: Tensor  # [b, U1, H]
    weight: Tensor  # [V, H] in the states' dtype
    bias: Tensor  # [V]
    targets: Tensor  # [b, U] int64, on the states' device, as are the lengths
    frames: Tensor  # [b]
    labels: Tensor  # [b]
    n_nodes: int
    blank: int
    dropout: float


Losses = Callable[[Part], Tensor]  # losses [b]
# logits [b, T, U1, V], targets [b, U], frames [b], labels [b], all on the logits' device, blank -> losses [b]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def joint(encoder: Tensor, predictor: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Logits [B, T, U1, V] in the states' dtype."""
    hidden = functional.dropout(torch.relu(encoder[:, :, None] + predictor[:, None]), dropout)
    return functional.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))


def from_logits(loss: Loss) -> Losses:
    """The joint network before a loss that takes logits."""

    def losses_of(part: Part) -> Tensor:
        logits = joint(part.encoder, part.predictor, part.weight, part.bias, part.dropout)
        return loss(logits, part.targets, part.frames, part.labels, part.blank)

    return losses_of


def _parts(batch: Batch, size: int) -> Callable[[], Iterator[Part]]:
    """The sub-batches; their integers are moved to the device once. A single one has the batch's own states."""
    device, dtype = batch.encoder.device, batch.encoder.dtype
    integers = []
    for begin in range(0, len(batch.frames), size):
        rows = slice(begin, begin + size)
        frames, labels = batch.frames[rows], batch.labels[rows]
        targets = batch.targets[rows, : int(labels.max())]
        there = [array.to(device).contiguous() for array in (targets, frames, labels)]
        integers.append((rows, int(frames.max()), int((frames * (labels + 1)).sum()), there))

    def generate() -> Iterator[Part]:
        for rows, T, n_nodes, (targets, frames, labels) in integers:
            states = batch.encoder, batch.predictor
            if len(integers) > 1:
                cuts = batch.encoder[rows, :T], batch.predictor[rows, : targets.shape[1] + 1]
                states = tuple(cut.detach().contiguous().requires_grad_() for cut in cuts)
            yield Part(
                rows,
                *states,
                batch.weight.to(dtype),
                batch.bias.to(dtype),
                targets,
                frames,
                labels,
                n_nodes,
                batch.blank,
                batch.dropout,
            )

    return generate


def over_sub_batches(batch: Batch, losses_of: Losses, size: int, release: bool = True) -> Step:
    """A step over sub-batches of ``size`` utterances."""
    generate, total = _parts(batch, size), len(batch.frames)
    states = batch.encoder, batch.predictor

    def backward(done: list[tuple[Part, Tensor]]) -> None:
        losses = [loss for _, loss in done]
        torch.autograd.backward(losses, [torch.full_like(loss, 1 / total) for loss in losses])
        for part, _ in done:
            for whole, piece in zip(states, (part.encoder, part.predictor), strict=True):
                if piece is not whole:
                    assert whole.grad is not None
                    assert piece.grad is not None
                    whole.grad[part.rows, : piece.shape[1]] = piece.grad
                    piece.grad = None

    def step() -> Tensor:
        for whole in states:
            whole.grad = torch.zeros_like(whole) if size < total else None
        batch.weight.grad = batch.bias.grad = None
        results, kept = [], []
        for part in generate():
            losses = losses_of(part)
            results.append(losses.detach())
            if release:
                backward([(part, losses)])
            else:
                kept.append((part, losses))
            del part, losses  # and the graph, before the next sub-batch
        if kept:
            backward(kept)
        return torch.cat(results)

    return step


def in_sub_batches(loss: Loss, size: int | None = None) -> Callable[[Batch], Step]:
    """A provider's ``prepare`` for a loss that takes logits: sub-batches of ``size``, or the whole batch; release."""
    return lambda batch: over_sub_batches(batch, from_logits(loss), size or len(batch.frames))


def node_scores(logits: Tensor, targets: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the blank and of the next label [B, T, U1]; the last state has no next label."""
    scores = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    B, T, U1, _ = scores.shape
    marks = scores[:, :, :-1].gather(3, targets[:, None, :, None].expand(B, T, U1 - 1, 1))[..., 0]
    return scores[..., blank], functional.pad(marks, (0, 1), value=LOW)


def sum_diagonals(blanks: Tensor, marks: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    """Losses [B] of node scores [B, T, U1], one anti-diagonal d = t + u at a time."""
    B, T, U1 = blanks.shape
    d, u = torch.arange(T + U1 - 1, device=blanks.device)[:, None], torch.arange(U1, device=blanks.device)
    t = d - u  # [D, U1]
    inside, at = (t >= 0) & (t < T), t.clamp(0, T - 1)
    blank_bdu, mark_bdu = (torch.where(inside, x[:, at, u], LOW) for x in (blanks, marks))
    alpha = torch.where(u == 0, 0.0, LOW).expand(B, U1).to(blanks)
    alphas = [alpha]
    for k in range(T + U1 - 2):
        marked = functional.pad((alpha + mark_bdu[:, k])[:, :-1], (1, 0), value=LOW)
        alpha = torch.logaddexp(alpha + blank_bdu[:, k], marked)
        alphas.append(alpha)
    b, last = torch.arange(B, device=blanks.device), frames - 1
    return -(torch.stack(alphas, 1)[b, last + labels, labels] + blanks[b, last, labels])


def diagonal_loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """The loss in PyTorch's operations alone."""
    return sum_diagonals(*node_scores(logits, targets, blank), frames, labels)
