"""The three matrix products of a tile."""

from __future__ import annotations

import numpy as np

from flash_rnnt_cupy.backends.numpy_cpu.call import Array, NumpyCall


def product(call: NumpyCall, hidden: Array, logits: Array, n_rows: int) -> None:
    """logits [R, V] = hidden [R, H] weight^T, for the first n_rows rows."""
    assert call.weight is not None
    np.matmul(hidden[:n_rows], call.weight.T, out=logits[:n_rows])


def product_weight(
    call: NumpyCall, grad_logits: Array, hidden: Array, n_rows: int, grad_weight: Array, scratch: Array | None
) -> None:
    """grad_weight [V, H] += grad_logits^T hidden; ``scratch`` [V, H] takes the tile's product."""
    del call
    if n_rows == 0:
        return
    assert scratch is not None
    np.matmul(grad_logits[:n_rows].T, hidden[:n_rows], out=scratch)
    grad_weight += scratch


def product_hidden(call: NumpyCall, grad_logits: Array, hidden: Array, n_rows: int) -> None:
    """hidden [R, H] = grad_logits [R, V] weight: the hidden states give way to their gradient."""
    assert call.weight is not None
    np.matmul(grad_logits[:n_rows], call.weight, out=hidden[:n_rows])
