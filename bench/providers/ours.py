"""This library's modes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bench.providers import Batch, Provider, Step, clear_gradients, cuda_missing
from flash_rnnt_cupy.adapters.pytorch import joint_rnnt_loss


def _provider(name: str, needs_gpu: bool = True, **options: Any) -> Provider:
    def prepare(batch: Batch) -> Step:
        def step() -> Tensor:
            clear_gradients(batch)
            losses = joint_rnnt_loss(
                *batch.leaves,
                batch.targets,
                batch.frames,
                batch.labels,
                blank=batch.blank,
                dropout=batch.dropout,
                seed=1,
                reduction="none",
                **options,
            )
            losses.mean().backward()
            return losses.detach()

        return step

    return Provider(name, cuda_missing if needs_gpu else lambda: "", prepare)


OURS = (
    _provider("ours, dense", needs_gpu=False, min_occupancy=0.0),
    _provider("ours", needs_gpu=False),
    *(_provider(f"ours, dense, {rows} rows", min_occupancy=0.0, tile_rows=rows) for rows in (16_896, 135_168)),
    *(_provider(f"ours, {rows} rows", tile_rows=rows) for rows in (16_896, 135_168)),
    _provider("ours, generic kernels, dense", min_occupancy=0.0, backend="cuda-generic"),
    _provider("ours, generic kernels", backend="cuda-generic"),
    _provider("ours, generic kernels, untiled", backend="cuda-generic", tile_rows=None),
)
