"""Sizes at which GPU losses break in public: more states, utterances, frames or scores than some counter holds."""

from typing import Any

import numpy as np
import pytest

import flash_rnnt_cupy as frc
from flash_rnnt_cupy import backends
from tests.oracles import closed_forms
from tests.oracles.checks import assert_close
from tests.problems import draw_joint

if reason := backends.unavailable("cuda"):
    pytest.skip(reason, allow_module_level=True)

import cupy


def uniform_logits(T: int, U: int, V: int, dtype: str = "float32") -> tuple[Any, ...]:
    """Arguments of the logits form, packed, all scores equal."""
    return cupy.zeros((T * (U + 1), V), dtype), np.zeros(U, np.int32), [T], [U]


@pytest.mark.parametrize(("T", "U"), [(4, 1023), (4, 1024), (3, 5000), (70_000, 1), (2, 70_000)])
def test_many_states_and_many_frames(T: int, U: int) -> None:
    losses, gradient = frc.rnnt_loss_and_grad(*uniform_logits(T, U, 3), reduction="none")
    assert_close(losses.get(), [closed_forms.rnnt_nll(T, U, 3)], rtol=1e-6, atol=0)
    assert_close(gradient.sum(-1).get(), np.zeros(T * (U + 1)), rtol=0, atol=1e-6)


def test_more_utterances_than_a_grid_axis_holds() -> None:
    B = 70_000
    ones = np.ones(B, np.int64)
    logits = cupy.zeros((B, 2, 2, 3), np.float32)
    losses, gradient = frc.rnnt_loss_and_grad(logits, np.zeros((B, 1), np.int64), ones, ones, reduction="none")
    assert_close(losses.get(), np.full(B, closed_forms.rnnt_nll(1, 1, 3)), rtol=1e-6, atol=0)
    assert not gradient[:, 1:].any()
    assert bool(gradient[:, 0].any((1, 2)).all())
    states = cupy.zeros((B, 1, 8), np.float16), cupy.zeros((B, 2, 8), np.float16), cupy.zeros((3, 8), np.float32)
    joint = frc.joint_rnnt_loss(*states, None, np.zeros((B, 1), np.int64), ones, ones, reduction="none")
    assert_close(joint.get(), np.full(B, closed_forms.rnnt_nll(1, 1, 3)), rtol=1e-6, atol=0)


def test_more_virtual_scores_than_32_bits_count() -> None:
    T, U, V = 4096, 255, 2100  # 2.2e9 scores
    states = cupy.zeros((1, T, 8), np.float16), cupy.zeros((1, U + 1, 8), np.float16), cupy.zeros((V, 8), np.float32)
    arguments = (*states, cupy.zeros(V, np.float32), np.zeros((1, U), np.int64), [T], [U])
    losses, gradients = frc.joint_rnnt_loss_and_grad(*arguments, reduction="none", min_occupancy=0)
    assert_close(losses.get(), [closed_forms.rnnt_nll(T, U, V)], rtol=1e-6, atol=0)
    expected = np.full(V, (T + U) / V)  # every step's probability mass, less the steps themselves
    expected[0] -= U
    expected[-1] -= T
    assert_close(gradients.bias.get(), expected, rtol=1e-3, atol=0)


