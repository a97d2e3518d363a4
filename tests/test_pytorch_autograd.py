"""`adapters.pytorch` in autograd: what is computed, kept, freed and refused; mixed precision."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_rnnt_cupy import InputError, pipeline
from flash_rnnt_cupy.adapters import torch_call
from flash_rnnt_cupy.adapters.pytorch import FlashRNNTLoss, JointNetwork, joint_rnnt_loss, rnnt_loss
from tests import torch_problems as problems
from tests.torch_problems import FRAMES, LABELS, B, H, T, U, V, all_near, gradients, near, on_each_device

NAMES = ("encoder", "predictor", "weight", "bias")
TILES = pytest.mark.parametrize("tile_rows", ["auto", 3, None])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the gradients that each backward was asked for."""
    calls: list[set[str]] = []
    backward = pipeline.backward

    def spy(saved: Any, grad_losses: Any, wanted: frozenset[str], overwrite: bool) -> Any:
        calls.append(set(wanted))
        return backward(saved, grad_losses, wanted, overwrite)

    monkeypatch.setattr(pipeline, "backward", spy)
    return calls


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(NAMES, n)], ids="-".join)
def test_only_what_needs_a_gradient_is_computed(wanted: tuple[str, ...], asked: list[set[str]]) -> None:
    problem, everything = problems.joint().leaves(*wanted), problems.joint().leaves()
    joint_rnnt_loss(*problem).backward()
    assert asked == [set(wanted)]
    joint_rnnt_loss(*everything).backward()
    for name in NAMES:
        gradient = getattr(problem, name).grad
        if name in wanted:
            near(gradient, getattr(everything, name).grad, 1e-15, name)
        else:
            assert gradient is None


def test_two_losses_of_one_batch_add_up() -> None:
    problem = problems.joint().leaves()
    loss = joint_rnnt_loss(*problem) + joint_rnnt_loss(*problem, fastemit_lambda=0.5)
    parts = [
        gradients(joint_rnnt_loss(*problem, fastemit_lambda=weight), problem.differentiable) for weight in (0.0, 0.5)
    ]
    all_near(gradients(loss, problem.differentiable), [a + b for a, b in zip(*parts, strict=True)], 1e-15)


@on_each_device
@pytest.mark.parametrize("weights", [[1.0, 10.0, 0.1], [0.0, 0.0, 0.0], [-1.0, 0.0, 2.0**16]])
def test_upstream_gradients(weights: list[float], device: str) -> None:
    problem = problems.joint(device=device).leaves()
    losses = joint_rnnt_loss(*problem, reduction="none", clamp=0.05, min_occupancy=0.0)
    each = [gradients(loss, problem.differentiable) for loss in _separately(problem, clamp=0.05, min_occupancy=0.0)]
    expected = [sum(w * g for w, g in zip(weights, tensors, strict=True)) for tensors in zip(*each, strict=True)]
    found = gradients(losses, problem.differentiable, torch.tensor(weights, dtype=torch.float64, device=device))
    all_near(found, expected, 1e-13)
    assert any(weights) or not any(gradient.any() for gradient in found)


def _separately(problem: problems.Joint, **options: Any) -> Iterator[Tensor]:
    for b in range(B):
        one = slice(b, b + 1)
        yield joint_rnnt_loss(
            problem.encoder[one],
            problem.predictor[one],
            problem.weight,
            problem.bias,
            problem.targets[one],
            problem.frames[one],
            problem.labels[one],
            **options,
        )


@TILES
def test_backward_again(tile_rows: Any) -> None:
    problem = problems.joint().leaves()
    loss = joint_rnnt_loss(*problem, tile_rows=tile_rows, dropout=0.3)
    first, second, third = (torch.autograd.grad(loss, problem.differentiable, retain_graph=r) for r in (1, 1, 0))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_backward_again_of_logits() -> None:
    problem = problems.logits().leaves()
    loss = rnnt_loss(*problem)
    loss.backward(retain_graph=True)
    first = problem.logits.grad.clone()
    loss.backward()
    assert torch.equal(problem.logits.grad, 2 * first)


def test_second_derivatives_are_refused() -> None:
    problem, scores = problems.joint().leaves(), problems.logits().leaves()
    for loss, leaf in ((joint_rnnt_loss(*problem), problem.encoder), (rnnt_loss(*scores), scores.logits)):
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert gradient.requires_grad  # no constant
        with pytest.raises(NotImplementedError, match="no second derivative"):
            gradient.square().sum().backward()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.functional.hessian(lambda bias: joint_rnnt_loss(*problem[:3], bias, *problem[4:]), problem.bias)


