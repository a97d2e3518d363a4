"""A whole training step of a 100M-parameter transducer: `python -m bench model`.

Encoder of Conformer shape, LSTM predictor, joint network and loss, backward and AdamW, in plain PyTorch with bfloat16
autocast, on random data. All but joint network and loss is the same in every row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import measure
from bench.providers import peers, torchaudio
from bench.providers.dense import Part, joint
from bench.providers.ours import from_logits
from bench.records import Record
from flash_rnnt_cupy.adapters.pytorch import joint_rnnt_loss

DROPOUT = 0.1


@dataclass(frozen=True)
class Sizes:
    """Of model and batch; frames are of 10 ms, of which the encoder makes a quarter."""

    batch: int = 64
    frames: int = 1500
    labels: int = 60
    mel: int = 80
    width: int = 512
    layers: int = 16
    heads: int = 8
    predictor: int = 640
    joint: int = 640
    vocabulary: int = 1024


class Block(nn.Module):
    """Half a feed-forward step, attention, depthwise convolution, and half a feed-forward step."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(DROPOUT), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.heads = heads
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gated, self.pointwise = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.depthwise = nn.Conv1d(width, width, 31, padding=15, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to the same."""
        x = x + 0.5 * self.feeds[0](self.norms[0](x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).mT for part in self.queries(self.norms[1](x)).chunk(3, -1))
        q, k, v = (part.movedim(-1, 1) for part in (q, k, v))
        x = x + self.mixed(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        local = self.depthwise(functional.glu(self.gated(self.norms[2](x))).mT).mT
        x = x + self.pointwise(functional.silu(local))
        x = x + 0.5 * self.feeds[1](self.norms[3](x))
        return self.norms[4](x)


class Transducer(nn.Module):
    """Up to the states of the joint network, and its output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.subsampling = nn.Sequential(
            nn.Conv1d(sizes.mel, width, 3, 2, 1), nn.SiLU(), nn.Conv1d(width, width, 3, 2, 1), nn.SiLU()
        )
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.predictor)
        self.lstm = nn.LSTM(sizes.predictor, sizes.predictor, batch_first=True)
        self.encoder_projection = nn.Linear(width, sizes.joint)
        self.predictor_projection = nn.Linear(sizes.predictor, sizes.joint)
        self.output = nn.Linear(sizes.joint, sizes.vocabulary)

    def forward(self, mel: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder states [B, T, H] of mel [B, frames, mel], predictor states [B, U1, H]."""
        x = self.subsampling(mel.mT).mT
        for block in self.blocks:
            x = block(x)
        shifted = functional.pad(targets, (1, 0), value=self.output.out_features - 1)  # blank starts
        return self.encoder_projection(x), self.predictor_projection(self.lstm(self.embedding(shifted))[0])


# encoder and predictor states, output layer, targets, frames, labels -> mean loss
JointLoss = Callable[[Tensor, Tensor, nn.Linear, Tensor, Tensor, Tensor], Tensor]


def _ours(**options: Any) -> JointLoss:
    def loss(encoder: Tensor, predictor: Tensor, output: nn.Linear, *integers: Tensor) -> Tensor:
        return joint_rnnt_loss(encoder, predictor, output.weight, output.bias, *integers, dropout=DROPOUT, **options)

    return loss


def _dense(loss_of_logits: Callable[..., Tensor], dtype: torch.dtype | None) -> JointLoss:
    def loss(encoder: Tensor, predictor: Tensor, output: nn.Linear, *integers: Tensor) -> Tensor:
        logits = joint(encoder, predictor, output.weight, output.bias, DROPOUT)
        return loss_of_logits(logits.to(dtype), *integers, output.out_features - 1).mean()

    return loss


def _flash_rnnt(encoder: Tensor, predictor: Tensor, output: nn.Linear, *integers: Tensor) -> Tensor:
    parameters = (parameter.to(encoder.dtype) for parameter in (output.weight, output.bias))
    blank = output.out_features - 1
    part = Part(slice(None), encoder, predictor, *parameters, *integers, n_nodes=0, blank=blank, dropout=DROPOUT)
    return peers.flash_rnnt(peers.DEFAULT_ROWS)(part).mean()


LOSSES: dict[str, tuple[Callable[[], str], JointLoss]] = {
    "ours, auto tiles": (str, _ours()),
    "ours, auto tiles, min_occupancy 0": (str, _ours(min_occupancy=0.0)),
    "ours, untiled": (str, _ours(tile_rows=None)),
    "dense logits, our loss of them": (str, _dense(from_logits, None)),
    "dense logits, torchaudio": (torchaudio.missing, _dense(torchaudio.loss, torch.float32)),
    "dense logits, NeMo Numba": (peers.NEMO, _dense(peers.nemo, torch.float32)),
    "original Flash RNN-T, 200000 rows": (peers.FLASH_RNNT, _flash_rnnt),
}


def measured(sizes: Sizes, loss: JointLoss, seconds: float) -> dict[str, Any]:
    """Times and peak memory of a step."""
    torch.manual_seed(0)
    device = measure.device()
    model = Transducer(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mel = torch.randn(sizes.batch, sizes.frames, sizes.mel, device=device)
    labels = torch.randint(sizes.labels * 2 // 3, sizes.labels + 1, (sizes.batch,))
    targets = torch.randint(sizes.vocabulary - 1, (sizes.batch, int(labels.max())))
    frames = torch.linspace(0.7 * sizes.frames, sizes.frames, sizes.batch).long() // 4
    on_device = targets.to(device)
    integers = [integer.to(device) for integer in (targets, frames, labels)]

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            encoder, predictor = model(mel, on_device)
            value = loss(encoder, predictor, model.output, *integers)
        value.backward()
        optimizer.step()
        return value.detach()

    first = float(step())
    row = measure.timed(step, seconds)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "nodes": int((frames * (labels + 1)).sum()),
        "loss": first,
        "step_ms": row["sustained_ms"][1],
        **row,
    }


def run(record: Record, sizes: Sizes, seconds: float) -> None:
    """Fills the record's section "model"."""
    for name, (missing, loss) in LOSSES.items():
        row: dict[str, Any] = {"loss_by": name, "batch": sizes.batch}
        if record.done("model", **row):
            continue
        measure.release()
        try:
            reason = missing()
            row |= {"failed": reason} if reason else measured(sizes, loss, seconds)
        except Exception as error:
            row["failed"] = measure.reason(error)
        record.add("model", row, "loss_by", "batch")
        peak = "" if row.get("peak_gib") is None else f" @ {row['peak_gib']:.2f} GiB"
        print(f"{name:<32} {row.get('failed') or format(row['step_ms'], '.1f') + ' ms a step' + peak}", flush=True)


def main(arguments: list[str]) -> None:
    """Adds to the record of `run`."""
    parser = argparse.ArgumentParser(prog="bench model", description=__doc__)
    parser.add_argument("--batch", type=int, default=Sizes.batch)
    parser.add_argument("--seconds", type=float, default=5.0, help="at most, of a row's sustained part")
    options = parser.parse_args(arguments)
    run(Record("run"), Sizes(batch=options.batch), options.seconds)
