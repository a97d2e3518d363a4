"""Named batches: lengths of real shape; states and output layer drawn at random, or of a trained model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from bench.providers import Batch

WIDTH, VOCABULARY, DROPOUT = 640, 1024, 0.1
STATES = "FLASH_RNNT_TRAINED_STATES"  # environment variable: an npz file of encNN, predNN, tokNN, weight, bias
NAMES = ("short", "medium", "long", "trained", "large-vocabulary", "two-hours")


@dataclass(frozen=True, eq=False)
class Workload:
    """Lengths of a batch and what it is multiplied with; the blank is last with random states, first with trained."""

    name: str
    frames_b: np.ndarray
    labels_b: np.ndarray
    width: int = WIDTH
    vocabulary: int = VOCABULARY
    dropout: float = DROPOUT
    states: Path | None = None

    @property
    def nodes(self) -> int:
        """N."""
        return int((self.frames_b * (self.labels_b + 1)).sum())

    def batch(self, device: str, dtype: torch.dtype, seed: int = 0) -> Batch:
        """Leaves on the device: states in ``dtype``, parameters in float32."""
        arrays = self._random(device, seed) if self.states is None else self._trained(self.states)
        *leaves, targets = arrays
        encoder, predictor, weight, bias = (
            leaf.to(device, kind).requires_grad_()
            for leaf, kind in zip(leaves, (dtype, dtype, torch.float32, torch.float32), strict=True)
        )
        return Batch(
            name=self.name,
            encoder=encoder,
            predictor=predictor,
            weight=weight,
            bias=bias,
            targets=targets,
            frames=torch.from_numpy(self.frames_b),
            labels=torch.from_numpy(self.labels_b),
            blank=self.vocabulary - 1 if self.states is None else 0,
            dropout=self.dropout,
        )

    def _random(self, device: str, seed: int) -> tuple[torch.Tensor, ...]:
        """Normal states, and a default-initialised output layer: an untrained model."""
        random = torch.Generator(device).manual_seed(seed)
        batch, T, U = len(self.frames_b), int(self.frames_b.max()), int(self.labels_b.max())
        shapes = (batch, T, self.width), (batch, U + 1, self.width)
        states = [torch.randn(shape, generator=random, device=device) for shape in shapes]
        layer = [
            (torch.rand(shape, generator=random, device=device) * 2 - 1) * self.width**-0.5
            for shape in ((self.vocabulary, self.width), (self.vocabulary,))
        ]
        targets = torch.from_numpy(np.random.default_rng(seed).integers(0, self.vocabulary - 1, (batch, U)))
        return (*states, *layer, targets)

    def _trained(self, path: Path) -> tuple[torch.Tensor, ...]:
        """The file's utterances in order, repeated, padded with zeros."""
        file, batch = np.load(path), len(self.frames_b)
        n = sum(name.startswith("enc") for name in file)

        def padded(prefix: str) -> torch.Tensor:
            arrays = [torch.from_numpy(file[f"{prefix}{i:02d}"]) for i in range(n)]
            return torch.nn.utils.rnn.pad_sequence([arrays[b % n] for b in range(batch)], batch_first=True)

        layer = [torch.from_numpy(file[name]) for name in ("weight", "bias")]
        return padded("enc"), padded("pred"), *layer, padded("tok").long()


@cache
def load(name: str) -> Workload:
    """The batch of that name; LookupError says what it lacks."""
    if name == "trained":
        return _load_trained()
    if name == "tiny":  # to see the machinery run, anywhere
        return Workload(name, np.array([12, 9, 7]), np.array([5, 0, 4]), width=64, vocabulary=32)
    if name == "large-vocabulary":
        random = np.random.default_rng(0)
        return Workload(name, random.integers(200, 401, 16), random.integers(30, 81, 16), vocabulary=16_384)
    if name == "two-hours":  # at 80 ms a frame; 1.8e9 nodes: 21 GiB, where their logits take 3.4 TiB
        return Workload(name, np.array([90_000]), np.array([20_000]), dropout=0.0)
    stored = json.loads(Path(__file__).with_name("workloads.json").read_text(encoding="utf-8"))["workloads"]
    if name not in stored:
        raise LookupError(f"no workload {name}; there are {', '.join(NAMES)}, tiny")
    return Workload(name, np.array(stored[name]["T"]), np.array(stored[name]["U"]))


def _load_trained() -> Workload:
    if STATES not in os.environ:
        raise LookupError(f"{STATES} names no file of trained states")
    path = Path(os.environ[STATES])
    file = np.load(path)
    n = sum(name.startswith("enc") for name in file)
    frames, labels = (
        np.array([len(file[f"{kind}{b % n:02d}"]) for b in range(128)], np.int64) for kind in ("enc", "tok")
    )
    return Workload("trained", frames, labels, states=path)
