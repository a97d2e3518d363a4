"""The road data takes, in order; every public call is a thin caller of `forward` and `backward`.

    forward    tiles: joint -> product -> normalise -> lattice;  lattice -> alpha, log-likelihoods -> losses
    backward   lattice, alpha -> posteriors (in place) -> rows that matter
               tiles: joint -> product -> normalise-backward -> weight product -> hidden product -> joint-backward

Where the plan is fused, forward's chain is one stage over all nodes, and the first three of backward are one.
The logits form skips the joint and the products: its one tile is the caller's scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_rnnt_cupy.backends import Allocate, Backend, Buffer, Call, Lattice
from flash_rnnt_cupy.plan import Plan, Tile
from flash_rnnt_cupy.problem import Form, Inputs

NO_ROWS = Tile(0, 0, 0, 0)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the wanted inputs, each in its input's shape and dtype; None where it was not wanted.

    Padding is zero. ``rows`` of ``nodes`` lattice nodes were visited; the others hold ``dropped_posterior``
    of the batch's posterior mass, and leaving them out changes the logit gradients by at most twice that in
    L1 (at unit upstream gradient).
    """

    encoder: Buffer | None = None
    predictor: Buffer | None = None
    weight: Buffer | None = None
    bias: Buffer | None = None
    logits: Buffer | None = None
    rows: int = 0
    nodes: int = 0
    dropped_posterior: float = 0.0


@dataclass(frozen=True)
class Workspace:
    """Hidden states [R, H], logits [R, V] and active bits [R, H / 8] of one tile; without ReLU and dropout no bits."""

    hidden: Buffer
    logits: Buffer
    active: Buffer | None = None


@dataclass(eq=False)
class Saved:
    """What forward leaves for backward.

    ``lattice`` is the one thing that changes: backward turns its scores into posteriors in place and sets
    ``spent``; a further backward first scores the tiles anew. ``workspace`` is kept in untiled mode only.
    """

    plan: Plan
    inputs: Inputs
    backend: Backend
    allocate: Allocate
    call: Call
    lattice: Lattice
    log_likelihood_b: Buffer
    workspace: Workspace | None = None
    spent: bool = False

    def take(self, part: str) -> Buffer | None:
        """Memory for a part of the account; None where the plan has no such part."""
        account = self.plan.account
        return self.allocate(account[part]) if part in account else None


def forward(plan: Plan, inputs: Inputs, backend: Backend, allocate: Allocate) -> tuple[Buffer, Saved]:
    """Losses [B] in the problem's loss dtype, and what backward needs (too little, if planned without)."""
    call = backend.begin(plan, inputs, allocate, {})
    saved = Saved(plan, inputs, backend, allocate, call, Lattice(None, None, None), None)
    saved.lattice = Lattice(saved.take("scores"), saved.take("normalizers"), saved.take("alpha"))
    saved.log_likelihood_b = saved.take("log likelihoods")
    _score(saved)
    backend.sum_alignments(call, saved.lattice, saved.log_likelihood_b)
    return backend.losses(call, saved.log_likelihood_b), saved


def backward(saved: Saved, grad_losses_b: Buffer, wanted: frozenset[str], overwrite_logits: bool = False) -> Gradients:
    """Gradients of the inputs named in ``wanted``, at upstream gradients ``grad_losses_b`` [B].

    With ``overwrite_logits`` (logits form) the gradient takes the place of the caller's logits; no further
    backward can follow then.
    """
    backend, plan = saved.backend, saved.plan
    if saved.spent:
        _score(saved)
    saved.spent = True
    backend.posteriors(saved.call, saved.lattice, saved.log_likelihood_b)
    if plan.problem.form is Form.JOINT:
        return _joint_backward(saved, grad_losses_b, wanted)
    logits = saved.inputs.logits
    grad_logits = logits if overwrite_logits else saved.take("gradient of logits")
    call = backend.start_backward(saved.call, grad_losses_b)
    backend.normalize_backward(call, plan.whole, logits, saved.lattice, grad_logits, None)
    return Gradients(logits=grad_logits, rows=plan.rows.n_rows, nodes=plan.rows.n_rows)


def _score(saved: Saved) -> None:
    """Fills the lattice with the columns (and normalizers) of every node."""
    backend, plan, call, lattice = saved.backend, saved.plan, saved.call, saved.lattice
    if plan.problem.form is not Form.JOINT:
        backend.normalize_forward(call, plan.whole, saved.inputs.logits, lattice)
        return
    if plan.fused:
        assert backend.score
        backend.score(call, plan.whole, lattice)
        return
    workspace = _take_workspace(saved)
    for tile in plan.tiles:
        _tile_logits(saved, call, tile, workspace)
        backend.normalize_forward(call, tile, workspace.logits, lattice)
    if plan.untiled:
        saved.workspace = workspace


def _take_workspace(saved: Saved) -> Workspace:
    return Workspace(saved.take("tile hidden"), saved.take("tile logits"), saved.take("tile active"))


def _tile_logits(saved: Saved, call: Call, tile: Tile, workspace: Workspace) -> None:
    """Hidden states and logits of a tile; the same calls in forward and backward give the same bits."""
    saved.backend.joint_forward(call, tile, workspace.hidden, workspace.active)
    saved.backend.product(call, workspace.hidden, workspace.logits, tile.n_rows)


def _joint_backward(saved: Saved, grad_losses_b: Buffer, wanted: frozenset[str]) -> Gradients:
    """Recomputes the rows that matter, tile by tile, and adds up the gradients."""
    backend, plan, lattice = saved.backend, saved.plan, saved.lattice
    call = saved.call if plan.untiled else backend.select_rows(saved.call, lattice)
    kept, saved.workspace = saved.workspace, None  # its logits become gradients: good for one backward
    apart = {name for name in wanted if f"sums of {name}" in plan.account}  # summed in a wider dtype
    sums = {name: saved.take(f"sums of {name}" if name in apart else f"gradient of {name}") for name in wanted}
    for buffer in sums.values():
        backend.fill_zero(saved.call, buffer)
    weight_product = saved.take("weight product")
    workspace = kept or _take_workspace(saved)
    hidden, logits = workspace.hidden, workspace.logits
    call = backend.start_backward(call, grad_losses_b)

    def work(call: Call, tile: Tile) -> None:
        if plan.fused:
            assert backend.grad_scores
            backend.grad_scores(call, tile, lattice, hidden, workspace.active, logits, sums.get("bias"))
        else:
            if kept is None:
                _tile_logits(saved, call, tile, workspace)
            backend.normalize_backward(call, tile, logits, lattice, logits, sums.get("bias"))
        if "weight" in wanted:
            backend.product_weight(call, logits, hidden, tile.n_rows, sums["weight"], weight_product)
        if "encoder" in wanted or "predictor" in wanted:
            backend.product_hidden(call, logits, hidden, tile.n_rows)
            backend.joint_backward(call, tile, hidden, workspace.active, sums.get("encoder"), sums.get("predictor"))

    work(call, NO_ROWS)  # makes the launches ready while the device selects rows
    call, dropped = backend.rows_in_work(call)  # may wait for it
    for tile in plan.cut(call.rows):
        work(call, tile)

    gradients = dict(sums)
    for name in apart:
        gradients[name] = saved.take(f"gradient of {name}")
    for name in wanted:
        backend.finish(call, name, sums[name], gradients[name])
    return Gradients(**gradients, rows=call.rows.n_rows, nodes=plan.rows.n_rows, dropped_posterior=dropped)
