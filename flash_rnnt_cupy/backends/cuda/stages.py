"""The stages on a CUDA device: fill a parameter record, launch.

Every stage has the signature that `flash_rnnt_cupy.backends` gives it. Records have the fields of the structs
of the same name in `kernels_cu/`; their layout is checked when a kernel is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends import Allocate, Lattice
from flash_rnnt_cupy.backends.cuda import tables
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec
from flash_rnnt_cupy.backends.cuda.driver import Driver, Grid, Record
from flash_rnnt_cupy.backends.cuda.facts import BLOCKS_PER_MULTIPROCESSOR, ring_shape
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, is_aligned
from flash_rnnt_cupy.plan import Plan, Rows, Tile, accumulator_dtype
from flash_rnnt_cupy.problem import ACTIVATIONS, ITEMSIZE, Form, Inputs, Problem
from flash_rnnt_cupy.topology import RNNT, Logit, Topology

DRAWS = 1 << 16
THREADS = 256
JOINT_ROWS = 32  # rows of a block of joint_forward: 8 warps of kRowsPerWarp
SUM_COLUMNS = 256  # columns of a block of sums: 32 lanes x 8
WARPS = THREADS // 32
MAX_STATE_THREADS = 1024
MAX_GRID_Y = 65_535
FORWARD_BLOCKS_PER_MULTIPROCESSOR = 8
MAX_RESIDENT_STEPS = 8  # normalize.cu: kResident

Constants = tuple[tuple[str, str | int], ...]


def _record(acc: str, *fields: tuple[str, Any]) -> np.dtype[Any]:
    """A parameter record: "pointer", "acc" (the accumulator dtype) and NumPy types, laid out as C++ does."""
    kinds = {"pointer": np.uint64, "acc": np.dtype(acc)}
    plain = [(name, kinds[kind] if isinstance(kind, str) else kind) for name, kind in fields]
    return np.dtype(plain, align=True)


@functools.cache
def joint_record(acc: str) -> np.dtype[Any]:
    """JointParams of joint.cu."""
    return _record(
        acc,
        ("rows", tables.ROWS),
        ("tile", tables.TILE),
        ("encoder", "pointer"),
        ("predictor", "pointer"),
        ("encoder_offset_b", "pointer"),
        ("predictor_offset_b", "pointer"),
        ("encoder_step", np.int64),
        ("predictor_step", np.int64),
        ("hidden", "pointer"),
        ("grad_encoder", "pointer"),
        ("grad_predictor", "pointer"),
        ("encoder_grad_row_b", "pointer"),
        ("predictor_grad_row_b", "pointer"),
        ("encoder_carry", "pointer"),
        ("predictor_carry", "pointer"),
        ("grad_scale", "pointer"),
        ("tile_rows", np.int64),
        ("predictor_carry_size", np.int64),
        ("seed", np.uint64),
        ("scale", "acc"),
        ("threshold", np.uint32),
    )


@functools.cache
def normalize_record(acc: str) -> np.dtype[Any]:
    """NormalizeParams of normalize.cu."""
    return _record(
        acc,
        ("rows", tables.ROWS),
        ("tile", tables.TILE),
        ("logits", "pointer"),
        ("grad_logits", "pointer"),
        ("logits_offset_b", "pointer"),
        ("logits_step_t", np.int64),
        ("logits_step_u", np.int64),
        ("grad_offset_b", "pointer"),
        ("grad_step_t", np.int64),
        ("grad_step_u", np.int64),
        ("bias", "pointer"),
        ("labels", "pointer"),
        ("label_start_b", "pointer"),
        ("column_cn", "pointer"),
        ("normalizer_gn", "pointer"),
        ("upstream_b", "pointer"),
        ("bias_partials", "pointer"),
        ("bias_sums", "pointer"),
        ("n_nodes", np.int64),
        ("clamp", "acc"),
        ("blank", np.int32),
        ("batch", np.int32),
        ("bias_chunks", np.int32),
        ("padded_frames", np.int32),
        ("padded_states", np.int32),
    )


@functools.cache
def recursion_record(acc: str) -> np.dtype[Any]:
    """RecursionParams of recursion.cu."""
    return _record(
        acc,
        ("node_start_b", "pointer"),
        ("frame_start_b", "pointer"),
        ("state_start_b", "pointer"),
        ("column_cn", "pointer"),
        ("alpha_n", "pointer"),
        ("log_likelihood_b", "pointer"),
        ("losses_b", "pointer"),
        ("ring", "pointer"),
        ("n_nodes", np.int64),
        ("emit_weight", np.float64),
        ("max_states", np.int32),
        ("batch", np.int32),
        ("zero_infinity", np.int32),
    )


SELECT_RECORD = _record(
    "float64",
    ("node_start_b", "pointer"),
    ("frame_start_b", "pointer"),
    ("state_start_b", "pointer"),
    ("utterance_f", "pointer"),
    ("column_cn", "pointer"),
    ("lo_f", "pointer"),
    ("hi_f", "pointer"),
    ("dropped_f", "pointer"),
    ("n_nodes", np.int64),
    ("n_frames", np.int64),
    ("min_occupancy", np.float64),
)
CONVERT_RECORD = _record("float64", ("from", "pointer"), ("to", "pointer"), ("scale", "pointer"), ("n", np.int64))
UPSTREAM_RECORD = _record(
    "float64",
    ("grad_losses_b", "pointer"),
    ("unit_b", "pointer"),
    ("scale", "pointer"),
    ("batch", np.int32),
    ("split", np.int32),
)


# ---- specialisations ---------------------------------------------------------------------------------------------


@functools.cache
def joint_spec(state: str, work: str, acc: str, width: int, activation: str, dropout: bool, wide: bool) -> ModuleSpec:
    """joint.cu for these dtypes and this joint network."""
    constants: Constants = (
        ("STATE", state),
        ("WORK", work),
        ("ACCUMULATOR", acc),
        ("WIDTH", width),
        ("ACTIVATION", activation),
        ("DROPOUT", int(dropout)),
        ("WIDE", int(wide)),
    )
    return ModuleSpec("joint.cu", constants, (("JointParams", joint_record(acc)),))


@functools.cache
def normalize_spec(
    topology: Topology,
    logit: str,
    acc: str,
    vocabulary: int,
    *,
    has_bias: bool,
    grid: bool,
    log_probs: bool,
    clamped: bool,
    wide: bool,
) -> ModuleSpec:
    """normalize.cu for these scores."""
    constants: Constants = (
        *_table_constants(topology),
        ("LOGIT", logit),
        ("ACCUMULATOR", acc),
        ("VOCABULARY", vocabulary),
        ("ROW_THREADS", _row_threads(vocabulary)),
        ("GRID", int(grid)),
        ("HAS_BIAS", int(has_bias)),
        ("LOG_PROBS", int(log_probs)),
        ("CLAMPED", int(clamped)),
        ("WIDE", int(wide)),
    )
    return ModuleSpec("normalize.cu", constants, (("NormalizeParams", normalize_record(acc)),))


@functools.cache
def recursion_spec(topology: Topology, acc: str) -> ModuleSpec:
    """recursion.cu for this loss."""
    constants: Constants = (*_table_constants(topology), ("ACCUMULATOR", acc))
    return ModuleSpec("recursion.cu", constants, (("RecursionParams", recursion_record(acc)),))


@functools.cache
def select_spec(topology: Topology, acc: str) -> ModuleSpec:
    """select.cu for this loss."""
    constants: Constants = (
        ("OCCUPANCY_COLUMNS", f"{_bits(topology.occupancy_columns or ())}u"),
        ("ACCUMULATOR", acc),
    )
    return ModuleSpec("select.cu", constants, (("SelectParams", SELECT_RECORD),))


@functools.cache
def convert_spec(source: str, target: str, acc: str, scaled: bool) -> ModuleSpec:
    """convert.cu between these dtypes."""
    constants: Constants = (("FROM", source), ("TO", target), ("ACCUMULATOR", acc), ("SCALED", int(scaled)))
    records = (("ConvertParams", CONVERT_RECORD), ("UpstreamParams", UPSTREAM_RECORD))
    return ModuleSpec("convert.cu", constants, records)


def all_specs() -> Iterator[ModuleSpec]:
    """Every source in each of its dtypes, and every option of each source once."""
    for state in ("float16", "bfloat16", "float32", "float64"):
        acc = accumulator_dtype(state)
        for wide in (False, True):
            yield joint_spec(state, state, acc, 640, "relu", True, wide)
            for vocabulary in (1_000, 5_000, 50_000):
                yield normalize_spec(
                    RNNT,
                    state,
                    acc,
                    vocabulary,
                    has_bias=True,
                    grid=False,
                    log_probs=False,
                    clamped=False,
                    wide=wide,
                )
            for log_probs in (False, True):
                yield normalize_spec(
                    RNNT, state, acc, 500, has_bias=False, grid=True, log_probs=log_probs, clamped=True, wide=wide
                )
        yield convert_spec(acc, state, acc, True)
    for activation in ACTIVATIONS:
        for acc in ("float32", "float64"):
            yield joint_spec(acc, acc, acc, 512, activation, False, True)
    for acc in ("float32", "float64"):
        yield recursion_spec(RNNT, acc)
        yield select_spec(RNNT, acc)


def _row_threads(vocabulary: int) -> int:
    """Threads that share a row of V scores: a warp, or a block."""
    return 32 if vocabulary <= 2048 else 256 if vocabulary <= 16384 else 1024


def _row_steps(vocabulary: int) -> int:
    """Vectors of a row that a thread of normalize.cu has; rows of a block of 1024 threads are never resident."""
    threads = _row_threads(vocabulary)
    return MAX_RESIDENT_STEPS + 1 if threads > THREADS else -(-vocabulary // (threads * 8))


def _bits(members: tuple[int, ...]) -> int:
    return sum(1 << member for member in members)


@functools.cache
def _table_constants(topology: Topology) -> Constants:
    """The loss as constants of table.cuh."""

    def braces(values: Iterator[Any]) -> str:
        return "{" + ", ".join(map(str, values)) + "}"

    numbers = {Logit.BLANK: "kBlank", Logit.LABEL: "kLabel"}
    groups, columns, arcs = topology.groups, topology.columns, topology.arcs
    return (
        ("GROUP_STARTS", braces(group.start for group in groups)),
        ("GROUP_STOPS", braces(-1 if group.stop is None else group.stop for group in groups)),
        (
            "COLUMN_LOGITS",
            braces(numbers[c.logit] if isinstance(c.logit, Logit) else c.logit for c in columns),
        ),
        ("COLUMN_GROUPS", braces(column.group for column in columns)),
        ("ARC_DT", braces(arc.dt for arc in arcs)),
        ("ARC_DU", braces(arc.du for arc in arcs)),
        ("ARC_COLUMNS", braces(f"{_bits(arc.columns)}u" for arc in arcs)),
        ("ARC_CONSTANTS", braces(float(arc.constant) for arc in arcs)),
        ("ARC_MAY_END", braces(str(arc.may_end).lower() for arc in arcs)),
        ("ARC_REACH", topology.reach),
    )


# ---- a call ------------------------------------------------------------------------------------------------------


class Launch:
    """A kernel and its parameters, made ready once a call; only the tile changes."""

    def __init__(self, driver: Driver, spec: ModuleSpec, entry: str, record: Record) -> None:
        self._kernel = driver.kernel(spec, entry, record)
        self._tile = record["tile"].view(np.int64)

    def __call__(self, tile: Tile, grid: Grid, block: Grid) -> None:
        """Runs it on a tile."""
        self._tile[:] = tile
        self._kernel(grid, block, 0)


@dataclass(frozen=True, eq=False)
class CudaCall:
    """One call's arrays and index tables, and the launches made ready so far."""

    driver: Driver
    multiprocessors: int
    plan: Plan
    inputs: Inputs
    allocate: Allocate
    rows: Rows
    table: Mapping[str, int]  # address of each index table
    kept: dict[str, DeviceArray]  # the memory behind them, and weight and bias where they are not the caller's
    weight: DeviceArray | None
    bias: DeviceArray | None
    upstream: DeviceArray | None = None  # [B] unit gradients, then their scale
    bias_partials: DeviceArray | None = None
    encoder_carry: DeviceArray | None = None
    predictor_carry: DeviceArray | None = None
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """Sizes and options."""
        return self.plan.problem

    @property
    def acc(self) -> str:
        """Dtype of sums and lattice."""
        return accumulator_dtype(self.problem.dtype)

    @property
    def grad_scale(self) -> int:
        """Address of the scale of the upstream gradients; 0 in forward."""
        return self.upstream.pointer + ITEMSIZE[self.acc] * self.problem.batch if self.upstream else 0

    def take(self, name: str) -> DeviceArray:
        """Memory for a part of the account."""
        part = self.plan.account[name]
        array: DeviceArray = self.allocate(part.shape, part.dtype)
        return array

    def run(self, spec: ModuleSpec, entry: str, grid: Grid, block: Grid, record: Record, shared: int = 0) -> None:
        """Launches a kernel that runs once."""
        self.driver.kernel(spec, entry, record)(grid, block, shared)


