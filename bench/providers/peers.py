"""Other transducer losses, each over sub-batches of utterances, as its users would call it.

Most take logits [b, T, U1, V], which plain PyTorch computes in the states' dtype. A sub-batch has as many utterances
as its name says, or as many as their logits fit in LOGITS bytes. All are imported: installed, or
found along PYTHONPATH.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.providers import Batch, Provider, Step, torchaudio
from bench.providers.dense import (
    Loss,
    Losses,
    Part,
    diagonal_loss,
    from_logits,
    joint,
    node_scores,
    over_sub_batches,
    sum_diagonals,
)

LOGITS = 1.5 * 2**30  # bytes of a sub-batch's logits, at most
SIZES = None, 8, 32  # utterances of a sub-batch; None: by LOGITS
DEFAULT_ROWS = 200_000  # the original Flash RNN-T's
TILE_ROWS = 25_000, DEFAULT_ROWS, 800_000


def utterances(batch: Batch) -> int:
    """Utterances of a sub-batch whose logits fit in LOGITS bytes."""
    nodes = int(batch.frames.max()) * (int(batch.labels.max()) + 1)
    return max(1, int(LOGITS / (nodes * batch.weight.shape[0] * batch.encoder.element_size())))


def indexed(losses_of: Losses) -> Losses:
    """Refuses more logits than the 32-bit indices of most kernels reach: they would read elsewhere."""

    def checked(part: Part) -> Tensor:
        logits = part.encoder.shape[0] * part.encoder.shape[1] * part.predictor.shape[1] * part.weight.shape[0]
        if logits >= 2**31:
            raise ValueError(f"{logits} logits in a sub-batch, 2^31 or more")
        return losses_of(part)

    return checked


@cache
def compiled_scores(blank: int, dropout: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Joint network and node scores as one graph, for all shapes."""

    def scores(
        encoder: Tensor, predictor: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        return node_scores(joint(encoder, predictor, weight, bias, dropout), targets, blank)

    return torch.compile(scores, dynamic=True)


def compiled(part: Part) -> Tensor:
    """Plain PyTorch, compiled but for the recursion, whose graph would grow with T + U."""
    scores_of = compiled_scores(part.blank, part.dropout)
    scores = scores_of(part.encoder, part.predictor, part.weight, part.bias, part.targets)
    return sum_diagonals(*scores, part.frames, part.labels)


def nemo(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """NeMo's RNNTLossNumba."""
    module: Any = importlib.import_module("nemo.collections.asr.parts.numba.rnnt_loss")
    losses: Tensor = module.RNNTLossNumba(blank, "none")(logits, targets, frames, labels)
    return losses


def nemo_float32(logits: Tensor, *rest: Any) -> Tensor:
    """The same, as NeMo calls it where Numba lacks float16."""
    return nemo(logits.float(), *rest)


def warp_rnnt(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """warp_rnnt.rnnt_loss, which takes log-probabilities."""
    module: Any = importlib.import_module("warp_rnnt")
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    losses: Tensor = module.rnnt_loss(log_probs, targets.int(), frames.int(), labels.int(), blank=blank, gather=True)
    return losses


def optimized_transducer(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """optimized_transducer.transducer_loss of one utterance: it gives sums alone."""
    module: Any = importlib.import_module("optimized_transducer")
    loss: Tensor = module.transducer_loss(
        logits=logits.float().flatten(0, 2),
        targets=targets.int(),
        logit_lengths=frames.int(),
        target_lengths=labels.int(),
        blank=blank,
        reduction="sum",
        from_log_softmax=False,
    )
    return loss.view(1)


def k2(name: str) -> Loss:
    """rnnt_loss of k2 or fast_rnnt."""

    def loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
        module: Any = importlib.import_module(name)
        zero = torch.zeros_like(labels)
        boundary = torch.stack([zero, zero, labels, frames], 1)
        losses: Tensor = module.rnnt_loss(logits.float(), targets, blank, boundary, reduction="none")
        return losses

    return loss


def apex(part: Part) -> Tensor:
    """Apex's joint and loss on packed nodes; its losses have the states' dtype."""
    module: Any = importlib.import_module("apex.contrib.transducer.transducer")
    packed = module.TransducerJoint(True, relu=True, dropout=part.dropout > 0, dropout_prob=part.dropout)
    targets, frames, labels = part.targets.int(), part.frames.int(), part.labels.int()
    offsets = torch.cumsum(part.frames * (part.labels + 1), 0)
    hidden = packed(part.encoder, part.predictor, frames, labels + 1, offsets, part.n_nodes)
    logits = linear(hidden, part.weight, part.bias)
    del hidden
    loss = module.TransducerLoss(fuse_softmax_backward=True, packed_input=True)
    losses: Tensor = loss(logits, targets, frames, labels, part.blank, offsets, part.encoder.shape[1])
    return losses


def blank_last(part: Part) -> Part:
    """The same with the blank as the last class."""
    if part.blank == len(part.weight) - 1:
        return part
    order = torch.tensor([*range(part.blank), *range(part.blank + 1, len(part.weight)), part.blank])
    weight, bias = (parameter[order.to(parameter.device)] for parameter in (part.weight, part.bias))
    targets = part.targets - (part.targets > part.blank).to(part.targets.dtype)
    return dataclasses.replace(part, weight=weight, bias=bias, targets=targets, blank=len(part.weight) - 1)


def flash_rnnt(tile_rows: int) -> Losses:
    """The original Flash RNN-T, handed a joint network whose projections are done."""

    def losses_of(given: Part) -> Tensor:
        part = blank_last(given)
        module: Any = importlib.import_module("nemo.collections.asr.losses.flash_rnnt")
        classes = part.weight.shape[0]
        network = SimpleNamespace(
            joint_net=[SimpleNamespace(weight=part.weight, bias=part.bias, out_features=classes)],
            num_classes_with_blank=classes,
            num_extra_outputs=0,
            activation="relu",
            dropout=part.dropout,
            training=True,
            is_adapter_available=lambda: False,
            masking_prob=0.0,
            log_softmax=None,
            temperature=1.0,
            project_encoder=lambda states: states,
            project_prednet=lambda states: states,
        )
        loss = module.FlashRNNTLoss(part.blank, max_joint_rows=tile_rows)
        losses: Tensor = loss(network, part.encoder, part.predictor, part.targets, part.frames, part.labels)
        return losses

    return losses_of


def found(module: str) -> bool:
    """Whether the module, which may have parents, can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent
        return False


def without(*modules: str) -> Callable[[], str]:
    """Why a loss that needs these modules and a GPU cannot run here."""

    def missing() -> str:
        absent = [name for name in modules if not found(name)]
        if absent:
            return f"{absent[0]} is not installed"
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    return missing


def sub_batched(
    name: str, missing: Callable[[], str], losses_of: Losses, size: int | None = None, release: bool = True
) -> Provider:
    """A provider over sub-batches."""

    def prepare(batch: Batch) -> Step:
        return over_sub_batches(batch, losses_of, size or utterances(batch), release)

    title = f"{name}, sub-batches of {size or f'{LOGITS / 2**30:g} GiB'}, {'release' if release else 'retain'}"
    return Provider(title, missing, prepare)


def whole(name: str, missing: Callable[[], str], losses_of: Losses) -> Provider:
    """A provider that takes the batch at once."""
    return Provider(name, missing, lambda batch: over_sub_batches(batch, losses_of, len(batch.frames)))


FLASH_RNNT = without("nemo.collections.asr.losses.flash_rnnt", "triton")
NEMO = without("nemo.collections.asr.parts.numba.rnnt_loss", "numba")
APEX = without("apex.contrib.transducer", "transducer_joint_cuda", "transducer_loss_cuda")


def _of_size(size: int | None) -> Iterator[Provider]:
    for release in (True, False):
        yield sub_batched("torchaudio", torchaudio.missing, indexed(from_logits(torchaudio.loss)), size, release)
        yield sub_batched("plain PyTorch", str, from_logits(diagonal_loss), size, release)
        yield sub_batched("Apex", APEX, indexed(apex), size, release)
    yield sub_batched("compiled PyTorch", without(), compiled, size)
    yield sub_batched("NeMo Numba", NEMO, indexed(from_logits(nemo)), size)
    yield sub_batched("NeMo Numba float32", NEMO, indexed(from_logits(nemo_float32)), size)
    yield sub_batched("warp_rnnt", without("warp_rnnt"), indexed(from_logits(warp_rnnt)), size)
    for name in ("k2", "fast_rnnt"):
        yield sub_batched(name, without(name), indexed(from_logits(k2(name))), size)


PEERS = (
    *(whole(f"original Flash RNN-T, {rows} rows", FLASH_RNNT, flash_rnnt(rows)) for rows in TILE_ROWS),
    whole("original Flash RNN-T, one tile", FLASH_RNNT, flash_rnnt(sys.maxsize)),
    *(provider for size in SIZES for provider in _of_size(size)),
    sub_batched(
        "optimized_transducer",
        without("optimized_transducer"),
        indexed(from_logits(optimized_transducer)),
        1,
    ),
)
