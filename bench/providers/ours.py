"""This library: tile sizes, both backward modes, with and without fused kernels, and its loss of given logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.providers import Batch, Provider, Step
from bench.providers.dense import in_sub_batches
from flash_rnnt_cupy.adapters.pytorch import joint_rnnt_loss, rnnt_loss
from flash_rnnt_cupy.backends import GENERIC, unavailable


def _joint(**options: Any) -> Callable[[Batch], Step]:
    def prepare(batch: Batch) -> Step:
        integers = batch.targets, batch.frames, batch.labels

        def step() -> Tensor:
            loss = joint_rnnt_loss(
                *batch.leaves, *integers, blank=batch.blank, dropout=batch.dropout, seed=1, **options
            )
            loss.backward()
            return loss.detach()

        return step

    return prepare


def from_logits(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """Losses [b] of given logits, whose gradient takes their place."""
    return rnnt_loss(logits, targets, frames, labels, blank, reduction="none", overwrite_logits=True)


def _never() -> str:
    return ""


def _no_cuda() -> str:
    return "" if torch.cuda.is_available() else unavailable("cuda") or "no CUDA device"


DENSE = 0.0  # min_occupancy: backward visits all nodes
OURS = (
    Provider("ours, auto tiles, active", _never, _joint()),
    Provider("ours, auto tiles, dense", _never, _joint(min_occupancy=DENSE)),
    Provider("ours, 16896 rows, active", _never, _joint(tile_rows=16_896)),  # 128 for each multiprocessor of an H200
    Provider("ours, 16896 rows, dense", _never, _joint(tile_rows=16_896, min_occupancy=DENSE)),
    Provider("ours, 135168 rows, active", _never, _joint(tile_rows=135_168)),
    Provider("ours, 135168 rows, dense", _never, _joint(tile_rows=135_168, min_occupancy=DENSE)),
    Provider("ours, untiled", _never, _joint(tile_rows=None)),
    Provider("ours, generic kernels, auto tiles, active", _no_cuda, _joint(backend=GENERIC)),
    Provider("ours, generic kernels, auto tiles, dense", _no_cuda, _joint(backend=GENERIC, min_occupancy=DENSE)),
    Provider("ours, loss of given logits, sub-batches of 8", _never, in_sub_batches(from_logits, 8)),
)
