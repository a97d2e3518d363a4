"""From a node's V scores to its columns, and back to the gradient of the scores.

    forward    normalizer_g = log of the sum of exp(z - top_g), top_g = max of z over group g
               column_c = (z[v_c] - top_g) - normalizer_g,  g = group of c
    backward   dz[v] = mass_g exp((z[v] - top_g) - normalizer_g) - sum over columns c on logit v of posterior_c,
               clipped to [-clamp, clamp], times the utterance's upstream gradient

Scores enter relative to the largest, so that large ones keep their digits.

-inf scores are lawful: they get probability and gradient zero, and a node with none but -inf passes nothing
on. A NaN or +inf score makes every column of its node NaN, and so the loss of its utterance.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flash_rnnt_cupy.backends import Lattice
from flash_rnnt_cupy.backends.numpy_cpu.call import Array, NumpyCall
from flash_rnnt_cupy.plan import Rectangle, Tile, accumulator_dtype
from flash_rnnt_cupy.problem import Form
from flash_rnnt_cupy.topology import Logit


def normalize_forward(call: NumpyCall, tile: Tile, logits: Array, lattice: Lattice) -> None:
    """Fills the lattice at the tile's nodes from ``logits`` (the tile's, or the caller's); logits stay."""
    topology = call.problem.topology
    for rectangle, scores in _scores(call, tile, logits):
        columns = call.node_view(lattice.column_cn, rectangle)
        normalizers = []
        for g, group in enumerate(() if call.problem.form is Form.LOG_PROBS else topology.groups):
            normalizers.append(_center(scores[..., group.slice()]))
            if lattice.normalizer_gn is not None:
                call.node_view(lattice.normalizer_gn, rectangle)[g] = normalizers[g]
        for c, column in enumerate(topology.columns):
            _gather(call, column.logit, rectangle, scores, columns[c])
            if normalizers:
                masked = normalizers[column.group] == -np.inf  # there the column is -inf already
                columns[c] -= np.where(masked, 0, normalizers[column.group])
        columns[columns == np.inf] = np.nan


def normalize_backward(
    call: NumpyCall,
    tile: Tile,
    logits: Array,
    lattice: Lattice,
    grad_logits: Array,
    grad_bias: Array | None,
) -> None:
    """Writes the gradient of the tile's scores to ``grad_logits`` (which may be ``logits``), padding as zero.

    Adds its sum over rows to ``grad_bias``. ``lattice`` holds posteriors.
    """
    problem = call.problem
    clamp = problem.options.clamp
    assert call.grad_losses_b is not None
    for rectangle, scores in _scores(call, tile, logits):
        posteriors = call.node_view(lattice.column_cn, rectangle)  # [C, frames, states]
        if problem.form is Form.LOG_PROBS:
            scores[...] = 0
        else:
            assert lattice.normalizer_gn is not None
            _softmax_times_mass(call, rectangle, scores, posteriors, lattice.normalizer_gn)
        for c, column in enumerate(problem.topology.columns):
            _scatter_subtract(call, column.logit, rectangle, scores, posteriors[c])
        if clamp is not None:
            np.clip(scores, -clamp, clamp, out=scores)
        np.multiply(scores, call.grad_losses_b[rectangle.b], out=scores, casting="same_kind")
        call.logits_view(grad_logits, tile, rectangle)[...] = scores
        if grad_bias is not None:
            grad_bias += scores.sum((0, 1))
    if grad_logits.ndim == 4:
        _zero_padding(call, grad_logits)


def _scores(call: NumpyCall, tile: Tile, logits: Array) -> Iterator[tuple[Rectangle, Array]]:
    """Copies of the scores, bias added, in the accumulator dtype, [frames, states, V] a piece."""
    dtype = np.dtype(accumulator_dtype(call.problem.dtype))
    for rectangle in call.rectangles(tile, logits.shape[-1], dtype.itemsize):
        scores = call.logits_view(logits, tile, rectangle).astype(dtype)
        if call.bias is not None:
            scores += call.bias
        yield rectangle, scores


def _gather(call: NumpyCall, logit: Logit | int, rectangle: Rectangle, scores: Array, column: Array) -> None:
    """column [frames, states] = the logit's scores; -inf where there is no next label."""
    if logit is Logit.LABEL:
        labels = call.labels(rectangle)
        column[:, : len(labels)] = scores[:, np.arange(len(labels)), labels]
        column[:, len(labels) :] = -np.inf
    else:
        column[...] = scores[..., _row(call, logit)]


def _scatter_subtract(
    call: NumpyCall, logit: Logit | int, rectangle: Rectangle, scores: Array, posterior: Array
) -> None:
    """Takes the posterior off the logit's gradient."""
    if logit is Logit.LABEL:
        labels = call.labels(rectangle)
        scores[:, np.arange(len(labels)), labels] -= posterior[:, : len(labels)]
    else:
        scores[..., _row(call, logit)] -= posterior


def _row(call: NumpyCall, logit: Logit | int) -> int:
    return call.problem.blank if logit is Logit.BLANK else int(logit)  # type: ignore[arg-type]


def _subtract_top(scores: Array) -> None:
    """scores -= their largest over the last axis, where that is not -inf. In a row with +inf that score is NaN."""
    top = scores.max(-1, keepdims=True)
    scores -= np.where(top == -np.inf, 0, top)


def _center(scores: Array) -> Array:
    """Subtracts the largest score over the last axis; returns the log of the sum of exponentials of the rest."""
    _subtract_top(scores)
    with np.errstate(divide="ignore"):
        normalizer: Array = np.log(np.exp(scores).sum(-1))
    return normalizer


def _softmax_times_mass(
    call: NumpyCall, rectangle: Rectangle, scores: Array, posteriors: Array, normalizer_gn: Array
) -> None:
    """scores[v] = mass_g exp((scores[v] - top_g) - normalizer_g); zero where the mass is."""
    normalizers = call.node_view(normalizer_gn, rectangle)
    topology = call.problem.topology
    for g, group in enumerate(topology.groups):
        mass = sum(posteriors[c] for c, column in enumerate(topology.columns) if column.group == g)
        part = scores[..., group.slice()]
        _subtract_top(part)
        part -= normalizers[g][..., None]
        np.exp(part, out=part)
        part *= np.asarray(mass)[..., None]
        part[mass == 0] = 0


def _zero_padding(call: NumpyCall, grad_logits: Array) -> None:
    """Zeroes what lies beyond each utterance's frames and states in [B, T, U1, V]."""
    for b in range(call.problem.batch):
        grad_logits[b, call.packing.frames_b[b] :] = 0
        grad_logits[b, :, call.packing.states_b[b] :] = 0
