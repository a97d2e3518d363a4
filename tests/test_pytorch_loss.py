"""The functions of `adapters.pytorch`: values and gradients, what goes in, and what must not change."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_rnnt_cupy import InputError, InputTypeError
from flash_rnnt_cupy.adapters import torch_call
from flash_rnnt_cupy.adapters.pytorch import joint_rnnt_loss, rnnt_loss
from tests import torch_problems as problems
from tests.oracles import published
from tests.oracles.checks import assert_close
from tests.torch_problems import LABELS, B, H, U, V, all_near, gradients, near, on_each_device, values

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}


@on_each_device
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none", "min_occupancy": 0.0},
        {"reduction": "sum", "activation": "tanh"},
        {"reduction": "mean", "dropout": 0.4, "seed": 3},
        {"reduction": "mean_volume", "tile_rows": 3, "min_occupancy": 0.0},
        {"reduction": "mean_per_label", "tile_rows": None, "activation": "gelu"},
    ],
)
def test_gradcheck_joint(options: dict[str, Any], device: str) -> None:
    problem = problems.joint(device=device).leaves()

    def loss(*tensors: Tensor) -> Tensor:
        return joint_rnnt_loss(*tensors, *problem[4:], **options)

    assert torch.autograd.gradcheck(loss, problem.differentiable, nondet_tol=0.0)


@on_each_device
@pytest.mark.parametrize("reduction", ["none", "mean", "mean_per_label"])
@pytest.mark.parametrize("fused_log_softmax", [True, False])
def test_gradcheck_logits(reduction: str, fused_log_softmax: bool, device: str) -> None:
    problem = problems.logits(device=device).leaves()

    def loss(scores: Tensor) -> Tensor:
        scores = scores if fused_log_softmax else scores.log_softmax(-1) - 1e-3  # probabilities below 1
        return rnnt_loss(scores, *problem[1:], reduction=reduction, fused_log_softmax=fused_log_softmax)

    fast = (fused_log_softmax, reduction) != (True, "mean")  # along random directions
    assert torch.autograd.gradcheck(loss, (problem.logits,), nondet_tol=0.0, fast_mode=fast)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tile_rows", ["auto", 4, None])
def test_joint_equals_plain_torch(dtype: torch.dtype, with_bias: bool, tile_rows: Any, device: str) -> None:
    problem = problems.joint(dtype, device)
    ours = problem._replace(bias=problem.bias if with_bias else None).leaves()
    losses = joint_rnnt_loss(*ours, reduction="none", tile_rows=tile_rows)
    plain = ours._replace(**{name: getattr(ours, name).double() for name in ("encoder", "predictor", "weight")})
    truth = problems.plain_losses(problems.plain_logits(plain))
    assert losses.dtype == dtype
    near(losses, truth, ROUNDING[dtype])
    weights = problems.upstream(losses)
    expected = gradients(truth, ours.differentiable, weights.double())
    all_near(gradients(losses, ours.differentiable, weights), expected, ROUNDING[dtype])


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused_log_softmax", [True, False])
def test_logits_equal_plain_torch(dtype: torch.dtype, fused_log_softmax: bool, device: str) -> None:
    problem = problems.logits(dtype, device)
    if not fused_log_softmax:
        problem = problem._replace(logits=problem.logits.log_softmax(-1) - 1e-3)
    problem = problem.leaves()
    losses = rnnt_loss(*problem, reduction="none", fused_log_softmax=fused_log_softmax)
    truth = problems.plain_losses(problem, fused_log_softmax=fused_log_softmax)
    near(losses, truth, ROUNDING[dtype])
    weights = problems.upstream(losses)
    leaf = (problem.logits,)
    all_near(gradients(losses, leaf, weights), gradients(truth, leaf, weights), ROUNDING[dtype])


@on_each_device
@pytest.mark.parametrize("example", [e for e in published.EXAMPLES if e.loss == "rnnt"], ids=lambda e: e.name)
def test_published_examples(example: published.Example, device: str) -> None:
    longest = max(map(len, example.labels))
    targets = torch.tensor([[*labels, *(longest - len(labels)) * [-1]] for labels in example.labels]).long()
    lengths = torch.tensor(example.frames), torch.tensor([len(labels) for labels in example.labels])
    for fused, scores, gradient, atol in (
        (True, torch.tensor(example.logits), example.logit_gradient, example.logit_gradient_atol),
        (False, torch.tensor(example.logits).log_softmax(-1), example.logprob_gradient, example.logprob_gradient_atol),
    ):
        leaf = scores.to(device).requires_grad_()
        losses = rnnt_loss(leaf, targets, *lengths, example.blank, -1, "none", fused)
        assert_close(values(losses), example.losses, rtol=0, atol=example.losses_atol)
        if gradient is not None:
            losses.sum().backward()
            assert leaf.grad is not None
            assert_close(values(leaf.grad), gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_volume", "mean_per_label"])
def test_reductions(reduction: str) -> None:
    problem = problems.logits()
    losses = rnnt_loss(*problem, reduction="none")
    labels = torch.tensor(LABELS)
    expected = {
        "sum": losses.sum(),
        "mean": losses.mean(),
        "mean_volume": losses.sum() / labels.sum(),
        "mean_per_label": (losses / labels.clamp(min=1)).mean(),
    }
    near(rnnt_loss(*problem, reduction=reduction), expected[reduction], 1e-14)


@on_each_device
@pytest.mark.parametrize("kind", ["int32", "int64", "mixed", "lists", "host"])
def test_integers_of_any_kind(kind: str, device: str) -> None:
    problem = problems.joint(device=device)
    given = {
        "int32": [t.int() for t in problem[4:]],
        "int64": list(problem[4:]),
        "mixed": [problem.targets.int(), problem.frames, problem.labels.int()],
        "lists": [t.tolist() for t in problem[4:]],
        "host": [problem.targets, problem.frames.cpu(), problem.labels.cpu()],
    }[kind]
    assert torch.equal(joint_rnnt_loss(*problem[:4], *given), joint_rnnt_loss(*problem))


def test_packed_equals_padded() -> None:
    problem = problems.joint().leaves()
    rows = [problem.encoder[b, : problem.frames[b]] for b in range(B)]
    states = [problem.predictor[b, : problem.labels[b] + 1] for b in range(B)]
    labels = [problem.targets[b, : problem.labels[b]] for b in range(B)]
    packed = problem._replace(encoder=torch.cat(rows), predictor=torch.cat(states), targets=torch.cat(labels))
    ours, padded = joint_rnnt_loss(*packed), joint_rnnt_loss(*problem)
    near(ours, padded, 1e-14)
    all_near(gradients(ours, problem.differentiable), gradients(padded, problem.differentiable), 1e-14)


def test_nan_in_the_padding_changes_nothing() -> None:
    problem = problems.logits().leaves()
    poisoned = problem.logits.detach().clone()
    for b in range(B):
        poisoned[b, problem.frames[b] :] = float("nan")
        poisoned[b, :, problem.labels[b] + 1 :] = float("nan")
    other = problem._replace(logits=poisoned.requires_grad_())
    ours, clean = rnnt_loss(*other), rnnt_loss(*problem)
    assert torch.equal(ours, clean)
    (gradient,) = gradients(ours, [poisoned])
    assert torch.equal(gradient, gradients(clean, [problem.logits])[0])
    assert not gradient[torch.isnan(poisoned)].any()


def test_empty_batch() -> None:
    tensors = [torch.zeros(shape, requires_grad=True) for shape in ((0, 4, H), (0, 3, H), (V, H), (V,))]
    integers = (
        torch.zeros(0, 2, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )
    loss = joint_rnnt_loss(*tensors, *integers)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients(loss, tensors))
    assert joint_rnnt_loss(*tensors, *integers, reduction="none").shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_strides_and_inputs_stay(dtype: torch.dtype) -> None:
    problem = problems.joint(dtype)
    strided = problem._replace(
        encoder=problem.encoder.transpose(0, 2).contiguous().transpose(0, 2),
        predictor=problem.predictor[:1].expand(B, U + 1, H),
        weight=problem.weight.repeat_interleave(2, 0)[::2],
    )
    assert not any(tensor.is_contiguous() for tensor in strided[:3])
    dense = strided._replace(**{name: getattr(strided, name).contiguous() for name in strided._fields[:4]})
    before = [tensor.clone() for tensor in strided.differentiable]
    for tensor in (*strided.differentiable, *dense.differentiable):
        tensor.requires_grad_()
    ours, expected = joint_rnnt_loss(*strided), joint_rnnt_loss(*dense)
    assert torch.equal(ours, expected)
    found = gradients(ours, strided.differentiable)
    assert all(map(torch.equal, found, gradients(expected, dense.differentiable)))
    assert [gradient.dtype for gradient in found] == 4 * [dtype]
    assert all(map(torch.equal, strided.differentiable, before))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_buffers_are_the_tensors_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=dtype).reshape(3, 4)[:, 1:]
    buffer = torch_call._buffer(tensor)
    back = torch_call._tensor(buffer)
    assert buffer.ctypes.data == tensor.data_ptr() == back.data_ptr()
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_seed_comes_from_torch() -> None:
    problem = problems.joint()
    torch.manual_seed(5)
    first, second = joint_rnnt_loss(*problem, dropout=0.5), joint_rnnt_loss(*problem, dropout=0.5)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    torch.randint(2**63 - 1, (2,))  # each call advances the generator by one number
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert joint_rnnt_loss(*problem, dropout=0.5) == first != second
    state = torch.get_rng_state()
    joint_rnnt_loss(*problem, dropout=0.5, seed=1)
    joint_rnnt_loss(*problem)
    assert torch.equal(torch.get_rng_state(), state)


def test_global_state_stays() -> None:
    problem = problems.joint(torch.float32).leaves()

    def state() -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), np.geterr()

    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            before = state()
            loss = joint_rnnt_loss(*problem, dropout=0.1)
            loss.backward()
            with pytest.raises(InputError, match="blank"):
                joint_rnnt_loss(*problem, blank=V)
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32
    assert loss.device.type == "cpu"


def test_user_errors() -> None:
    problem = problems.joint()
    encoder, _, weight = problem[:3]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"encoder": encoder.numpy()}, InputTypeError, "encoder: expected a torch.Tensor, got ndarray"),
        ({"bias": [0.0] * V}, InputTypeError, "bias: expected a torch.Tensor, got list"),
        ({"weight": weight.to("meta")}, InputError, "weight: .* got torch.strided on meta"),
        ({"weight": weight.to_sparse()}, InputError, "weight: .* got torch.sparse_coo on cpu"),
        ({"encoder": encoder.long()}, InputTypeError, "encoder: expected one of float16.* got int64"),
        ({"encoder": encoder.to(torch.float8_e5m2)}, InputTypeError, "encoder: .* got float8_e5m2"),
        ({"bias": problem.bias.float()}, InputTypeError, "bias: expected float64, as weight, got float32"),
        ({"targets": problem.targets.to(torch.uint8)}, InputTypeError, "targets: expected int32 or int64, got uint8"),
        ({"targets": problem.targets.to_sparse()}, InputTypeError, "targets: .* got .*layout"),
        ({"frames": problem.frames.float()}, InputTypeError, "encoder_lengths: expected int32 or int64, got float32"),
        ({"frames": [4, 0, 3]}, InputError, "encoder_lengths: expected at least 1, got 0 at utterance 1"),
        ({"targets": problem.targets + V}, InputError, "targets: .* at utterance 0, position 0"),
    ]
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            joint_rnnt_loss(*problem._replace(**changes))
    for options in ({"dropout": 1.0}, {"activation": "elu"}, {"reduction": "max"}, {"backend": "abacus"}, {"seed": -1}):
        with pytest.raises(InputError, match=next(iter(options))):
            joint_rnnt_loss(*problem, **options)
    with pytest.raises(InputTypeError, match=r"logits: expected a torch\.Tensor"):
        rnnt_loss([[[[0.0]]]], [[]], [1], [0])


def test_bfloat16_on_a_cpu_needs_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputTypeError, match=r"logits: .* got bfloat16 \(pip install ml_dtypes\)"):
        rnnt_loss(*problems.logits(torch.bfloat16))
