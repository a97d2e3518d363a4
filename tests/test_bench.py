"""The benchmark's own rules, on small batches: rows resume, failures are rows, wrong results are refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from bench import gate, report, run
from bench.providers import Batch, Provider, Step, ours

PROVIDER = ours.OURS[0]


@pytest.fixture
def batch() -> Batch:
    random = np.random.default_rng(0)
    states = [torch.from_numpy(random.normal(size=size).astype("float32")) for size in ((4, 9, 8), (4, 6, 8))]
    layer = [torch.from_numpy(random.normal(size=size).astype("float32")) for size in ((11, 8), (11,))]
    frames, labels = torch.tensor([9, 4, 7, 8]), torch.tensor([5, 0, 3, 2])
    return Batch("small", *states, *layer, torch.randint(0, 10, (4, 5)), frames, labels, 10, 0.1).to("cpu")


def failing(batch: Batch) -> Step:
    del batch
    raise MemoryError("no room")


def wrong(batch: Batch) -> Step:
    right = PROVIDER.prepare(batch)

    def step() -> torch.Tensor:
        losses = right()
        batch.leaves[1].grad *= 1.1  # type: ignore[operator]
        return losses

    return step


def test_rows_are_kept_and_not_run_again(batch: Batch, tmp_path: Path) -> None:
    path, calls = tmp_path / "run.json", []

    def counted(batch: Batch) -> Step:
        calls.append(batch.name)
        return PROVIDER.prepare(batch)

    chosen = [Provider("counted", lambda: "", counted), Provider("absent", lambda: "not installed", failing)]
    first = run.run([batch], chosen, 0.01, path)
    n_calls = len(calls)
    assert n_calls == 2  # the gate's, and the measured one
    assert run.run([batch], chosen, 0.01, path) == json.loads(path.read_text())["run"] == first
    assert len(calls) == n_calls
    measured, absent = first
    assert measured["samples_per_s"] > 0
    assert measured["errors"]["weight"] < 1e-5
    assert absent["failed"] == "not installed"


def test_what_a_provider_raises_is_a_row(batch: Batch, tmp_path: Path) -> None:
    chosen = [Provider("failing", lambda: "", failing), Provider("wrong", lambda: "", wrong)]
    rows = run.run([batch], chosen, 0.01, tmp_path / "run.json")
    assert rows[0]["failed"] == "MemoryError: no room"
    assert "wrong result" in rows[1]["failed"]
    assert "samples_per_s" not in rows[1]


def test_the_gate_measures_the_distance_to_float64(batch: Batch) -> None:
    assert max(gate.check(PROVIDER, batch).values()) < 1e-5
    found = gate.errors(Provider("wrong", lambda: "", wrong), batch)
    assert found["predictor"] == pytest.approx(0.1, rel=1e-3)


RECORD: dict[str, Any] = {
    "environment": {"date": "2026-01-01T00:00", "commit": "0" * 40, "versions": {}, "device": {"name": "a GPU"}},
    "run": [
        {"batch": "short", "nodes": 10**6, "provider": "ours", "samples_per_s": 1234.5, "peak_gib": 0.3,
         "errors": {"loss": 1e-4}},
        {"batch": "short", "nodes": 10**6, "provider": "theirs", "failed": "OutOfMemoryError: 80 GiB"},
    ],
}  # fmt: skip


def test_a_table_is_written_between_its_markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- run -->\nold\n<!-- end -->\nafter\n")
    (tmp_path / "run-2026-01-01.json").write_text(json.dumps(RECORD))
    monkeypatch.setattr(report, "DOCUMENTS", (document,))
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    report.main()
    text = document.read_text()
    assert text.startswith("before\n<!-- run -->\n| samples/s @ peak GiB | short, 1.00 M nodes |")
    assert "| ours | 1,234 @ 0.30 |" in text
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figures_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from bench import plot  # noqa: PLC0415

    monkeypatch.setattr(plot, "newest", {"run": RECORD, "stages": None}.get)
    drawn = plot.main(tmp_path)
    assert [path.name for path in drawn] == ["memory.svg", "frontier.svg"]
    assert all(path.stat().st_size > 5_000 for path in drawn)
