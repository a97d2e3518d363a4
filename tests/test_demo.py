"""The demo: its audio, its streaming parts, and its training against a dense joint network and a plain loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flash_rnnt_cupy.demo import audio, decode, morse, speech, train
from flash_rnnt_cupy.demo.model import SUBSAMPLING, Transducer
from flash_rnnt_cupy.errors import InputError
from tests.oracles.checks import assert_close

VOCABULARY = len(morse.SOURCE.alphabet) + 1


def test_a_message_depends_on_seed_and_index_alone() -> None:
    first, again, other = morse.message(0, 5), morse.message(0, 5), morse.message(1, 5)
    assert first.text == again.text
    assert np.array_equal(first.audio, again.audio)
    assert (first.text, len(first.audio)) != (other.text, len(other.audio))


@pytest.mark.parametrize("words_per_minute", [15.0, 20.0, 30.0])
def test_paris_is_fifty_dots_long(words_per_minute: float) -> None:
    signal = morse.Signal(words_per_minute=words_per_minute)
    samples = len(morse.synthesise("PARIS", signal, np.random.default_rng(0)))
    seconds = samples / audio.SAMPLE_RATE - 7 * signal.dot  # it begins with a word gap
    assert_close(seconds, 60 / words_per_minute, rtol=1e-3, atol=0, names="seconds")


def test_a_dash_is_three_dots_and_a_letter_gap_too() -> None:
    assert morse.keying("ET T") == [(1, 1), (0, 3), (1, 3), (0, 7), (1, 3), (0, 7)]
    assert morse.keying("A") == [(1, 1), (0, 1), (1, 3), (0, 7)]


def test_features_do_not_look_ahead() -> None:
    sound = morse.message(0, 0).audio
    whole = audio.log_mel(sound)
    part = audio.log_mel(sound[: len(sound) // 2])
    assert 0 < len(part) < len(whole)
    assert np.array_equal(whole[: len(part)], part)


def test_the_encoder_does_not_look_ahead_and_goes_on_where_it_stopped() -> None:
    torch.manual_seed(0)
    model = Transducer(VOCABULARY, 16).eval()
    features = torch.from_numpy(audio.log_mel(morse.message(0, 0).audio))[None]
    with torch.no_grad():
        whole, _ = model.encoder(features)
        half = whole.shape[1] // 2 * SUBSAMPLING
        first, past = model.encoder(features[:, :half])
        second, _ = model.encoder(features[:, half:], past)
    joined = torch.cat([first, second], dim=1)
    assert_close(joined.numpy(), whole.numpy(), rtol=1e-5, atol=1e-5)


def test_a_stream_is_read_as_the_whole() -> None:
    torch.manual_seed(1)
    model = Transducer(VOCABULARY, 16).eval()
    sound = morse.message(0, 1).audio
    listener = decode.Listener(model, morse.SOURCE.alphabet)
    assert decode.transcribe(model, morse.SOURCE.alphabet, sound) == listener.hear(sound)


@pytest.mark.parametrize(
    ("left", "right", "edits"),
    [("", "", 0), ("abc", "abc", 0), ("kitten", "sitting", 3), ("", "ab", 2), ("flaw", "lawn", 2)],
)
def test_edit_distance(left: str, right: str, edits: int) -> None:
    assert decode.edit_distance(left, right) == edits
    assert decode.edit_distance(right, left) == edits


def test_character_error_rate_counts_all_characters_together() -> None:
    assert decode.character_error_rate(["abcd", "e"], ["abcx", "e"]) == 1 / 5


def test_transcripts_are_written_as_they_are_spoken() -> None:
    assert speech.spoken("Press 1, please. [beep]") == "press one please"
    assert speech.spoken("dial #21") == ""


def test_missing_recordings_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "SOUNDS", Path("/nowhere"))
    speech.prompts.cache_clear()
    with pytest.raises(InputError, match="apt-get install asterisk-core-sounds-en-wav"):
        speech.prompts()


def test_a_short_run_trains_reads_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    source = train.SOURCES["morse"]
    monkeypatch.setitem(train.SOURCES, "morse", replace(source, held_out=lambda seed: [morse.message(seed, 10**9)]))
    threads = torch.get_num_threads()
    result = train.main(output=str(tmp_path / "demo.png"), steps=3, workers=0)
    torch.set_num_threads(threads)
    assert len(result.losses) == 3
    assert np.isfinite(result.losses).all()
    assert result.picture.stat().st_size > 10_000
    assert result.error_rate >= 0
    assert result.dense_bytes > 0 < result.our_bytes
    assert str(result) in capsys.readouterr().out


def plain_loss(encoded: Any, predicted: Any, joint: Any, labels: Any, frames: Any, lengths: Any) -> Any:
    """Dense joint network, log-softmax, and the recursion along anti-diagonals, all by autograd; mean over B."""
    hidden = torch.relu(joint.encoder_projection(encoded)[:, :, None] + joint.predictor_projection(predicted)[:, None])
    log_probs = joint.output(hidden).log_softmax(-1)
    losses = []
    for b, (T, U) in enumerate(zip(frames.tolist(), lengths.tolist(), strict=True)):
        blank = log_probs[b, :T, : U + 1, -1]
        label = log_probs[b, :T, torch.arange(U), labels[b, :U]]
        column = torch.cat([blank.new_zeros(1), blank[:-1, 0].cumsum(0)])  # alpha[:, 0]
        for u in range(1, U + 1):
            arrive, stay = column + label[:, u - 1], torch.cat([blank.new_zeros(1), blank[:-1, u].cumsum(0)])
            column = stay + (arrive - stay).logcumsumexp(0)
        losses.append(-(column[-1] + blank[-1, U]))
    return torch.stack(losses).mean()


def test_the_loss_curve_is_that_of_a_dense_joint_and_a_plain_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(morse.SOURCE, batch_size=3, lesson_steps=2, lesson_size=4, width=24)

    def curve() -> list[float]:
        torch.manual_seed(0)
        model = Transducer(VOCABULARY, source.width)
        return [loss for loss, _ in islice(train.train(model, source, seed=0, steps=6, workers=0), 6)]

    ours = curve()

    def dense(joint: Any, encoded: Any, predicted: Any, labels: Any, frames: Any, lengths: Any, **_: Any) -> Any:
        return plain_loss(encoded, predicted, joint, labels, frames, lengths)

    monkeypatch.setattr("flash_rnnt_cupy.adapters.pytorch.JointNetwork.loss", dense)
    assert_close(ours, curve(), rtol=2e-4, atol=0, names="loss of each step")
