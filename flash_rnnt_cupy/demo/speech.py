"""Real speech: the telephone prompts of Debian's `asterisk-core-sounds-en-wav`, one speaker, about 24 minutes."""

from __future__ import annotations

import gzip
import re
import wave
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flash_rnnt_cupy.demo.audio import SAMPLE_RATE
from flash_rnnt_cupy.demo.data import Source, Utterance
from flash_rnnt_cupy.errors import InputError

SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
TRANSCRIPTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
INSTALL = "apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
HELD_OUT_EVERY = 10  # files
LONGEST, JOINED = 8.0, 4.0  # seconds: prompts above are left out, below are joined to others
PAUSE = np.zeros(3 * SAMPLE_RATE // 10, np.float32)


def spoken(transcript: str) -> str:
    """Lower case, digits as words, no punctuation; empty where it is not speech or not written as it is spoken."""
    text = re.sub(r"\[.*?\]|\(.*?\)|<.*?>", " ", transcript.lower())
    text = re.sub(r"\b\d\b", lambda digit: DIGITS[int(digit[0])], text)
    return "" if re.search(r"[\d#*=+/$@]", text) else " ".join(re.sub(r"[^a-z']", " ", text).split())


def read_wave(path: Path) -> NDArray[np.float32]:
    """A 16-bit mono file at SAMPLE_RATE -> [samples]."""
    with wave.open(str(path)) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / np.float32(2**15)


@cache
def prompts() -> list[Utterance]:
    """All that are spoken, in the order of the transcripts."""
    if not (SOUNDS.is_dir() and TRANSCRIPTS.is_file()):
        raise InputError("data", f"recordings in {SOUNDS} and {TRANSCRIPTS}", "none", remedy=INSTALL)
    with gzip.open(TRANSCRIPTS, "rt", encoding="utf-8") as lines:
        named = [line.split(":", 1) for line in lines if ":" in line]
    texts = {SOUNDS / f"{name}.wav": spoken(transcript) for name, transcript in named}
    return [Utterance(read_wave(path), text) for path, text in texts.items() if text and path.is_file()]


@cache
def to_learn_from() -> tuple[list[Utterance], NDArray[np.float64]]:
    """The prompts that are not held out and not too long, and each one's share of their time."""
    learnt = [prompt for index, prompt in enumerate(prompts()) if index % HELD_OUT_EVERY]
    learnt = [prompt for prompt in learnt if len(prompt.audio) <= LONGEST * SAMPLE_RATE]
    samples = np.array([len(prompt.audio) for prompt in learnt])
    return learnt, samples / samples.sum()


def varied(seed: int, index: int) -> Utterance:
    """A prompt, or some in a row, at another speed and with some noise."""
    rng = np.random.default_rng((seed, index))
    learnt, shares = to_learn_from()
    chosen: list[Utterance] = []
    while sum(len(prompt.audio) for prompt in chosen) < JOINED * SAMPLE_RATE:
        chosen.append(learnt[rng.choice(len(learnt), p=shares)])
    audio = np.concatenate([*(prompt.audio for prompt in chosen), PAUSE])
    audio = np.interp(np.arange(0, len(audio) - 1, rng.uniform(0.88, 1.12)), np.arange(len(audio)), audio)
    noise = 10 ** rng.uniform(-4, -2) * rng.standard_normal(len(audio))
    return Utterance((audio + noise).astype(np.float32), " ".join(prompt.text for prompt in chosen))


def held_out(seed: int) -> list[Utterance]:
    """Every tenth prompt, whatever the seed."""
    del seed
    return [Utterance(np.concatenate([audio, PAUSE]), text) for audio, text in prompts()[::HELD_OUT_EVERY]]


SOURCE = Source(
    "recorded prompts",
    " '" + "abcdefghijklmnopqrstuvwxyz",
    training=varied,
    held_out=held_out,
    steps=300,
    batch_size=16,
    width=192,
)
