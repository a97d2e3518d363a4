"""The dropout generator under TestU01 and chi-square tests of drop patterns: `python -m bench rng --testu01 DIR`.

DIR holds include/ and lib/ of an installed TestU01; the tests are compiled from `rng.c`, which says what is tested.
The record is rewritten after every test: what was cut short shows how far it came. Called again on the same day it
goes on: runs that the record has whole are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.records import Record

HERE = Path(__file__).parent
SOURCE = HERE / "rng.c"
ORDERS = ("columns", "nodes", "lanes", "column", "wide", "seeds", "high")
VIEWS = ("words", "low", "high", "drops", "words_reversed", "low_reversed", "high_reversed")
TESTS = {"patterns": 6, "smallcrush": 10, "crush": 96}
SCRAMBLES = ("product", "folded", "added")
RUNS = (
    *(("smallcrush", scramble, order, "words") for scramble in SCRAMBLES for order in ORDERS),
    *(("patterns", scramble, order, "words") for scramble in SCRAMBLES for order in ORDERS),
    *(("smallcrush", scramble, order, view) for scramble in SCRAMBLES for order in ORDERS[:3] for view in VIEWS[1:]),
    ("crush", "added", "columns", "words"),
    ("crush", "added", "nodes", "words"),
)
KEY = ("battery", "scramble", "order", "view")
NOTABLE, FAILURE = 1e-3, 1e-10  # two-sided; beyond the second TestU01's authors speak of a clear failure


def compile_program(directory: Path, *flags: str) -> Path:
    """The program of `rng.c`."""
    program = directory / "rng"
    command = ["cc", "-std=gnu11", "-O3", "-Wall", "-Wextra", str(SOURCE), "-o", str(program), *flags]
    subprocess.run(command, check=True)
    return program


def key(run: dict[str, Any]) -> tuple[str, ...]:
    """What a run is of."""
    return tuple(run[name] for name in KEY)


def summarise(run: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """What the tests so far say."""
    beyond = [min(result["p"], 1 - result["p"]) for result in results]
    run["tests"] = f"{len({result['test'].split()[0] for result in results})} of {TESTS[run['battery']]}"
    if run["battery"] == "patterns":
        run["tests"] = f"{len(results)} of {TESTS['patterns']}"
    run["statistics"] = len(results)
    run["outside"] = [result for result, p in zip(results, beyond, strict=True) if p < NOTABLE]
    run["verdict"] = "fails" if min(beyond) < FAILURE else "suspect" if min(beyond) < 1e-4 else "passes"


def main(arguments: list[str]) -> None:
    """Runs everything and keeps the record."""
    parser = argparse.ArgumentParser(prog="bench rng", description=__doc__)
    parser.add_argument("--testu01", type=Path, required=True)
    testu01 = parser.parse_args(arguments).testu01
    record = Record("rng")
    record.put("tool", "TestU01 1.2.3")
    whole = [key(run) for run in record.rows("runs") if run["tests"] == "{0} of {0}".format(TESTS[run["battery"]])]
    libraries = [f"-L{testu01}/lib", "-ltestu01", "-lprobdist", "-lmylib", "-lm"]
    with tempfile.TemporaryDirectory() as directory:
        program = compile_program(Path(directory), "-march=native", "-DTESTU01", f"-I{testu01}/include", *libraries)
        for battery, scramble, order, view in RUNS:
            if (battery, scramble, order, view) in whole:
                continue
            begin = time.perf_counter()
            run: dict[str, Any] = {"battery": battery, "scramble": scramble, "order": order, "view": view}
            results: list[dict[str, Any]] = []
            command = [str(program), battery, scramble, order, view]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout
                for line in process.stdout:
                    if not line.startswith("{"):
                        continue  # TestU01's own words
                    results.append(json.loads(line))
                    summarise(run, results)
                    run["seconds"] = round(time.perf_counter() - begin, 1)
                    record.add("runs", run, *KEY)
            if process.returncode:
                raise RuntimeError(f"{' '.join(command)} failed")
            print(battery, scramble, order, view, run["verdict"], f"{run['seconds']} s", flush=True)
