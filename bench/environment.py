"""What a figure must carry to mean anything: commit, device, versions, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from flash_rnnt_cupy import backends

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "nvidia-cuda-nvrtc", "nvidia-cublas")


def describe() -> dict[str, Any]:
    """Of this process, for a record."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": versions,
        "device": _device(),
    }


def _commit() -> str:
    """Of the checkout, with + where files differ from it; BENCH_COMMIT names it for a copy without history."""
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


def _device() -> dict[str, Any]:
    if backends.unavailable("cuda"):
        return {"name": f"CPU {platform.machine()}, {os.cpu_count()} cores"}
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "name": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "driver": cupy.cuda.runtime.driverGetVersion(),
    }
