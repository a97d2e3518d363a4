"""`adapters.pytorch` under torch.compile, and the operators behind it.

Graphs run by "aot_eager": everything but code generation, which the operators do not take part in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flash_rnnt_cupy import InputError
from flash_rnnt_cupy.adapters.pytorch import FlashRNNTLoss, JointNetwork, joint_rnnt_loss, rnnt_loss
from flash_rnnt_cupy.adapters.torch_autograd import gradients_operator, loss_operator
from flash_rnnt_cupy.adapters.torch_call import Settings
from tests import torch_problems as problems
from tests.torch_problems import B, V, gradients


@pytest.fixture(autouse=True)
def _no_earlier_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Tensor], dynamic: bool | None = None) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


SETTINGS = [
    Settings("joint", activation="tanh", dropout=0.3, reduction="none", tile_rows=4),
    Settings("joint", tile_rows=None, clamp=0.1, workspace_bytes=10_000, min_occupancy=1e-8),
    Settings("logits", blank=-1, fastemit_lambda=0.1, reduction="mean_per_label", tile_rows=None),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"{settings.form}-{settings.reduction}")
def test_opcheck(settings: Settings) -> None:
    joint, logits = problems.joint().leaves(), problems.logits().leaves()
    tensors = [logits.logits] if settings.form == "logits" else list(joint.differentiable)
    arguments = [*joint[4:], torch.tensor(-5), [True] * len(tensors), *settings]
    torch.library.opcheck(loss_operator, (tensors, *arguments))
    detached = [tensor.detach() for tensor in tensors]
    stash = loss_operator(detached, *arguments)[2]
    for wanted in ([True] * len(tensors), [True] + [False] * (len(tensors) - 1)):
        arguments[4] = wanted
        torch.library.opcheck(gradients_operator, (detached, stash, torch.rand(B).double(), *arguments))
    arguments[4] = [False] * len(tensors)
    torch.library.opcheck(loss_operator, (detached, *arguments))
    assert loss_operator(detached, *arguments)[2].numel() == 0


@pytest.mark.parametrize(
    "options", [{}, {"tile_rows": 3, "reduction": "mean_volume"}, {"tile_rows": None, "clamp": 0.1}]
)
def test_compiled_equals_eager(options: dict[str, Any]) -> None:
    problem = problems.joint().leaves()

    def loss(*arguments: Any) -> Tensor:
        return joint_rnnt_loss(*arguments, **options)

    ours, eager = compiled(loss)(*problem), loss(*problem)
    assert torch.equal(ours, eager)
    expected = gradients(eager, problem.differentiable)
    with torch._functorch.config.patch(donated_buffer=False):  # which torch.compile asks for to retain the graph
        ours = compiled(loss)(*problem)
        for _ in range(2):
            found = torch.autograd.grad(ours, problem.differentiable, retain_graph=True)
            assert all(map(torch.equal, found, expected))


def test_compiled_logits_equal_eager() -> None:
    problem = problems.logits(torch.float32).leaves()

    def loss(scores: Tensor, *integers: Tensor) -> Tensor:
        return rnnt_loss(scores * 2, *integers, overwrite_logits=True).exp()

    ours, eager = compiled(loss)(*problem), loss(*problem)
    assert torch.equal(ours, eager)
    assert torch.equal(gradients(ours, [problem.logits])[0], gradients(eager, [problem.logits])[0])


def test_one_graph_for_all_shapes() -> None:
    torch.manual_seed(0)
    network = JointNetwork(16, 16, 16, V, dropout=0.2)
    counter = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(network.loss, fullgraph=True, dynamic=True, backend=counter)
    n_graphs = []
    for batch, T, U in ((3, 9, 6), (2, 9, 4), (5, 4, 5), (4, 8, 3)):  # sizes of the first batch all differ
        arguments = (
            torch.randn(batch, T, 16, requires_grad=True),
            torch.randn(batch, U + 1, 16, requires_grad=True),
            torch.randint(V - 1, (batch, U)),
            torch.randint(1, T + 1, (batch,)),
            torch.randint(U + 1, (batch,)),
        )
        found = []
        for function in (loss, network.loss):
            torch.manual_seed(1)
            value = function(*arguments)
            found.append([value, *torch.autograd.grad(value, [*arguments[:2], *network.parameters()])])
        assert all(map(torch.equal, *found))
        n_graphs.append(counter.frame_count)
    assert n_graphs[0] == n_graphs[-1]


def test_seeds() -> None:
    problem = problems.joint()
    for seed in (0, 7, 2**63 + 5, 2**64 - 1):
        loss = FlashRNNTLoss(dropout=0.5, seed=seed)
        assert torch.equal(compiled(loss)(*problem), loss(*problem))
    loss = compiled(FlashRNNTLoss(dropout=0.5))
    torch.manual_seed(1)
    first, second = loss(*problem), loss(*problem)
    torch.manual_seed(1)
    assert loss(*problem) == first != second


def test_autocast_and_no_grad() -> None:
    problem = problems.joint(torch.float32).leaves()
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = compiled(joint_rnnt_loss)(*problem), joint_rnnt_loss(*problem)
    assert torch.equal(ours, eager)
    assert all(map(torch.equal, *(gradients(loss, problem.differentiable) for loss in (ours, eager))))
    with torch.no_grad():
        assert torch.equal(compiled(joint_rnnt_loss)(*problem), joint_rnnt_loss(*problem))


def test_second_derivatives_are_refused() -> None:
    problem = problems.joint().leaves()
    integers, seed = problem[4:], torch.tensor(0)
    losses = loss_operator(list(problem.differentiable), *integers, seed, [True] * 4, *SETTINGS[0])[0]
    (gradient,) = torch.autograd.grad(losses.sum(), problem.encoder, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_errors_come_out_of_the_graph() -> None:
    problem = problems.joint()
    with pytest.raises(InputError, match=r"targets: .* at utterance 0, position 0"):
        compiled(joint_rnnt_loss)(*problem._replace(targets=problem.targets + V))
