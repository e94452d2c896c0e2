"""A run that is saved and taken up again ends like one that was not interrupted, bit for bit, whatever saves it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside_ddp import batch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from worlds import Worlds, digest

import gradwire as gw

PAUSE, STEPS = 3, 6


class Run:
    """One training run: everything that a checkpoint has to hold."""

    def __init__(self, plan: Any, seed: int) -> None:
        torch.manual_seed(100 * seed + dist.get_rank())
        self.model = nn.Sequential(nn.Linear(6, 300), nn.LayerNorm(300), nn.Tanh(), nn.Linear(300, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.model(batch(step)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "gradwire": self.handle.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.handle.load_state_dict(state["gradwire"])
        self.schedule.load_state_dict(state["schedule"])

    def end(self) -> str:
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        gradients = [parameter.grad for parameter in self.model.parameters()]
        tensors = [*self.model.state_dict().values(), *gradients, *moments, *self.handle.state_dict().values()]
        self.handle.detach()
        return digest(tensors)


def torch_save(run: Run, folder: str) -> Callable[[], None]:
    torch.save(run.state(), f"{folder}/rank{dist.get_rank()}.pt")
    return lambda: None


def torch_load(run: Run, folder: str) -> None:
    run.load(torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=True))


def distributed_save(run: Run, folder: str) -> Callable[[], None]:
    dcp.save(run.state(), checkpoint_id=folder)
    return lambda: None


def distributed_async_save(run: Run, folder: str) -> Callable[[], None]:
    """Training goes on while it writes."""
    return dcp.async_save(run.state(), checkpoint_id=folder).result


def distributed_load(run: Run, folder: str) -> None:
    state = run.state()
    dcp.load(state, checkpoint_id=folder)
    run.load(state)


WAYS = {
    "torch.save": (torch_save, torch_load),
    "distributed checkpoint": (distributed_save, distributed_load),
    "asynchronous distributed checkpoint": (distributed_async_save, distributed_load),
}
PLANS = {
    "exact": gw.Uniform(gw.Identity()),
    "compressed": gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=3)), bucket_bytes=1000, chunk_bytes=2000),
}


def interrupted(way: str, plan: Any, folder: str) -> tuple[str, str, str]:
    """The ends of a run at once, of one that saved in the middle and went on, and of the one taken up from there."""
    save, load = WAYS[way]
    at_once = Run(plan, seed=1)
    at_once.train(0, STEPS)
    saving = Run(plan, seed=1)
    saving.train(0, PAUSE)
    written = save(saving, folder)
    saving.train(PAUSE, STEPS)
    written()
    resumed = Run(plan, seed=2)
    load(resumed, folder)
    resumed.train(PAUSE, STEPS)
    return at_once.end(), saving.end(), resumed.end()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_resumed_run_repeats_the_uninterrupted_one(worlds: Worlds, way: str, plan: str, tmp_path: Path) -> None:
    for at_once, saving, resumed in worlds.run(2, interrupted, way, PLANS[plan], str(tmp_path)):
        assert saving == at_once, "saving changed the run"
        assert resumed == at_once


def saved_by_rank_zero(folder: str) -> bool:
    """Rank 0 alone saves, and all go on after a barrier: saving waits for nobody."""
    run = Run(PLANS["compressed"], seed=1)
    for step in range(4):
        run.train(step, step + 1)
        if dist.get_rank() == 0:
            torch.save([run.model.state_dict(), run.optimizer.state_dict(), run.handle.state_dict()], f"{folder}/rank0")
        dist.barrier()
    run.handle.detach()
    return True


def test_rank_zero_saves_alone(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, saved_by_rank_zero, str(tmp_path)) == [True, True]
