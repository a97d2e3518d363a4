"""Backward on the nodes that matter: `min_occupancy`, the rows it leaves, and the mass it reports as dropped."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import reference
from tests.conftest import BackendUnderTest
from tests.oracles.checks import assert_close
from tests.problems import Array, Logits, draw_joint, draw_logits, joint_of_logits, uniform_logits

T, U, V = 24, 9, 4
DEFAULT = 1e-7


def lattice_of(paths: list[list[tuple[int, int]]], strength: float = 4.0) -> Logits:
    """Logits that prefer the arcs of the given paths, each a list of (t, u) node by node."""
    problem = uniform_logits(T, U, V)
    for path in paths:
        for (t, u), (_, next_u) in zip(path, [*path[1:], (T, U)], strict=True):
            v = problem.targets[0, u] if next_u > u else V - 1
            problem.logits[0, t, u, v] = strength
    return problem


LABELS_FIRST = [(0, u) for u in range(U + 1)] + [(t, U) for t in range(1, T)]
LABELS_LAST = [(t, 0) for t in range(T)] + [(T - 1, u) for u in range(1, U + 1)]
LATTICES = {
    "two alignments far apart": lattice_of([LABELS_FIRST, LABELS_LAST]),
    "flat": uniform_logits(T, U, V),
    "a single path": lattice_of([LABELS_FIRST]),
    "another single path": lattice_of([LABELS_LAST]),
    "random": draw_logits((T,), (U,), V, scale=1),
    "confident": draw_logits((T,), (U,), V, scale=8),
}
each_lattice = pytest.mark.parametrize("logits", LATTICES.values(), ids=LATTICES.keys())


def occupancy(problem: Logits) -> Array:
    """Posterior of each node, [T, U1]."""
    log_probs = reference.log_softmax(problem.logits[0])
    labels = problem.targets[0]
    _, blank, label = reference.arc_posteriors(log_probs[..., V - 1], log_probs[:, np.arange(len(labels)), labels])
    return blank + np.pad(label, ((0, 0), (0, 1)))


def selected(occupied: Array, smallest: float) -> Array:
    """[T, U1], True on the shortest run of states of each frame with all that exceed ``smallest``."""
    kept = np.zeros(occupied.shape, bool)
    for frame, row in zip(kept, occupied, strict=True):
        above = [u for u, value in enumerate(row) if value > smallest]
        if above:
            frame[above[0] : above[-1] + 1] = True
    return kept


def relative_l2(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@each_lattice
@pytest.mark.parametrize("smallest", [1e-7, 1e-4, 1e-2, 0.3])
def test_rows_and_dropped_mass(backend: BackendUnderTest, smallest: float, logits: Logits) -> None:
    occupied = occupancy(logits)
    kept = selected(occupied, smallest)
    _, gradients = backend.joint(joint_of_logits(logits), min_occupancy=smallest, tile_rows=50)
    assert (gradients.rows, gradients.nodes) == (kept.sum(), T * (U + 1))
    assert_close(gradients.dropped_posterior, occupied[~kept].sum(), rtol=1e-6, atol=1e-12)


@each_lattice
@pytest.mark.parametrize("smallest", [1e-7, 1e-4, 1e-2, 0.3])
def test_what_is_dropped_is_at_most_twice_the_reported_mass(
    backend: BackendUnderTest, smallest: float, logits: Logits
) -> None:
    problem = joint_of_logits(logits)  # its weight gradient is the logit gradient of each node
    _, dense = backend.joint(problem, min_occupancy=0)
    _, banded = backend.joint(problem, min_occupancy=smallest)
    difference = np.abs(np.asarray(dense.weight) - np.asarray(banded.weight)).sum()
    assert difference <= 2 * banded.dropped_posterior + 1e-12


def test_the_default() -> None:
    for call in (frc.joint_rnnt_loss, frc.joint_rnnt_loss_and_grad):
        assert inspect.signature(call).parameters["min_occupancy"].default == DEFAULT


@each_lattice
def test_the_default_is_exact_to_rounding(backend: BackendUnderTest, logits: Logits) -> None:
    problem = joint_of_logits(logits)
    _, dense = backend.joint(problem)
    _, default = backend.joint(problem, min_occupancy=DEFAULT)
    assert relative_l2(default.weight, dense.weight) <= 1e-6
    dense_logits = np.asarray(dense.weight).T.reshape(T, U + 1, V)
    assert_close(dense_logits, logits.truth().gradients["logits"][0], rtol=1e-10, atol=1e-12)


def test_the_default_is_exact_to_the_posterior_where_the_gradient_vanishes(backend: BackendUnderTest) -> None:
    problem = joint_of_logits(lattice_of([LABELS_FIRST], strength=25.0))
    _, dense = backend.joint(problem)
    _, default = backend.joint(problem, min_occupancy=DEFAULT)
    assert 0 < np.abs(dense.weight).max() < 1e-9
    assert np.abs(np.asarray(default.weight) - np.asarray(dense.weight)).sum() <= 2 * default.dropped_posterior
    assert default.dropped_posterior <= DEFAULT * (default.nodes - default.rows)


def test_losses_do_not_change(backend: BackendUnderTest) -> None:
    problem = draw_joint(scale=3)
    dense = backend.joint_loss(problem, min_occupancy=0)
    for smallest in (1e-8, 0.1, 0.9):
        np.testing.assert_array_equal(backend.joint_loss(problem, min_occupancy=smallest), dense)


@pytest.mark.parametrize("tile_rows", [1, 7, 64, "auto"])
@pytest.mark.parametrize("options", [{}, {"activation": "tanh", "dropout": 0.25, "seed": 3}, {"fastemit_lambda": 0.2}])
def test_default_gradients_of_a_confident_batch(
    backend: BackendUnderTest, options: dict[str, Any], tile_rows: int | str
) -> None:
    problem = draw_joint((30, 12, 25), (9, 4, 0), H=6, scale=6)
    _, dense = backend.joint(problem, **options)
    _, default = backend.joint(problem, min_occupancy=DEFAULT, tile_rows=tile_rows, **options)
    assert default.rows < 0.8 * default.nodes
    for name in ("encoder", "predictor", "weight", "bias"):
        assert relative_l2(getattr(default, name), getattr(dense, name)) <= 1e-6


def test_fastemit_counts_in_the_occupancy(backend: BackendUnderTest) -> None:
    problem = draw_joint(scale=3)
    _, plain = backend.joint(problem, min_occupancy=0.05)
    _, weighed = backend.joint(problem, min_occupancy=0.05, fastemit_lambda=10.0)
    assert weighed.rows >= plain.rows


def test_one_node_is_kept_where_all_mass_is_on_one_path(backend: BackendUnderTest) -> None:
    problem = joint_of_logits(lattice_of([LABELS_FIRST], strength=60.0))
    _, gradients = backend.joint(problem, min_occupancy=DEFAULT)
    assert gradients.rows == len(LABELS_FIRST)
    assert gradients.dropped_posterior <= DEFAULT * gradients.nodes


def test_nothing_is_kept_of_an_utterance_without_alignment(backend: BackendUnderTest) -> None:
    logits = uniform_logits(4, 2, 3)
    logits.logits[..., logits.targets[0, 1]] = -np.inf
    problem = joint_of_logits(logits)
    problem = problem.replace(  # 0 * -inf would spoil the other nodes: put the mask into the bias
        weight=np.zeros_like(problem.weight), bias=logits.logits[0, 0, 0]
    )
    losses, gradients = backend.joint(problem, min_occupancy=DEFAULT)
    assert losses.tolist() == [np.inf]
    assert (gradients.rows, gradients.dropped_posterior) == (0, 0)
    assert not any(np.any(getattr(gradients, name)) for name in ("encoder", "predictor", "weight", "bias"))
