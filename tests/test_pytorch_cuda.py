"""`adapters.pytorch` on a GPU: whose memory, whose stream, whose device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_rnnt_cupy import InputError
from flash_rnnt_cupy.adapters.pytorch import joint_rnnt_loss
from tests import torch_problems as problems
from tests.torch_problems import V, all_near, gradients, no_cuda

pytestmark = pytest.mark.skipif(bool(no_cuda), reason=no_cuda)


def test_all_memory_is_torchs() -> None:
    import cupy  # noqa: PLC0415  only where there is a GPU

    problem = problems.joint(torch.float32, "cuda").leaves()
    gradients(joint_rnnt_loss(*problem), problem.differentiable)  # loads kernels, fills caches
    pool = cupy.get_default_memory_pool().used_bytes()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = joint_rnnt_loss(*problem)
    assert torch.cuda.max_memory_allocated() > before
    loss.backward()
    kept = [loss, *(tensor.grad for tensor in problem.differentiable)]
    assert torch.cuda.memory_allocated() - before == sum(-(-tensor.nbytes // 512) * 512 for tensor in kept)
    assert cupy.get_default_memory_pool().used_bytes() == pool


def test_work_goes_to_the_current_stream() -> None:
    problem = problems.joint(torch.float32, "cuda").leaves()
    expected = gradients(joint_rnnt_loss(*problem), problem.differentiable)
    poisoned = [torch.full_like(tensor, float("nan")) for tensor in problem.differentiable]
    inputs = [tensor.requires_grad_() for tensor in poisoned]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(50_000_000)  # the values arrive late
        for tensor, value in zip(inputs, problem.differentiable, strict=True):
            tensor.copy_(value)
    with torch.cuda.stream(stream):
        loss = joint_rnnt_loss(*inputs, *problem[4:])
    torch.cuda.current_stream().wait_stream(stream)
    all_near(gradients(loss, inputs), expected, 0.0)


def test_device_and_stream_stay_also_after_an_error() -> None:
    import cupy  # noqa: PLC0415  only where there is a GPU

    last = torch.cuda.device_count() - 1
    problem = problems.joint(torch.float32, f"cuda:{last}").leaves()

    def state() -> tuple[Any, ...]:
        return (
            torch.cuda.current_device(),
            torch.cuda.current_stream(),
            cupy.cuda.Device(),
            cupy.cuda.get_current_stream(),
        )

    before = state()
    joint_rnnt_loss(*problem).backward()
    assert state() == before
    with pytest.raises(InputError):
        joint_rnnt_loss(*problem, blank=V)
    assert state() == before


def test_mixed_devices_are_refused_by_name() -> None:
    problem = problems.joint(torch.float32, "cuda")
    with pytest.raises(InputError, match="weight: expected an array on cuda:0, as encoder, got cpu"):
        joint_rnnt_loss(*problem._replace(weight=problem.weight.cpu()))
