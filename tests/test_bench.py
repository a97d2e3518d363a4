from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from bench import accuracy, cpu, gate, logits, plot, report, run, stages, workloads
from bench.providers import Batch, Provider, Step
from bench.providers.dense import diagonal_loss, in_sub_batches
from bench.providers.ours import OURS
from bench.records import Record

SECONDS = 0.01


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.PAUSE", 0.0)


def counting(calls: list[str], wrong: float = 1.0) -> Provider:
    """Our first provider, with losses and gradients of ``wrong`` times the right size."""

    def prepare(batch: Batch) -> Step:
        calls.append(batch.name)
        step = OURS[0].prepare(batch)

        def scaled() -> torch.Tensor:
            losses = step() * wrong
            for leaf in batch.leaves:
                leaf.grad *= wrong
            return losses

        return scaled

    return Provider("counted", str, prepare)


def raising(batch: Batch) -> Step:
    raise ValueError(f"no {batch.name}")


def test_an_interrupted_run_skips_what_is_done_and_keeps_what_failed(tmp_path: Path) -> None:
    tiny, calls = workloads.load("tiny"), []
    used = (counting(calls), Provider("raises", str, raising), Provider("absent", lambda: "not here", raising))
    for _ in range(2):
        record = Record("run", tmp_path)
        run.run([tiny], used, record, SECONDS, torch.float32)
    assert calls == ["tiny", "tiny"]  # the gate and the batch, once
    rows = json.loads(record.path.read_text(encoding="utf-8"))["run"]
    assert {row["provider"]: row.get("failed") for row in rows} == {
        "counted": None,
        "raises": "ValueError: no tiny",
        "absent": "not here",
    }
    measured = next(row for row in rows if row["provider"] == "counted")
    assert measured["samples_per_s"] > 0
    assert measured["peak_gib"] is None or torch.cuda.is_available()
    assert all(error < 1e-5 for error in measured["errors"].values())


@pytest.mark.parametrize("wrong", [1.2, float("nan")])
def test_the_gate_refuses_wrong_numbers(wrong: float) -> None:
    cut = workloads.load("tiny").batch("cpu", torch.float32).cut(2, 6, 3)
    with pytest.raises(gate.Refused, match="losses"):
        gate.errors(counting([], wrong), cut, gate.exact(cut))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_pytorch_passes_the_gate(dtype: torch.dtype) -> None:
    cut = workloads.load("tiny").batch("cpu", dtype).cut(3, 9, 4)
    errors = gate.errors(Provider("dense", str, in_sub_batches(diagonal_loss, 2)), cut, gate.exact(cut))
    assert set(errors) == set(gate.ALLOWED)


def test_stages_accuracy_and_cpu_leave_rows(tmp_path: Path) -> None:
    record = Record("sample", tmp_path)
    stages.run(record, [workloads.load("tiny")], "float32")
    accuracy.run(record, [(30, 10)])
    cpu.run(record, "tiny", 2, cpu.PROVIDERS[:1])
    assert record.rows("stages")[0]["stages_ms"]["sum_alignments"] > 0
    assert record.rows("accuracy")[0]["error"] < 1e-6
    assert record.rows("cpu")[0]["seconds"] > 0


def sample(folder: Path) -> None:
    """Records of a run with figures that a report can be told by."""
    record = Record("run", folder)
    row = {"workload": "short", "provider": "ours", "dtype": "float16", "nodes": 10**6, "samples_per_s": 45678.0}
    times = {"sustained_ms": [1.0, 2.0, 3.0], "cool_ms": [1.0, 2.0, 3.0], "first_call_s": 1.0, "peak_gib": 0.34}
    done = row | times | {"errors": dict.fromkeys(gate.ALLOWED, 1e-4)}
    failed = {**row, "provider": "theirs", "failed": "out of memory"}
    record.put("run", [done, failed, done | {"provider": "others, retain"}])
    record.put("accuracy", [{"loss": "ours", "T": T, "U": 10, "error": 1e-6} for T in (50, 500)])
    logits = {"forward_ms": 1.2, "read_ms": 1.0, "backward_ms": 2.2, "read_write_ms": 2.0}
    record.put("logits", [{"sizes": [2, 3, 4, 5], "ragged": False, "nodes": 24, **logits}])
    step = {"parameters": 10**8, "step_ms": 123.4, "peak_gib": 5.0}
    record.put("model", [{"loss_by": "ours", "batch": 64, **step}])
    stages_ms = dict.fromkeys(stages.STAGES, 1.0)
    stage = {"workload": "medium", "tile_rows": 64, "min_occupancy": 0.0, "step_ms": 9.0, "stages_ms": stages_ms}
    Record("stages", folder).put("stages", [stage])


def test_report_writes_between_its_markers_only(tmp_path: Path) -> None:
    sample(tmp_path)
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- run -->\nold\n<!-- end -->\n<!-- cpu -->\nkept\n<!-- end -->\nafter\n")
    report.write([document], tmp_path)
    text = document.read_text()
    assert text.startswith("before\n<!-- run -->\n| samples/s @ peak GiB | short, 1 M nodes |")
    assert text.endswith("<!-- end -->\n<!-- cpu -->\nkept\n<!-- end -->\nafter\n")
    assert "| ours | 45,678 @ 0.34 |" in text
    assert "old" not in text
    assert "others, retain" not in text
    assert "theirs: out of memory" in str(report.run_details(tmp_path))
    assert "| full | 24 | 1.200 | 1.000 | 2.200 | 2.000 | 1.20, 1.10 |" in str(report.logits(tmp_path))
    assert "| ours | 64 | 123.4 | 5.00 |" in str(report.model(tmp_path))


def test_report_takes_an_older_record_s_row_where_the_newest_failed(tmp_path: Path) -> None:
    sample(tmp_path)
    path = next(tmp_path.glob("run-*.json"))
    newer = json.loads(path.read_text(encoding="utf-8"))
    newer["environment"]["date"] = "2999-01-01T00:00:00+00:00"
    newer["run"] = [{**newer["run"][1], "provider": "ours"}]
    (tmp_path / "run-2999-01-01-other.json").write_text(json.dumps(newer), encoding="utf-8")
    assert [row.get("failed") for row in report.of_run(tmp_path)] == [None, "out of memory", None]


def test_plot_draws_every_figure(tmp_path: Path) -> None:
    sample(tmp_path)
    paths = plot.draw(tmp_path, tmp_path / "figures")
    assert {path.name for path in paths} == {f"{name}.{kind}" for name in plot.DRAWN for kind in ("svg", "png")}
    assert all(path.stat().st_size > 1000 for path in paths)


def test_batches_cut_for_the_gate_are_ragged_and_without_dropout() -> None:
    tiny = workloads.load("tiny")
    cut = dataclasses.replace(tiny, dropout=0.5).batch("cpu", torch.float32).cut(2, 6, 3)
    assert cut.dropout == 0
    assert cut.frames.tolist() == [6, 5]
    assert cut.labels.tolist() == [3, 0]


def test_the_loss_of_given_logits_is_timed_beside_its_floors() -> None:
    row = logits.measured((2, 7, 5, 16), ragged=True, seconds=0.01)
    assert row["nodes"] <= 2 * 7 * 5
    assert all(row[name] > 0 for name in ("forward_ms", "both_ms_with_a_copy", "copy_ms", "read_ms", "read_write_ms"))
