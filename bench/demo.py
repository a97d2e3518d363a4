"""Runs the demo and keeps its result and picture: `python -m bench.demo morse`, or `speech`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench import environment
from flash_rnnt_cupy.demo import train

HERE = Path(__file__).parent


def main(data: str) -> None:
    """Writes bench/records/demo-<data>-<date>.json and bench/figures/demo-<data>.png."""
    figure = HERE / "figures" / f"demo-{data}.png"
    figure.parent.mkdir(exist_ok=True)
    result = train.main(data=data, output=str(figure.relative_to(Path.cwd())))
    record = {"environment": environment.describe(), "printed": str(result)}
    path = HERE / "records" / f"demo-{data}-{record['environment']['date'][:10]}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
