"""Whether a provider is right: losses and gradients of a small cut of the batch, against float64.

Truth is computed from the values as rounded to the batch's dtypes, by `flash_rnnt_cupy.reference`.
"""

from __future__ import annotations

import numpy as np

from bench.providers import Batch, Provider
from flash_rnnt_cupy import reference

UTTERANCES, FRAMES, LABELS = 3, 40, 12
NAMES = ("encoder", "predictor", "weight", "bias")
ALLOWED = 2e-2  # of two-byte products; what is wrong is off by far more


def errors(provider: Provider, batch: Batch) -> dict[str, float]:
    """Largest relative error of the losses, and of each gradient its distance (L2) relative to the true one."""
    cut = batch.cut(UTTERANCES, FRAMES, LABELS)
    losses = provider.prepare(cut)().double().cpu().numpy()
    exact = [leaf.detach().double().cpu().numpy() for leaf in cut.leaves]
    truth = {name: np.zeros_like(value) for name, value in zip(NAMES, exact, strict=True)}
    true_losses = np.zeros(len(losses))
    for b in range(len(losses)):
        T, U = int(cut.frames[b]), int(cut.labels[b])
        encoder, predictor = exact[0][b, :T], exact[1][b, : U + 1]
        result = reference.joint_rnnt_loss(encoder, predictor, *exact[2:], cut.targets[b, :U].numpy(), cut.blank)
        true_losses[b] = result.loss
        truth["encoder"][b, :T], truth["predictor"][b, : U + 1] = result.encoder, result.predictor
        truth["weight"] += result.weight
        truth["bias"] += result.bias
    found = {"loss": float(np.max(np.abs(losses / true_losses - 1)))}
    for name, leaf in zip(NAMES, cut.leaves, strict=True):
        assert leaf.grad is not None
        true = truth[name] / len(losses)
        found[name] = float(np.linalg.norm(leaf.grad.double().cpu().numpy() - true) / np.linalg.norm(true))
    return found


def check(provider: Provider, batch: Batch) -> dict[str, float]:
    """The errors; raises where one is too large."""
    found = errors(provider, batch)
    if not all(error < ALLOWED for error in found.values()):
        raise AssertionError(f"wrong result: {found}")
    return found
