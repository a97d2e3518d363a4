"""The joint network: hidden states of a tile, and the gradients of encoder and predictor states.

h[t, u]  = mask * f(e[t] + p[u]) / keep
de[t]    = sum over u of dh[t, u] * mask / keep * f'(e[t] + p[u]);     dp[u] the same, summed over t
"""

from __future__ import annotations

import numpy as np

from flash_rnnt_cupy.backends.numpy_cpu.activations import TABLE
from flash_rnnt_cupy.backends.numpy_cpu.call import Array, NumpyCall
from flash_rnnt_cupy.backends.numpy_cpu.dropout import BLOCK, keep_mask
from flash_rnnt_cupy.plan import Rectangle, Tile


def joint_forward(call: NumpyCall, tile: Tile, hidden: Array, active: None) -> None:
    """hidden [R, H]: the rows of the tile; there are no active bits."""
    del active
    activation = TABLE[call.problem.options.activation]
    for rectangle in call.rectangles(tile, max(hidden.shape[1], BLOCK), hidden.itemsize):
        out = call.rows_view(hidden, tile, rectangle)
        _pre_activation(call, rectangle, out)
        activation.apply(out)
        _drop(call, rectangle, out)


def joint_backward(
    call: NumpyCall,
    tile: Tile,
    grad_hidden: Array,
    active: None,
    grad_encoder: Array | None,
    grad_predictor: Array | None,
) -> None:
    """Adds the tile's part to grad_encoder and grad_predictor (shaped like the inputs); uses up grad_hidden."""
    del active
    activation = TABLE[call.problem.options.activation]
    for rectangle in call.rectangles(tile, max(grad_hidden.shape[1], BLOCK), grad_hidden.itemsize):
        grad = call.rows_view(grad_hidden, tile, rectangle)
        slope = np.empty_like(grad)
        _pre_activation(call, rectangle, slope)
        activation.derive(slope)
        grad *= slope
        _drop(call, rectangle, grad)
        if grad_encoder is not None:
            view = call.encoder_view(grad_encoder, rectangle)
            view += grad.sum(1)
        if grad_predictor is not None:
            view = call.predictor_view(grad_predictor, rectangle)
            view += grad.sum(0)


def _pre_activation(call: NumpyCall, rectangle: Rectangle, out: Array) -> None:
    """e[t] + p[u], added in the dtype of ``out``."""
    encoder = call.encoder_view(call.inputs.encoder, rectangle)
    predictor = call.predictor_view(call.inputs.predictor, rectangle)
    np.add(encoder[:, None], predictor[None], out=out, dtype=out.dtype)


def _drop(call: NumpyCall, rectangle: Rectangle, rows: Array) -> None:
    """Multiplies by the dropout mask over the keep probability."""
    options = call.problem.options
    if options.drop_below == 0:
        return
    mask = keep_mask(options.seed, call.nodes(rectangle), rows.shape[-1], options.drop_below)
    rows *= mask.reshape(rows.shape)
    rows *= rows.dtype.type(options.keep_scale)
