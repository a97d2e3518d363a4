"""torchaudio's loss of given logits, where it is installed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


def missing() -> str:
    """Why it cannot be used; empty: it can."""
    return "" if importlib.util.find_spec("torchaudio") else "torchaudio is not installed"


def loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """Losses [b]; it wants int32."""
    import torchaudio  # noqa: PLC0415  it may be missing

    integers = (integer.to(torch.int32).contiguous() for integer in (targets, frames, labels))
    return torchaudio.functional.rnnt_loss(logits, *integers, blank=blank, reduction="none")