def begin(
    driver: Driver,
    multiprocessors: int,
    plan: Plan,
    inputs: Inputs,
    allocate: Allocate,
    kept: Mapping[str, DeviceArray],
) -> CudaCall:
    """Uploads the index tables and brings weight and bias to the dtypes in which they are used."""
    packing = plan.rows.packing
    arrays = tables.packing_tables(packing) | tables.rows_tables(plan.rows)
    if plan.problem.form is Form.JOINT:
        for name, starts in (("encoder", packing.frame_start_b), ("predictor", packing.state_start_b)):
            given = getattr(inputs, name)
            arrays[f"{name}_offset_b"] = tables.row_offsets(given, 3, starts)
            padded = len(given.shape) == 3
            arrays[f"{name}_grad_row_b"] = np.arange(packing.batch) * given.shape[1] if padded else starts[:-1]
    elif len(inputs.logits.shape) == 4:
        arrays["logits_offset_b"] = np.arange(packing.batch, dtype=np.int64) * inputs.logits.strides[0]
        arrays["grad_offset_b"] = np.arange(packing.batch, dtype=np.int64) * int(np.prod(inputs.logits.shape[1:]))
    arrays["labels"] = np.zeros(0, np.int32)  # the last table: its size moves no other
    made = dict(kept)
    if "index tables" not in made:
        arrays["labels"] = _packed_labels(inputs.targets, packing.labels_b)
        made["index tables"] = allocate(plan.account["index tables"].shape, "int64")
        driver.upload(list(arrays.values()), made["index tables"])
    table = tables.addresses(arrays, made["index tables"].pointer)
    call = CudaCall(driver, multiprocessors, plan, inputs, allocate, plan.rows, table, made, inputs.weight, inputs.bias)
    return dataclasses.replace(
        call,
        weight=_as_used(call, inputs.weight, "weight as multiplied"),
        bias=_as_used(call, inputs.bias, "bias as added"),
    )


