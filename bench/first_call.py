"""Seconds of a process's first call, with an empty and a filled kernel cache: `python -m bench.first_call`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import environment

RECORDS = Path(__file__).with_name("records")
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


def main() -> None:
    """Measures both and writes a record."""
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
    record = {"environment": environment.describe(), "first_call_s": seconds}
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"first-call-{record['environment']['date'][:10]}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
