"""The stages of a tile in one kernel each, on devices of compute capability 9.0 (score_sm90.cu, grad_sm90.cu).

They take the place of joint_forward, product and normalize_forward or normalize_backward where
`facts.against_fused` has no reason against it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from flash_rnnt_cupy.backends import Lattice
from flash_rnnt_cupy.backends.cuda.facts import FUSED_SHARED_BYTES, STRIP_ROWS, item_panels, panels
from flash_rnnt_cupy.backends.cuda.memory import DeviceArray, is_aligned
from flash_rnnt_cupy.backends.cuda.specs import FUSED_RECORD, PACK_RECORD, fused_spec, pack_spec
from flash_rnnt_cupy.backends.cuda.stages import (
    MULTIPLIED,
    THREADS,
    CudaCall,
    Launch,
    add_bias_partials,
    fill,
    states_fields,
)
from flash_rnnt_cupy.plan import Tile

FUSED_THREADS = 512
SLABS, PANEL_BIAS = "weight in slabs", "bias in panels"  # parts of the account


def pack_parameters(call: CudaCall) -> CudaCall:
    """Weight and bias in the order in which the fused kernels read them, and the weight as cuBLAS does, once a call."""
    if SLABS not in call.kept:
        _pack(call)
    return dataclasses.replace(call, weight=call.kept.get(MULTIPLIED, call.weight))


def _pack(call: CudaCall) -> None:
    kept, problem, given = call.kept, call.problem, call.inputs
    for part in (SLABS, PANEL_BIAS, MULTIPLIED):
        if part in call.plan.account:
            kept[part] = call.take(part)
    record = np.zeros(1, PACK_RECORD)
    fill(
        record,
        {
            "weight": given.weight.pointer,
            "bias": given.bias.pointer if given.bias is not None else 0,
            "slabs": kept[SLABS].pointer,
            "panel_bias": kept[PANEL_BIAS].pointer,
            "multiplied": kept[MULTIPLIED].pointer if MULTIPLIED in kept else 0,
            "keep": 1 / problem.options.keep_scale,
        },
    )
    spec = pack_spec(problem.dtype, problem.parameter_dtype, problem.joint_width, problem.vocabulary)
    chunks = math.prod(kept[SLABS].shape) // 8
    call.run(spec, "pack", (-(-chunks // THREADS),), (THREADS,), record)


def _launch(call: CudaCall, entry: str, lattice: Lattice, values: dict[str, Any]) -> Launch:
    """A fused kernel over this call's rows."""
    key = (entry, *values.values())
    if key in call.launches:
        return call.launches[key]
    problem, inputs, options = call.problem, call.inputs, call.problem.options
    record = np.zeros(1, FUSED_RECORD)
    fill(
        record,
        {
            **states_fields(call),
            "slabs": call.kept[SLABS].pointer,
            "panel_bias": call.kept[PANEL_BIAS].pointer,
            "labels": call.table["labels"],
            "label_start_b": call.table["label_start_b"],
            "column_cn": lattice.column_cn.pointer,
            "normalizer_n": lattice.normalizer_gn.pointer if lattice.normalizer_gn is not None else 0,
            "n_nodes": call.plan.rows.n_rows,
            "scale": options.keep_scale,
            "blank": problem.blank,
            **values,
        },
    )
    assert all(map(is_aligned, (inputs.encoder, inputs.predictor)))
    network = problem.joint_width, problem.vocabulary, options.activation, options.drop_below > 0
    spec = fused_spec(entry, problem.dtype, *network)
    call.launches[key] = Launch(call.driver, spec, entry, record, FUSED_SHARED_BYTES, early=entry == "grad_scores")
    return call.launches[key]


def _grid(call: CudaCall, tile: Tile, items_a_strip: int) -> tuple[int]:
    """A block a multiprocessor: the items go round them."""
    return (min(-(-tile.n_rows // STRIP_ROWS) * items_a_strip, call.multiprocessors),)


def score(call: CudaCall, tile: Tile, lattice: Lattice) -> None:
    """Fills the lattice at the tile's nodes."""
    if tile.n_rows:
        _launch(call, "score", lattice, {})(tile, _grid(call, tile, 1), (FUSED_THREADS,))


def grad_scores(
    call: CudaCall,
    tile: Tile,
    lattice: Lattice,
    hidden: DeviceArray,
    active: DeviceArray | None,
    grad_logits: DeviceArray,
    grad_bias: DeviceArray | None,
) -> None:
    """Writes the tile's hidden states, their active bits and the gradient of its scores; adds to the bias's."""
    values = {
        "upstream_b": call.upstream.pointer if call.upstream is not None else 0,
        "hidden": hidden.pointer,
        "active": active.pointer if active is not None else 0,
        "grad_logits": grad_logits.pointer,
        "grad_step": grad_logits.pitch,
        "bias_partials": call.bias_partials.pointer if grad_bias is not None and call.bias_partials is not None else 0,
    }
    launch = _launch(call, "grad_scores", lattice, values)
    vocabulary = call.problem.vocabulary
    launch(tile, _grid(call, tile, -(-panels(vocabulary) // item_panels("grad_scores", vocabulary))), (FUSED_THREADS,))
    if grad_bias is not None:
        add_bias_partials(call, tile, grad_logits, lattice, grad_logits, grad_bias)