def _as_used(call: CudaCall, given: DeviceArray | None, part: str) -> DeviceArray | None:
    """Weight or bias in the dtype of the account's part, if there is one."""
    if given is None or part not in call.plan.account:
        return given
    if part not in call.kept:
        call.kept[part] = call.take(part)
        _convert(call, given, call.kept[part], None)
    return call.kept[part]


def _packed_labels(targets: npt.NDArray[np.int64], labels_b: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Labels of all transcripts one after another."""
    if targets.ndim == 2:
        targets = targets[np.arange(targets.shape[1])[None] < labels_b[:, None]]
    return targets.astype(np.int32)


def _convert(call: CudaCall, source: DeviceArray, target: DeviceArray, scale: int | None) -> None:
    """target = source * *scale, in the target's dtype."""
    record = np.zeros(1, CONVERT_RECORD)
    n = target.nbytes // ITEMSIZE[target.dtype]
    _fill(record, {"from": source.pointer, "to": target.pointer, "scale": scale or 0, "n": n})
    spec = convert_spec(source.dtype, target.dtype, call.acc, scale is not None)
    if n:
        call.run(spec, "convert", (-(-n // (4 * THREADS)),), (THREADS,), record)


def _fill(record: Record, values: Mapping[str, Any]) -> None:
    """Sets all fields at once, those without a value to zero; a record in a record is a tuple."""
    record[0] = tuple({**_zeros(record.dtype), **values}.values())


@functools.cache
def _zeros(record: np.dtype[Any]) -> dict[str, Any]:
    """The fields in order, and zero for each."""
    return dict(zip(record.names or (), np.zeros((), record).item(), strict=True))


def _rows_record(call: CudaCall) -> tuple[int, ...]:
    """The tables that say which rows are in work."""
    return tuple([call.table[name] for name in tables.ROWS.names or ()])


def _pointer(array: DeviceArray | None) -> int:
    return array.pointer if array is not None else 0


# ---- joint and products --------------------------------------------------------------------------------------------


def _joint_launch(
    call: CudaCall,
    entry: str,
    hidden: DeviceArray,
    grad_encoder: DeviceArray | None = None,
    grad_predictor: DeviceArray | None = None,
) -> Launch:
    """A kernel of joint.cu over this call's rows."""
    key = (entry, hidden.pointer, _pointer(grad_encoder), _pointer(grad_predictor))
    if key in call.launches:
        return call.launches[key]
    problem, inputs = call.problem, call.inputs
    drop_below = min(round(problem.options.dropout * DRAWS), DRAWS - 1)
    spec = joint_spec(
        problem.dtype,
        hidden.dtype,
        call.acc,
        problem.joint_width,
        problem.options.activation,
        drop_below > 0,
        all(is_aligned(array) for array in (inputs.encoder, inputs.predictor, hidden)),
    )
    record = np.zeros(1, joint_record(call.acc))
    _fill(
        record,
        {
            "rows": _rows_record(call),
            "encoder": inputs.encoder.pointer,
            "predictor": inputs.predictor.pointer,
            "encoder_offset_b": call.table["encoder_offset_b"],
            "predictor_offset_b": call.table["predictor_offset_b"],
            "encoder_step": inputs.encoder.strides[-2],
            "predictor_step": inputs.predictor.strides[-2],
            "hidden": hidden.pointer,
            "grad_encoder": _pointer(grad_encoder),
            "grad_predictor": _pointer(grad_predictor),
            "encoder_grad_row_b": call.table["encoder_grad_row_b"],
            "predictor_grad_row_b": call.table["predictor_grad_row_b"],
            "encoder_carry": _pointer(call.encoder_carry),
            "predictor_carry": _pointer(call.predictor_carry),
            "grad_scale": call.grad_scale,
            "tile_rows": call.plan.tile_rows,
            "predictor_carry_size": ring_shape(problem, call.rows.packing)[2] * problem.joint_width,
            "seed": problem.options.seed,
            "scale": DRAWS / (DRAWS - drop_below),
            "threshold": drop_below,
        },
    )
    call.launches[key] = Launch(call.driver, spec, entry, record)
    return call.launches[key]


def joint_forward(call: CudaCall, tile: Tile, hidden: DeviceArray) -> None:
    """Hidden [R, H]: the rows of the tile."""
    _joint_launch(call, "joint_forward", hidden)(tile, (-(-tile.n_rows // JOINT_ROWS),), (THREADS,))


def joint_backward(
    call: CudaCall,
    tile: Tile,
    grad_hidden: DeviceArray,
    grad_encoder: DeviceArray | None,
    grad_predictor: DeviceArray | None,
) -> None:
    """Writes the gradients that the tile completes, the rest goes to the next; uses up grad_hidden."""
    frames = tile.frame_end - tile.frame_begin
    _joint_launch(call, "joint_backward", grad_hidden, grad_encoder=grad_encoder)(tile, (frames,), (THREADS,))
    if grad_predictor is not None:
        packing = call.rows.packing
        first, last = packing.utterance_f[tile.frame_begin], packing.utterance_f[tile.frame_end - 1]
        n_states = int(packing.state_start_b[last + 1] - packing.state_start_b[first])
        grid = (n_states, -(-call.problem.joint_width // SUM_COLUMNS))
        _joint_launch(call, "predictor_gradient", grad_hidden, grad_predictor=grad_predictor)(tile, grid, (32, WARPS))


def product(call: CudaCall, hidden: DeviceArray, logits: DeviceArray, n_rows: int) -> None:
    """Logits [R, V] = hidden [R, H] weight^T, for the first n_rows rows."""
    assert call.weight is not None
    call.driver.gemm(hidden.rows(n_rows), call.weight, logits.rows(n_rows), False, True, False)


def product_weight(
    call: CudaCall,
    grad_logits: DeviceArray,
    hidden: DeviceArray,
    n_rows: int,
    grad_weight: DeviceArray,
    scratch: DeviceArray | None,
) -> None:
    """grad_weight [V, H] += grad_logits^T hidden."""
    del scratch
    call.driver.gemm(grad_logits.rows(n_rows), hidden.rows(n_rows), grad_weight, True, False, True)


def product_hidden(call: CudaCall, grad_logits: DeviceArray, hidden: DeviceArray, n_rows: int) -> None:
    """Hidden [R, H] = grad_logits [R, V] weight: the hidden states give way to their gradient."""
    assert call.weight is not None
    call.driver.gemm(grad_logits.rows(n_rows), call.weight, hidden.rows(n_rows), False, False, False)


# ---- scores and lattice --------------------------------------------------------------------------------------------


def _normalize_launch(
    call: CudaCall,
    entry: str,
    logits: DeviceArray,
    lattice: Lattice,
    grad_logits: DeviceArray,
    grad_bias: DeviceArray | None = None,
) -> Launch:
    """A kernel of normalize.cu over this call's rows."""
    key = (entry, logits.pointer, grad_logits.pointer, _pointer(grad_bias))
    if key in call.launches:
        return call.launches[key]
    problem, options = call.problem, call.problem.options
    grid = len(logits.shape) == 4
    arrays = [logits, grad_logits, *([call.bias] if call.bias is not None else [])]
    spec = normalize_spec(
        problem.topology,
        logits.dtype,
        call.acc,
        problem.vocabulary,
        has_bias=call.bias is not None,
        grid=grid,
        log_probs=problem.form is Form.LOG_PROBS,
        clamped=options.clamp is not None,
        wide=all(is_aligned(array) for array in arrays),
    )
    values = {
        "rows": _rows_record(call),
        "logits": logits.pointer,
        "grad_logits": grad_logits.pointer,
        "logits_step_u": logits.strides[-2],
        "grad_step_u": grad_logits.strides[-2],
        "bias": _pointer(call.bias),
        "labels": call.table["labels"],
        "label_start_b": call.table["label_start_b"],
        "column_cn": lattice.column_cn.pointer,
        "normalizer_gn": _pointer(lattice.normalizer_gn),
        "upstream_b": _pointer(call.upstream),
        "bias_partials": _pointer(call.bias_partials),
        "bias_sums": _pointer(grad_bias),
        "n_nodes": call.plan.rows.n_rows,
        "clamp": options.clamp or 0,
        "blank": problem.blank,
        "batch": problem.batch,
        "bias_chunks": BLOCKS_PER_MULTIPROCESSOR * call.multiprocessors,
    }
    if grid:
        in_place = grad_logits.pointer == logits.pointer
        values |= {
            "logits_offset_b": call.table["logits_offset_b"],
            "logits_step_t": logits.strides[1],
            "grad_offset_b": call.table["logits_offset_b" if in_place else "grad_offset_b"],
            "grad_step_t": grad_logits.strides[1],
            "padded_frames": logits.shape[1],
            "padded_states": logits.shape[2],
        }
    record = np.zeros(1, normalize_record(call.acc))
    _fill(record, values)
    call.launches[key] = Launch(call.driver, spec, entry, record)
    return call.launches[key]


def _row_grid(call: CudaCall, tile: Tile, blocks_per_multiprocessor: int) -> tuple[Grid, Grid]:
    """Blocks and threads of a kernel that gives runs of rows to its warps, or to its blocks."""
    threads = _row_threads(call.problem.vocabulary)
    blocks = -(-tile.n_rows // WARPS) if threads == 32 else tile.n_rows
    return (min(blocks, blocks_per_multiprocessor * call.multiprocessors),), (max(threads, THREADS),)


def normalize_forward(call: CudaCall, tile: Tile, logits: DeviceArray, lattice: Lattice) -> None:
    """Fills the lattice at the tile's nodes from ``logits`` (the tile's, or the caller's); logits stay."""
    if tile.n_rows:
        launch = _normalize_launch(call, "normalize_forward", logits, lattice, logits)
        launch(tile, *_row_grid(call, tile, FORWARD_BLOCKS_PER_MULTIPROCESSOR))


def normalize_backward(
    call: CudaCall,
    tile: Tile,
    logits: DeviceArray,
    lattice: Lattice,
    grad_logits: DeviceArray,
    grad_bias: DeviceArray | None,
) -> None:
    """Writes the gradient of the tile's scores to ``grad_logits`` (which may be ``logits``), padding as zero.

    Adds its sum over rows to ``grad_bias``. ``lattice`` holds posteriors.
    """
    if not tile.n_rows:
        call.driver.zero(grad_logits)
        return
    problem, arrays = call.problem, (logits, lattice, grad_logits, grad_bias)
    grid_of_rows = _row_grid(call, tile, BLOCKS_PER_MULTIPROCESSOR)
    _normalize_launch(call, "normalize_backward", *arrays)(tile, *grid_of_rows)
    if grad_bias is not None:
        if _row_steps(problem.vocabulary) > MAX_RESIDENT_STEPS:
            chunks = BLOCKS_PER_MULTIPROCESSOR * call.multiprocessors
            grid: Grid = (-(-problem.vocabulary // SUM_COLUMNS), chunks)
            _normalize_launch(call, "bias_partials", *arrays)(tile, grid, (32, WARPS))
        if tile.row_end == call.rows.n_rows:
            _normalize_launch(call, "bias_add", *arrays)(tile, (-(-problem.vocabulary // 32),), (32, WARPS))
    if len(grad_logits.shape) == 4:
        cells = grad_logits.shape[1] * grad_logits.shape[2]
        grid = (-(-cells // WARPS), min(problem.batch, MAX_GRID_Y))
        _normalize_launch(call, "zero_padding", *arrays)(tile, grid, (THREADS,))


def _recursion(call: CudaCall, lattice: Lattice, log_likelihood_b: DeviceArray, entry: str) -> None:
    problem = call.problem
    if problem.batch == 0:
        return
    ring = ring_shape(problem, call.plan.rows.packing)
    ring_memory = _scratch(call, "recursion ring")  # kept until the launch
    record = np.zeros(1, recursion_record(call.acc))
    _fill(
        record,
        {
            "node_start_b": call.table["node_start_b"],
            "frame_start_b": call.table["frame_start_b"],
            "state_start_b": call.table["state_start_b"],
            "column_cn": lattice.column_cn.pointer,
            "alpha_n": _pointer(lattice.alpha_n),
            "log_likelihood_b": log_likelihood_b.pointer,
            "ring": _pointer(ring_memory),
            "n_nodes": call.plan.rows.n_rows,
            "emit_weight": 1 + problem.options.fastemit_lambda,
            "max_states": ring[2],
            "batch": problem.batch,
        },
    )
    threads = min(-(-ring[2] // 32) * 32, MAX_STATE_THREADS)
    shared_bytes = 0 if ring_memory is not None else 8 * ring[1] * ring[2]
    spec = recursion_spec(problem.topology, call.acc)
    call.run(spec, entry, (problem.batch,), (threads,), record, shared_bytes)


def sum_alignments(call: CudaCall, lattice: Lattice, log_likelihood_b: DeviceArray) -> None:
    """Writes the log-likelihood of each utterance, and alpha where the lattice keeps it."""
    _recursion(call, lattice, log_likelihood_b, "sum_alignments")


def posteriors(call: CudaCall, lattice: Lattice, log_likelihood_b: DeviceArray) -> None:
    """Turns columns into column posteriors, in place; arcs that emit weigh 1 + fastemit_lambda."""
    _recursion(call, lattice, log_likelihood_b, "posteriors")


def losses(call: CudaCall, log_likelihood_b: DeviceArray) -> DeviceArray:
    """Losses [B] in the problem's loss dtype."""
    problem = call.problem
    losses_b: DeviceArray = call.allocate((problem.batch,), problem.loss_dtype)
    record = np.zeros(1, recursion_record(call.acc))
    _fill(
        record,
        {
            "log_likelihood_b": log_likelihood_b.pointer,
            "losses_b": losses_b.pointer,
            "batch": problem.batch,
            "zero_infinity": problem.options.zero_infinity,
        },
    )
    if problem.batch:
        spec = recursion_spec(problem.topology, call.acc)
        call.run(spec, "losses", (-(-problem.batch // THREADS),), (THREADS,), record)
    return losses_b


# ---- backward ------------------------------------------------------------------------------------------------------


def select_rows(call: CudaCall, lattice: Lattice) -> tuple[Rows, float]:
    """Rows in work, and the posterior mass of the nodes left out; waits for the device once."""
    problem, packing = call.problem, call.plan.rows.packing
    n_frames = packing.n_frames
    if problem.options.min_occupancy == 0 or n_frames == 0:
        return call.plan.rows, 0.0
    selection = call.take("band selection")  # [2, F] words: dropped_f, then lo_f and hi_f
    dropped = selection.pointer
    record = np.zeros(1, SELECT_RECORD)
    _fill(
        record,
        {
            "node_start_b": call.table["node_start_b"],
            "frame_start_b": call.table["frame_start_b"],
            "state_start_b": call.table["state_start_b"],
            "utterance_f": call.table["utterance_f"],
            "column_cn": lattice.column_cn.pointer,
            "dropped_f": dropped,
            "lo_f": dropped + 8 * n_frames,
            "hi_f": dropped + 12 * n_frames,
            "n_nodes": call.plan.rows.n_rows,
            "n_frames": n_frames,
            "min_occupancy": problem.options.min_occupancy,
        },
    )
    spec = select_spec(problem.topology, call.acc)
    call.run(spec, "select_rows", (-(-n_frames // WARPS),), (THREADS,), record)
    words = call.driver.download(selection)
    lo_f, hi_f = words[1].view(np.int32).reshape(2, n_frames)
    return packing.band_rows(lo_f, hi_f), float(words[0].view(np.float64).sum())


def start_backward(call: CudaCall, rows: Rows, grad_losses_b: DeviceArray) -> CudaCall:
    """The same call over ``rows``, with the upstream gradients split into unit gradients and their scale."""
    batch = call.problem.batch
    upstream = call.take("upstream")
    scale = upstream.pointer + ITEMSIZE[call.acc] * batch
    record = np.zeros(1, UPSTREAM_RECORD)
    _fill(
        record,
        {
            "grad_losses_b": grad_losses_b.pointer,
            "unit_b": upstream.pointer,
            "scale": scale,
            "batch": batch,
            "split": call.problem.form is Form.JOINT,  # the logits form has no `finish`
        },
    )
    spec = convert_spec(call.acc, call.acc, call.acc, True)
    call.run(spec, "split_upstream", (1,), (THREADS,), record)
    table, kept = call.table, call.kept
    if rows is not call.plan.rows:
        memory, arrays = call.take("band tables"), tables.rows_tables(rows)
        call.driver.upload(list(arrays.values()), memory)
        table, kept = {**table, **tables.addresses(arrays, memory.pointer)}, {**kept, "band tables": memory}
    bias_partials = _scratch(call, "bias partial sums")
    if bias_partials is not None:
        call.driver.zero(bias_partials)
    return dataclasses.replace(
        call,
        rows=rows,
        table=table,
        kept=kept,
        upstream=upstream,
        bias_partials=bias_partials,
        encoder_carry=_scratch(call, "encoder carry"),
        predictor_carry=_scratch(call, "predictor carry"),
        launches={},
    )


def _scratch(call: CudaCall, part: str) -> DeviceArray | None:
    """Memory for a part of the account, if it has it."""
    return call.take(part) if part in call.plan.account else None


def fill_zero(call: CudaCall, buffer: DeviceArray) -> None:
    """Zero bytes."""
    call.driver.zero(buffer)


def finish(call: CudaCall, name: str, sums: DeviceArray, gradient: DeviceArray) -> None:
    """gradient = sums times the scale of the upstream gradients; those of the states have it already."""
    if name in ("weight", "bias"):
        _convert(call, sums, gradient, call.grad_scale)
