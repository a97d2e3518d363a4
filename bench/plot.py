"""The figures of README.md from the newest records: `python -m bench.plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from bench import workloads
from bench.report import newest
from flash_rnnt_cupy import plan_memory

FIGURES = Path(__file__).with_name("figures")
INK = "#808080"  # readable on white and on dark
OURS, OTHERS = "#2b7fd4", ("#d4742b", "#3a9a5b", "#a05bc0", "#b59a2a", "#c04a6a", "#4aa6a6")
FRAMES_A_SECOND, LABELS_A_SECOND = 12.5, 3.5
STYLE = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "flash_rnnt_cupy",
}


def frontier(record: dict[str, Any], folder: Path) -> Path:
    """Throughput against peak memory, a panel a batch."""
    rows = [row for row in record["run"] if "failed" not in row and "peak_gib" in row]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    figure, axes = plt.subplots(1, len(batches), figsize=(4.2 * len(batches), 4), squeeze=False)
    others = list(dict.fromkeys(_library(row) for row in rows if _library(row) != "ours"))
    for axis, batch in zip(axes[0], batches, strict=True):
        for library in ["ours", *others]:
            mine = [row for row in rows if (row["batch"], _library(row)) == (batch, library)]
            points = [(row["peak_gib"], row["samples_per_s"]) for row in mine]
            if points:
                colour = OURS if library == "ours" else OTHERS[others.index(library) % len(OTHERS)]
                axis.plot(*zip(*sorted(points), strict=True), "o", color=colour, label=library)
        axis.set(xscale="log", yscale="log", title=batch, xlabel="peak memory, GiB", ylabel="samples a second")
    axes[0][0].legend()
    return _save(figure, folder / "frontier")


def _library(row: dict[str, Any]) -> str:
    return str(row["provider"]).partition(",")[0]


def stages(record: dict[str, Any], folder: Path) -> Path:
    """Milliseconds of each stage of a dense step, with and without fused kernels."""
    runs = [run for run in record["stages"] if run["min_occupancy"] == 0][::-1]
    names = [name for name in runs[0]["stages_ms"] if any(run["stages_ms"][name] > 0.02 for run in runs)]
    figure, axis = plt.subplots(figsize=(9, 3.2))
    left = np.zeros(len(runs))
    labels = [f"{run['backend']}, {run['tile_rows']} rows" for run in runs]
    for i, name in enumerate(names):
        widths = np.array([run["stages_ms"][name] for run in runs])
        axis.barh(labels, widths, left=left, label=name, color=plt.get_cmap("tab20")(i))
        left += widths
    axis.set_xlabel(f"milliseconds of a dense step, {runs[0]['workload']}")
    axis.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return _save(figure, folder / "stages")


def memory(folder: Path) -> Path:
    """Planned peak of a step against the length of one utterance."""
    seconds = np.array([5, 10, 20, 60, 180, 600, 1800, 3600])
    sizes = {"joint_width": workloads.WIDTH, "vocabulary": workloads.VOCABULARY, "dtype": "float16"}
    accounts = [
        plan_memory([int(s * FRAMES_A_SECOND)], [int(s * LABELS_A_SECOND)], backend="cuda", **sizes) for s in seconds
    ]
    figure, axis = plt.subplots(figsize=(6, 4))
    axis.plot(seconds, [a.peak_bytes / 2**30 for a in accounts], "o-", color=OURS, label="ours, tiled")
    axis.plot(seconds, [a.dense_bytes / 2**30 for a in accounts], "s--", color=OTHERS[0], label="scores alone, dense")
    axis.set(xscale="log", yscale="log", xlabel="seconds of audio, one utterance", ylabel="GiB")
    axis.legend()
    return _save(figure, folder / "memory")


def _save(figure: Any, path: Path) -> Path:
    """As SVG; the other half of the pair is the transparent ground."""
    path = path.with_suffix(".svg")
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path


def main(folder: Path = FIGURES) -> list[Path]:
    """Draws what there are records for."""
    folder.mkdir(exist_ok=True)
    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        drawn = [memory(folder)]
        if record := newest("run"):
            drawn.append(frontier(record, folder))
        if record := newest("stages"):
            drawn.append(stages(record, folder))
    print("\n".join(map(str, drawn)))
    return drawn


if __name__ == "__main__":
    main()
