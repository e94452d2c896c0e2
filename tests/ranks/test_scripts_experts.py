"""What a script sets aside for DDP stays each rank's own: experts that only one rank has, and their buffers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest

import gradwire as gw


class Experts(nn.Module):
    """A gate that all ranks share, and experts of the rank's own, of another size on each."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        torch.manual_seed(rank)
        self.gate, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        expert = nn.Sequential(nn.Linear(8, 5 + rank), nn.BatchNorm1d(5 + rank), nn.Linear(5 + rank, 3))
        self.experts = nn.ModuleDict({f"of_{rank}": expert})
        named = [*self.named_parameters(), *self.named_buffers()]
        own = [name for name, _ in named if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[f"of_{dist.get_rank()}"](self.norm(self.gate(x)).tanh())


def trained(schedule: Any) -> tuple[dict[str, str], bool]:
    """Digests of all weights and buffers after five steps, and whether the expert was as before when training began."""
    model = Experts()
    shared = [*model.gate.parameters(), *model.norm.parameters()]
    optimizer, own = torch.optim.SGD(shared, lr=0.1), torch.optim.SGD(model.experts.parameters(), lr=0.1)
    at_first = digest(model.experts.state_dict().values())
    if schedule is None:
        run: Any = DistributedDataParallel(model)
    else:
        run = model
        policy = gw.Policy(default=gw.Identity(), schedule=schedule)
        handle = gw.parallelize(model, optimizer, plan=policy, drift_check_steps=1)
    unchanged = digest(model.experts.state_dict().values()) == at_first
    for step in range(5):
        for each in (optimizer, own):
            each.zero_grad()
        run(batch(step)).square().mean().backward()
        for each in (optimizer, own):
            each.step()
    ends = {name: digest([tensor]) for name, tensor in model.state_dict().items()}
    if schedule is not None:
        handle.detach()
    return ends, unchanged


SCHEDULES = ["backward", "pipelined", gw.Pipelined(shard_optimizer=True)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_experts_of_one_rank_stay_its_own(worlds: Worlds, schedule: Any) -> None:
    ours, ddps = worlds.run(2, trained, schedule), worlds.run(2, trained, None)
    assert ours == ddps
    (first, unchanged), (second, _) = ours
    assert unchanged and {name for name in first if name in second and first[name] == second[name]} == {
        name for name in first if not name.startswith("experts.") and "running" not in name
    }


def joined() -> list[tuple[bool, bool]]:
    """Rank 1 has two batches more; whether the shared part and the expert are as they were when its loop ended."""
    model = Experts()
    handle = gw.parallelize(model, plan=gw.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = (model.gate, model.experts)
    before: list[str] = []
    with handle.join():
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        before = [digest(part.parameters()) for part in parts]
    after = [digest(part.parameters()) for part in parts]
    handle.detach()
    return [one == other for one, other in zip(before, after, strict=True)]


def test_join_leaves_experts_alone(worlds: Worlds) -> None:
    assert worlds.run(2, joined) == [[False, True], [True, True]]


def two_groups() -> str:
    """Experts with a handle of their own, over their own ranks."""
    model = Experts()
    groups = [dist.new_group([rank]) for rank in range(2)]
    make = partial(gw.parallelize, plan=gw.Identity())
    handles = [make(model), make(model.experts, process_group=groups[dist.get_rank()])]
    model(batch(0)).square().mean().backward()
    for handle in handles:
        handle.detach()
    return digest(p.grad for p in model.gate.parameters() if p.grad is not None)


def test_experts_may_have_a_handle_of_their_own(worlds: Worlds) -> None:
    first, second = worlds.run(2, two_groups)
    assert first == second
