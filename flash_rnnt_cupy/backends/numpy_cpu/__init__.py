"""The NumPy backend: the same stages and tiles as on a GPU, for machines without one and for tests.

float16 and bfloat16 inputs are widened to float32 tile by tile; losses and gradients come from float32
products (float64 for float64 inputs) and a float64 recursion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from flash_rnnt_cupy.backends import Allocate, Backend
from flash_rnnt_cupy.backends.numpy_cpu import joint, normalize, products, recursion, select
from flash_rnnt_cupy.backends.numpy_cpu.call import SCRATCH_BYTES, TEMPORARIES, Array, NumpyCall
from flash_rnnt_cupy.dtypes import numpy_dtype
from flash_rnnt_cupy.plan import DeviceFacts, Life, Packing, Part, Plan, accumulator_dtype
from flash_rnnt_cupy.problem import Inputs, Problem


def _scratch(problem: Problem, packing: Packing, gradients: frozenset[str]) -> tuple[Part, ...]:
    """Temporaries of the stages, by count of the code."""
    frontier = (recursion.FRONTIER_ARRAYS, problem.batch, packing.max_states)
    parts = [
        Part("recursion frontier", frontier, "float64", Life.TILE),
        Part("stage temporaries", (TEMPORARIES, SCRATCH_BYTES // 4), "float32", Life.TILE),
    ]
    if "weight" in gradients & problem.shapes.keys():  # NumPy cannot add a product to an array
        dtype = accumulator_dtype(problem.dtype)
        parts.append(Part("weight product", problem.shapes["weight"], dtype, Life.BACKWARD))
    return tuple(parts)


FACTS = DeviceFacts(
    name="CPU (NumPy)",
    tile_bytes=32 << 20,
    half_products=False,
    shared_bytes=0,
    alpha_shape=lambda _, packing: (packing.n_nodes,),
    sums_apart=frozenset({"encoder", "predictor", "weight", "bias"}),
    logits_multiple=1,
    scratch=_scratch,
    against_fused=lambda _: ("NumPy has none",),
    row_multiple=1,
)


def allocate(part: Part) -> Array:
    """Uninitialised memory."""
    return np.empty(part.shape, numpy_dtype(part.dtype))


def _supports(problem: Problem) -> tuple[str, ...]:
    del problem
    return ()


def _begin(plan: Plan, inputs: Inputs, take: Allocate, kept: Mapping[str, Array]) -> NumpyCall:
    """Weight and bias in the dtypes in which they are used."""
    given = {"weight as multiplied": inputs.weight, "bias as added": inputs.bias}
    made = {name: kept[name] for name in given if name in kept}
    for name, array in given.items():
        if name in plan.account and name not in made:
            made[name] = take(plan.account[name])
            made[name][...] = array
    weight, bias = (made.get(name, array) for name, array in given.items())
    return NumpyCall(plan.problem, plan.rows, inputs, weight, bias, made)


def _losses(call: NumpyCall, log_likelihood_b: Array) -> Array:
    losses = -log_likelihood_b
    if call.problem.options.zero_infinity:
        losses[losses == np.inf] = 0
    return losses.astype(call.problem.loss_dtype)


def _start_backward(call: NumpyCall, grad_losses_b: Array) -> NumpyCall:
    return dataclasses.replace(call, grad_losses_b=grad_losses_b)


def _fill_zero(call: NumpyCall, buffer: Array) -> None:
    del call
    buffer[...] = 0


def _finish(call: NumpyCall, name: str, sums: Array, gradient: Array) -> None:
    del call, name
    if sums is not gradient:
        with np.errstate(over="ignore"):  # float16: beyond its range is inf, as in any framework
            gradient[...] = sums


# NaN, +inf and what overflows to it are lawful: they make their utterance NaN, without a warning
_quiet = np.errstate(invalid="ignore", over="ignore")

BACKEND = Backend(
    name="numpy",
    facts=FACTS,
    supports=_supports,
    allocate=allocate,
    begin=_begin,
    joint_forward=_quiet(joint.joint_forward),
    product=_quiet(products.product),
    normalize_forward=_quiet(normalize.normalize_forward),
    sum_alignments=_quiet(recursion.sum_alignments),
    losses=_losses,
    posteriors=_quiet(recursion.posteriors),
    select_rows=select.select_rows,
    start_backward=_start_backward,
    rows_in_work=select.rows_in_work,
    normalize_backward=_quiet(normalize.normalize_backward),
    product_weight=_quiet(products.product_weight),
    product_hidden=_quiet(products.product_hidden),
    joint_backward=_quiet(joint.joint_backward),
    fill_zero=_fill_zero,
    finish=_finish,
)
