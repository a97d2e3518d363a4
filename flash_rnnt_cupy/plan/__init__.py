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
    recomputes nothing and leaves nothing out.
    """

    problem: Problem
    facts: DeviceFacts
    rows: Rows
    tile_rows: int
    untiled: bool
    account: MemoryAccount

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of forward, over all nodes."""
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
        return f"{self.problem} on {self.facts.name}: N={self.rows.n_rows}, {mode}"


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
    n_tile = _tile_rows(problem, facts, rows.n_rows, tile_rows, workspace_bytes)
    untiled = tile_rows is None and problem.form is Form.JOINT
    parts = _parts(problem, facts, rows.packing, n_tile, untiled, gradients)
    dense = rows.n_rows * problem.vocabulary * ITEMSIZE[problem.dtype]
    account = MemoryAccount(f"{problem} on {facts.name}, tiles of {n_tile} rows", tuple(parts), dense)
    return Plan(problem, facts, rows, n_tile, untiled, account)


def _tile_rows(
    problem: Problem, facts: DeviceFacts, n_rows: int, tile_rows: TileRows, workspace_bytes: int | None
) -> int:
    """Rows a tile; the logits form works in place on the caller's scores, in one tile."""
    if problem.form is not Form.JOINT:
        return max(n_rows, 1)
    row_bytes = (problem.joint_width + problem.vocabulary) * ITEMSIZE[facts.workspace_dtype(problem.dtype)]
    fitting = n_rows if workspace_bytes is None else workspace_bytes // row_bytes
    if tile_rows == "auto":
        aligned = facts.tile_bytes // row_bytes // MIN_AUTO_ROWS * MIN_AUTO_ROWS
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


def _parts(
    problem: Problem,
    facts: DeviceFacts,
    packing: Packing,
    n_tile: int,
    untiled: bool,
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
    if joint and problem.parameter_dtype != work:
        parts.append(Part("weight as multiplied", (vocabulary, width), work, Life.SAVED))
    if "bias" in problem.shapes and problem.parameter_dtype != lattice_dtype:
        parts.append(Part("bias as added", (vocabulary,), lattice_dtype, Life.SAVED))
    if joint:
        life = Life.SAVED if untiled else Life.TILE
        parts.append(Part("tile hidden", (n_tile, width), work, life))
        parts.append(Part("tile logits", (n_tile, vocabulary), work, life))
    parts += facts.scratch(problem, packing, gradients)
    for name, shape in problem.shapes.items():
        if name not in gradients:
            continue
        dtype = problem.dtype_of(name)
        parts.append(Part(f"gradient of {name}", shape, dtype, Life.BACKWARD))
        if dtype != lattice_dtype and name in facts.sums_apart:
            parts.append(Part(f"sums of {name}", shape, lattice_dtype, Life.BACKWARD))
    return parts
