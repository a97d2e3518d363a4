"""Writes the tables of README.md and bench/NOTES.md from the newest records: `python -m bench report`.

A table stands between `<!-- name -->` and `<!-- end -->`, and is never edited by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.records import FOLDER, HERE, Row, stored
from bench.stages import WITHIN_REACH_MS

DOCUMENTS = (HERE.parent / "README.md", HERE / "NOTES.md")
NONE = "–"


def current(kind: str, section: str, *key: str, folder: Path = FOLDER) -> list[Row]:
    """Of every row that the newest record's device has, the newest that did not fail, or else the newest.

    Each carries its record's environment.
    """
    records = stored(kind, folder)
    rows: dict[tuple[Any, ...], Row] = {}
    for record in records:
        if record["environment"]["device"] == records[0]["environment"]["device"]:
            for row in record.get(section, []):
                there = rows.setdefault(tuple(row[name] for name in key), row | {"of": record["environment"]})
                if "failed" in there and "failed" not in row:
                    there.pop("failed")
                    there |= row | {"of": record["environment"]}
    return list(rows.values())


def of_run(folder: Path = FOLDER) -> list[Row]:
    """Rows of `run`."""
    return current("run", "run", "workload", "provider", "dtype", folder=folder)


def of_accuracy(folder: Path = FOLDER) -> list[Row]:
    """Rows of `accuracy`."""
    return current("run", "accuracy", "loss", "T", "U", folder=folder)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _source(*environments: dict[str, Any]) -> str:
    where = environments[0]
    versions = where["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "cupy-cuda13x") if name in versions)
    dates, commits = (
        ", ".join(dict.fromkeys(there[name][:n] for there in environments)) for name, n in (("date", 10), ("commit", 9))
    )
    return f"{where['device']['name']}, {dates}, commit {commits}, {named}."


def _with_source(header: Iterable[str], lines: Iterable[Iterable[str]], rows: Sequence[Row]) -> str:
    return f"{_table(header, lines)}\n\n{_source(*(row['of'] for row in rows))}"


def _names(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _crossed(rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str]) -> list[list[str]]:
    """A line for each value of ``down``, a cell for each of ``across``."""
    found = {(row[down], row[across]): cell(row) for row in rows if "failed" not in row}
    columns = _names(rows, across)
    lines = [[name, *(found.get((name, column), NONE) for column in columns)] for name in _names(rows, down)]
    return [line for line in lines if set(line[1:]) != {NONE}]


def _throughput(row: Row) -> str:
    peak = "" if row["peak_gib"] is None else f" @ {row['peak_gib']:.2f}"
    rate = row["samples_per_s"]
    return f"{rate:,.0f}{peak}" if rate >= 10 else f"{rate:.2g}{peak}"


def run(folder: Path) -> str | None:
    """Throughput and memory of a training step, a column a batch, without the schedule that keeps more."""
    rows = [row for row in of_run(folder) if not row["provider"].endswith("retain")]
    if not rows:
        return None
    header = ["samples/s @ peak GiB"]
    for name in _names(rows, "workload"):
        nodes = next(row["nodes"] for row in rows if row["workload"] == name)
        header.append(f"{name}, {nodes / 1e6:.3g} M nodes")
    return _with_source(header, _crossed(rows, "provider", "workload", _throughput), rows)


def run_details(folder: Path) -> str | None:
    """All that `run` measured, and why what failed did."""
    rows = of_run(folder)
    if not rows:
        return None
    header = (
        "batch",
        "provider",
        "step, ms: 5, 50, 95 % of the sustained",
        "of the first 20",
        "error of losses",
        "largest of a gradient",
        "first call, s",
    )
    done = [row for row in rows if "failed" not in row]
    lines = [
        (
            row["workload"],
            row["provider"],
            *(", ".join(f"{ms:.3g}" for ms in row[f"{name}_ms"]) for name in ("sustained", "cool")),
            f"{row['errors']['losses']:.1e}",
            f"{max(error for name, error in row['errors'].items() if name != 'losses'):.1e}",
            f"{row['first_call_s']:.2f}",
        )
        for row in done
    ]
    failed = [f"- {row['workload']}, {row['provider']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([_with_source(header, lines, rows), *(["", "Not measured:", "", *failed] if failed else [])])


def accuracy(folder: Path) -> str | None:
    """Posterior sums."""
    rows = of_accuracy(folder)
    if not rows:
        return None
    labelled = [row | {"lengths": f"T {row['T']}, U {row['U']}"} for row in rows]
    header = ["largest error of a frame's posterior sum", *_names(labelled, "lengths")]
    return _with_source(header, _crossed(labelled, "loss", "lengths", lambda row: f"{row['error']:.1e}"), rows)


def cpu(folder: Path) -> str | None:
    """Time and memory on the CPU."""
    rows = current("cpu", "cpu", "provider", "workload", "utterances", folder=folder)
    done = [row for row in rows if "failed" not in row]
    if not done:
        return None
    lines = [(row["provider"], f"{row['seconds']:.2f}", f"{row['memory_bytes'] / 2**20:,.0f}") for row in done]
    nodes, threads = done[0]["nodes"], done[0]["threads"]
    header = (f"{nodes:,} nodes, float32, {threads} threads", "step, s", "memory of the step, MiB")
    return _with_source(header, lines, done)


def model(folder: Path) -> str | None:
    """A whole training step."""
    rows = [row for row in current("run", "model", "loss_by", "batch", folder=folder) if "failed" not in row]
    if not rows:
        return None
    lines = [
        (
            row["loss_by"],
            str(row["batch"]),
            f"{row['step_ms']:.1f}",
            NONE if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
        )
        for row in rows
    ]
    header = (
        f"joint network and loss, {rows[0]['parameters'] / 1e6:.0f} M parameters",
        "batch",
        "step, ms",
        "peak GiB",
    )
    return _with_source(header, lines, rows)


def logits(folder: Path) -> str | None:
    """The loss of given logits beside its floors."""
    rows = current("run", "logits", "ragged", folder=folder)
    if not rows:
        return None
    lines = [
        (
            "ragged" if row["ragged"] else "full",
            f"{row['nodes']:,}",
            *(f"{row[name]:.3f}" for name in ("forward_ms", "read_ms", "backward_ms", "read_write_ms")),
            f"{row['forward_ms'] / row['read_ms']:.2f}, {row['backward_ms'] / row['read_write_ms']:.2f}",
        )
        for row in rows
    ]
    batch, T, U1, V = rows[0]["sizes"]
    header = (
        f"float16 logits [{batch}, {T}, {U1}, {V}]",
        "nodes",
        "forward, ms",
        "reading them",
        "backward in place, ms",
        "reading and writing them",
        "ratios",
    )
    return _with_source(header, lines, rows)


def stages(folder: Path) -> str | None:
    """Time of each stage of a step."""
    record = next((record for record in stored("stages", folder) if "stages" in record), None)
    if record is None:
        return None
    runs = [run for run in record["stages"] if "failed" not in run]
    columns = [
        f"{r['workload']}, {'fused, ' if r.get('fused') else ''}{r['tile_rows']} rows, "
        f"min_occupancy {r['min_occupancy']:g}"
        for r in runs
    ]
    header = ["stage, ms", *columns, "within reach (medium, dense)"]
    names = [name for name in runs[0]["stages_ms"] if any(run["stages_ms"][name] >= 0.005 for run in runs)]
    rows = [
        [name, *(f"{run['stages_ms'][name]:.2f}" for run in runs), str(WITHIN_REACH_MS.get(name, ""))] for name in names
    ]
    rows.append(["whole step", *(f"{run['step_ms']:.2f}" for run in runs), ""])
    return f"{_table(header, rows)}\n\n{_source(record['environment'])}"


def suite(folder: Path) -> str | None:
    """What passed on the GPU."""
    record = next((record for record in stored("suite", folder) if "sanitizer" in record), None)
    if record is None:
        return None
    counts = record["suite"]
    tools = ", ".join(f"{tool} exit {result['exit']}" for tool, result in record["sanitizer"].items())
    return (
        f"{counts.get('passed', 0)} tests passed, {counts.get('failed', 0)} failed in {counts['seconds']:.0f} s; "
        f"compute-sanitizer: {tools}. {_source(record['environment'])}"
    )


def first_call(folder: Path) -> str | None:
    """Seconds before the first result of a process."""
    for record in stored("first-call", folder):
        seconds = record["first_call_s"]
        return (
            f"First call of a process: {seconds['empty']:.1f} s with an empty kernel cache, {seconds['filled']:.2f} s "
            f"with a filled one. {_source(record['environment'])}"
        )
    return None


def occupancy(folder: Path) -> str | None:
    """Rows left, and distance to the dense gradients, by threshold."""
    rows = current("occupancy", "occupancy", "lattice", folder=folder)
    if not rows:
        return None
    thresholds = list(rows[0]["thresholds"])
    header = ["rows visited, distance to dense", *thresholds, "float32 from float64"]
    lines = [
        [
            row["lattice"],
            *(f"{row['thresholds'][t]['rows']:.1%}, {row['thresholds'][t]['error']:.1e}" for t in thresholds),
            f"{row['float32_error']:.1e}",
        ]
        for row in rows
    ]
    return _with_source(header, lines, rows)


def demo(data: str) -> Callable[[Path], str | None]:
    """What the demo printed."""

    def write(folder: Path) -> str | None:
        records = stored(f"demo-{data}", folder)
        return f"```\n{records[0]['printed'].strip()}\n```" if records else None

    return write


WRITERS: dict[str, Callable[[Path], str | None]] = {
    "run": run,
    "run-details": run_details,
    "accuracy": accuracy,
    "cpu": cpu,
    "model": model,
    "logits": logits,
    "stages": stages,
    "suite": suite,
    "first-call": first_call,
    "occupancy": occupancy,
    "demo-morse": demo("morse"),
    "demo-speech": demo("speech"),
}


def write(documents: Iterable[Path] = DOCUMENTS, folder: Path = FOLDER) -> None:
    """Rewrites every marked table for which there is a record."""
    tables = {name: writer(folder) for name, writer in WRITERS.items()}
    for document in documents:
        text = document.read_text(encoding="utf-8")
        for name, table in tables.items():
            if table is not None:
                marked = f"<!-- {name} -->\n{table}\n<!-- end -->"
                text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, t=marked: t, text, flags=re.DOTALL)
        document.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Rewrites README.md and bench/NOTES.md."""
    argparse.ArgumentParser(prog="bench report", description=__doc__).parse_args(arguments)
    write()