@pytest.mark.parametrize("reduction", ["none", "mean", "mean_per_label"])
def test_the_upstream_gradient_may_itself_need_one(reduction: str) -> None:
    problem = problems.joint().leaves()
    plain = joint_rnnt_loss(*problem, reduction=reduction)
    (expected,) = torch.autograd.grad(plain.square().sum(), problem.weight)
    graphed = joint_rnnt_loss(*problem, reduction=reduction)
    (found,) = torch.autograd.grad(graphed.square().sum(), problem.weight, create_graph=True)
    assert torch.equal(found, expected)
    assert found.requires_grad


def test_torch_func_grad() -> None:
    problem = problems.joint().leaves()

    def loss(weight: Tensor) -> Tensor:
        return joint_rnnt_loss(*problem[:2], weight, *problem[3:])

    found = torch.func.grad(loss)(problem.weight.detach())
    assert torch.equal(found, gradients(loss(problem.weight), [problem.weight])[0])


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes that calls have allocated and that are still alive."""
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    empty = torch.empty

    def recorded(*args: Any, **options: Any) -> Tensor:
        tensor = empty(*args, **options)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(torch_call.torch, "empty", recorded)

    def count() -> int:
        gc.collect()
        return sum(storage.nbytes() for ref in alive if (storage := ref()) is not None)

    return count


def lattice_bytes(untiled: bool) -> int:
    nodes = sum(t * (u + 1) for t, u in zip(FRAMES, LABELS, strict=True))
    parts = [2 * nodes, B, nodes, nodes]  # columns, log-likelihoods, normalizer, alpha
    tile = nodes * (8 * (H + V) + -(-H // 8)) * untiled  # hidden states, logits, active bits
    return sum(8 * size + -8 * size % torch_call.ALIGNMENT for size in parts) + tile


@TILES
def test_backward_frees_the_lattice(tile_rows: Any, allocated: Callable[[], int]) -> None:
    problem = problems.joint().leaves()
    loss = joint_rnnt_loss(*problem, tile_rows=tile_rows)
    assert allocated() == lattice_bytes(untiled=tile_rows is None)
    loss.backward(retain_graph=True)
    assert allocated() == lattice_bytes(untiled=tile_rows is None) + sum(x.nbytes for x in problem.differentiable)
    for tensor in problem.differentiable:
        tensor.grad = None
    loss.backward()
    assert loss.grad_fn is not None
    assert allocated() == sum(x.nbytes for x in problem.differentiable)  # their gradients


def test_backward_of_logits_frees_the_lattice(allocated: Callable[[], int]) -> None:
    problem = problems.logits().leaves()
    loss = rnnt_loss(*problem)
    assert allocated() == lattice_bytes(untiled=False)
    loss.backward()
    assert allocated() == problem.logits.nbytes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
@pytest.mark.parametrize("tile_rows", ["auto", None])
def test_nothing_is_kept_without_gradients(mode: Any, tile_rows: Any, allocated: Callable[[], int]) -> None:
    problem = problems.joint().leaves() if mode else problems.joint()
    expected = joint_rnnt_loss(*problem, tile_rows=tile_rows).detach()
    with (mode or torch.enable_grad)():
        loss = joint_rnnt_loss(*problem, tile_rows=tile_rows)
        other = rnnt_loss(*problems.plain_logits(problem))
    assert allocated() == 0
    assert torch.equal(loss, expected)
    near(other, expected, 1e-12)
    assert loss.grad_fn is None
    assert not loss.requires_grad
    assert loss.is_inference() == (mode is torch.inference_mode)


@pytest.mark.parametrize("name", NAMES)
def test_change_between_forward_and_backward_is_noticed(name: str) -> None:
    problem = problems.joint().leaves()
    changed = problem._replace(**{name: getattr(problem, name) * 1})
    loss = joint_rnnt_loss(*changed)
    getattr(changed, name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_overwriting_the_logits() -> None:
    problem = problems.logits().leaves()
    (expected,) = gradients(rnnt_loss(*problem), [problem.logits])
    scores = problem.logits * 1
    seen: list[Tensor] = []
    scores.register_hook(seen.append)
    loss = rnnt_loss(scores, *problem[1:], overwrite_logits=True)
    (found,) = torch.autograd.grad(loss, problem.logits, retain_graph=True)
    assert torch.equal(found, expected)
    assert seen[0].data_ptr() == scores.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # the scores are no more

    scores = problem.logits * 1
    both = scores.square().sum() + rnnt_loss(scores, *problem[1:], overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()  # autograd comes to the square last

    with pytest.raises(InputError, match="got a leaf"):
        rnnt_loss(*problem, overwrite_logits=True)
    with pytest.raises(InputError, match="got strides"):
        rnnt_loss((problem.logits * 1).mT.contiguous().mT, *problem[1:], overwrite_logits=True)
    with torch.no_grad():  # then nothing is overwritten
        near(rnnt_loss(*problem, overwrite_logits=True), loss, 1e-15)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_states_with_float32_parameters(dtype: torch.dtype, device: str) -> None:
    half, single = problems.joint(dtype, device), problems.joint(torch.float32, device)
    problem = half._replace(weight=single.weight, bias=single.bias).leaves()
    exact = problem._replace(**{name: getattr(problem, name).double() for name in NAMES})
    loss, truth = joint_rnnt_loss(*problem), problems.plain_losses(problems.plain_logits(exact)).mean()
    assert loss.dtype == torch.float32
    near(loss, truth, torch.finfo(dtype).eps)
    found = gradients(loss, problem.differentiable)
    assert [gradient.dtype for gradient in found] == [dtype, dtype, torch.float32, torch.float32]
    all_near(found, gradients(truth, problem.differentiable), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_states_of_two_dtypes_are_promoted(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    problem = problems.joint(torch.float32)
    problem = problem._replace(encoder=problem.encoder.to(dtypes[0]), predictor=problem.predictor.to(dtypes[1]))
    problem = problem.leaves()
    wide = problem._replace(encoder=problem.encoder.float(), predictor=problem.predictor.float())
    ours, expected = joint_rnnt_loss(*problem), joint_rnnt_loss(*wide)
    assert torch.equal(ours, expected)
    found = gradients(ours, problem.differentiable)
    assert [gradient.dtype for gradient in found] == [*dtypes, torch.float32, torch.float32]
    assert all(map(torch.equal, found, gradients(expected, problem.differentiable)))


@on_each_device
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_autocast(weights_dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    network = JointNetwork(6, 4, H, V).to(device, weights_dtype)
    encoder_out = torch.randn(B, T, 6, device=device, dtype=weights_dtype, requires_grad=True)
    predictor_out = torch.randn(B, U + 1, 4, device=device, dtype=weights_dtype, requires_grad=True)
    integers = problems.joint(device=device)[4:]
    with torch.autocast(device, torch.bfloat16):
        loss = network.loss(encoder_out, predictor_out, *integers)
        loss.backward()
    exact = network.double()
    truth = problems.plain_losses(
        problems.plain_logits(
            problems.Joint(
                exact.encoder_projection(encoder_out.detach().double()),
                exact.predictor_projection(predictor_out.detach().double()),
                exact.output.weight,
                exact.output.bias,
                *integers,
            )
        )
    )
    near(loss, truth.mean(), 0.02)
    assert loss.dtype == torch.float32
    assert encoder_out.grad is not None
    assert encoder_out.grad.dtype == weights_dtype


def test_autocast_of_plain_states() -> None:
    problem = problems.joint(torch.float32).leaves()
    half = problem._replace(encoder=problem.encoder.bfloat16(), predictor=problem.predictor.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        ours = joint_rnnt_loss(*problem)
        double = joint_rnnt_loss(*problems.joint())
    assert torch.equal(ours, joint_rnnt_loss(*half))
    assert [gradient.dtype for gradient in gradients(ours, problem.differentiable)] == 4 * [torch.float32]
    assert double.dtype == torch.float64  # as autocast leaves float64 alone
    assert torch.equal(double, joint_rnnt_loss(*problems.joint()))


def test_grad_scaler() -> None:
    problem = problems.joint(torch.float32).leaves()
    plain = gradients(joint_rnnt_loss(*problem, clamp=0.1), problem.differentiable)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(problem.differentiable, lr=0.0)
    scaler.scale(joint_rnnt_loss(*problem, clamp=0.1)).backward()
    assert all(torch.equal(x.grad, 2**16 * gradient) for x, gradient in zip(problem.differentiable, plain, strict=True))
    scaler.unscale_(optimizer)
    assert all(torch.equal(x.grad, gradient) for x, gradient in zip(problem.differentiable, plain, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    loss_module = FlashRNNTLoss(dropout=0.5)
    found = []
    for checkpointed in (True, False):
        problem = problems.joint().leaves()
        torch.manual_seed(7)
        if checkpointed:
            loss = torch.utils.checkpoint.checkpoint(loss_module, *problem, use_reentrant=use_reentrant)
        else:
            loss = loss_module(*problem)
        torch.manual_seed(8)  # the mask of backward must not come from here
        found.append((loss, *gradients_of(loss, problem)))
    assert all(map(torch.equal, *found))


def gradients_of(loss: Tensor, problem: problems.Joint) -> list[Tensor | None]:
    loss.backward()
    return [tensor.grad for tensor in problem.differentiable]


def test_saved_tensors_may_move() -> None:
    problem = problems.joint().leaves()
    expected = gradients(joint_rnnt_loss(*problem), problem.differentiable)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        loss = joint_rnnt_loss(*problem)
    for _ in range(2):
        found = torch.autograd.grad(loss, problem.differentiable, retain_graph=True)
        assert all(map(torch.equal, found, expected))
