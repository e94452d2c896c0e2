"""Ranks that resume with different files: all of them load, or all of them raise the same sentence."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import World, Worlds, digest, seeded

import gradwire as gw
from gradwire.engine import saving
from gradwire.integrations.handles import gather_states, load_handle, save_handle

PLANS: dict[str, Any] = {
    "feedback": gw.ErrorFeedback(gw.QSGD(bits=2)),
    "auto": "auto",
    "bits": gw.AdaptiveBits(period=40, accumulate=8),
    "tuned": gw.Tuned(gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)))),
    "delayed": gw.Uniform(gw.QSGD(bits=4), schedule=gw.Delayed(k=3, local_lr=0.01)),
    "local": gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(4)),
}


class Job:
    """A model in training under one of the plans."""

    def __init__(self, plan: str) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 20))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=PLANS[plan])

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 40, generator=seeded(step, dist.get_rank()))).square().mean().backward()
            self.optimizer.step()

    def end(self) -> str:
        self.handle.flush()
        weights = digest(self.model.state_dict().values())
        self.handle.detach()
        return weights


def saved_run(plan: str, folder: str, steps: int) -> None:
    job = Job(plan)
    job.train(range(steps))
    save_handle(job.handle, folder)
    job.end()


def resumed_run(plan: str, folders: list[str], steps: int) -> tuple[str, list[str]]:
    """The error of loading, or the weights after more steps; and the warnings."""
    job = Job(plan)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            load_handle(job.handle, folders[dist.get_rank()])
        except ValueError as error:
            job.end()
            return str(error), []
    job.train(range(steps))
    return job.end(), [str(each.message) for each in warned]


def in_a_short_world(act: Callable[[World], Any]) -> Any:
    """Ranks that wait for each other fail in time, and not after the minute of other worlds."""
    with World(2, group_timeout_s=15.0) as world:
        return act(world)


@pytest.mark.parametrize(("plan", "steps"), [*((plan, 13) for plan in PLANS), ("auto", 30)])
def test_a_rank_without_its_own_file_resumes_with_the_others(tmp_path: Path, plan: str, steps: int) -> None:
    """As with a state of which a rank is missing: residuals of that rank begin at zero, and the other ranks are told nothing."""

    def act(world: World) -> list[tuple[str, list[str]]]:
        world.run(saved_run, plan, str(tmp_path), steps)
        (tmp_path / "gradwire-rank1.pt").unlink()
        return world.run(resumed_run, plan, [str(tmp_path)] * 2, 40)

    first, second = in_a_short_world(act)
    assert len(first[0]) == len(second[0]) == 64, (first, second)
    if plan != "local":
        assert first[0] == second[0]
    assert first[1] == [] and all("nothing of rank 1" in words for words in second[1])
    if plan != "auto":  # which keeps residuals or not, by the plan that it chose
        assert bool(second[1]) == (plan in ("feedback", "tuned"))


@pytest.mark.parametrize("plan", ["feedback", "auto", "bits"])
def test_a_rank_without_any_file_is_named_on_all_ranks(tmp_path: Path, plan: str) -> None:
    """On two nodes without a shared folder, where one lost its files."""

    def act(world: World) -> list[tuple[str, list[str]]]:
        world.run(saved_run, plan, str(tmp_path / "a"), 13)
        (tmp_path / "empty").mkdir()
        return world.run(resumed_run, plan, [str(tmp_path / "a"), str(tmp_path / "empty")], 3)

    first, second = in_a_short_world(act)
    assert first == second
    assert "rank 1 found no state to load, and rank 0 found one of step 13" in first[0]
    assert "a folder that all of them share" in first[0]


@pytest.mark.parametrize("plan", ["feedback", "auto"])
def test_files_of_different_steps_are_told_on_all_ranks(tmp_path: Path, plan: str) -> None:
    def act(world: World) -> list[tuple[str, list[str]]]:
        for name, steps in (("a", 7), ("b", 9)):
            world.run(saved_run, plan, str(tmp_path / name), steps)
        shutil.copy(tmp_path / "b" / "gradwire-rank1.pt", tmp_path / "a")
        return world.run(resumed_run, plan, [str(tmp_path / "a")] * 2, 3)

    first, second = in_a_short_world(act)
    assert first == second
    assert "the step in rank 0's state is 7, and in rank 1's 9: these were not saved together" in first[0]


def test_a_damaged_file_of_one_rank_is_told_on_all_ranks(tmp_path: Path) -> None:
    def act(world: World) -> list[tuple[str, list[str]]]:
        world.run(saved_run, "feedback", str(tmp_path), 5)
        state = torch.load(tmp_path / "gradwire-rank1.pt", weights_only=True)
        state["rank1/residual/0/0.weight"] = torch.zeros(7)
        torch.save(state, tmp_path / "gradwire-rank1.pt")
        return world.run(resumed_run, "feedback", [str(tmp_path)] * 2, 3)

    first, second = in_a_short_world(act)
    assert "7 elements where the model's tensor has 2400" in second[0]
    assert first[0].startswith("rank 1 could not load its state, so no rank loads one: ValueError: ")
    assert "7 elements where the model's tensor has 2400" in first[0]


def test_without_any_file_all_begin_with_a_warning(tmp_path: Path) -> None:
    def act(world: World) -> list[tuple[str, list[str]]]:
        return world.run(resumed_run, "feedback", [str(tmp_path)] * 2, 3)

    for _, warned in in_a_short_world(act):
        assert len(warned) == 1 and "Residuals begin at zero" in warned[0]


def files_read(folder: str) -> list[str]:
    """The files that a rank reads to resume, and where to."""
    job, read, load = Job("feedback"), list[str](), torch.load

    def noted(path: Path, **options: Any) -> Any:
        read.append(f"{path.name} {options['map_location']}")
        return load(path, **options)

    with mock.patch.object(torch, "load", noted):
        load_handle(job.handle, folder)
    job.end()
    return read


def test_a_rank_reads_its_own_file_alone_where_all_ranks_have_theirs(tmp_path: Path, worlds: Worlds) -> None:
    worlds.run(3, saved_run, "feedback", str(tmp_path), 5)
    assert worlds.run(3, files_read, str(tmp_path)) == [[f"gradwire-rank{rank}.pt cpu"] for rank in range(3)]
    (tmp_path / "gradwire-rank1.pt").unlink()
    everywhere = ["gradwire-rank0.pt cpu", "gradwire-rank2.pt cpu"]
    assert worlds.run(3, files_read, str(tmp_path)) == [everywhere] * 3


def resumed_where_a_folder_cannot_be_read(folder: str) -> str:
    job, listed = Job("feedback"), Path.glob

    def unreadable(self: Path, pattern: str) -> Any:
        raise PermissionError(f"{self} cannot be read")

    with mock.patch.object(Path, "glob", unreadable if dist.get_rank() == 1 else listed), pytest.raises(Exception) as caught:
        load_handle(job.handle, folder)
    job.end()
    return f"{caught.type.__name__}: {caught.value}"


def test_a_folder_that_one_rank_cannot_read_is_told_on_all_ranks(tmp_path: Path) -> None:
    def act(world: World) -> list[str]:
        world.run(saved_run, "feedback", str(tmp_path), 5)
        return world.run(resumed_where_a_folder_cannot_be_read, str(tmp_path))

    first, second = in_a_short_world(act)
    assert second.startswith("PermissionError") and first.startswith("ValueError: rank 1 could not load its state")
    assert second in first


def test_what_ranks_tell_of_a_state_does_not_grow_with_the_model() -> None:
    none: Any = {"decided": None, "chosen": None, "searching": False, "measuring": b"", "local_steps": None}
    saved: Any = SimpleNamespace(step=7, order=list(range(5000)), own=True, **none)
    other = SimpleNamespace(**vars(saved) | {"order": [1, 0, *range(2, 5000)]})
    plan: Any = SimpleNamespace(schedule=gw.Backward())
    card, unlike = (saving._card_of(each, plan, "job") for each in (saved, other))
    assert len(json.dumps(card)) < 200 and card["alike"]["order"] != unlike["alike"]["order"]


def refused_on_one() -> tuple[str, int]:
    """The handle after another rank refused its state: as before."""
    job = Job("feedback")
    job.train(range(3))
    state = job.handle.state_dict()
    job.train(range(3, 5))
    if dist.get_rank() == 1:
        state = {key: value for key, value in state.items() if not key.endswith("residual/0/2.weight")}
    with pytest.raises(ValueError) as caught:
        job.handle.load_state_dict(state)
    job.train(range(5, 7))
    step = int(job.handle.state_dict()[f"rank{dist.get_rank()}/step"])
    job.end()
    return str(caught.value), step


def test_a_state_that_one_rank_refuses_changes_no_handle(worlds: Worlds) -> None:
    first, second = worlds.run(2, refused_on_one)
    assert "the state has no residual/0/2.weight" in second[0] and second[0] in first[0]
    assert first[1] == second[1] == 7


def gathered_without(failures: dict[int, Exception]) -> tuple[str, str]:
    """What a rank raises that gathers states when the states of some ranks fail."""
    job = Job("feedback")
    job.train(range(2))

    def fails() -> dict[str, torch.Tensor]:
        raise failures[dist.get_rank()]

    if dist.get_rank() in failures:
        job.handle.state_dict = fails  # type: ignore[method-assign]
    with pytest.raises((gw.GradwireError, MemoryError)) as caught:
        gather_states(job.handle)
    job.end()
    return type(caught.value).__name__, str(caught.value)


def test_states_are_gathered_of_all_ranks_or_none(worlds: Worlds) -> None:
    in_mid_step, short = gw.StepStateError("as ordered"), MemoryError("short")
    first, second = worlds.run(2, gathered_without, {1: in_mid_step})
    assert first[0] == "StepStateError" and first[1].startswith("rank 1 could not save its state")
    assert second == ("StepStateError", "as ordered")
    for others in ({}, {0: in_mid_step}):
        first, second = worlds.run(2, gathered_without, {1: short} | others)
        assert first[0] == "CommunicationError" and first[1].startswith("rank 1 could not save its state")
        assert second == ("MemoryError", "short")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_files_of_an_earlier_save_with_more_ranks_are_left_out(tmp_path: Path, ranks: int) -> None:
    for writers, steps in ((3, 4), (2, 7)):
        with World(writers, group_timeout_s=15.0) as world:
            world.run(saved_run, "feedback", str(tmp_path / "both"), steps)
            world.run(saved_run, "feedback", str(tmp_path / str(writers)), steps)
    with World(ranks, group_timeout_s=15.0) as world:
        mixed = world.run(resumed_run, "feedback", [str(tmp_path / "both")] * ranks, 3)
        alone = world.run(resumed_run, "feedback", [str(tmp_path / "2")] * ranks, 3)
    assert [weights for weights, _ in mixed] == [weights for weights, _ in alone] and len(alone[0][0]) == 64
    for _, warned in mixed:
        assert any("beside those of step 7 of 2 ranks. Left out: gradwire-rank2.pt." in each for each in warned)


def test_files_of_two_jobs_at_one_step_are_told_on_all_ranks(tmp_path: Path) -> None:
    def act(world: World) -> list[tuple[str, list[str]]]:
        for name in ("a", "b"):
            world.run(saved_run, "feedback", str(tmp_path / name), 7)
        shutil.copy(tmp_path / "b" / "gradwire-rank1.pt", tmp_path / "a")
        return world.run(resumed_run, "feedback", [str(tmp_path / "a")] * 2, 3)

    first, second = in_a_short_world(act)
    assert first == second
    assert "the job in rank 0's state is " in first[0] and "these were not saved together" in first[0]
