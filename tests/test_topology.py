"""Other losses as tables, through the whole road of the logits form, against enumerated paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from flash_rnnt_cupy import pipeline
from flash_rnnt_cupy.backends import Lattice
from flash_rnnt_cupy.backends.numpy_cpu import BACKEND, recursion
from flash_rnnt_cupy.backends.numpy_cpu.call import NumpyCall
from flash_rnnt_cupy.plan import Packing, make_plan
from flash_rnnt_cupy.problem import Form, Inputs, Options, Problem
from flash_rnnt_cupy.topology import RNNT, Arc, Column, Group, Logit, Topology
from tests.oracles import paths
from tests.oracles.checks import assert_close
from tests.problems import Array, draw_targets

V, BLANK, SIGMA = 6, 5, 0.05
FRAMES, LABELS = (4, 1, 3, 4), (2, 0, 3, 1)

TOKENS = (Column("blank", Logit.BLANK), Column("label", Logit.LABEL))


def monotonic(label_may_end: bool) -> Topology:
    arcs = Arc("blank", 1, 0, (0,), may_end=True), Arc("label", 1, 1, (1,), may_end=label_may_end)
    return Topology("monotonic", (Group("tokens"),), TOKENS, arcs)


MULTI_BLANK = Topology(
    "multi-blank",
    (Group("tokens"),),
    (*TOKENS, Column("blank of 2 frames", 4)),
    (
        Arc("blank", 1, 0, (0,), -SIGMA, may_end=True),
        Arc("blank of 2 frames", 2, 0, (2,), -SIGMA, may_end=True),
        Arc("label", 0, 1, (1,), -SIGMA),
    ),
)
DURATIONS = (0, 1, 2)
TDT = Topology(
    "tdt",
    (Group("tokens", 0, V), Group("durations", V)),
    (*TOKENS, *(Column(f"{d} frames", V + i, group=1) for i, d in enumerate(DURATIONS))),
    (
        *(Arc(f"blank of {d}", d, 0, (0, 2 + i), -SIGMA, may_end=True) for i, d in enumerate(DURATIONS) if d),
        *(Arc(f"label of {d}", d, 1, (1, 2 + i), -SIGMA) for i, d in enumerate(DURATIONS)),
    ),
)

Paths = Callable[[Array, Sequence[int]], list[paths.Path]]


@dataclass(frozen=True)
class Case:
    topology: Topology
    paths: Paths
    n_logits: int = V


CASES = {
    "rnnt": Case(RNNT, partial(paths.rnnt, blank=BLANK)),
    "monotonic, ends by blank": Case(monotonic(False), partial(paths.monotonic, blank=BLANK, ends_by="blank")),
    "monotonic, ends by any": Case(monotonic(True), partial(paths.monotonic, blank=BLANK, ends_by="any")),
    "multi-blank": Case(MULTI_BLANK, partial(paths.multi_blank, blanks={1: BLANK, 2: 4}, sigma=SIGMA)),
    "tdt": Case(TDT, partial(paths.tdt, blank=BLANK, durations=DURATIONS, sigma=SIGMA), n_logits=V + len(DURATIONS)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def problem_of(topology: Topology, logits: Array, options: Options, form: Form = Form.LOGITS) -> Problem:
    return Problem(
        form=form,
        topology=topology,
        frames_b=np.array(FRAMES, np.int64),
        labels_b=np.array(LABELS, np.int64),
        vocabulary=logits.shape[-1],
        blank=BLANK,
        dtype="float64",
        shapes={"logits": logits.shape},
        options=options,
    )


def draw(case: Case) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(len(FRAMES), max(FRAMES), max(LABELS) + 1, case.n_logits))
    return logits, draw_targets(rng, LABELS, max(LABELS), 4, -1)  # labels in 0 ... 2


@each_case
@pytest.mark.parametrize("fastemit_lambda", [0.0, 0.3])
def test_losses_and_logit_gradients_are_those_of_the_paths(case: Case, fastemit_lambda: float) -> None:
    logits, targets = draw(case)
    problem = problem_of(case.topology, logits, Options(fastemit_lambda=fastemit_lambda))
    plan = make_plan(problem, BACKEND.facts)
    losses, saved = pipeline.forward(plan, Inputs(targets, logits=logits), BACKEND, BACKEND.allocate)
    gradients = pipeline.backward(saved, np.ones(len(FRAMES)), frozenset({"logits"}))
    for b, (T, U) in enumerate(zip(FRAMES, LABELS, strict=True)):
        grid = logits[b, :T, : U + 1]
        found = case.paths(grid, targets[b, :U].tolist())
        assert_close(losses[b], paths.nll(found), rtol=1e-13, atol=1e-13)
        expected = paths.logit_gradient(found, grid.shape, fastemit_lambda)
        assert_close(gradients.logits[b, :T, : U + 1], expected, rtol=0, atol=1e-13)


@each_case
def test_a_second_backward_gives_the_same_gradient(case: Case) -> None:
    logits, targets = draw(case)
    plan = make_plan(problem_of(case.topology, logits, Options()), BACKEND.facts)
    _, saved = pipeline.forward(plan, Inputs(targets, logits=logits), BACKEND, BACKEND.allocate)
    first, second = (pipeline.backward(saved, np.ones(4), frozenset({"logits"})).logits for _ in range(2))
    np.testing.assert_array_equal(second, first)


def column_log_probs(case: Case, grid: Array, labels: Sequence[int]) -> Array:
    """[C, T, U1] in plain loops; -inf for a label that does not exist."""
    columns = np.full((len(case.topology.columns), *grid.shape[:2]), -np.inf)
    for c, column in enumerate(case.topology.columns):
        group = case.topology.groups[column.group]
        members = range(*group.slice().indices(grid.shape[2]))
        for t, u in np.ndindex(*grid.shape[:2]):
            if column.logit is Logit.LABEL and u >= len(labels):
                continue
            v = {Logit.BLANK: BLANK, Logit.LABEL: [*labels, None][u]}.get(column.logit, column.logit)
            columns[c, t, u] = paths.log_softmax(grid[t, u], v, members)[0]
    return columns


@each_case
def test_the_recursion_alone_gives_losses_and_column_posteriors(case: Case) -> None:
    logits, targets = draw(case)
    packing = Packing(np.array(FRAMES, np.int64), np.array(LABELS, np.int64))
    problem = problem_of(case.topology, logits, Options())
    call = NumpyCall(problem, packing.all_rows(), Inputs(targets, logits=logits), weight=None, bias=None, kept={})
    grids = [logits[b, :T, : U + 1] for b, (T, U) in enumerate(zip(FRAMES, LABELS, strict=True))]
    columns = [column_log_probs(case, grid, targets[b, : LABELS[b]].tolist()) for b, grid in enumerate(grids)]
    column_cn = np.concatenate([column.reshape(len(column), -1) for column in columns], 1)
    lattice = Lattice(column_cn, None, np.full(packing.n_nodes, np.nan))
    log_likelihood_b = np.full(len(FRAMES), np.nan)
    recursion.sum_alignments(call, lattice, log_likelihood_b)
    assert not np.isnan(lattice.alpha).any()
    recursion.posteriors(call, lattice, log_likelihood_b)
    for b, grid in enumerate(grids):
        found = case.paths(grid, targets[b, : LABELS[b]].tolist())
        assert_close(-log_likelihood_b[b], paths.nll(found), rtol=1e-13, atol=1e-13)
        nodes = slice(packing.node_start_b[b], packing.node_start_b[b + 1])
        posterior_c = column_cn[:, nodes].reshape(-1, *grid.shape[:2])
        expected = np.zeros_like(posterior_c)
        for weight, step in paths.weighted_steps(found):
            for c in columns_of(case, step.kind):
                expected[c, step.t, step.u] += weight
        assert_close(posterior_c, expected, rtol=0, atol=1e-13)


def columns_of(case: Case, kind: str) -> list[int]:
    """Columns of an oracle's symbol, e.g. "label_2" of TDT: the label, and 2 frames."""
    token, _, duration = kind.partition("_")
    if case.topology is TDT:
        return [int(token == "label"), 2 + DURATIONS.index(int(duration))]
    return [2] if kind == "blank_2" else [int(token == "label")]


