"""How a step is timed, on a GPU or on the CPU."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

COOL, WARM_UP, SUSTAINED = 20, 30, 100  # runs
PAUSE = 1.0  # seconds before the cool ones


def device() -> str:
    """Where measurements run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def mark() -> Any:
    """A point in time: of the device's current stream, or of this process."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Milliseconds; waits for ``end``."""
    if not torch.cuda.is_available():
        return (end - begin) * 1e3
    end.synchronize()
    return begin.elapsed_time(end)


def release() -> None:
    """Gives back what earlier rows left behind, and starts the peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # of PyTorch's products: else a row pays for what ran before it
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Largest amount that PyTorch had allocated since `release`; None on the CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def times(step: Callable[[], Any], n: int, seconds: float, least: int) -> list[float]:
    """Milliseconds of n runs, or of as many as fit in the seconds, but at least so many.

    Runs follow each other without waiting, as in training: the host prepares one while the device does the last.
    """
    marks, begin = [mark()], time.monotonic()
    while len(marks) <= n and (len(marks) <= least or time.monotonic() - begin < seconds):
        step()
        marks.append(mark())
    return [between(*pair) for pair in itertools.pairwise(marks)]


def timed(step: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Cool: the first 20 runs after a pause; sustained: runs 51-150; 5, 50 and 95 percentiles in milliseconds.

    What takes longer than ``seconds`` a run is run once for each.
    """
    once = times(step, 1, 0, 1)[0]
    least = 5 if once < 1e3 * seconds else 1
    release()
    time.sleep(PAUSE)
    cool = times(step, COOL, seconds / 3, least)
    times(step, WARM_UP, seconds / 3, 0)
    sustained = times(step, SUSTAINED, seconds, least)
    percentiles = {
        f"{name}_ms": [float(np.percentile(runs, q)) for q in (5, 50, 95)]
        for name, runs in (("cool", cool), ("sustained", sustained))
    }
    return {**percentiles, "runs": [len(cool), len(sustained)], "peak_gib": peak_gib()}


def reason(error: Exception) -> str:
    """An exception in one line, for a row."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0][:200] if words else ''}"
