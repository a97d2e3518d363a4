"""Features of audio: log-mel frames that never look ahead, so they can be computed while audio arrives."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 8000  # Hz
WINDOW = 256  # samples in a feature frame, 32 ms
HOP = 80  # samples from one feature frame to the next, 10 ms
BANDS = 40
POWER_FLOOR = 1e-5


@cache
def mel_filters() -> NDArray[np.float32]:
    """Triangles evenly spaced in mel, from 60 Hz to half the sample rate: [WINDOW // 2 + 1, BANDS]."""
    low, high = 2595 * np.log10(1 + np.array([60, SAMPLE_RATE / 2]) / 700)
    edges = 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(WINDOW, 1 / SAMPLE_RATE)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    triangles = np.minimum((hertz - left) / (centre - left), (right - hertz) / (right - centre))
    return np.maximum(triangles, 0).astype(np.float32)


def log_mel(audio: NDArray[np.float32]) -> NDArray[np.float32]:
    """Audio [samples] -> features [frames, BANDS]; frame i is of the WINDOW samples from i * HOP.

    A frame's mean over the bands is taken off: what remains is its shape, whatever the volume.
    """
    if len(audio) < WINDOW:
        return np.zeros((0, BANDS), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(audio, WINDOW)[::HOP]
    spectrum = np.fft.rfft(windows * np.hanning(WINDOW).astype(np.float32))
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32) / WINDOW
    bands = np.log(power @ mel_filters() + POWER_FLOOR)
    features: NDArray[np.float32] = (bands - bands.mean(axis=1, keepdims=True)) / 3
    return features
