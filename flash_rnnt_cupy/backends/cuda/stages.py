"""The stages on a CUDA device: fill a parameter record, launch.

Every stage has the signature that `flash_rnnt_cupy.backends` gives it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends import Allocate, Lattice
from flash_rnnt_cupy.backends.cuda import tables
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec
from flash_rnnt_cupy.backends.cuda.driver import Driver, Grid, Record
from flash_rnnt_cupy.backends.cuda.facts import BLOCKS_PER_MULTIPROCESSOR, MAX_THREADS, diagonals
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, is_aligned
from flash_rnnt_cupy.backends.cuda.specs import (
    CONVERT_RECORD,
    SELECT_RECORD,
    UPSTREAM_RECORD,
    convert_spec,
    is_resident,
    joint_record,
    joint_spec,
    normalize_record,
    normalize_spec,
    recursion_record,
    recursion_spec,
    row_threads,
    select_spec,
)
from flash_rnnt_cupy.plan import Life, Part, Plan, Rows, Tile, accumulator_dtype
from flash_rnnt_cupy.problem import ITEMSIZE, Form, Inputs, Problem

THREADS = 256
JOINT_ROWS = 32  # rows of a block of joint_forward: 8 warps of kRowsPerWarp
SUM_WARPS = 4  # of a block of joint_backward: kSumWarps
SLICE_COLUMNS = 128  # that it sums at once: kSlice
SHORT_SUM, LONG_SUM = 16, 128  # rows, from which a sum has a warp for each slice of columns, and a block
SUM_COLUMNS = 256  # columns of a block of bias sums: 32 lanes x 8
WARPS = THREADS // 32
MULTIPLIED, ADDED = "weight as multiplied", "bias as added"  # parts of the account
MAX_GRID_Y = 65_535
FORWARD_BLOCKS_PER_MULTIPROCESSOR = 8

# ---- a call ------------------------------------------------------------------------------------------------------


class Launch:
    """A kernel and its parameters, made ready once a call; only the tile changes."""

    def __init__(
        self, driver: Driver, spec: ModuleSpec, entry: str, record: Record, shared_bytes: int = 0, early: bool = False
    ) -> None:
        self._kernel = driver.kernel(spec, entry, record, shared_bytes, early)
        self._tile = record["tile"].view(np.int64)

    def __call__(self, tile: Tile, grid: Grid, block: Grid) -> None:
        """Runs it on a tile, unless that has no rows."""
        if tile.n_rows:
            self._tile[:] = tile
            self._kernel(grid, block)


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
    selected: Callable[[], npt.NDArray[Any]] | None = None  # the band tables, once the device has written them
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
        array: DeviceArray = self.allocate(self.plan.account[name])
        return array

    def run(self, spec: ModuleSpec, entry: str, grid: Grid, block: Grid, record: Record, shared: int = 0) -> None:
        """Launches a kernel that runs once."""
        self.driver.kernel(spec, entry, record, shared, False)(grid, block)


def begin(
    driver: Driver,
    multiprocessors: int,
    plan: Plan,
    inputs: Inputs,
    allocate: Allocate,
    kept: Mapping[str, DeviceArray],
) -> CudaCall:
    """Uploads the index tables."""
    made, words = dict(kept), tables.index_words(plan.problem, plan.rows.packing)
    if "index tables" not in made:
        made["index tables"] = allocate(plan.account["index tables"])
        arrays = tables.index_tables(plan.rows, inputs)
        driver.upload([arrays[name] for name in words], made["index tables"])
    table = tables.addresses(words, made["index tables"].pointer)
    return CudaCall(driver, multiprocessors, plan, inputs, allocate, plan.rows, table, made, inputs.weight, inputs.bias)


def convert_parameters(call: CudaCall) -> CudaCall:
    """Brings weight and bias to the dtypes in which they are used, where they have others."""
    for part, given in ((MULTIPLIED, call.weight), (ADDED, call.bias)):
        if given is not None and part in call.plan.account and part not in call.kept:
            call.kept[part] = call.take(part)
            _convert(call, given, call.kept[part], None)
    weight, bias = call.kept.get(MULTIPLIED, call.weight), call.kept.get(ADDED, call.bias)
    return dataclasses.replace(call, weight=weight, bias=bias)


def _convert(call: CudaCall, source: DeviceArray, target: DeviceArray, scale: int | None) -> None:
    """target = source * *scale, in the target's dtype."""
    record = np.zeros(1, CONVERT_RECORD)
    n = target.nbytes // ITEMSIZE[target.dtype]
    fill(record, {"from": source.pointer, "to": target.pointer, "scale": scale or 0, "n": n})
    spec = convert_spec(source.dtype, target.dtype, call.acc, scale is not None)
    if n:
        call.run(spec, "convert", (-(-n // (4 * THREADS)),), (THREADS,), record)


def fill(record: Record, values: Mapping[str, Any]) -> None:
    """Sets all fields at once, those without a value to zero; a record in a record is a tuple."""
    record[0] = tuple({**_zeros(record.dtype), **values}.values())


@functools.cache
def _zeros(record: np.dtype[Any]) -> dict[str, Any]:
    """The fields in order, and zero for each."""
    return dict(zip(record.names or (), np.zeros((), record).item(), strict=True))


def rows_record(call: CudaCall) -> tuple[int, ...]:
    """The tables that say which rows are in work."""
    return tuple([call.table[name] for name in tables.ROWS.names or ()])


def states_fields(call: CudaCall) -> dict[str, Any]:
    """Which rows are in work, where their states are, and which of their columns dropout takes."""
    inputs, options = call.inputs, call.problem.options
    return {
        "rows": rows_record(call),
        "encoder": inputs.encoder.pointer,
        "predictor": inputs.predictor.pointer,
        "encoder_offset_b": call.table["encoder_offset_b"],
        "predictor_offset_b": call.table["predictor_offset_b"],
        "encoder_step": inputs.encoder.strides[-2],
        "predictor_step": inputs.predictor.strides[-2],
        "seed": options.seed,
        "threshold": options.drop_below,
    }


def _pointer(array: DeviceArray | None) -> int:
    return array.pointer if array is not None else 0


# ---- joint and products --------------------------------------------------------------------------------------------


def _joint_launch(
    call: CudaCall,
    entry: str,
    hidden: DeviceArray,
    active: DeviceArray | None,
    grad_encoder: DeviceArray | None = None,
    grad_predictor: DeviceArray | None = None,
) -> Launch:
    """A kernel of joint.cu over this call's rows."""
    key = (entry, hidden.pointer, _pointer(active), _pointer(grad_encoder), _pointer(grad_predictor))
    if key in call.launches:
        return call.launches[key]
    problem, inputs = call.problem, call.inputs
    rows = inputs.encoder, inputs.predictor, hidden, grad_encoder, grad_predictor
    spec = joint_spec(
        problem.dtype,
        hidden.dtype,
        call.acc,
        problem.joint_width,
        problem.options.activation,
        problem.options.drop_below > 0,
        all(is_aligned(array) for array in rows if array is not None),
    )
    record = np.zeros(1, joint_record(call.acc))
    fill(
        record,
        {
            **states_fields(call),
            "hidden": hidden.pointer,
            "active": _pointer(active),
            "grad_encoder": _pointer(grad_encoder),
            "grad_predictor": _pointer(grad_predictor),
            "encoder_grad_row_b": call.table["encoder_grad_row_b"],
            "predictor_grad_row_b": call.table["predictor_grad_row_b"],
            "encoder_carry": _pointer(call.encoder_carry),
            "predictor_carry": _pointer(call.predictor_carry),
            "grad_scale": call.grad_scale,
            "tile_rows": call.plan.tile_rows,
            "predictor_carry_size": call.rows.packing.max_states * problem.joint_width,
        },
    )
    call.launches[key] = Launch(call.driver, spec, entry, record)
    return call.launches[key]


def joint_forward(call: CudaCall, tile: Tile, hidden: DeviceArray, active: DeviceArray | None) -> None:
    """Hidden [R, H] of the tile's rows, not yet divided by the keep probability; and their active bits."""
    _joint_launch(call, "joint_forward", hidden, active)(tile, (-(-tile.n_rows // JOINT_ROWS),), (THREADS,))


def joint_backward(
    call: CudaCall,
    tile: Tile,
    grad_hidden: DeviceArray,
    active: DeviceArray | None,
    grad_encoder: DeviceArray | None,
    grad_predictor: DeviceArray | None,
) -> None:
    """Writes the gradients that the tile completes, the rest goes to the next."""
    launch = _joint_launch(call, "joint_backward", grad_hidden, active, grad_encoder, grad_predictor)
    if not tile.n_rows:
        return
    packing, n_frames = call.rows.packing, tile.frame_end - tile.frame_begin
    first, last = packing.utterance_f[tile.frame_begin], packing.utterance_f[tile.frame_end - 1]
    n_states = int(packing.state_start_b[last + 1] - packing.state_start_b[first])
    n_sums = n_frames * (grad_encoder is not None) + n_states * (grad_predictor is not None)
    slices = min(-(-call.problem.joint_width // SLICE_COLUMNS), MAX_GRID_Y)
    rows = tile.n_rows // min(n_frames, n_states)  # of a sum, in the mean of the kind that has more
    warps = SUM_WARPS if rows >= LONG_SUM else 1
    grid = -(-n_sums * warps // SUM_WARPS), slices if rows >= SHORT_SUM else 1
    launch(tile, grid, (32, warps, SUM_WARPS // warps))


def product(call: CudaCall, hidden: DeviceArray, logits: DeviceArray, n_rows: int) -> None:
    """Logits [R, V] = hidden [R, H] weight^T / keep probability, for the first n_rows rows."""
    assert call.weight is not None
    scores = logits.rows(n_rows).columns(call.problem.vocabulary)
    _multiply(call, hidden.rows(n_rows), call.weight, scores, transpose_b=True)


def product_weight(
    call: CudaCall,
    grad_logits: DeviceArray,
    hidden: DeviceArray,
    n_rows: int,
    grad_weight: DeviceArray,
    scratch: DeviceArray | None,
) -> None:
    """grad_weight [V, H] += grad_logits^T hidden / keep probability."""
    del scratch
    grads = grad_logits.rows(n_rows).columns(call.problem.vocabulary)
    _multiply(call, grads, hidden.rows(n_rows), grad_weight, transpose_a=True, add=True)


def product_hidden(call: CudaCall, grad_logits: DeviceArray, hidden: DeviceArray, n_rows: int) -> None:
    """Hidden [R, H] = grad_logits [R, V] weight / keep probability: the hidden states give way to their gradient."""
    assert call.weight is not None
    grads = grad_logits.rows(n_rows).columns(call.problem.vocabulary)
    _multiply(call, grads, call.weight, hidden.rows(n_rows))


def _multiply(
    call: CudaCall,
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """C = op(a) op(b) / keep probability; + c if ``add``. Nothing, where ``a`` has no rows."""
    if a.shape[0]:
        call.driver.gemm(a, b, c, transpose_a, transpose_b, add, call.problem.options.keep_scale)


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
    spec = normalize_spec(
        problem.topology,
        logits.dtype,
        call.acc,
        problem.vocabulary,
        has_bias=call.bias is not None,
        grid=grid,
        log_probs=problem.form is Form.LOG_PROBS,
        clamped=options.clamp is not None,
        wide=is_aligned(logits) and is_aligned(grad_logits) and _pointer(call.bias) % 16 == 0,
    )
    values = {
        "rows": rows_record(call),
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
        "bias_chunks": call.bias_partials.shape[0] if call.bias_partials is not None else 0,
    }
    if grid:
        in_place = grad_logits.pointer == logits.pointer
        values |= {
            "logits_offset_b": call.table["logits_offset_b"],
            "logits_step_t": logits.strides[1],
            "grad_offset_b": call.table["logits_offset_b" if in_place else "grad_offset_b"],
            "grad_step_t": grad_logits.strides[1],
            "padded_states": logits.shape[2],
        }
    record = np.zeros(1, normalize_record(call.acc))
    fill(record, values)
    call.launches[key] = Launch(call.driver, spec, entry, record)
    return call.launches[key]


def _row_grid(call: CudaCall, tile: Tile, blocks_per_multiprocessor: int) -> tuple[Grid, Grid]:
    """Blocks and threads of a kernel that gives runs of rows to its warps, or to its blocks."""
    threads = row_threads(call.problem.vocabulary)
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
    problem, arrays = call.problem, (logits, lattice, grad_logits, grad_bias)
    grid_of_rows = _row_grid(call, tile, BLOCKS_PER_MULTIPROCESSOR)
    _normalize_launch(call, "normalize_backward", *arrays)(tile, *grid_of_rows)
    if grad_bias is not None:
        if not is_resident(problem.vocabulary):
            chunks = BLOCKS_PER_MULTIPROCESSOR * call.multiprocessors
            grid: Grid = (-(-problem.vocabulary // SUM_COLUMNS), chunks)
            _normalize_launch(call, "bias_partials", *arrays)(tile, grid, (32, WARPS))
        add_bias_partials(call, tile, *arrays)
    if len(grad_logits.shape) == 4:
        grid = (grad_logits.shape[1], min(problem.batch, MAX_GRID_Y))
        _normalize_launch(call, "zero_padding", *arrays)(tile, grid, (THREADS,))


def add_bias_partials(
    call: CudaCall,
    tile: Tile,
    logits: DeviceArray,
    lattice: Lattice,
    grad_logits: DeviceArray,
    grad_bias: DeviceArray | None,
) -> None:
    """After the last tile, the partial sums of all go to the bias's gradient."""
    if tile.row_end == call.rows.n_rows:
        launch = _normalize_launch(call, "bias_add", logits, lattice, grad_logits, grad_bias)
        launch(tile, (-(-call.problem.vocabulary // 32),), (32, WARPS))


def _recursion(call: CudaCall, lattice: Lattice, log_likelihood_b: DeviceArray, entry: str) -> None:
    problem = call.problem
    if problem.batch == 0:
        return
    threads, pitch, period, words, shared = diagonals(call.plan.facts.shared_bytes, problem, call.plan.rows.packing)
    memory = None if shared else call.take("recursion diagonals")  # kept until the launch
    record = np.zeros(1, recursion_record(call.acc))
    fill(
        record,
        {
            "node_start_b": call.table["node_start_b"],
            "frame_start_b": call.table["frame_start_b"],
            "state_start_b": call.table["state_start_b"],
            "column_cn": lattice.column_cn.pointer,
            "checkpoints": _pointer(lattice.alpha),
            "log_likelihood_b": log_likelihood_b.pointer,
            "diagonals": _pointer(memory),
            "n_nodes": call.plan.rows.n_rows,
            "block_words": words,
            "emit_weight": 1 + problem.options.fastemit_lambda,
            "period": period,
            "pitch": pitch,
            "batch": problem.batch,
        },
    )
    spec = recursion_spec(problem.topology, call.acc)
    call.run(spec, entry, (problem.batch,), (threads,), record, 8 * words if shared else 0)


def sum_alignments(call: CudaCall, lattice: Lattice, log_likelihood_b: DeviceArray) -> None:
    """Writes the log-likelihood of each utterance, and alpha where the lattice keeps it."""
    _recursion(call, lattice, log_likelihood_b, "sum_alignments")


def posteriors(call: CudaCall, lattice: Lattice, log_likelihood_b: DeviceArray) -> None:
    """Turns columns into column posteriors, in place; arcs that emit weigh 1 + fastemit_lambda."""
    _recursion(call, lattice, log_likelihood_b, "posteriors")


def losses(call: CudaCall, log_likelihood_b: DeviceArray) -> DeviceArray:
    """Losses [B] in the problem's loss dtype."""
    problem = call.problem
    losses_b: DeviceArray = call.allocate(Part("losses", (problem.batch,), problem.loss_dtype, Life.FORWARD))
    record = np.zeros(1, recursion_record(call.acc))
    fill(
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


def select_rows(call: CudaCall, lattice: Lattice) -> CudaCall:
    """The same call over the rows that matter, which the device is to write."""
    problem, packing = call.problem, call.plan.rows.packing
    n_frames = packing.n_frames
    if problem.options.min_occupancy == 0 or n_frames == 0:
        return call
    memory, dropped_f = call.take("band tables"), call.take("dropped posteriors")
    band = tables.addresses(tables.band_words(packing), memory.pointer)
    record = np.zeros(1, SELECT_RECORD)
    fill(
        record,
        {
            "node_start_b": call.table["node_start_b"],
            "frame_start_b": call.table["frame_start_b"],
            "state_start_b": call.table["state_start_b"],
            "utterance_f": call.table["utterance_f"],
            "column_cn": lattice.column_cn.pointer,
            **band,
            "dropped_f": dropped_f.pointer,
            "n_nodes": call.plan.rows.n_rows,
            "n_frames": n_frames,
            "min_occupancy": problem.options.min_occupancy,
        },
    )
    spec = select_spec(problem.topology, call.acc)
    call.run(spec, "select_rows", (-(-n_frames // WARPS),), (THREADS,), record)
    call.run(spec, "start_rows", (1,), (MAX_THREADS,), record)
    kept = {**call.kept, "band tables": memory}
    selected = call.driver.download(memory)
    return dataclasses.replace(call, table={**call.table, **band}, kept=kept, selected=selected, launches={})


def start_backward(call: CudaCall, grad_losses_b: DeviceArray) -> CudaCall:
    """The same call with the upstream gradients split into unit gradients and their scale."""
    batch = call.problem.batch
    upstream = call.take("upstream")
    scale = upstream.pointer + ITEMSIZE[call.acc] * batch
    record = np.zeros(1, UPSTREAM_RECORD)
    fill(
        record,
        {
            "grad_losses_b": grad_losses_b.pointer,
            "unit_b": upstream.pointer,
            "scale": scale,
            "step": grad_losses_b.strides[0],
            "batch": batch,
            "split": call.problem.form is Form.JOINT,  # the logits form has no `finish`
        },
    )
    spec = convert_spec(call.acc, call.acc, call.acc, True)
    call.run(spec, "split_upstream", (1,), (THREADS,), record)
    bias_partials = _scratch(call, "bias partial sums")
    if bias_partials is not None:
        call.driver.zero(bias_partials)
    return dataclasses.replace(
        call,
        upstream=upstream,
        bias_partials=bias_partials,
        encoder_carry=_scratch(call, "encoder carry"),
        predictor_carry=_scratch(call, "predictor carry"),
        launches={},
    )


def rows_in_work(call: CudaCall) -> tuple[CudaCall, float]:
    """The same call, and the posterior mass of the rows left out; waits for the device if it selects them."""
    if call.selected is None:
        return call, 0.0
    rows, dropped = tables.band_rows(call.plan.rows.packing, call.selected())
    return dataclasses.replace(call, rows=rows), dropped


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
