"""Named batches: lengths of real shape, states and output layer drawn at random, or of a trained model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.providers import Batch

WIDTH, VOCABULARY, DROPOUT = 640, 1024, 0.1
NAMES = ("short", "medium", "long")


@dataclass(frozen=True, eq=False)
class Workload:
    """Lengths of a batch; H 640, V 1024, blank last, ReLU, dropout 0.1."""

    name: str
    frames_b: np.ndarray
    labels_b: np.ndarray

    @property
    def nodes(self) -> int:
        """N."""
        return int((self.frames_b * (self.labels_b + 1)).sum())

    def arrays(self, library: Any, dtype: str, seed: int = 0) -> dict[str, Any]:
        """Arguments of the joint form on CuPy or NumPy: normal states, a default-initialised output layer."""
        random = library.random.default_rng(seed)
        batch, bound = len(self.frames_b), WIDTH**-0.5
        shapes = {
            "encoder": (batch, int(self.frames_b.max()), WIDTH),
            "predictor": (batch, int(self.labels_b.max()) + 1, WIDTH),
        }
        states = {name: random.standard_normal(shape, dtype=np.float32).astype(dtype) for name, shape in shapes.items()}
        weight = (random.random((VOCABULARY, WIDTH), dtype=np.float32) * 2 - 1) * bound
        bias = (random.random(VOCABULARY, dtype=np.float32) * 2 - 1) * bound
        targets = np.random.default_rng(seed).integers(0, VOCABULARY - 1, (batch, int(self.labels_b.max())))
        return {
            **states,
            "weight": weight,
            "bias": bias,
            "targets": targets,
            "encoder_lengths": self.frames_b,
            "target_lengths": self.labels_b,
        }


@cache
def load(name: str) -> Workload:
    """The batch of that name."""
    stored = json.loads(Path(__file__).with_name("workloads.json").read_text(encoding="utf-8"))
    lengths = stored["workloads"][name]
    return Workload(name, np.array(lengths["T"]), np.array(lengths["U"]))


def batch(name: str) -> Batch:
    """The batch of that name: float16 states, float32 parameters."""
    arrays = load(name).arrays(np, "float16")
    return _batch(name, arrays, VOCABULARY - 1)


def trained_batch(path: Path) -> Batch:
    """States of a trained model: the file's 24 utterances in order, repeated to 128; the blank is 0."""
    stored, utterances = np.load(path), [f"{i % 24:02d}" for i in range(128)]
    frames = np.array([len(stored[f"enc{i}"]) for i in utterances])
    labels = np.array([len(stored[f"tok{i}"]) for i in utterances])
    arrays = {
        "encoder": np.zeros((128, frames.max(), WIDTH), np.float16),
        "predictor": np.zeros((128, labels.max() + 1, WIDTH), np.float16),
        "weight": stored["weight"].astype(np.float32),
        "bias": stored["bias"],
        "targets": np.zeros((128, labels.max()), np.int64),
        "encoder_lengths": frames,
        "target_lengths": labels,
    }
    for b, i in enumerate(utterances):
        arrays["encoder"][b, : frames[b]] = stored[f"enc{i}"]
        arrays["predictor"][b, : labels[b] + 1] = stored[f"pred{i}"]
        arrays["targets"][b, : labels[b]] = stored[f"tok{i}"]
    return _batch("trained", arrays, 0)


def _batch(name: str, arrays: dict[str, Any], blank: int) -> Batch:
    tensors = [torch.from_numpy(np.asarray(value)) for value in arrays.values()]
    return Batch(name, *tensors, blank, DROPOUT)
