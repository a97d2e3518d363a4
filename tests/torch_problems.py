"""Small ragged batches of tensors, and the transducer loss in plain torch operations as their truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_rnnt_cupy import backends
from tests.oracles.checks import assert_close

no_cuda = backends.unavailable("cuda") or ("" if torch.cuda.is_available() else "torch sees no GPU")
on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(bool(no_cuda), reason=no_cuda))]
)

FRAMES, LABELS = (4, 2, 3), (2, 3, 0)  # T > U, T < U and no labels; padding everywhere
B, T, U, H, V = 3, 5, 4, 3, 5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "identity": lambda x: x,
}


class Joint(NamedTuple):
    """Arguments of a joint-form call; the blank is the last row."""

    encoder: Tensor
    predictor: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Any
    frames: Any
    labels: Any

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self[:4] if tensor is not None)

    def leaves(self, *names: str) -> Joint:
        """Copies of the tensors; those named, or all, require a gradient."""
        wanted = names or self._fields[:4]
        fresh = {
            name: tensor.detach().clone().requires_grad_(name in wanted)
            for name, tensor in zip(self._fields[:4], self[:4], strict=True)
            if tensor is not None
        }
        return self._replace(**fresh)


class Logits(NamedTuple):
    """Arguments of a logits-form call; the blank is the last column."""

    logits: Tensor
    targets: Any
    frames: Any
    labels: Any

    def leaves(self) -> Logits:
        return self._replace(logits=self.logits.detach().clone().requires_grad_())


def joint(dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Joint:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)

    tensors = normal(B, T, H), normal(B, U + 1, H), normal(V, H), normal(V)
    return Joint(*tensors, *(integers.to(device) for integers in transcripts(draw)))


def logits(dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Logits:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, T, U + 1, V, generator=draw, dtype=torch.float64).to(device, dtype)
    return Logits(scores, *(integers.to(device) for integers in transcripts(draw)))


def transcripts(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(V - 1, (B, U), generator=draw), torch.tensor(FRAMES), torch.tensor(LABELS)


def plain_logits(problem: Joint, activation: str = "relu") -> Logits:
    """The dense scores [B, T, U1, V]."""
    hidden = ACTIVATIONS[activation](problem.encoder[:, :, None] + problem.predictor[:, None])
    scores = hidden @ problem.weight.T
    return Logits(scores if problem.bias is None else scores + problem.bias, *problem[4:])


def plain_losses(problem: Logits, blank: int = -1, fused_log_softmax: bool = True) -> Tensor:
    """NLL of each utterance, node by node in torch operations."""
    log_probs = problem.logits.log_softmax(-1) if fused_log_softmax else problem.logits
    losses = []
    for rows, y, frames, labels in zip(log_probs, problem.targets, problem.frames, problem.labels, strict=True):
        last_frame, last_state = int(frames) - 1, int(labels)
        reached: dict[tuple[int, int], Tensor] = {(0, 0): rows.new_zeros(())}
        for t in range(last_frame + 1):
            for u in range(last_state + 1):
                ways = []
                if t:
                    ways.append(reached[t - 1, u] + rows[t - 1, u, blank])
                if u:
                    ways.append(reached[t, u - 1] + rows[t, u - 1, int(y[u - 1])])
                if ways:
                    reached[t, u] = torch.stack(ways).logsumexp(0)
        losses.append(-(reached[last_frame, last_state] + rows[last_frame, last_state, blank]))
    return torch.stack(losses)


def upstream(losses: Tensor) -> Tensor:
    """A gradient for each loss, one of them negative and one zero."""
    return torch.tensor([-2.0, 0.0, 0.5][: len(losses)]).to(losses)


def gradients(losses: Tensor, leaves: Sequence[Tensor], grad_losses: Tensor | None = None) -> list[Tensor]:
    return list(torch.autograd.grad(losses, leaves, grad_losses))


def near(actual: Tensor, expected: Tensor, tolerance: float, names: str = "tensor") -> None:
    """Within ``tolerance``, relative to the largest element."""
    truth = values(expected)
    largest = float(np.abs(truth[np.isfinite(truth)]).max(initial=0))
    assert_close(values(actual), truth, rtol=0, atol=tolerance * max(largest, 1), names=names)


def all_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for i, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        near(ours, truth, tolerance, f"tensor {i}")


def values(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return tensor.detach().to("cpu", torch.float64).numpy()
