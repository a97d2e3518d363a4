"""Named batches: lengths of real shape, states and output layer drawn at random."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

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
