"""The joint network: hidden states of a tile, and the gradients of encoder and predictor states.

h[t, u]  = mask * f(e[t] + p[u]) / keep
de[t]    = sum over u of dh[t, u] * mask / keep * f'(e[t] + p[u]);     dp[u] the same, summed over t
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends.numpy_cpu.activations import TABLE
from flash_rnnt_cupy.backends.numpy_cpu.call import Array, NumpyCall
from flash_rnnt_cupy.backends.numpy_cpu.dropout import BLOCK, keep_mask
from flash_rnnt_cupy.plan import Rectangle, Tile

Bits = npt.NDArray[np.uint8]


def joint_forward(call: NumpyCall, tile: Tile, hidden: Array, active: Bits | None) -> None:
    """hidden [R, H] and active bits [R, ceil(H / 8)]: the rows of the tile."""
    options, width = call.problem.options, hidden.shape[1]
    for rectangle in call.rectangles(tile, width, hidden.itemsize):
        out = call.rows_view(hidden, tile, rectangle)
        _pre_activation(call, rectangle, out)
        TABLE[options.activation].apply(out)
    if active is None:
        return
    for begin, end in call.runs(tile, max(width, BLOCK)):
        rows = hidden[begin - tile.row_begin : end - tile.row_begin]
        if options.drop_below:
            kept = keep_mask(options.seed, call.rows.nodes(begin, end), width, options.drop_below)
            rows *= kept
            rows *= rows.dtype.type(options.keep_scale)
        counts = rows > 0 if options.activation == "relu" else kept
        active[begin - tile.row_begin : end - tile.row_begin] = np.packbits(counts, axis=1)


def joint_backward(
    call: NumpyCall,
    tile: Tile,
    grad_hidden: Array,
    active: Bits | None,
    grad_encoder: Array | None,
    grad_predictor: Array | None,
) -> None:
    """Adds the tile's part to grad_encoder and grad_predictor (shaped like the inputs); uses up grad_hidden."""
    options, width = call.problem.options, grad_hidden.shape[1]
    derive = TABLE[options.activation].derive
    if active is not None:
        for begin, end in call.runs(tile, width):
            run = slice(begin - tile.row_begin, end - tile.row_begin)
            grad_hidden[run] *= np.unpackbits(active[run], axis=1, count=width).view(np.bool_)
            if options.drop_below:
                grad_hidden[run] *= grad_hidden.dtype.type(options.keep_scale)
    for rectangle in call.rectangles(tile, width, grad_hidden.itemsize):
        grad = call.rows_view(grad_hidden, tile, rectangle)
        if derive is not None:
            slope = np.empty_like(grad)
            _pre_activation(call, rectangle, slope)
            derive(slope)
            grad *= slope
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
