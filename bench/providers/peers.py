"""Other transducer losses, each over sub-batches of utterances, as its users would call it.

Most take logits [n, T, U1, V], which plain PyTorch computes in the states' dtype. A sub-batch has as many utterances
as its logits fit in LOGITS bytes, and is cut to its longest T and U. "retain" is one backward after all sub-batches,
"release" a backward after each. NeMo's source is looked for in the folder of peers, nemo/, laid out as its repository;
the others must be installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from bench.providers import Batch, Provider, Step

LOGITS = 1.5 * 2**30  # bytes of a sub-batch's logits, at most
IMPOSSIBLE = -1e30  # log-probability of what cannot happen; finite, so that its gradient is 0 and not NaN


@dataclass(frozen=True, eq=False)
class Part:
    """A sub-batch of n utterances, its states leaves of their own."""

    rows: slice
    encoder: Tensor  # [n, T, H]
    predictor: Tensor  # [n, U1, H]
    weight: Tensor  # [V, H] in the states' dtype
    bias: Tensor  # [V]
    targets: Tensor  # [n, U] int32
    frames: Tensor  # [n] int32
    labels: Tensor  # [n] int32
    n_nodes: int
    blank: int
    dropout: float


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]  # logits, targets, frames, labels, blank: losses [n]
Losses = Callable[[Part], Tensor]  # the same from states


def utterances(batch: Batch) -> int:
    """n: utterances of a sub-batch."""
    nodes = int(batch.frames.max()) * (int(batch.labels.max()) + 1)
    return max(1, int(LOGITS / (nodes * batch.weight.shape[0] * batch.encoder.element_size())))


def parts(batch: Batch) -> Callable[[], Iterator[Part]]:
    """The sub-batches; their integers are moved to the device once."""
    n, device, dtype = utterances(batch), batch.encoder.device, batch.encoder.dtype
    integers = []
    for begin in range(0, len(batch.frames), n):
        rows = slice(begin, begin + n)
        frames, labels = batch.frames[rows], batch.labels[rows]
        targets = batch.targets[rows, : int(labels.max())]
        on_device = [array.to(device, torch.int32).contiguous() for array in (targets, frames, labels)]
        integers.append((rows, int(frames.max()), int((frames * (labels + 1)).sum()), on_device))

    def generate() -> Iterator[Part]:
        for rows, T, n_nodes, (targets, frames, labels) in integers:
            yield Part(
                rows,
                batch.encoder.detach()[rows, :T].contiguous().requires_grad_(),
                batch.predictor.detach()[rows, : targets.shape[1] + 1].contiguous().requires_grad_(),
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


def prepare(batch: Batch, losses_of: Losses, release: bool) -> Step:
    """A step over sub-batches."""
    generate, n_utterances = parts(batch), len(batch.frames)
    states = batch.encoder, batch.predictor

    def backward(done: list[tuple[Part, Tensor]]) -> None:
        losses = [loss for _, loss in done]
        torch.autograd.backward(losses, [torch.full_like(loss, 1 / n_utterances) for loss in losses])
        for part, _ in done:
            for whole, piece in zip(states, (part.encoder, part.predictor), strict=True):
                assert whole.grad is not None
                assert piece.grad is not None
                whole.grad[part.rows, : piece.shape[1]] = piece.grad
                piece.grad = None

    def step() -> Tensor:
        for whole in states:
            whole.grad = torch.zeros_like(whole)
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


def from_logits(loss: Loss) -> Losses:
    """The plain joint network before a loss that takes logits."""

    def losses_of(part: Part) -> Tensor:
        hidden = dropout(torch.relu(part.encoder[:, :, None] + part.predictor[:, None]), part.dropout)
        logits = linear(hidden, part.weight, part.bias)
        del hidden
        return loss(logits, part.targets, part.frames, part.labels, part.blank)

    return losses_of


def plain(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """The recursion of Graves 2012, eq. 16, along anti-diagonals d = t + u, left to autograd."""
    n, T, U1, _ = logits.shape
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    blank_ntu = log_probs[..., blank]
    label_ntu = log_probs[:, :, :-1].gather(3, targets.long()[:, None, :, None].expand(n, T, U1 - 1, 1))[..., 0]
    u = torch.arange(U1, device=logits.device)
    t_du = torch.arange(T + U1 - 1, device=logits.device)[:, None] - u  # [D, U1]
    inside = (t_du >= 0) & (t_du < T)
    at = t_du.clamp(0, T - 1)
    blank_ndu = torch.where(inside, blank_ntu[:, at, u], IMPOSSIBLE)
    label_ndu = torch.where(inside[:, :-1], label_ntu[:, at[:, :-1], u[:-1]], IMPOSSIBLE)
    alpha_nu = torch.where(u == 0, 0.0, IMPOSSIBLE).expand(n, U1)
    alphas = [alpha_nu]
    impossible = alpha_nu.new_full((n, 1), IMPOSSIBLE)
    for d in range(T + U1 - 2):
        after_label = torch.cat([impossible, alpha_nu[:, :-1] + label_ndu[:, d]], 1)
        alpha_nu = torch.logaddexp(alpha_nu + blank_ndu[:, d], after_label)
        alphas.append(alpha_nu)
    b, last = torch.arange(n, device=logits.device), (frames - 1).long()
    return -(torch.stack(alphas)[last + labels, b, labels.long()] + blank_ntu[b, last, labels.long()])


def torchaudio(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """torchaudio.functional.rnnt_loss."""
    functional: Any = importlib.import_module("torchaudio.functional")
    losses: Tensor = functional.rnnt_loss(logits, targets, frames, labels, blank, reduction="none")
    return losses


def nemo(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """NeMo's RNNTLossNumba."""
    module: Any = importlib.import_module("nemo.collections.asr.parts.numba.rnnt_loss")
    losses: Tensor = module.RNNTLossNumba(blank, "none")(logits, targets.long(), frames.long(), labels.long())
    return losses


