"""What leaving nodes out of backward costs in accuracy and saves in rows: `python -m bench occupancy [states.npz]`.

Relative L2 distance of the gradients to the dense ones, the largest over the inputs, in float32 on the CPU, beside
what float32 itself is off from float64. Lattices: random states, a flat one, and those of a trained model if given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import flash_rnnt_cupy as frc
from bench.records import Record
from bench.workloads import VOCABULARY, WIDTH

THRESHOLDS = (1e-6, 1e-7, 1e-8)
NAMES = ("encoder", "predictor", "weight", "bias")
TRAINED = (0, 7, 16)  # utterances of the file


def _lattices(states: Path | None) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Name; encoder, predictor, weight, bias and targets of one utterance."""
    random = np.random.default_rng(0)
    if states is not None:
        stored = np.load(states)
        for i in TRAINED:
            arrays = [stored[f"enc{i:02d}"][None], stored[f"pred{i:02d}"][None], stored["weight"], stored["bias"]]
            yield f"trained, utterance {i}", [*arrays, stored[f"tok{i:02d}"][None]]
    for T, U in ((190, 58), (242, 102)):
        shapes, bound = ((1, T, WIDTH), (1, U + 1, WIDTH)), WIDTH**-0.5
        layer = [random.uniform(-bound, bound, shape) for shape in ((VOCABULARY, WIDTH), (VOCABULARY,))]
        yield f"random, T {T}, U {U}", [*map(random.standard_normal, shapes), *layer, random.integers(1, 999, (1, U))]
    T, U, H, V = 150, 60, 8, 64
    flat = [np.zeros(shape) for shape in ((1, T, H), (1, U + 1, H), (V, H), (V,))]
    yield f"flat, T {T}, U {U}", [*flat, random.integers(1, V, (1, U))]


def _gradients(arrays: list[np.ndarray], dtype: str, min_occupancy: float) -> frc.Gradients:
    states = [array.astype(dtype) for array in arrays[:4]]
    lengths = np.array([states[0].shape[1]]), np.array([states[1].shape[1] - 1])
    options: dict[str, Any] = {"blank": 0, "reduction": "sum", "min_occupancy": min_occupancy}
    return frc.joint_rnnt_loss_and_grad(*states, arrays[4], *lengths, **options)[1]


def _distance(ours: frc.Gradients, truth: frc.Gradients) -> float:
    pairs = [(getattr(ours, name), getattr(truth, name)) for name in NAMES]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


def main(arguments: list[str]) -> None:
    """Measures all lattices, prints and writes a record."""
    parser = argparse.ArgumentParser(prog="bench occupancy", description=__doc__)
    parser.add_argument("states", nargs="?", type=Path, help="npz file of a trained model's states")
    record = Record("occupancy")
    for name, arrays in _lattices(parser.parse_args(arguments).states):
        dense = _gradients(arrays, "float32", 0.0)
        row = {"lattice": name, "float32_error": _distance(dense, _gradients(arrays, "float64", 0.0)), "thresholds": {}}
        for threshold in THRESHOLDS:
            active = _gradients(arrays, "float32", threshold)
            kept, error = active.rows / active.nodes, _distance(active, dense)
            row["thresholds"][f"{threshold:g}"] = {"rows": kept, "error": error, "dropped": active.dropped_posterior}
        record.add("occupancy", row, "lattice")
        print(json.dumps(row))
