"""`adapters.pytorch` under DistributedDataParallel: two processes on one machine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from flash_rnnt_cupy.adapters.pytorch import JointNetwork
from tests import torch_problems as problems
from tests.torch_problems import V, all_near

WORLD = 2


class Model(nn.Module):
    """An encoder, a predictor and the joint network; ``forward`` is what DistributedDataParallel wraps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(problems.H, 4)
        self.predictor = nn.Embedding(V, 4)
        self.joint = JointNetwork(4, 4, 4, V)

    def forward(self, features: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
        states = self.predictor(nn.functional.pad(targets, (1, 0), value=V - 1))
        return self.joint.loss(self.encoder(features), states, targets, frames, labels)


def batch() -> list[Tensor]:
    """Four utterances; those of the second process have no labels at all."""
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(4, 5, problems.H, generator=draw)
    return [
        features,
        torch.randint(V - 1, (4, 3), generator=draw),
        torch.tensor([5, 3, 4, 1]),
        torch.tensor([3, 1, 0, 0]),
    ]


def work(rank: int, folder: str) -> None:
    """One process: its share of the batch, two steps, gradients written to the folder."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        model = nn.parallel.DistributedDataParallel(Model())
        share = [values[rank * 2 : rank * 2 + 2] for values in batch()]
        for _ in range(2):
            model.zero_grad()
            model(*share).backward()
        torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=WORLD)
    model = Model()
    model(*batch()).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for rank in range(WORLD):
        all_near(torch.load(tmp_path / f"{rank}.pt"), expected, 1e-6)
