"""The peers of the benchmark: those that run here against the float64 recursion, sub-batches and schedules included."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.providers import Batch, Provider, dense, peers
from flash_rnnt_cupy import reference

PLAIN = [provider for provider in peers.PEERS if provider.name.startswith("plain")]
FRAMES, LABELS = (4, 7, 3, 1), (2, 3, 0, 5)
H, V = 6, 5


def batch(dropout: float = 0.0) -> Batch:
    draw = torch.Generator().manual_seed(0)
    n, T, U = len(FRAMES), max(FRAMES), max(LABELS)
    shapes = (n, T, H), (n, U + 1, H), (V, H), (V,)
    leaves = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    targets = torch.randint(V - 1, (n, U), generator=draw)
    return Batch("tiny", *leaves, targets, torch.tensor(FRAMES), torch.tensor(LABELS), V - 1, dropout)


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("provider", PLAIN, ids=lambda provider: provider.name)
def test_losses_and_gradients(provider: Provider, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    monkeypatch.setattr(peers, "LOGITS", n * max(FRAMES) * (max(LABELS) + 1) * V * 4)  # for those sized by it
    assert peers.utterances(given) == n
    step = provider.prepare(given)
    losses, again = step(), step()
    assert torch.equal(losses, again)  # and gradients do not add up over steps
    encoder, predictor, weight, bias = (leaf.detach().double().numpy() for leaf in given.leaves)
    truth = [np.zeros_like(array) for array in (encoder, predictor, weight, bias)]
    for b, (T, U) in enumerate(zip(FRAMES, LABELS, strict=True)):
        exact = reference.joint_rnnt_loss(
            encoder[b, :T], predictor[b, : U + 1], weight, bias, given.targets[b, :U].numpy(), V - 1
        )
        np.testing.assert_allclose(losses[b].item(), exact.loss, rtol=1e-5)
        truth[0][b, :T], truth[1][b, : U + 1] = exact.encoder, exact.predictor
        truth[2] += exact.weight
        truth[3] += exact.bias
    for leaf, expected in zip(given.leaves, truth, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad.numpy(), expected / len(FRAMES), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("blank", [0, 2, V - 1])
def test_classes_may_be_put_in_order(blank: int) -> None:
    given = batch()
    labels = torch.tensor([k for k in range(V) if k != blank])
    given = dataclasses.replace(given, targets=labels[given.targets], blank=blank)
    losses_of = dense.from_logits(dense.diagonal_loss)
    losses = dense.over_sub_batches(given, losses_of, 4)()
    gradients = [leaf.grad for leaf in given.leaves]
    again = dense.over_sub_batches(given, lambda part: losses_of(peers.blank_last(part)), 4)()
    torch.testing.assert_close(again, losses)
    for leaf, gradient in zip(given.leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_dropout_changes_losses() -> None:
    given = batch(dropout=0.5)
    step = PLAIN[0].prepare(given)
    assert not torch.equal(step(), step())


def test_float16_is_close_to_float32() -> None:
    whole = batch()
    half = Batch(
        "half", *(leaf.detach().half().requires_grad_() for leaf in whole.leaves[:2]), *list(vars(whole).values())[3:]
    )
    torch.testing.assert_close(PLAIN[0].prepare(half)(), PLAIN[0].prepare(whole)(), rtol=2e-2, atol=2e-2)


def test_what_is_missing_is_said() -> None:
    reasons = {provider.name.split(",")[0]: provider.missing() for provider in peers.PEERS}
    assert reasons["plain PyTorch"] == ""
    assert reasons["NeMo Numba"] == "nemo.collections.asr.parts.numba.rnnt_loss is not installed"
    assert reasons["Apex"] == "apex.contrib.transducer is not installed"
    assert reasons["original Flash RNN-T"] == "nemo.collections.asr.losses.flash_rnnt is not installed"
    assert peers.without("no_such_module")() == "no_such_module is not installed"


def test_more_logits_than_indices_reach_are_refused() -> None:
    sizes = {"encoder": (8, 885, H), "predictor": (8, 453, H), "weight": (1024, H)}
    part = SimpleNamespace(**{name: torch.empty(1).expand(size) for name, size in sizes.items()})
    loss = peers.indexed(lambda part: part.encoder)
    with pytest.raises(ValueError, match="3284213760 logits"):
        loss(part)
    part.encoder = part.encoder[:2]
    assert loss(part) is part.encoder
