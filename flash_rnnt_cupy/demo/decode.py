"""Reading audio while it arrives, and the character error rate."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flash_rnnt_cupy.demo.audio import BANDS, HOP, SAMPLE_RATE, log_mel
from flash_rnnt_cupy.demo.data import Utterance
from flash_rnnt_cupy.demo.model import SUBSAMPLING, Transducer

PIECE = SAMPLE_RATE * 32 // 100  # samples handed over at a time, 0.32 s
MOST_LABELS_A_FRAME = 4


class Listener:
    """One stream of audio, decoded greedily; `model` is in evaluation mode."""

    def __init__(self, model: Transducer, alphabet: str) -> None:
        self.model, self.alphabet, self.blank = model, alphabet, len(alphabet)
        self.device = model.joint.output.weight.device
        self.samples = np.zeros(0, np.float32)  # not yet in a feature frame
        self.features = np.zeros((0, BANDS), np.float32)  # not yet in a frame of the encoder
        self.past: list[Tensor] | None = None
        self.context = [self.blank, self.blank]
        self.predicted = self.predict()

    def predict(self) -> Tensor:
        """The predictor's state after the last two labels."""
        predicted: Tensor = self.model.predictor(torch.tensor([self.context], device=self.device))[0, -1]
        return predicted

    @torch.no_grad()
    def hear(self, audio: NDArray[np.float32]) -> str:
        """The next samples -> the characters that they made sure."""
        self.samples = np.concatenate([self.samples, audio])
        new = log_mel(self.samples)
        self.samples = self.samples[len(new) * HOP :]
        features = np.concatenate([self.features, new])
        whole = len(features) // SUBSAMPLING * SUBSAMPLING
        self.features = features[whole:]
        if whole == 0:
            return ""
        encoded, self.past = self.model.encoder(torch.from_numpy(features[None, :whole]).to(self.device), self.past)
        return "".join(self.read(frame) for frame in encoded[0])

    def read(self, frame: Tensor) -> str:
        """The characters of one frame of the encoder."""
        text = ""
        for _ in range(MOST_LABELS_A_FRAME):
            label = int(self.model.joint.log_probs(frame, self.predicted).argmax())
            if label == self.blank:
                break
            text += self.alphabet[label]
            self.context = [self.context[1], label]
            self.predicted = self.predict()
        return text


def transcribe(model: Transducer, alphabet: str, audio: NDArray[np.float32]) -> str:
    """Audio, heard piece by piece -> text."""
    listener = Listener(model, alphabet)
    return "".join(listener.hear(audio[start : start + PIECE]) for start in range(0, len(audio), PIECE))


def edit_distance(left: str, right: str) -> int:
    """Fewest insertions, deletions and substitutions that turn one into the other."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def character_error_rate(references: list[str], hypotheses: list[str]) -> float:
    """Edits needed by all hypotheses together, per reference character."""
    edits = sum(edit_distance(*pair) for pair in zip(references, hypotheses, strict=True))
    return edits / sum(map(len, references))


def judge(model: Transducer, alphabet: str, utterances: list[Utterance]) -> tuple[float, list[tuple[str, str]]]:
    """Character error rate, and every reference with what was read."""
    references = [utterance.text for utterance in utterances]
    hypotheses = [transcribe(model, alphabet, utterance.audio) for utterance in utterances]
    return character_error_rate(references, hypotheses), list(zip(references, hypotheses, strict=True))
