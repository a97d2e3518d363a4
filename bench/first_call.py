"""Seconds of a process's first call, with an empty and a filled kernel cache: `python -m bench first-call`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from bench.records import Record

CALL = """
import time, cupy, numpy as np
cupy.zeros(1).get()
states = [cupy.zeros(shape, "float16") for shape in ((1, 50, 640), (1, 11, 640), (1024, 640), (1024,))]
import flash_rnnt_cupy
begin = time.perf_counter()
flash_rnnt_cupy.joint_rnnt_loss_and_grad(*states, np.zeros((1, 10), int), [50], [10])
cupy.cuda.Device().synchronize()
print(time.perf_counter() - begin)
"""


def main(arguments: list[str]) -> None:
    """Measures both and writes a record."""
    argparse.ArgumentParser(prog="bench first-call", description=__doc__).parse_args(arguments)
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "filled"):
            done = subprocess.run(
                [sys.executable, "-c", CALL],
                env={**os.environ, "FLASH_RNNT_CACHE": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            seconds[state] = float(done.stdout)
            print(f"first call with an {state} cache: {seconds[state]:.2f} s")
    Record("first-call").put("first_call_s", seconds)