def test_more_real_scores_than_32_bits_count() -> None:
    B, T, U, V = 33, 256, 63, 4096  # 2.2e9 scores
    logits = cupy.zeros((B, T, U + 1, V), np.float16)
    lengths = np.full(B, T), np.full(B, U)
    labels = np.zeros((B, U), np.int64)
    losses, gradient = frc.rnnt_loss_and_grad(logits, labels, *lengths, reduction="none", overwrite_logits=True)
    assert_close(losses.get(), np.full(B, closed_forms.rnnt_nll(T, U, V)), rtol=1e-6, atol=0)
    assert gradient.data.ptr == logits.data.ptr
    blank, label = closed_forms.rnnt_posteriors(T, U)
    last = gradient[-1, :, :, -1].get().astype(np.float64)
    assert_close(last, (blank + np.pad(label, ((0, 0), (0, U + 1 - label.shape[1])))) / V - blank, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("V", [2, 3, 2049, 16_385, 262_144])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vocabularies(V: int, dtype: str) -> None:
    problem = draw_joint((4, 2, 3), (3, 0, 2), H=24, V=V, dtype=dtype)
    options = {"reduction": "none", "blank": problem.blank, "min_occupancy": 0}
    expected_losses, expected = frc.joint_rnnt_loss_and_grad(*problem.args, **options)
    arrays = [cupy.asarray(array) for array in problem.args[:4]]
    losses, gradients = frc.joint_rnnt_loss_and_grad(*arrays, *problem.args[4:], **options)
    rough = {"float16": 5e-3, "float32": 1e-5}[dtype]
    assert_close(losses.get(), expected_losses, rtol=rough, atol=0)
    for name in ("encoder", "predictor", "weight", "bias"):
        actual, wanted = (np.asarray(g, np.float64) for g in (getattr(gradients, name).get(), getattr(expected, name)))
        assert_close(actual, wanted, rtol=0, atol=5 * rough * np.abs(wanted).max(), names=name)


@pytest.mark.parametrize("H", [1, 7, 8, 63, 64, 65, 640, 1536])
def test_widths_and_unaligned_memory(H: int) -> None:
    problem = draw_joint((5, 1, 4), (3, 2, 0), H=H, V=40, dtype="float16")
    options = {"reduction": "sum", "blank": problem.blank, "dropout": 0.2, "seed": 5, "tile_rows": 7}
    expected_loss, expected = frc.joint_rnnt_loss_and_grad(*problem.args, **options)

    def misplaced(array: Any) -> Any:
        memory = cupy.empty(array.size + 1, array.dtype)
        memory[1:] = cupy.asarray(array).ravel()
        return memory[1:].reshape(array.shape)

    arrays = [misplaced(array) for array in problem.args[:4]]
    assert all(array.data.ptr % 16 for array in arrays)
    loss, gradients = frc.joint_rnnt_loss_and_grad(*arrays, *problem.args[4:], **options)
    assert_close(loss.get(), expected_loss, rtol=5e-3, atol=0)
    for name in ("encoder", "predictor", "weight", "bias"):
        actual, wanted = (np.asarray(g, np.float64) for g in (getattr(gradients, name).get(), getattr(expected, name)))
        assert_close(actual, wanted, rtol=0, atol=2e-2 * max(np.abs(wanted).max(), 1e-3), names=name)


@pytest.mark.parametrize(("T", "U", "V"), [(500, 100, 1024), (2000, 400, 1024)])
def test_posterior_sums_of_long_uniform_lattices(T: int, U: int, V: int) -> None:
    """The columns of a large vocabulary, without its other classes."""
    log_probs = cupy.full((T * (U + 1), 2), -np.log(V), np.float32)
    arguments = (log_probs, np.zeros(U, np.int64), [T], [U])
    _, gradient = frc.rnnt_loss_and_grad(*arguments, reduction="sum", fused_log_softmax=False)
    posterior = -gradient.get().astype(np.float64).reshape(T, U + 1, 2)
    assert_close(posterior[..., 1].sum(1), np.ones(T), rtol=0, atol=1e-5)
    assert_close(posterior[:, :U, 0].sum(0), np.ones(U), rtol=0, atol=1e-5)


def test_the_loss_of_a_very_long_lattice() -> None:
    T, U, V = 6000, 1500, 2
    losses = frc.rnnt_loss(*uniform_logits(T, U, V), reduction="none")
    assert_close(losses.get(), [closed_forms.rnnt_nll(T, U, V)], rtol=1e-6, atol=0)


def test_a_loss_scale_neither_overflows_nor_vanishes() -> None:
    problem = draw_joint((30, 40), (10, 20), H=32, V=50, dtype="float16", parameter_dtype="float32")
    arrays = [cupy.asarray(array) for array in problem.args[:4]]

    def gradients(scale: float) -> frc.Gradients:
        options = {"reduction": "sum", "blank": problem.blank, "grad_losses": scale}
        return frc.joint_rnnt_loss_and_grad(*arrays, *problem.args[4:], **options)[1]

    plain = gradients(1.0)
    for scale in (2.0**16, 2.0**-16, -(2.0**20)):  # powers of two: the same bits, scaled
        scaled = gradients(scale)
        for name in ("weight", "bias"):
            assert_close(getattr(scaled, name).get(), scale * getattr(plain, name).get(), rtol=0, atol=0, names=name)
