"""The test suite on a GPU, and the kernels under compute-sanitizer: `python -m bench suite`. Writes a record."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.records import Record

ROOT = Path(__file__).parent.parent
# Not initcheck: it does not see what cuBLAS writes through the bulk copy engine, and calls every logit uninitialised.
SANITIZERS = ("memcheck", "racecheck", "synccheck")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda and not shim"]
WORKLOAD = [sys.executable, "-m", "tests.sanitizer_workload"]


def _run(command: list[str]) -> tuple[int, str, float]:
    """Exit status, output, seconds."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


def _suite(arguments: list[str]) -> dict[str, Any]:
    status, output, seconds = _run([*PYTEST, *arguments])
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output.splitlines()[-1])}
    print(output[-12_000:])
    return {"exit": status, "seconds": round(seconds, 1), **counts}


def _sanitizer(tool: str) -> dict[str, Any]:
    path = shutil.which("compute-sanitizer")
    if path is None:
        return {"exit": None, "summary": "compute-sanitizer is not installed"}
    status, output, seconds = _run([path, "--tool", tool, "--error-exitcode", "1", *WORKLOAD])
    summary = [line for line in output.splitlines() if "SUMMARY" in line or "workload done" in line]
    print(f"{tool}: exit {status}, {' '.join(summary)}")
    if status:
        print(output[-3000:])
    return {"exit": status, "seconds": round(seconds, 1), "summary": summary}


def main(arguments: list[str]) -> int:
    """Runs all; further arguments go to pytest. Returns 0 if everything passed."""
    record, suite = Record("suite"), _suite(arguments)
    record.put("suite", suite)
    sanitizer = {tool: _sanitizer(tool) for tool in SANITIZERS}
    record.put("sanitizer", sanitizer)
    return 1 if suite["exit"] or any(result["exit"] for result in sanitizer.values()) else 0
