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


def steps(record: dict[str, Any]) -> str:
    """Throughput and memory of a training step."""
    rows = [
        (
            row["workload"],
            f"{row['nodes'] / 1e6:.2f} M",
            "all nodes" if row["min_occupancy"] == 0 else f"posterior above {row['min_occupancy']:g}",
            f"{row['samples_per_s']:,.0f}",
            f"{row['samples_per_s_cool']:,.0f}",
            f"{row['peak_gib']:.2f}",
        )
        for row in record["steps"]
    ]
    header = ("batch", "nodes", "backward visits", "samples/s, sustained", "first 20 steps", "peak GiB")
    return f"{_table(header, rows)}\n\n{_source(record)}"


def stages(record: dict[str, Any]) -> str:
    """Time of each stage of a step."""
    runs = record["stages"]
    header = [
        "stage, ms",
        *(f"{r['workload']}, {r['tile_rows']} rows, min_occupancy {r['min_occupancy']:g}" for r in runs),
        "within reach (medium, dense)",
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


WRITERS = {
    "steps": steps,
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
