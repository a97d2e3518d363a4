"""From a problem and a device's facts to tiles and a memory account, before anything is allocated.

Pure functions of sizes: no arrays but lengths, no CuPy, the same answer on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flash_rnnt_cupy.errors import PlanError
from flash_rnnt_cupy.plan.device import DeviceFacts, accumulator_dtype
from flash_rnnt_cupy.plan.memory import Life, MemoryAccount, Part
from flash_rnnt_cupy.plan.packing import Packing, Rectangle, Rows
from flash_rnnt_cupy.plan.tiling import Tile, cut_tiles
from flash_rnnt_cupy.problem import ITEMSIZE, Form, Problem

__all__ = [
    "GRADIENTS",
    "DeviceFacts",
    "Life",
    "MemoryAccount",
    "Packing",
    "Part",
    "Plan",
    "Rectangle",
    "Rows",
    "Tile",
    "TileRows",
    "accumulator_dtype",
    "make_plan",
]

MIN_AUTO_ROWS = 128  # fewer rows leave the matrix products too little to do; multiples of it suit them
GRADIENTS = ("encoder", "predictor", "weight", "bias", "logits")
TileRows = int | None | Literal["auto"]


@dataclass(frozen=True, eq=False)
class Plan:
    """How a problem is worked: all its rows, their tiles, and the memory account.

    ``untiled``: one tile for everything whose hidden states and logits are kept for backward, which then
    recomputes nothing and leaves nothing out. Without ``against_fused`` reasons the device's fused kernels do
    the work of a tile: forward has no tiles and keeps nothing, so that no plan is untiled.
    """

    problem: Problem
    facts: DeviceFacts
    rows: Rows
    tile_rows: int
    untiled: bool
    against_fused: tuple[str, ...]
    account: MemoryAccount

    @property
    def fused(self) -> bool:
        """Whether hidden states and logits never leave the chip in forward."""
        return not self.against_fused

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of forward without fused kernels, over all nodes."""
        return self.cut(self.rows)

    @property
    def whole(self) -> Tile:
        """All nodes as one tile."""
        return Tile(0, self.rows.n_rows, 0, self.rows.packing.n_frames)

    def cut(self, rows: Rows) -> tuple[Tile, ...]:
        """Tiles over ``rows``."""
        return cut_tiles(rows.row_start_f, self.tile_rows)

    def __str__(self) -> str:
        """One line."""
        mode = "untiled" if self.untiled else f"{self.tile_rows} rows a tile"
        return f"{self.problem} on {self.facts.name}: N={self.rows.n_rows}, {mode}, {_kernels(self.against_fused)}"


def make_plan(
    problem: Problem,
    facts: DeviceFacts,
    tile_rows: TileRows = "auto",
    workspace_bytes: int | None = None,
    gradients: frozenset[str] = frozenset(GRADIENTS),
) -> Plan:
    """Chooses the tile size and adds up the memory.

    ``gradients`` names what backward will be asked for; empty means that there is no backward. Raises
    PlanError where a tile does not fit ``workspace_bytes``.
    """
    rows = Packing(problem.frames_b, problem.labels_b).all_rows()
    against_fused = facts.against_fused(problem)
    fused = not against_fused
    n_tile = _tile_rows(problem, facts, rows.n_rows, tile_rows, workspace_bytes, fused)
    untiled = tile_rows is None and problem.form is Form.JOINT and not fused
    parts = _parts(problem, facts, rows.packing, n_tile, untiled, fused, gradients)
    dense = rows.n_rows * problem.vocabulary * ITEMSIZE[problem.dtype]
    title = f"{problem} on {facts.name}, tiles of {n_tile} rows, {_kernels(against_fused)}"
    return Plan(problem, facts, rows, n_tile, untiled, against_fused, MemoryAccount(title, tuple(parts), dense))


def _kernels(against_fused: tuple[str, ...]) -> str:
    return f"no fused kernels ({'; '.join(against_fused)})" if against_fused else "fused kernels"


