"""The picture of a training run: the loss, and one held-out utterance as the model hears it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flash_rnnt_cupy import reference
from flash_rnnt_cupy.demo.audio import HOP, SAMPLE_RATE, log_mel
from flash_rnnt_cupy.demo.data import Source, Utterance
from flash_rnnt_cupy.demo.model import SUBSAMPLING, Transducer

FRAME = SUBSAMPLING * HOP / SAMPLE_RATE  # seconds
BLUE, GREY = "#0b61a4", "#9aa5b1"


@torch.no_grad()
def alignment(model: Transducer, alphabet: str, utterance: Utterance) -> NDArray[np.float64]:
    """Probability that each character of the text is emitted at each frame of the encoder: [T, U]."""
    device = model.joint.output.weight.device
    encoded, _ = model.encoder(torch.from_numpy(log_mel(utterance.audio))[None].to(device))
    labels = torch.tensor([[alphabet.index(character) for character in utterance.text]], device=device)
    predicted = model.predictor(labels)
    scores = model.joint.log_probs(encoded[0, :, None], predicted[0, None]).double().cpu().numpy()
    blank, label = scores[:, :, -1], scores[:, np.arange(labels.shape[1]), labels[0].cpu()]
    return reference.arc_posteriors(blank, label)[2]


def draw(path: Path, source: Source, losses: list[float], model: Transducer, utterance: Utterance) -> None:
    """Loss curve above; below, when each character of the utterance is emitted, over its spectrogram."""
    figure = Figure(figsize=(9, 9), dpi=120, facecolor="white", layout="constrained")
    curve, emissions, spectrogram = figure.subplots(3, 1, height_ratios=(3, 4, 3))

    window = min(10, len(losses))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    curve.semilogy(np.arange(1, len(losses) + 1), losses, color=GREY, linewidth=0.8, label="each step")
    curve.semilogy(np.arange(window, len(losses) + 1), smooth, color=BLUE, linewidth=1.8, label=f"mean of {window}")
    curve.set(title=f"{source.title}: training", xlabel="step", ylabel="loss (nats per character)")
    curve.grid(color=GREY, alpha=0.3)
    curve.legend(frameon=False)

    posteriors = alignment(model, source.alphabet, utterance)
    T, U = posteriors.shape
    shown = emissions.imshow(
        posteriors.T, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(0, T * FRAME, -0.5, U - 0.5)
    )
    emissions.set_yticks(range(U), [character.replace(" ", "␣") for character in utterance.text])
    emissions.set(title="when each character is emitted", ylabel="transcript, upwards")
    figure.colorbar(shown, ax=emissions, label="posterior probability")

    with np.errstate(divide="ignore"):  # silence is -inf dB
        level = spectrogram.specgram(
            utterance.audio, NFFT=256, Fs=SAMPLE_RATE, noverlap=256 - HOP, cmap="Greys", scale="dB", vmin=-120
        )[3]
    spectrogram.set(xlabel="time (s)", ylabel="frequency (Hz)", xlim=(0, T * FRAME))
    emissions.sharex(spectrogram)
    figure.colorbar(level, ax=spectrogram, label="power density (dB/Hz)")
    figure.savefig(path)
