"""Sizes at the edges, integer types, and memory layouts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.conftest import BackendUnderTest
from tests.oracles.checks import assert_close
from tests.oracles.closed_forms import rnnt_nll
from tests.problems import draw_joint, draw_logits, uniform_logits

EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def check_joint(backend: BackendUnderTest, frames: Any, labels: Any, H: int = 5, V: int = 7, **options: Any) -> None:
    problem = draw_joint(frames, labels, H, V)
    truth = problem.truth()
    losses, gradients = backend.joint(problem, **options)
    backend.assert_near(losses, truth.losses, "float64")
    backend.assert_gradients(gradients, truth, "float64")


def check_logits(backend: BackendUnderTest, frames: Any, labels: Any, V: int = 5) -> None:
    problem = draw_logits(frames, labels, V)
    truth = problem.truth()
    losses, gradient = backend.logits(problem)
    backend.assert_near(losses, truth.losses, "float64")
    backend.assert_near(gradient, truth.gradients["logits"], "float64")


@pytest.mark.parametrize("batch", [(1, 0), (1, 1), (1, 6), (9, 0), (3, 9), (2, 10)], ids="T={0[0]} U={0[1]}".format)
def test_one_frame_no_labels_and_fewer_frames_than_labels(backend: BackendUnderTest, batch: tuple[int, int]) -> None:
    check_joint(backend, batch[:1], batch[1:])
    check_logits(backend, batch[:1], batch[1:])


def test_all_transcripts_empty(backend: BackendUnderTest) -> None:
    problem = draw_joint((3, 5), (0, 0))
    assert problem.targets.shape == (2, 0)
    check_joint(backend, (3, 5), (0, 0))
    _, gradients = backend.joint(problem)
    assert np.isfinite(gradients.predictor).all()


@pytest.mark.parametrize("V", [2, 3, 31, 33])
@pytest.mark.parametrize("H", [1, 3, 31, 33])
def test_small_and_odd_widths(backend: BackendUnderTest, H: int, V: int) -> None:
    check_joint(backend, (4, 2), (2, 3), H, V, tile_rows=5)


def test_a_vocabulary_of_the_blank_alone(backend: BackendUnderTest) -> None:
    losses, gradients = backend.joint(draw_joint((4, 2), (0, 0), V=1))
    assert_close(losses, [0, 0], rtol=0, atol=1e-14)
    assert_close(gradients.weight, np.zeros((1, gradients.weight.shape[1])), rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(6))
def test_ragged_batches_around_the_sizes_of_blocks(backend: BackendUnderTest, seed: int) -> None:
    rng = np.random.default_rng(seed)
    frames, labels = rng.choice(EDGES, 4), rng.choice(EDGES, 4)
    problem = draw_logits(frames.tolist(), labels.tolist(), V=3, seed=seed)
    losses, gradient = backend.logits(problem.as_log_probs(), fused_log_softmax=False)
    assert np.isfinite(losses).all()
    for b, (T, U) in enumerate(zip(frames, labels, strict=True)):
        posterior = -gradient[b, :T, : U + 1]
        assert_close(posterior[..., -1].sum(1), np.ones(T), rtol=0, atol=1e-10)
        assert_close(posterior[..., :-1].sum((0, 2))[:U], np.ones(U), rtol=0, atol=1e-10)


@pytest.mark.parametrize("U", [1023, 1024, 1025, 1500])
def test_more_labels_than_a_block_has_threads(backend: BackendUnderTest, U: int) -> None:
    losses, gradient = backend.logits(uniform_logits(4, U, 16))
    assert_close(losses, [rnnt_nll(4, U, 16)], rtol=1e-12, atol=0)
    assert_close(gradient.sum(-1), np.zeros((1, 4, U + 1)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("B", [1, 2, 129, 1025])
def test_batches_of_one_and_of_many(backend: BackendUnderTest, B: int) -> None:
    problem = draw_joint([1] * B, [1] * B, H=3, V=4)
    truth = problem.truth()
    losses, gradients = backend.joint(problem)
    backend.assert_near(losses, truth.losses, "float64")
    backend.assert_gradients(gradients, truth, "float64", factor=1000)


def test_an_empty_batch(backend: BackendUnderTest) -> None:
    joint, logits = draw_joint((), ()), draw_logits((), ())
    losses, gradients = backend.joint(joint)
    assert losses.shape == (0,)
    assert gradients.encoder.shape == joint.encoder.shape
    assert not np.any(gradients.weight)
    assert backend.joint_loss(joint, reduction="mean") == 0
    losses, gradient = backend.logits(logits)
    assert (losses.shape, gradient.shape) == ((0,), logits.logits.shape)


@pytest.mark.parametrize(("targets", "frames", "labels"), list(product(["int32", "int64"], repeat=3)))
def test_integer_types(backend: BackendUnderTest, targets: str, frames: str, labels: str) -> None:
    problem = draw_joint()
    typed = problem.replace(
        targets=problem.targets.astype(targets),
        frames=problem.frames.astype(frames),
        labels=problem.labels.astype(labels),
    )
    np.testing.assert_array_equal(backend.joint_loss(typed), backend.joint_loss(problem))


def test_python_lists_of_integers(backend: BackendUnderTest) -> None:
    problem = draw_joint((3, 2), (1, 1))
    lists = problem.replace(**{name: getattr(problem, name).tolist() for name in ("targets", "frames", "labels")})
    expected_losses, expected = backend.joint(problem)
    losses, gradients = backend.joint(lists)
    np.testing.assert_array_equal(losses, expected_losses)
    np.testing.assert_array_equal(gradients.encoder, expected.encoder)


def every_other(module: ModuleType, array: Any) -> Any:
    wide = module.full((*array.shape[:-1], 2 * array.shape[-1]), 99, dtype=array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def transposed(module: ModuleType, array: Any) -> Any:
    return module.ascontiguousarray(array.T).T


def reversed_in_memory(module: ModuleType, array: Any) -> Any:
    everywhere = tuple(slice(None, None, -1) for _ in array.shape)
    return module.ascontiguousarray(array[everywhere])[everywhere]


def within_a_larger_array(module: ModuleType, array: Any) -> Any:
    wide = module.full(tuple(n + 2 for n in array.shape), 99, dtype=array.dtype)
    inner = tuple(slice(1, -1) for _ in array.shape)
    wide[inner] = array
    return wide[inner]


@pytest.mark.parametrize("layout", [every_other, transposed, reversed_in_memory, within_a_larger_array])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_memory_layouts(backend: BackendUnderTest, dtype: str, layout: Callable[[ModuleType, Any], Any]) -> None:
    joint, logits = draw_joint(dtype=dtype), draw_logits(dtype=dtype)
    expected_losses, expected = backend.joint(joint, tile_rows=4)
    losses, gradients = backend.joint(joint, tile_rows=4, layout=layout)
    backend.assert_near(losses, expected_losses, dtype)
    for name in ("encoder", "predictor", "weight", "bias"):
        backend.assert_near(getattr(gradients, name), getattr(expected, name), dtype)
    expected_losses, gradient = backend.logits(logits)
    losses, laid_out = backend.logits(logits, layout=layout)
    np.testing.assert_array_equal(losses, expected_losses)
    np.testing.assert_array_equal(laid_out, gradient)


def test_read_only_arrays(backend: BackendUnderTest) -> None:
    joint, logits = draw_joint(), draw_logits()
    expected = backend.joint_loss(joint), backend.logits_loss(logits)
    for array in (*joint.args, *logits.args):
        array.flags.writeable = False
    np.testing.assert_array_equal(backend.joint(joint)[0], expected[0])
    np.testing.assert_array_equal(backend.logits(logits)[0], expected[1])
