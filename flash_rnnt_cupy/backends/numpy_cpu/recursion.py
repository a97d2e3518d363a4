"""Forward and backward recursion over the lattice, one anti-diagonal d = t + u of the whole batch at a time.

    alpha[t, u]  log of the mass that reaches a node;  alpha[0, 0] = 0;  log-likelihood = alpha[T, U]
    beta[t, u]   log of the mass from a node to the end;  beta[T, U] = 0
    posterior_k[t, u] = exp(alpha[t, u] + score_k[t, u] + beta[t + dt_k, u + du_k] - log-likelihood)

Sums run in float64. An arc leads dt + du diagonals ahead, so a ring of ``reach + 1`` diagonals [B, max U1]
holds all that the recursion looks at.

Source: Graves 2012 (arXiv:1211.3711), eq. 16-18.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flash_rnnt_cupy.backends import Lattice
from flash_rnnt_cupy.backends.numpy_cpu.call import Array, NumpyCall
from flash_rnnt_cupy.topology import Arc

FRONTIER_ARRAYS = 16  # [B, max U1] float64 temporaries alive at once, of two columns and arcs


def sum_alignments(call: NumpyCall, lattice: Lattice, log_likelihood_b: Array) -> None:
    """Writes the log-likelihood of each utterance, and alpha where the lattice keeps it."""
    ring = _ring(call)
    ring[0, :, 0] = 0
    final_diagonal_b = call.packing.frames_b + call.packing.labels_b
    for d in range(_n_diagonals(call)):
        reached, ring[d % len(ring)] = ring[d % len(ring)].copy(), -np.inf
        ends = np.flatnonzero(final_diagonal_b == d)
        log_likelihood_b[ends] = reached[ends, call.packing.labels_b[ends]]
        live, node = _nodes(call, d)
        alpha = np.where(live, reached, -np.inf)
        if lattice.alpha is not None:
            lattice.alpha[node[live]] = alpha[live]
        columns = _columns(lattice, live, node)
        for arc in call.problem.topology.arcs:
            mass = alpha + _score(call, arc, columns, d)
            target = ring[(d + arc.dt + arc.du) % len(ring), :, arc.du :]
            np.logaddexp(target, mass[:, : target.shape[1]], out=target)


def posteriors(call: NumpyCall, lattice: Lattice, log_likelihood_b: Array) -> None:
    """Turns columns into column posteriors, in place; arcs that emit weigh 1 + fastemit_lambda.

    An utterance without any alignment gets zeros, one with a NaN log-likelihood NaN.
    """
    topology, emit_weight = call.problem.topology, 1 + call.problem.options.fastemit_lambda
    ring = _ring(call)
    final_diagonal_b = call.packing.frames_b + call.packing.labels_b
    total = np.where(log_likelihood_b == -np.inf, 0, log_likelihood_b)[:, None]
    for d in reversed(range(_n_diagonals(call))):
        live, node = _nodes(call, d)
        columns = _columns(lattice, live, node)
        before = np.full(live.shape, -np.inf)  # alpha
        assert lattice.alpha is not None
        before[live] = lattice.alpha[node[live]]
        beta = np.full(live.shape, -np.inf)
        column_posteriors = np.zeros_like(columns)
        for arc in topology.arcs:
            source = ring[(d + arc.dt + arc.du) % len(ring), :, arc.du :]
            mass = _score(call, arc, columns, d)
            mass[:, : source.shape[1]] += source
            mass[:, source.shape[1] :] = -np.inf
            np.logaddexp(beta, mass, out=beta)
            posterior = np.exp(before + mass - total)
            for c in arc.columns:
                column_posteriors[c] += emit_weight * posterior if arc.emits else posterior
        lattice.column_cn[:, node[live]] = column_posteriors[:, live]
        ends = np.flatnonzero(final_diagonal_b == d)
        beta[ends, call.packing.labels_b[ends]] = 0
        ring[d % len(ring)] = beta


def _n_diagonals(call: NumpyCall) -> int:
    """Diagonals 0 ... max(T_b + U_b), the last ones holding final nodes only."""
    return int((call.packing.frames_b + call.packing.labels_b).max(initial=-1)) + 1


def _ring(call: NumpyCall) -> Array:
    longest = call.packing.max_states
    return np.full((call.problem.topology.reach + 1, call.problem.batch, longest), -np.inf)


def _nodes(call: NumpyCall, d: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Diagonal d as [B, max U1]: which (b, u) are nodes, and their numbers (0 where they are not)."""
    packing = call.packing
    u = np.arange(packing.max_states)[None]
    t = d - u
    live = (t >= 0) & (t < packing.frames_b[:, None]) & (u < packing.states_b[:, None])
    node = packing.node_start_b[:-1, None] + t * packing.states_b[:, None] + u
    return live, np.where(live, node, 0)


def _columns(lattice: Lattice, live: npt.NDArray[np.bool_], node: npt.NDArray[np.int64]) -> Array:
    """Columns of a diagonal, [C, B, max U1] float64, -inf outside the lattice."""
    return np.where(live, lattice.column_cn[:, node], np.float64(-np.inf))


def _score(call: NumpyCall, arc: Arc, columns: Array, d: int) -> Array:
    """Score of an arc at every node of diagonal d; -inf where it would leave the lattice and may not."""
    score: Array = columns[list(arc.columns)].sum(0) + arc.constant
    if arc.dt and not arc.may_end:
        lands = d - np.arange(score.shape[1])[None] + arc.dt
        score[lands >= call.packing.frames_b[:, None]] = -np.inf
    return score
