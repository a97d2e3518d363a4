"""Draws the figures of bench/figures/ from the newest records and the memory plan: `python -m bench plot`.

SVG and PNG, with a transparent ground and colours that are read on white and on dark.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from bench.records import FOLDER, HERE, stored
from bench.report import of_accuracy, of_run
from bench.stages import WITHIN_REACH_MS
from flash_rnnt_cupy import plan_memory

FIGURES = HERE / "figures"
OURS, FLOOR, INK = "#e8590c", "#1c9bd6", "#868e96"
PEERS = ("#1c9bd6", "#2f9e44", "#ae3ec9", "#c99a06", "#5c7cfa", "#c2255c", "#0ca678")
MARKERS = "osD^vP*X<>ph"
STYLE = {
    "savefig.transparent": True,
    "savefig.dpi": 150,
    "svg.hashsalt": "bench",  # the same figure, the same file
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), INK),
}
H, V = 640, 1024
FRAME_SECONDS, LABELS_PER_SECOND = 0.08, 2.8


def throughput(folder: Path) -> Figure | None:
    """Samples a second against peak memory, a panel a batch that others were measured on, too."""
    rows = [row for row in of_run(folder) if "failed" not in row and row["peak_gib"]]
    compared = {row["workload"] for row in rows if not _is_ours(row["provider"])}
    rows = [row for row in rows if row["workload"] in compared]
    if not rows:
        return None
    workloads, providers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("workload", "provider"))
    columns = 2 if len(workloads) == 4 else min(3, len(workloads))
    figure = Figure(figsize=(1 + 3.2 * columns, 1 + 2.9 * -(-len(workloads) // columns)), layout="constrained")
    panels = np.ravel(figure.subplots(-(-len(workloads) // columns), columns, squeeze=False))
    libraries = list(dict.fromkeys(name.partition(",")[0] for name in providers if not _is_ours(name)))
    for panel, workload in zip(panels, workloads, strict=False):
        for row in rows:
            if row["workload"] == workload:
                name = row["provider"]
                ours = _is_ours(name)
                colour = OURS if ours else PEERS[libraries.index(name.partition(",")[0]) % len(PEERS)]
                marker = MARKERS[providers.index(name) % len(MARKERS)]
                panel.plot(
                    row["peak_gib"],
                    row["samples_per_s"],
                    marker,
                    color=colour,
                    markersize=8 if ours else 5,
                    label=name,
                    zorder=3 if ours else 2,
                )
        panel.set(title=workload, xlabel="peak memory (GiB)", xscale="log", yscale="log")
        panel.set_ylabel("throughput (utterances / s)")
        panel.margins(x=0.15)
        for axis in (panel.xaxis, panel.yaxis):
            _few_ticks(axis)
    for panel in panels[len(workloads) :]:
        panel.set_axis_off()
    seen = {}
    for panel in panels:
        handles, names = panel.get_legend_handles_labels()
        seen |= dict(zip(names, handles, strict=True))
    figure.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=3)
    return figure


def _few_ticks(axis: Axis) -> None:
    """1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def stages(folder: Path) -> Figure | None:
    """Time of each stage beside what is within reach."""
    runs = [run for record in stored("stages", folder)[:1] for run in record.get("stages", []) if "failed" not in run]
    runs = [run for run in runs if run["workload"] == "medium" and run["min_occupancy"] == 0] or runs
    if not runs:
        return None
    times = {name: ms for name, ms in runs[0]["stages_ms"].items() if ms >= 0.005}
    figure = Figure(figsize=(7, 0.8 + 0.28 * len(times)), layout="constrained")
    axes: Axes = figure.subplots()
    at = np.arange(len(times))
    axes.barh(at + 0.2, list(times.values()), 0.38, color=OURS, label="measured")
    axes.barh(at - 0.2, [WITHIN_REACH_MS.get(name, 0.0) for name in times], 0.38, color=FLOOR, label="within reach")
    axes.set_yticks(at, list(times))
    axes.invert_yaxis()
    axes.set(xlabel="time in a training step (ms)", title=f"{runs[0]['workload']}, all nodes in backward")
    axes.grid(visible=False, axis="y")
    axes.legend()
    return figure


def memory(folder: Path) -> Figure:
    """Peak memory against the length of an utterance, as planned for an H200."""
    del folder  # nothing measured
    minutes = np.geomspace(0.1, 120, 25)
    lengths = [(int(60 * m / FRAME_SECONDS), int(60 * m * LABELS_PER_SECOND)) for m in minutes]

    def peaks(tile_rows: int | str | None) -> list[float]:
        plans = (plan_memory([T], [U], H, V, dtype="float16", tile_rows=tile_rows, backend="cuda") for T, U in lengths)
        return [plan.peak_bytes / 2**30 for plan in plans]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Axes = figure.subplots()
    nodes = np.array([T * (U + 1) for T, U in lengths], float)
    dense = 2 * nodes * (H + V) * 2 / 2**30  # hidden states and logits and their gradients
    axes.loglog(minutes, dense, "--", color=INK, label="dense joint network (hidden states, logits, gradients)")
    axes.loglog(minutes, peaks(None), color=FLOOR, label="ours, untiled")
    axes.loglog(minutes, peaks("auto"), color=OURS, linewidth=2.5, label="ours, default")
    axes.axhline(141e9 / 2**30, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("one H200", (minutes[0], 141e9 / 2**30), xytext=(0, 3), textcoords="offset points")
    axes.set(xlabel="audio of one utterance (minutes)", ylabel="peak memory (GiB)", title="joint network and loss")
    axes.legend()
    return figure


def accuracy(folder: Path) -> Figure | None:
    """Error of the posterior sums against the length of the lattice."""
    rows = [row for row in of_accuracy(folder) if "failed" not in row]
    if not rows:
        return None
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes: Axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(row["loss"] for row in rows)):
        points = sorted((row["T"] + row["U"], row["error"]) for row in rows if row["loss"] == name)
        ours = _is_ours(name)
        axes.loglog(
            *zip(*points, strict=True),
            marker=MARKERS[i],
            color=OURS if ours else PEERS[i % len(PEERS)],
            linewidth=2.5 if ours else 1.2,
            label=name,
        )
    axes.set(xlabel="lattice diagonals, T + U", ylabel="largest error of a posterior sum", title="uniform scores")
    _few_ticks(axes.xaxis)
    axes.legend()
    return figure


DRAWN: dict[str, Callable[[Path], Figure | None]] = {
    "throughput": throughput,
    "stages": stages,
    "memory": memory,
    "accuracy": accuracy,
}


def draw(folder: Path = FOLDER, figures: Path = FIGURES) -> list[Path]:
    """Every figure for which there is a record."""
    figures.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, drawn in DRAWN.items():
            figure = drawn(folder)
            if figure is not None:
                figure.savefig(figures / f"{name}.svg", metadata={"Date": None})
                figure.savefig(figures / f"{name}.png")
                paths += [figures / f"{name}.svg", figures / f"{name}.png"]
    return paths


def main(arguments: list[str]) -> None:
    """Draws all."""
    argparse.ArgumentParser(prog="bench plot", description=__doc__).parse_args(arguments)
    for path in draw():
        print(path)