def nemo_float32(logits: Tensor, *rest: Any) -> Tensor:
    """The same, as NeMo calls it where Numba lacks float16."""
    return nemo(logits.float(), *rest)


def warp_rnnt(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """warp_rnnt.rnnt_loss, which takes log-probabilities."""
    module: Any = importlib.import_module("warp_rnnt")
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    losses: Tensor = module.rnnt_loss(log_probs, targets, frames, labels, blank=blank, gather=True)
    return losses


def k2(name: str) -> Loss:
    """rnnt_loss of k2 or fast_rnnt."""

    def loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
        module: Any = importlib.import_module(name)
        zero = torch.zeros_like(labels)
        boundary = torch.stack([zero, zero, labels, frames], 1).long()
        losses: Tensor = module.rnnt_loss(logits.float(), targets.long(), blank, boundary, reduction="none")
        return losses

    return loss


def apex(part: Part) -> Tensor:
    """Apex's joint and loss on packed nodes; its losses have the states' dtype."""
    module: Any = importlib.import_module("apex.contrib.transducer.transducer")
    joint = module.TransducerJoint(True, relu=True, dropout=part.dropout > 0, dropout_prob=part.dropout)
    lengths = part.labels + 1
    offsets = torch.cumsum(part.frames * lengths, 0)  # int64
    hidden = joint(part.encoder, part.predictor, part.frames, lengths, offsets, part.n_nodes)
    logits = linear(hidden, part.weight, part.bias)
    losses: Tensor = module.TransducerLoss(packed_input=True)(
        logits, part.targets, part.frames, part.labels, part.blank, offsets, part.encoder.shape[1]
    )
    return losses


def without(*modules: str) -> Callable[[], str]:
    """Why a loss that needs these modules and a GPU cannot run here."""

    def missing() -> str:
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        if absent:
            return f"{absent[0]} is not installed"
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    return missing


def in_folder(peers: Path | None, name: str, *modules: str) -> Callable[[], str]:
    """Why a loss whose sources lie in a folder of peers cannot run here."""

    def missing() -> str:
        return without(*modules)() if peers and (peers / name).is_dir() else f"no {name}/ in the folder of peers"

    return missing


def provider(name: str, missing: Callable[[], str], losses_of: Losses, release: bool = True) -> Provider:
    """A provider over sub-batches."""
    title = f"{name}, sub-batches of {LOGITS / 2**30:g} GiB, {'release' if release else 'retain'}"
    return Provider(title, missing, lambda batch: prepare(batch, losses_of, release))


def stored(peers: Path | None, name: str, given: Provider) -> Provider:
    """The same, its sources on the path of modules."""

    def prepared(batch: Batch) -> Step:
        assert peers
        root = (peers / name).resolve()
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        return given.prepare(batch)

    return Provider(given.name, given.missing, prepared)


def PEERS(peers: Path | None) -> tuple[Provider, ...]:  # noqa: N802
    """All of them."""
    found = []
    for release in (True, False):
        found.append(provider("torchaudio", without("torchaudio"), from_logits(torchaudio), release))
    for release in (True, False):
        found.append(provider("plain PyTorch", lambda: "", from_logits(plain), release))
    numba = in_folder(peers, "nemo", "numba")
    for name, loss in (("NeMo Numba", nemo), ("NeMo Numba float32", nemo_float32)):
        found.append(stored(peers, "nemo", provider(name, numba, from_logits(loss))))
    found.append(provider("Apex", without("apex", "transducer_joint_cuda", "transducer_loss_cuda"), apex))
    found.append(provider("warp_rnnt", without("warp_rnnt"), from_logits(warp_rnnt)))
    found.extend(provider(name, without(name), from_logits(k2(name))) for name in ("k2", "fast_rnnt"))
    return tuple(found)
