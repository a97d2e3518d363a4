"""Writes the tables of README.md and bench/NOTES.md from the newest records: `python -m bench.report`.

A table stands between `<!-- name -->` and `<!-- end -->`, and is never edited by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.stages import WITHIN_REACH_MS

HERE = Path(__file__).parent
RECORDS = HERE / "records"
DOCUMENTS = (HERE.parent / "README.md", HERE / "NOTES.md")


def newest(kind: str) -> dict[str, Any] | None:
    """The newest record of that kind."""
    paths = sorted(RECORDS.glob(f"{kind}-*.json"))
    return json.loads(paths[-1].read_text(encoding="utf-8")) if paths else None


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _source(record: dict[str, Any]) -> str:
    where = record["environment"]
    versions = where["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "cupy-cuda13x") if name in versions)
    return f"{where['device']['name']}, {where['date'][:10]}, commit {where['commit'][:9]}, {named}."


def run(record: dict[str, Any]) -> str:
    """Samples a second @ peak GiB of every provider on every batch."""
    rows = record["run"]
    nodes = {row["batch"]: row["nodes"] for row in rows}
    cells = {(row["provider"], row["batch"]): _cell(row) for row in rows}
    names = list(dict.fromkeys(row["provider"] for row in rows if "failed" not in row))
    header = ("samples/s @ peak GiB", *(f"{batch}, {n / 1e6:.2f} M nodes" for batch, n in nodes.items()))
    table = _table(header, ((name, *(cells.get((name, batch), "-") for batch in nodes)) for name in names))
    worst = max(row["errors"]["loss"] for row in rows if "failed" not in row)
    return f"{table}\n\nLosses on a cut of each batch are within {worst:.0e} of float64's. {_source(record)}"


def _cell(row: dict[str, Any]) -> str:
    if "failed" in row:
        return "out of memory" if "OutOfMemory" in row["failed"] else "-"
    return f"{row['samples_per_s']:,.0f} @ {row['peak_gib']:.2f}"


def stages(record: dict[str, Any]) -> str:
    """Time of each stage of a step."""
    runs = record["stages"]
    header = [
        "stage, ms",
        *(f"{r['backend']}, {r['tile_rows']} rows, min_occupancy {r['min_occupancy']:g}" for r in runs),
        "within reach (dense)",
    ]
    names = [name for name in runs[0]["stages_ms"] if any(run["stages_ms"][name] >= 0.005 for run in runs)]
    rows = [
        [name, *(f"{run['stages_ms'][name]:.2f}" for run in runs), str(WITHIN_REACH_MS.get(name, ""))] for name in names
    ]
    rows.append(["whole step", *(f"{run['step_ms']:.2f}" for run in runs), ""])
    return f"{_table(header, rows)}\n\n{_source(record)}"


def gpu_suite(record: dict[str, Any]) -> str:
    """What passed on the GPU."""
    suite = record["suite"]
    tools = ", ".join(f"{tool} exit {result['exit']}" for tool, result in record["sanitizer"].items())
    return (
        f"{suite.get('passed', 0)} tests passed, {suite.get('failed', 0)} failed in {suite['seconds']:.0f} s; "
        f"compute-sanitizer: {tools}. {_source(record)}"
    )


def first_call(record: dict[str, Any]) -> str:
    """Seconds before the first result of a process."""
    seconds = record["first_call_s"]
    return (
        f"First call of a process: {seconds['empty']:.1f} s with an empty kernel cache, {seconds['filled']:.2f} s with "
        f"a filled one. {_source(record)}"
    )


def demo(record: dict[str, Any]) -> str:
    """What the demo printed."""
    return f"```\n{record['printed'].strip()}\n```"


def occupancy(record: dict[str, Any]) -> str:
    """Accuracy and rows of each threshold."""
    thresholds = list(record["occupancy"][0]["thresholds"])
    header = ["float32, rows visited and distance to dense", *thresholds, "float32 against float64"]
    rows = [
        [
            row["lattice"],
            *(f"{100 * at['rows']:.1f} %, {at['error']:.1e}" for at in row["thresholds"].values()),
            f"{row['float32_error']:.1e}",
        ]
        for row in record["occupancy"]
    ]
    return f"{_table(header, rows)}\n\n{record['environment']['device']['name']}, {record['environment']['date'][:10]}."


WRITERS = {
    "run": run,
    "occupancy": occupancy,
    "stages": stages,
    "gpu-suite": gpu_suite,
    "first-call": first_call,
    "demo-morse": demo,
    "demo-speech": demo,
}


def main() -> None:
    """Rewrites every marked table for which there is a record."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for name, write in WRITERS.items():
            record = newest(name)
            if record is not None:
                table = f"<!-- {name} -->\n{write(record)}\n<!-- end -->"
                text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, t=table: t, text, flags=re.DOTALL)
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
