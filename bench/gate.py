"""No time without a right result: losses and gradients of a few short utterances against plain float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bench.providers import Batch, Provider

UTTERANCES, FRAMES, LABELS = 3, 40, 12
ALLOWED = {"losses": 5e-3, "encoder": 5e-2, "predictor": 5e-2, "weight": 5e-2, "bias": 5e-2}  # relative L2 errors
Numbers = dict[str, Tensor]


class Refused(Exception):  # noqa: N818  it says what happened
    """A provider's result is wrong."""


def exact(batch: Batch) -> Numbers:
    """Losses [B] and gradients of their mean, by the definition, from the inputs as the states' dtype rounds them.

    In host memory: the device's is measured.
    """
    leaves = [leaf.detach().to(batch.encoder.dtype).double().requires_grad_() for leaf in batch.leaves[:3]]
    encoder, predictor, weight = leaves
    bias = batch.bias.detach().double().requires_grad_()
    logits = functional.linear(torch.relu(encoder[:, :, None] + predictor[:, None]), weight, bias)
    log_probs = logits.log_softmax(-1)
    losses = []
    for b, targets_u in enumerate(batch.targets):
        columns = torch.cat((torch.tensor([batch.blank]), targets_u)).to(log_probs.device)
        scores = log_probs[b, :, :, columns].cpu()  # [T, U1, 1 + U]: blank, then the labels
        losses.append(-_log_likelihood(scores, int(batch.frames[b]), int(batch.labels[b])))
    stacked = torch.stack(losses)
    gradients = torch.autograd.grad(stacked.mean(), [*leaves, bias])
    return {name: number.cpu() for name, number in zip(ALLOWED, (stacked.detach(), *gradients), strict=True)}


def _log_likelihood(scores: Tensor, T: int, U: int) -> Tensor:
    """Node by node."""
    alpha = {(0, 0): scores.new_zeros(())}
    for t in range(T):
        for u in range(U + 1):
            arrivals = []
            if t:
                arrivals.append(alpha[t - 1, u] + scores[t - 1, u, 0])
            if u:
                arrivals.append(alpha[t, u - 1] + scores[t, u - 1, u])
            if arrivals:
                alpha[t, u] = torch.logsumexp(torch.stack(arrivals), 0)
    return alpha[T - 1, U] + scores[T - 1, U, 0]


def errors(provider: Provider, batch: Batch, truth: Numbers) -> dict[str, float]:
    """Relative L2 error of the losses, or of their mean, and of each gradient.

    Raises Refused where one is larger than allowed.
    """
    for leaf in batch.leaves:
        leaf.grad = None
    losses = provider.prepare(batch)()
    found = dict(zip(ALLOWED, (losses, *(leaf.grad for leaf in batch.leaves)), strict=True))
    result = {}
    for name, exactly in truth.items():
        number = found[name]
        mean = name == "losses" and number is not None and number.dim() == 0
        right = exactly.mean() if mean else exactly
        if number is None or number.shape != right.shape:
            raise Refused(f"{name}: shape {None if number is None else tuple(number.shape)}, not {tuple(right.shape)}")
        difference = number.to(right) - right
        result[name] = float(difference.norm() / right.norm().clamp(min=1e-300))
    wrong = [f"{name} {error:.1e}" for name, error in result.items() if not error <= ALLOWED[name]]
    if wrong:
        raise Refused(f"errors against float64: {', '.join(wrong)}")
    return result
