"""Kernel modules and their parameter records, as the launcher and the compiler both know them.

A record has the fields of the struct of the same name in `kernels_cu/`; its layout is checked when a kernel is
compiled. A specification names a source and the constants that specialise it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_rnnt_cupy.backends.cuda import tables
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec
from flash_rnnt_cupy.backends.cuda.facts import FUSED_ACTIVATIONS, FUSED_SHARED_BYTES, item_panels
from flash_rnnt_cupy.plan import accumulator_dtype
from flash_rnnt_cupy.problem import ACTIVATIONS
from flash_rnnt_cupy.topology import RNNT, Logit, Topology

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
        ("active", "pointer"),
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
        ("checkpoints", "pointer"),
        ("log_likelihood_b", "pointer"),
        ("losses_b", "pointer"),
        ("diagonals", "pointer"),
        ("n_nodes", np.int64),
        ("block_words", np.int64),
        ("emit_weight", "acc"),
        ("period", np.int32),
        ("pitch", np.int32),
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
    ("row_start_f", "pointer"),
    ("dropped_f", "pointer"),
    ("dropped", "pointer"),
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
    ("step", np.int64),
    ("batch", np.int32),
    ("split", np.int32),
)


FUSED_RECORD = _record(
    "float32",
    ("rows", tables.ROWS),
    ("tile", tables.TILE),
    ("encoder", "pointer"),
    ("predictor", "pointer"),
    ("encoder_offset_b", "pointer"),
    ("predictor_offset_b", "pointer"),
    ("encoder_step", np.int64),
    ("predictor_step", np.int64),
    ("slabs", "pointer"),
    ("panel_bias", "pointer"),
    ("labels", "pointer"),
    ("label_start_b", "pointer"),
    ("column_cn", "pointer"),
    ("normalizer_n", "pointer"),
    ("upstream_b", "pointer"),
    ("hidden", "pointer"),
    ("active", "pointer"),
    ("grad_logits", "pointer"),
    ("bias_partials", "pointer"),
    ("grad_step", np.int64),
    ("n_nodes", np.int64),
    ("seed", np.uint64),
    ("scale", "acc"),
    ("threshold", np.uint32),
    ("blank", np.int32),
)
PACK_RECORD = _record(
    "float32",
    ("weight", "pointer"),
    ("bias", "pointer"),
    ("slabs", "pointer"),
    ("panel_bias", "pointer"),
    ("multiplied", "pointer"),
    ("keep", "acc"),
)


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
        ("ROW_THREADS", row_threads(vocabulary)),
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


@functools.cache
def fused_spec(entry: str, state: str, width: int, vocabulary: int, activation: str, dropout: bool) -> ModuleSpec:
    """score_sm90.cu or grad_sm90.cu for this joint network."""
    pair, operand = {"float16": ("f16x2", "f16"), "bfloat16": ("bf16x2", "bf16")}[state]
    constants: Constants = (
        ("STATE", state),
        ("PAIR", f'"{pair}"'),
        ("OPERAND", f'"{operand}"'),
        ("WIDTH", width),
        ("VOCABULARY", vocabulary),
        ("ITEM_PANELS", item_panels(entry, vocabulary)),
        ("ACTIVATION", activation),
        ("DROPOUT", int(dropout)),
        ("SHARED_BYTES", FUSED_SHARED_BYTES),
    )
    file = {"score": "score_sm90.cu", "grad_scores": "grad_sm90.cu"}[entry]
    return ModuleSpec(file, constants, (("FusedParams", FUSED_RECORD),))


@functools.cache
def pack_spec(state: str, parameter: str, width: int, vocabulary: int) -> ModuleSpec:
    """pack_sm90.cu for this output layer."""
    constants: Constants = (
        ("STATE", state),
        ("PARAMETER", parameter),
        ("WIDTH", width),
        ("VOCABULARY", vocabulary),
    )
    return ModuleSpec("pack_sm90.cu", constants, (("PackParams", PACK_RECORD),))


def fused_specs() -> Iterator[ModuleSpec]:
    """The sources that compile for compute capability 9.0 alone, each option once."""
    for entry in ("score", "grad_scores"):
        for state in ("float16", "bfloat16"):
            for width, vocabulary in ((640, 1024), (768, 4_100), (40, 29)):
                for dropout in (False, True):
                    yield fused_spec(entry, state, width, vocabulary, "relu", dropout)
        for activation in FUSED_ACTIVATIONS:
            yield fused_spec(entry, "float16", 512, 500, activation, True)
    for parameter in ("float16", "float32", "float64"):
        yield pack_spec("float16", parameter, 640, 1024)


def all_specs() -> Iterator[ModuleSpec]:
    """Every source in each of its dtypes, and every option of each source once."""
    for state in ("float16", "bfloat16", "float32", "float64"):
        acc = accumulator_dtype(state)
        for wide in (False, True):
            yield joint_spec(state, state, acc, 640, "relu", True, wide)
            for vocabulary in (1_000, 5_001, 50_000):
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


def row_threads(vocabulary: int) -> int:
    """Threads that share a row of V scores: a warp, or a block."""
    return 32 if vocabulary <= 2048 else 256 if vocabulary <= 16384 else 1024


def is_resident(vocabulary: int) -> bool:
    """Whether normalize.cu keeps a thread's part of a row in registers (kResident)."""
    threads = row_threads(vocabulary)
    return threads <= 256 and -(-vocabulary // (threads * 8)) <= 8


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
