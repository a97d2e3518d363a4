"""What a backend is, and the choice between them.

A backend is a record of stage functions. Every backend's stages have the signatures written here; they take
the backend's own `Call` (the problem's arrays and lengths, made ready once by ``begin``), a tile, and
buffers, and write into the buffers. ``Any`` stands for the backend's own array type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flash_rnnt_cupy.errors import BackendUnavailableError, InputError
from flash_rnnt_cupy.plan import Part, Plan, Tile
from flash_rnnt_cupy.plan.device import DeviceFacts
from flash_rnnt_cupy.problem import Inputs, Problem

Buffer = Any
Call = Any
Allocate = Callable[[Part], Buffer]  # uninitialised memory


@dataclass(frozen=True)
class Lattice:
    """Numbers kept per node, in node order.

    column_cn     [C, N]  log-probability of each column; after ``posteriors`` its posterior, in place
    normalizer_gn [G, N]  log-sum-exp of each softmax group, less its largest score; None where no gradient is wanted
    alpha                 log of the mass that reaches the node: of all [N], or of as many as the backend needs to
                          compute the others anew                   likewise
    """

    column_cn: Buffer
    normalizer_gn: Buffer | None
    alpha: Buffer | None


@dataclass(frozen=True)
class Backend:
    """The stages, in the order in which `pipeline` runs them.

    allocate(part)                                 the backend's own memory; callers may inject another's
    begin(plan, inputs, allocate, kept) -> call    call.kept: parts of the account that it has made, by name; with
                                                   these as ``kept`` the same call can begin again at no cost
    joint_forward(call, tile, hidden, active)      hidden[r] = dropout(activation(e[t] + p[u])), where a backend
                                                   may leave the factor 1 / keep probability to the products;
                                                   active: a bit a hidden unit for joint_backward, whether it was kept
                                                   and, for ReLU, is above 0; None where neither matters
    product(call, hidden, logits, n_rows)          logits = hidden weight^T
    normalize_forward(call, tile, logits, lattice) columns and normalizers of the tile's nodes; adds the bias
    score(call, tile, lattice)                     the three before in one, where the plan is fused
    sum_alignments(call, lattice, log_likelihood)  alpha; log_likelihood [B] float64
    losses(call, log_likelihood) -> losses         [B], in the problem's loss dtype
    posteriors(call, lattice, log_likelihood)      columns -> posteriors, FastEmit weight included
    select_rows(call, lattice) -> call             the same call over the rows above min_occupancy, which the device
                                                   may still have to find
    start_backward(call, grad_losses) -> call      the same call with upstream gradients [B]
    rows_in_work(call) -> call, dropped            the same call with call.rows found, which may wait for the device;
                                                   posterior mass of the rows left out. Before it the stages of a tile
                                                   are called once with one that has no rows, 0 of 0 frames: to make
                                                   ready what they can, and change nothing
    normalize_backward(call, tile, logits, lattice, grad_logits, grad_bias)
                                                   grad_logits may be logits; grad_bias None or added to
    grad_scores(call, tile, lattice, hidden, active, grad_logits, grad_bias)
                                                   joint_forward, product and normalize_backward in one, likewise
    product_weight(call, grad_logits, hidden, n_rows, grad_weight, product)   grad_weight += grad_logits^T hidden
    product_hidden(call, grad_logits, hidden, n_rows)                         hidden = grad_logits weight
    joint_backward(call, tile, grad_hidden, active, grad_encoder, grad_predictor)
                                                   sums over u and over t, tile by tile
    fill_zero(call, buffer)                        before sums
    finish(call, name, sums, gradient)             sums to the gradient's dtype; both may be one buffer
    """

    name: str
    facts: DeviceFacts
    supports: Callable[[Problem], tuple[str, ...]]  # reasons against; empty: it can
    allocate: Allocate
    begin: Callable[[Plan, Inputs, Allocate, Mapping[str, Buffer]], Call]
    joint_forward: Callable[[Call, Tile, Buffer, Buffer | None], None]
    product: Callable[[Call, Buffer, Buffer, int], None]
    normalize_forward: Callable[[Call, Tile, Buffer, Lattice], None]
    sum_alignments: Callable[[Call, Lattice, Buffer], None]
    losses: Callable[[Call, Buffer], Buffer]
    posteriors: Callable[[Call, Lattice, Buffer], None]
    select_rows: Callable[[Call, Lattice], Call]
    start_backward: Callable[[Call, Buffer], Call]
    rows_in_work: Callable[[Call], tuple[Call, float]]
    normalize_backward: Callable[[Call, Tile, Buffer, Lattice, Buffer, Buffer | None], None]
    product_weight: Callable[[Call, Buffer, Buffer, int, Buffer, Buffer | None], None]
    product_hidden: Callable[[Call, Buffer, Buffer, int], None]
    joint_backward: Callable[[Call, Tile, Buffer, Buffer | None, Buffer | None, Buffer | None], None]
    fill_zero: Callable[[Call, Buffer], None]
    finish: Callable[[Call, str, Buffer, Buffer], None]
    score: Callable[[Call, Tile, Lattice], None] | None = None
    grad_scores: Callable[[Call, Tile, Lattice, Buffer, Buffer | None, Buffer, Buffer | None], None] | None = None


NAMES = ("cuda", "numpy")  # in order of preference
GENERIC = "cuda-generic"  # "cuda" without its fused kernels, by name only: to compare them, or to do without them
HOST = "cpu"


def candidates(requested: str) -> tuple[str, ...]:
    """The backends that "auto" or a name stands for, in order of preference."""
    if requested not in ("auto", *NAMES, GENERIC):
        raise InputError("backend", f"one of auto, {', '.join(NAMES)}, {GENERIC}", repr(requested))
    return NAMES if requested == "auto" else (requested,)


def unavailable(name: str) -> str:
    """Why this machine lacks the backend; empty if it has it."""
    if name == "numpy":
        return ""
    from flash_rnnt_cupy.backends import cuda  # noqa: PLC0415  backends load on demand

    return cuda.unavailable()


def load(name: str, device: str) -> Backend:
    """The backend of that name on a device ("cpu", "cuda:0")."""
    if name == "numpy":
        from flash_rnnt_cupy.backends.numpy_cpu import BACKEND  # noqa: PLC0415  backends load on demand

        return BACKEND
    from flash_rnnt_cupy.backends import cuda  # noqa: PLC0415

    return cuda.backend(int(device.partition(":")[2] or 0), fused=name != GENERIC)


def choose(requested: str, problem: Problem, device: str) -> Backend:
    """The first backend that can do the problem where its arrays are; the error says why none can."""
    refusals = []
    for name in candidates(requested):
        where = "host memory" if device == HOST else device
        if (device == HOST) != (name == "numpy"):
            refusals.append(f"{name}: the arrays are in {where}")
        elif reason := unavailable(name):
            refusals.append(f"{name}: {reason}")
        else:
            backend = load(name, device)
            reasons = backend.supports(problem)
            if not reasons:
                return backend
            refusals.append(f"{name}: {'; '.join(reasons)}")
    raise BackendUnavailableError(f"no backend for {problem}: {', '.join(refusals)}")


def planning_facts(requested: str) -> DeviceFacts:
    """Facts to plan with: of the backend on this machine, or of an H200 for "cuda" where there is no GPU."""
    names = candidates(requested)
    name = next((n for n in names if not unavailable(n)), names[0])
    if unavailable(name):
        from flash_rnnt_cupy.backends.cuda.facts import H200  # noqa: PLC0415  backends load on demand

        return H200
    return load(name, HOST).facts
