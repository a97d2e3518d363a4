"""Runs the demo and keeps its result and picture: `python -m bench demo morse`, or `speech`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.records import Record
from flash_rnnt_cupy.demo import train

HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    """Writes a record and bench/figures/demo-<data>.png."""
    parser = argparse.ArgumentParser(prog="bench demo", description=__doc__)
    parser.add_argument("data", choices=("morse", "speech"))
    data = parser.parse_args(arguments).data
    figure = HERE / "figures" / f"demo-{data}.png"
    figure.parent.mkdir(exist_ok=True)
    record = Record(f"demo-{data}")  # of the checkout as it was before the picture changed
    record.put("printed", str(train.main(data=data, output=str(figure.relative_to(Path.cwd())))))