def _tile_rows(
    problem: Problem,
    facts: DeviceFacts,
    n_rows: int,
    tile_rows: TileRows,
    workspace_bytes: int | None,
    fused: bool,
) -> int:
    """Rows a tile; the logits form works in place on the caller's scores, in one tile."""
    if problem.form is not Form.JOINT:
        return max(n_rows, 1)
    row_bytes = sum(columns * ITEMSIZE[dtype] for columns, dtype in _tile_buffers(problem, facts).values())
    fitting = n_rows if workspace_bytes is None else workspace_bytes // row_bytes
    if tile_rows == "auto":
        hoped = facts.tile_bytes // row_bytes
        multiple = facts.row_multiple if fused and hoped >= facts.row_multiple else MIN_AUTO_ROWS
        aligned = hoped // multiple * multiple
        wanted = min(max(aligned, MIN_AUTO_ROWS), max(n_rows, 1))
        rows = min(wanted, fitting) if workspace_bytes is not None else wanted
        least = 1
    else:
        rows = least = max(n_rows, 1) if tile_rows is None else min(tile_rows, max(n_rows, 1))
    if workspace_bytes is not None and fitting < least:
        raise PlanError(
            "workspace_bytes",
            f"at least {least * row_bytes} bytes for {least} row(s) of {row_bytes} bytes",
            workspace_bytes,
            remedy="give more bytes or a smaller tile_rows",
        )
    return rows


def _tile_buffers(problem: Problem, facts: DeviceFacts) -> dict[str, tuple[int, str]]:
    """Columns and dtype of each buffer that has the rows of a tile."""
    work = facts.workspace_dtype(problem.dtype)
    buffers = {
        "hidden": (problem.joint_width, work),
        "logits": (-(-problem.vocabulary // facts.logits_multiple) * facts.logits_multiple, work),
    }
    if problem.options.activation == "relu" or problem.options.drop_below > 0:
        buffers["active"] = (-(-problem.joint_width // 8), "uint8")
    return buffers


def _parts(
    problem: Problem,
    facts: DeviceFacts,
    packing: Packing,
    n_tile: int,
    untiled: bool,
    fused: bool,
    gradients: frozenset[str],
) -> list[Part]:
    """Every buffer of the call, in the order in which it is needed."""
    n_nodes, vocabulary, width = packing.n_nodes, problem.vocabulary, problem.joint_width
    lattice_dtype = accumulator_dtype(problem.dtype)
    work = facts.workspace_dtype(problem.dtype)
    joint = problem.form is Form.JOINT

    parts = [Part(name, shape, problem.dtype_of(name), Life.GIVEN) for name, shape in problem.shapes.items()]
    parts += [
        Part("scores", (len(problem.topology.columns), n_nodes), lattice_dtype, Life.SAVED),
        Part("log likelihoods", (problem.batch,), "float64", Life.SAVED),
    ]
    if gradients:
        parts.append(Part("normalizers", (len(problem.topology.groups), n_nodes), lattice_dtype, Life.SAVED))
        parts.append(Part("alpha", facts.alpha_shape(problem, packing), "float64", Life.SAVED))
    if joint and problem.parameter_dtype != work and (gradients or not fused):
        parts.append(Part("weight as multiplied", (vocabulary, width), work, Life.SAVED))
    if "bias" in problem.shapes and problem.parameter_dtype != lattice_dtype and not fused:
        parts.append(Part("bias as added", (vocabulary,), lattice_dtype, Life.SAVED))
    if joint:
        life = Life.SAVED if untiled else Life.BACKWARD if fused else Life.TILE
        for name, (columns, dtype) in _tile_buffers(problem, facts).items():
            parts.append(Part(f"tile {name}", (n_tile, columns), dtype, life))
    parts += facts.scratch(problem, packing, gradients)
    for name, shape in problem.shapes.items():
        if name not in gradients:
            continue
        dtype = problem.dtype_of(name)
        parts.append(Part(f"gradient of {name}", shape, dtype, Life.BACKWARD))
        if dtype != lattice_dtype and name in facts.sums_apart:
            parts.append(Part(f"sums of {name}", shape, lattice_dtype, Life.BACKWARD))
    return parts
