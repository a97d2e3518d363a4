"""A streaming transducer: convolutions that never look ahead, a predictor that sees the last two labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flash_rnnt_cupy.adapters.pytorch import JointNetwork
from flash_rnnt_cupy.demo.audio import BANDS

SUBSAMPLING = 8  # feature frames in a frame of the encoder: 80 ms


class CausalBlock(nn.Module):
    """Convolution over time, batch norm, ReLU, added to the input where shapes agree: [B, C, time] -> [B, C', time'].

    `past` is the end of what came before `x`, silence at first; it comes back brought up to date.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(channels, width, kernel, stride, dilation=dilation)
        self.norm = nn.BatchNorm1d(width)
        self.context = dilation * (kernel - 1) + 1 - stride

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """(output, the past of the next call)."""
        if past is None:
            past = x.new_zeros(*x.shape[:2], self.context)
        joined = torch.cat([past, x], dim=2)
        y = torch.relu(self.norm(self.convolution(joined)))
        return x + y if x.shape == y.shape else y, joined[:, :, x.shape[2] :]


class Encoder(nn.Module):
    """Features [B, frames, BANDS] -> [B, T, width] with T = frames // SUBSAMPLING."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                CausalBlock(BANDS, width, kernel=4, stride=2),
                CausalBlock(width, width, kernel=4, stride=2),
                *[CausalBlock(width, width, kernel=3, dilation=dilation) for dilation in (1, 2, 4)],
                CausalBlock(width, width, kernel=4, stride=2),
                *[CausalBlock(width, width, kernel=3, dilation=dilation) for dilation in (1, 2, 4, 8)],
            ]
        )

    def forward(self, features: Tensor, past: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """`past` is what the call before returned, when audio comes in pieces."""
        before: Sequence[Tensor | None] = past or [None] * len(self.blocks)
        after = []
        x = features[:, : features.shape[1] // SUBSAMPLING * SUBSAMPLING].transpose(1, 2)
        for block, earlier in zip(self.blocks, before, strict=True):
            x, later = block(x, earlier)
            after.append(later)
        return x.transpose(1, 2), after


class Predictor(nn.Module):
    """Labels [B, U] -> [B, U1, width]; state u is made from labels u - 1 and u - 2, blank where there is none."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.blank = vocab_size - 1
        self.last = nn.Embedding(vocab_size, width)
        self.last_but_one = nn.Embedding(vocab_size, width)

    def forward(self, labels: Tensor) -> Tensor:
        """[B, U] -> [B, U1, width]."""
        context = nn.functional.pad(labels, (2, 0), value=self.blank)
        return torch.relu(self.last(context[:, 1:]) + self.last_but_one(context[:, :-1]))


class Transducer(nn.Module):
    """Encoder, predictor and the library's joint network."""

    WORKSPACE_BYTES = 4 << 20  # of the joint network's hidden states and scores, at a time

    def __init__(self, vocab_size: int, encoder_width: int, predictor_width: int = 64, joint_width: int = 128) -> None:
        super().__init__()
        self.encoder = Encoder(encoder_width)
        self.predictor = Predictor(vocab_size, predictor_width)
        self.joint = JointNetwork(encoder_width, predictor_width, joint_width, vocab_size)

    def loss(
        self, features: Tensor, frames: Tensor, labels: Tensor, lengths: Tensor, last: int | None = None
    ) -> Tensor:
        """Features [B, frames, BANDS], frames [B], labels [B, U], lengths [B] -> nats an utterance, mean over B.

        With ``last`` the labels must be said in the last so many frames of the encoder.
        """
        encoded, _ = self.encoder(features)
        T = frames // SUBSAMPLING
        if last is not None:
            ends = T[:, None] - last + torch.arange(last, device=T.device)
            encoded, T = encoded[torch.arange(len(T), device=T.device)[:, None], ends], torch.full_like(T, last)
        return self.joint.loss(
            encoded, self.predictor(labels), labels, T, lengths, workspace_bytes=self.WORKSPACE_BYTES
        )