def test_monotonic_with_fewer_frames_than_labels_is_impossible() -> None:
    logits, targets = np.zeros((4, 4, 5, V)), np.zeros((4, 4), np.int64)
    problem = problem_of(monotonic(True), logits, Options())
    packing = Packing(np.array(FRAMES, np.int64), np.array([2, 2, 4, 4]))
    call = NumpyCall(problem, packing.all_rows(), Inputs(targets), weight=None, bias=None, kept={})
    lattice = Lattice(np.full((2, packing.n_nodes), -1.0), None, np.zeros(packing.n_nodes))
    log_likelihood_b = np.empty(4)
    recursion.sum_alignments(call, lattice, log_likelihood_b)
    assert_close(log_likelihood_b, [np.log(6) - 4, -np.inf, -np.inf, -4], rtol=1e-14, atol=0)
    recursion.posteriors(call, lattice, log_likelihood_b)
    nodes = packing.node_start_b
    assert not lattice.column_cn[:, nodes[1] : nodes[3]].any()


@pytest.mark.parametrize(("dt", "du"), [(0, 0), (-1, 1), (1, -1), (0, 2)])
def test_a_table_whose_arc_moves_nowhere_or_backwards_is_rejected(dt: int, du: int) -> None:
    with pytest.raises(ValueError, match="jump"):
        Topology("bad", (Group("tokens"),), TOKENS, (Arc("jump", dt, du, (0,)),))


def test_a_table_without_an_occupancy_is_rejected() -> None:
    arcs = Arc("blank", 1, 0, (0,), may_end=True), Arc("label", 0, 1, ())
    with pytest.raises(ValueError, match="exactly once"):
        Topology("bad", (Group("tokens"),), TOKENS, arcs)


def test_occupancy_columns_and_reach() -> None:
    assert (RNNT.occupancy_columns, RNNT.reach) == ((0, 1), 1)
    assert (MULTI_BLANK.occupancy_columns, MULTI_BLANK.reach) == ((0, 1, 2), 2)
    assert (TDT.occupancy_columns, TDT.reach) == ((0, 1), 3)
