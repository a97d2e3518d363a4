"""Morse code audio, synthesised: speed, pitch, timing, volume, fading and noise vary, as they do on the air."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flash_rnnt_cupy.demo.audio import SAMPLE_RATE
from flash_rnnt_cupy.demo.data import Source, Utterance

CODE = {
    "A": ".-", "B": "-...", "C": "-.-.", "D": "-..", "E": ".", "F": "..-.", "G": "--.", "H": "....", "I": "..",
    "J": ".---", "K": "-.-", "L": ".-..", "M": "--", "N": "-.", "O": "---", "P": ".--.", "Q": "--.-", "R": ".-.",
    "S": "...", "T": "-", "U": "..-", "V": "...-", "W": ".--", "X": "-..-", "Y": "-.--", "Z": "--..",
    "0": "-----", "1": ".----", "2": "..---", "3": "...--", "4": "....-", "5": ".....", "6": "-....",
    "7": "--...", "8": "---..", "9": "----.", "?": "..--..", "/": "-..-.", "=": "-...-",
}  # fmt: skip
CHARACTERS = list(CODE)
LETTERS, DIGITS = CHARACTERS[:26], CHARACTERS[26:36]
WORDS = (
    "CQ DE K TNX FER CALL UR RST IS 599 579 NAME QTH WX RIG ANT HR HW? = AGN PSE QRM QRN QSB QSL 73 "
    "BK GM GA GE THE AND YOU FOR FINE WATT DIPOLE YAGI SUNNY RAIN COLD WARM TEMP GOOD VERY SIGNAL "
    "HERE MY TEST FROM OM DR HOPE"
).split()


@dataclass(frozen=True)
class Signal:
    """How a station sounds; by default a machine sending 20 words a minute over a perfect channel."""

    words_per_minute: float = 20.0
    pitch: float = 600.0  # Hz
    amplitude: float = 0.5
    timing_jitter: float = 0.0  # relative standard deviation of each length
    fading: float = 0.0  # depth, 0 to 1
    noise: float = 0.0  # standard deviation

    @property
    def dot(self) -> float:
        """Seconds: "PARIS " is 50 dots long."""
        return 1.2 / self.words_per_minute


def random_signal(rng: np.random.Generator) -> Signal:
    """A station on the air: 400-900 Hz, 18-28 words a minute, noise from a tenth to half of the tone."""
    amplitude = 0.5 * 10 ** rng.uniform(-1, 0)
    return Signal(
        words_per_minute=rng.uniform(18, 28),
        pitch=rng.uniform(400, 900),
        amplitude=amplitude,
        timing_jitter=rng.uniform(0, 0.06),
        fading=rng.uniform(0, 0.5),
        noise=amplitude * 10 ** rng.uniform(-1, -0.3),
    )


def keying(text: str) -> list[tuple[int, int]]:
    """Text -> (key down 1 or up 0, dots): a dash is 3 dots; gaps are 1 in a letter, 3 after it, 7 after a word."""
    keyed: list[tuple[int, int]] = []
    for word in text.split():
        for letter in word:
            for mark in CODE[letter]:
                keyed += [(1, 1 if mark == "." else 3), (0, 1)]
            keyed[-1] = (0, 3)
        keyed[-1] = (0, 7)
    return keyed


def synthesise(text: str, signal: Signal, rng: np.random.Generator) -> NDArray[np.float32]:
    """Audio [samples]: a word gap, then the text."""
    key, dots = np.array([(0, 7), *keying(text)]).T
    seconds = dots * signal.dot * np.exp(signal.timing_jitter * rng.standard_normal(len(dots)))
    ends = np.round(np.cumsum(seconds) * SAMPLE_RATE).astype(int)
    samples, ramp = ends[-1], SAMPLE_RATE // 200  # the key clicks are softened over 5 ms
    steps = np.zeros(samples + ramp - 1, np.float32)
    steps[ends[:-1]] = np.diff(key)
    envelope = np.convolve(steps.cumsum(), np.full(ramp, 1 / ramp, np.float32), mode="valid")
    time = np.arange(samples, dtype=np.float32) / SAMPLE_RATE
    fade = 1 - signal.fading * (0.5 + 0.5 * np.sin(2 * np.pi * (rng.uniform(0.1, 0.5) * time + rng.uniform())))
    tone = np.sin(2 * np.pi * (signal.pitch * time + rng.uniform()))
    hiss = rng.standard_normal(samples, dtype=np.float32)
    audio: NDArray[np.float32] = (signal.amplitude * fade * envelope * tone + signal.noise * hiss).astype(np.float32)
    return audio


def random_word(rng: np.random.Generator) -> str:
    """A word of radio traffic, a call sign or a random group: the last two cannot be learnt by heart."""
    kind = rng.integers(3)
    if kind == 0:
        return str(rng.choice(WORDS))
    if kind == 1:
        prefix, suffix = rng.choice(LETTERS, rng.integers(1, 3)), rng.choice(LETTERS, rng.integers(2, 4))
        return "".join([*prefix, rng.choice(DIGITS), *suffix])
    return "".join(rng.choice(CHARACTERS, rng.integers(1, 6)))


def message(seed: int, index: int) -> Utterance:
    """One or two words of one station."""
    rng = np.random.default_rng((seed, index))
    text = " ".join(random_word(rng) for _ in range(rng.integers(1, 3)))
    return Utterance(synthesise(text, random_signal(rng), rng), text)


def character(seed: int, index: int) -> Utterance:
    """A single one, of one station: for the first steps."""
    rng = np.random.default_rng((seed, index))
    text = str(rng.choice(CHARACTERS))
    return Utterance(synthesise(text, random_signal(rng), rng), text)


def held_out(seed: int) -> list[Utterance]:
    """Messages that training never asks for."""
    return [message(seed, 10**9 + index) for index in range(200)]


SOURCE = Source(
    "Morse code",
    " " + "".join(CODE),
    training=message,
    held_out=held_out,
    steps=540,
    batch_size=16,
    width=128,
    lesson=character,
    lesson_steps=100,
    lesson_size=48,
)
