"""What a source of utterances offers to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Utterance(NamedTuple):
    """Audio and what is said in it."""

    audio: NDArray[np.float32]  # [samples], full scale is 1
    text: str


@dataclass(frozen=True)
class Source:
    """Utterances to learn from and others to be judged by, and what suits their amount and kind."""

    title: str
    alphabet: str
    training: Callable[[int, int], Utterance]  # (seed, index): a function of these alone
    held_out: Callable[[int], list[Utterance]]  # (seed)
    steps: int
    batch_size: int
    width: int  # of the encoder
    lesson: Callable[[int, int], Utterance] | None = None  # like training, of one character
    lesson_steps: int = 0  # that begin with lessons
    lesson_size: int = 0  # lessons a step
