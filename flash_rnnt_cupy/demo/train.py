"""Trains the recogniser, reads held-out audio with it and draws a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from flash_rnnt_cupy import backends, plan_memory
from flash_rnnt_cupy.demo import decode, morse, plot, speech
from flash_rnnt_cupy.demo.audio import log_mel
from flash_rnnt_cupy.demo.data import Source
from flash_rnnt_cupy.demo.model import SUBSAMPLING, Transducer

SOURCES = {"morse": morse.SOURCE, "speech": speech.SOURCE}
LEARNING_RATE, WARM_UP, WEIGHT_DECAY, LARGEST_GRADIENT = 4e-3, 0.1, 1e-2, 5.0
LESSON_FRAMES = 4  # of the encoder: what a lesson's character must be said in
EXAMPLES = 5

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # features [B, frames, BANDS], frames [B], labels [B, U], lengths [B]


@dataclass(frozen=True)
class Result:
    """What came out; ``str()`` is the block that the demo prints."""

    title: str
    device: str
    losses: list[float]  # nats per character, of every step
    seconds: float
    error_rate: float  # per character, held-out
    read: list[tuple[str, str]]  # every held-out reference, and what was read
    dense_bytes: int
    our_bytes: int
    picture: Path

    def __str__(self) -> str:
        """Some lines to show."""
        first, last = self.losses[0], sum(self.losses[-10:]) / len(self.losses[-10:])
        lines = [
            f"{self.title}: {len(self.losses)} steps in {self.seconds:.0f} s on {self.device}",
            f"loss            {first:.2f} -> {last:.2f} nats per character",
            f"error rate      {self.error_rate:.1%} of characters, {len(self.read)} held-out recordings",
            f"memory          {_mib(self.our_bytes)} for joint network, loss and gradients of the largest batch;",
            f"                {_mib(self.dense_bytes)} for its dense B x T x U x (H + V) states, scores and gradients",
            f"picture         {self.picture}",
        ]
        lines += [f"  said {said!r}\n  read {read!r}" for said, read in self.read[:EXAMPLES]]
        return "\n".join(lines)


class Recordings(Dataset[tuple[Tensor, Tensor]]):
    """Utterances of a source as (features [frames, BANDS], labels [U]); each depends on seed and index alone."""

    def __init__(self, source: Source, seed: int, steps: int) -> None:
        self.source, self.seed = source, seed
        self.lessons = min(source.lesson_steps, steps) * source.lesson_size  # utterances of one character come first
        self.length = self.lessons + max(steps - source.lesson_steps, 0) * source.batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        make = self.source.training if index >= self.lessons or self.source.lesson is None else self.source.lesson
        audio, text = make(self.seed, index)
        labels = [self.source.alphabet.index(character) for character in text]
        return torch.from_numpy(log_mel(audio)), torch.tensor(labels)

    def batches(self) -> list[list[int]]:
        """Indices of every step's batch."""
        sizes = [self.source.lesson_size] * (self.lessons // max(self.source.lesson_size, 1))
        sizes += [self.source.batch_size] * ((self.length - self.lessons) // self.source.batch_size)
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return [list(range(begin, end)) for begin, end in pairwise(ends)]


def collate(utterances: list[tuple[Tensor, Tensor]]) -> Batch:
    """A padded batch."""
    features, labels = zip(*utterances, strict=True)
    frames, lengths = (torch.tensor([len(item) for item in items]) for items in (features, labels))
    padded = [pad_sequence(list(items), batch_first=True) for items in (features, labels)]
    return padded[0], frames, padded[1], lengths


def train(model: Transducer, source: Source, seed: int, steps: int, workers: int) -> Iterator[tuple[float, Batch]]:
    """Takes the steps one by one: (nats per character, the batch)."""
    device = model.joint.output.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=WARM_UP)
    recordings = Recordings(source, seed, steps)
    loader = DataLoader(recordings, batch_sampler=recordings.batches(), collate_fn=collate, num_workers=workers)
    model.train()
    for step, batch in enumerate(loader):
        features, frames, labels, lengths = (tensor.to(device) for tensor in batch)
        last = LESSON_FRAMES if step < source.lesson_steps else None
        loss = model.loss(features, frames, labels, lengths, last)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        schedule.step()
        yield loss.item() * len(lengths) / int(lengths.sum()), batch


def main(
    data: str = "morse", seed: int = 0, output: str = "demo.png", steps: int | None = None, workers: int = 1
) -> Result:
    """Trains on ``data`` ("morse" or "speech"), prints the result and returns it; ``output`` is the picture."""
    source = SOURCES[data]
    steps = steps or source.steps
    held_out = source.held_out(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(max(torch.get_num_threads() - workers, 1))
    device = "cpu" if backends.unavailable("cuda") or not torch.cuda.is_available() else "cuda"
    model = Transducer(len(source.alphabet) + 1, source.width).to(device)
    losses: list[float] = []
    largest: Batch | None = None
    begin = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.2f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(source.title, total=steps, loss=float("nan"))
        for loss, batch in train(model, source, seed, steps, workers):
            losses.append(loss)
            largest = batch if largest is None or _nodes(batch) > _nodes(largest) else largest
            progress.update(task, advance=1, loss=sum(losses[-10:]) / len(losses[-10:]))
    seconds = time.monotonic() - begin
    model.eval()
    error_rate, read = decode.judge(model, source.alphabet, held_out)
    picture = Path(output)
    plot.draw(picture, source, losses, model, max(held_out[:EXAMPLES], key=lambda utterance: len(utterance.text)))
    assert largest is not None
    name = torch.cuda.get_device_name() if device == "cuda" else f"the CPU ({torch.get_num_threads()} threads)"
    result = Result(source.title, name, losses, seconds, error_rate, read, *_memory(model, largest), picture=picture)
    print(result)
    return result


def _nodes(batch: Batch) -> int:
    """B x T x U1, padding included."""
    features, _, labels, _ = batch
    return len(features) * (features.shape[1] // SUBSAMPLING) * (labels.shape[1] + 1)


def _memory(model: Transducer, batch: Batch) -> tuple[int, int]:
    """Bytes that a dense joint network and loss would take for the batch, and that the library takes."""
    _, frames, _, lengths = batch
    vocabulary, width = model.joint.output.weight.shape
    account = plan_memory(
        frames // SUBSAMPLING,
        lengths,
        width,
        vocabulary,
        dtype="float32",
        workspace_bytes=model.WORKSPACE_BYTES,
    )
    return 2 * 4 * _nodes(batch) * (width + vocabulary), account.peak_bytes - account.given_bytes


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
