"""One call, as sizes and options: the record that every later stage reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.topology import Topology

Lengths = npt.NDArray[np.int64]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1, "int32": 4, "int64": 8}
FLOATS = ("float16", "bfloat16", "float32", "float64")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "silu", "identity")
DEFAULT_MIN_OCCUPANCY = 1e-7
DRAWS = 1 << 16  # values of a random draw of the dropout mask


class Form(Enum):
    """What the caller gives."""

    JOINT = "joint"  # encoder and predictor states, output layer
    LOGITS = "logits"  # scores before the softmax
    LOG_PROBS = "log_probs"  # scores after it


@dataclass(frozen=True)
class Options:
    """Everything that changes the numbers, not the sizes."""

    activation: str = "relu"
    dropout: float = 0.0
    seed: int = 0  # of the dropout mask, 0 <= seed < 2**64
    fastemit_lambda: float = 0.0
    clamp: float | None = None
    zero_infinity: bool = False
    min_occupancy: float = 0.0  # backward leaves out nodes of a smaller posterior; 0 keeps all

    @property
    def drop_below(self) -> int:
        """Draws below it drop a hidden unit: ``dropout`` in steps of 1 / 65536, 1 at most less one step."""
        return min(round(self.dropout * DRAWS), DRAWS - 1)

    @property
    def keep_scale(self) -> float:
        """1 / probability of keeping a hidden unit."""
        return DRAWS / (DRAWS - self.drop_below)


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked call: lengths, sizes, dtypes and options, no arrays.

    ``dtype`` is that of the states (joint form) or of the scores, ``parameter_dtype`` that of weight and bias.
    ``shapes`` holds the shape of each array that can get a gradient, padded or packed as the caller gave it.
    """

    form: Form
    topology: Topology
    frames_b: Lengths  # T_b
    labels_b: Lengths  # U_b
    vocabulary: int  # V
    blank: int  # 0 <= blank < V
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    options: Options
    joint_width: int = 0  # H; 0 without a joint network
    parameter_dtype: str = ""

    @property
    def batch(self) -> int:
        """B."""
        return len(self.frames_b)

    def dtype_of(self, name: str) -> str:
        """Dtype of the named array, and so of its gradient."""
        return self.parameter_dtype if name in ("weight", "bias") else self.dtype

    @property
    def loss_dtype(self) -> str:
        """Losses come back in float32, or float64 for float64 inputs."""
        return "float64" if self.dtype == "float64" else "float32"

    def __str__(self) -> str:
        """One line."""
        widths = f"H={self.joint_width} V={self.vocabulary}" if self.joint_width else f"V={self.vocabulary}"
        longest = f"T<={self.frames_b.max(initial=0)} U<={self.labels_b.max(initial=0)}"
        return f"{self.topology.name} {self.form.value}: B={self.batch} {longest} {widths} {self.dtype}"


@dataclass(frozen=True, eq=False)
class Inputs:
    """The caller's arrays, as the backend takes them; a padded array has one axis more than a packed one.

    encoder   [B, T, H] or [sum T_b, H]            logits   [B, T, U1, V] or [N, V]
    predictor [B, U1, H] or [sum U1_b, H]          targets  [B, U] or [sum U_b], integers
    weight    [V, H]      bias [V] or None
    """

    targets: Any
    encoder: Any = None
    predictor: Any = None
    weight: Any = None
    bias: Any = None
    logits: Any = None
