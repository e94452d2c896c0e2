"""Recording when something goes wrong, or back: the record is kept as far as it holds, and training goes on."""

import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from worlds import Worlds

import gradwire as gw
from gradwire.api.handle import Handle
from gradwire.core import TensorInfo
from gradwire.errors import StepStateError
from gradwire.record.run import Run
from gradwire.record.tensors import MOST_ELEMENTS, MOST_POINTS, Tensors

PLAN = gw.Uniform(gw.QSGD(bits=4))


class Loop:
    """A small training."""

    def __init__(self, plan: gw.Policy = PLAN) -> None:
        self.model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.handle: Handle = gw.parallelize(self.model, self.optimizer, plan=plan)

    def step(self) -> torch.Tensor:
        loss = self.model(torch.randn(8, 40)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


PAUSE_S = 1000.0


def gone_back(folder: str, plan: gw.Policy, load_at: int) -> tuple[list[int], list[int], list[float | None], float]:
    """6 steps; behind `load_at` of them the state behind 2 is loaded, after a pause that only the clock sees."""
    loop, usual = Loop(plan), time.perf_counter
    with pytest.MonkeyPatch.context() as patch, loop.handle.record(folder, error_steps=1) as recording:
        for number in range(6):
            if number == 2:
                state = loop.handle.state_dict()
            if number == load_at:
                patch.setattr(time, "perf_counter", lambda: usual() + PAUSE_S)
                loop.handle.load_state_dict(state)
            loop.step()
            recording.log(loss=float(number))
    if dist.get_rank() > 0:
        return [], [], [], 0.0
    run = Run.read(folder)
    errors = next(tensor.error for tensor in run.tensors if tensor.name == "0.weight")
    longest_s = max(step.step_us for step in run.steps[1:]) / 1e6
    return [step.step for step in run.steps], [step for step, _ in errors], [step.loss for step in run.steps], longest_s


@pytest.mark.parametrize("load_at", [3, 4])
def test_steps_that_a_loaded_state_undid_are_recorded_as_they_were_made_again(
    load_at: int, worlds: Worlds, tmp_path: Path
) -> None:
    ((steps, errors, losses, longest_s),) = worlds.run(1, gone_back, str(tmp_path), PLAN, load_at)
    last = 6 - load_at + 2
    assert steps == errors == list(range(last))
    assert losses == [0.0, 1.0, *map(float, range(load_at, 6))]
    assert longest_s < PAUSE_S / 2, "the load is in no step"


@pytest.mark.parametrize("load_at", [3, 4])
def test_steps_undone_while_steps_overlap(load_at: int, worlds: Worlds, tmp_path: Path) -> None:
    """The last one is still under way at the end, and is left out."""
    delayed = gw.Uniform(gw.QSGD(bits=4), schedule="delayed")
    steps, errors, losses, _ = worlds.run(2, gone_back, str(tmp_path), delayed, load_at)[0]
    last = 6 - load_at + 2 - 1
    assert steps == list(range(last)) and losses == [0.0, 1.0, *map(float, range(load_at, 5))]
    assert errors == sorted(set(errors)) and set(errors) <= set(steps)


def undone(folder: str) -> list[int]:
    """The state is loaded behind the last step: what it undoes is forgotten though nothing comes after it."""
    loop = Loop()
    with loop.handle.record(folder, error_steps=1):
        loop.step()
        state = loop.handle.state_dict()
        loop.step()
        loop.handle.load_state_dict(state)
    return [step.step for step in Run.read(folder).steps]


def test_steps_undone_at_the_end_are_forgotten(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(1, undone, str(tmp_path)) == [[0]]


def refused(folder: str) -> tuple[list[str], list[float | None]]:
    loop, told, buffer = Loop(), list[str](), torch.zeros(())
    with loop.handle.record(folder) as recording:
        for number in range(3):
            loop.step()
            recording.log(loss=buffer.fill_(float(number)))
        for loss in (None, "0.5", [0.5], 10**400, 1j, torch.tensor(1j)):
            try:
                recording.log(loss=loss)
            except ValueError as error:
                told.append(str(error))
    return told, [step.loss for step in Run.read(folder).steps]


def test_only_numbers_are_losses_and_each_is_its_own(worlds: Worlds, tmp_path: Path) -> None:
    ((told, losses),) = worlds.run(1, refused, str(tmp_path))
    assert len(told) == 6 and all("loss is" in words and "real number" in words for words in told)
    assert losses == [0.0, 1.0, 2.0], "a buffer that the script writes again is not kept"


def at_a_file(path: str) -> tuple[list[str], int, int]:
    """What the script is told, the steps that can be saved elsewhere, and the hooks that are left."""
    loop = Loop()
    before = len(loop.model._forward_pre_hooks)
    with warnings.catch_warnings(record=True) as told, loop.handle.record(path) as recording:
        warnings.simplefilter("always")
        for _ in range(3):
            loop.step()
            recording._saved = float("-inf")  # a minute has passed
    steps = len(recording.run().steps) if dist.get_rank() == 0 else 0
    hooks = len(loop.model._forward_pre_hooks) - before
    loop.handle.detach()
    return [str(each.message) for each in told], steps, hooks


def test_a_folder_that_cannot_be_made_is_one_warning_and_no_error(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (told, steps, hooks), other = worlds.run(2, at_a_file, str(tmp_path / "file"))
    (words,) = [each for each in told if "the record of this run was not written" in each]
    assert "file: no folder can be made there" in words and "Training goes on." in words
    assert (steps, hooks) == (3, 0)
    assert other == ([], 0, 0), "only rank 0 writes"


def after_detach(folder: str) -> str:
    loop = Loop()
    loop.handle.detach()
    try:
        with loop.handle.record(folder):
            loop.step()
    except StepStateError as error:
        return str(error)
    return ""


def test_a_detached_handle_records_nothing_and_says_so(worlds: Worlds, tmp_path: Path) -> None:
    (words,) = worlds.run(1, after_detach, str(tmp_path / "run"))
    assert f"handle.record('{tmp_path / 'run'}')" in words and "Call gw.parallelize again" in words
    assert not (tmp_path / "run").exists()


def broken(folder: str) -> tuple[str, list[str]]:
    loop = Loop()
    with pytest.warns() as told:
        try:
            with loop.handle.record(folder) as recording:
                loop.step()
                recording._kept._losses[0] = "what cannot be saved"
                raise KeyError("the script's own")
        except KeyError as error:
            return str(error), [str(each.message) for each in told]
    return "", []


def test_the_scripts_own_error_is_not_hidden_by_one_of_the_record(worlds: Worlds, tmp_path: Path) -> None:
    ((error, told),) = worlds.run(1, broken, str(tmp_path))
    assert "the script's own" in error and any("the record of this run" in words for words in told)


def never_called(folder: str) -> list[str]:
    loop = Loop()
    with pytest.warns() as told, loop.handle.record(folder):
        for _ in range(2):
            loop.model[2](loop.model[1](loop.model[0](torch.randn(8, 40)))).sum().backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return [str(each.message) for each in told]


def test_a_loop_that_never_calls_the_model_itself_is_told(worlds: Worlds, tmp_path: Path) -> None:
    (told,) = worlds.run(1, never_called, str(tmp_path))
    assert any("nothing was recorded" in words and "a call of the model itself" in words for words in told)


def inside_a_profile(folder: str) -> int:
    loop = Loop()
    with loop.handle.profile(folder + "/profile", steps=2, specs=()), loop.handle.record(folder):
        for _ in range(12):
            loop.step()
    return len(Run.read(folder).steps)


def test_a_record_inside_a_profile_has_all_steps(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, inside_a_profile, str(tmp_path)) == [12, 12]


def by_parts_after_one_call(folder: str) -> int:
    """Tasks that are kept of 20 steps for which the model itself was not called."""
    loop = Loop()
    with loop.handle.record(folder):
        loop.step()
        loop.model(torch.randn(8, 40))
        loop.step()
        for _ in range(20):
            loop.model[2](loop.model[1](loop.model[0](torch.randn(8, 40)))).sum().backward()
        kept = sum(len(each.task_times() or ()) for each in loop.handle.session.lanes.observers)
    loop.handle.detach()
    return kept


def test_steps_that_are_not_recorded_leave_nothing_behind(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, by_parts_after_one_call, str(tmp_path)) == [0, 0]


def folder_that_goes(folder: str, meanwhile: bool) -> tuple[list[str], int]:
    """The folder is removed while the script trains. What the script is told, and the steps that can be saved elsewhere."""
    loop, path = Loop(), Path(folder, "run")
    recording = loop.handle.record(path)
    with pytest.warns() as told, recording:
        for number in range(4):
            loop.step()
            if number == 0:
                path.rmdir()
            if meanwhile:
                recording._saved = float("-inf")  # a minute has passed
    recording.run().save(Path(folder, "elsewhere"))
    loop.handle.detach()
    return [str(each.message) for each in told], len(Run.read(Path(folder, "elsewhere")).steps)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_folder_that_is_gone_is_one_warning_and_no_error(worlds: Worlds, tmp_path: Path, meanwhile: bool) -> None:
    ((told, steps),) = worlds.run(1, folder_that_goes, str(tmp_path), meanwhile)
    (words,) = [each for each in told if "the record of this run was not written" in each]
    assert str(tmp_path / "run") in words and "Make it." in words and "recording.run().save(PATH)" in words
    assert steps == 4


ONE_OF_TWO: Any = SimpleNamespace(world_size=2, rank=0)


def use(tensors: Tensors, bits: int, numel: int, step: int) -> None:
    """Another exchange of one tensor is in use."""
    infos = [TensorInfo("weight", (numel, 1), "float32")]
    tensors.use(object(), gw.Uniform(gw.QSGD(bits=bits)).plan(infos), infos, step)


def test_measuring_a_large_tensor_takes_little_memory() -> None:
    tensors, numel = Tensors(ONE_OF_TWO), 7 * MOST_ELEMENTS + 3
    use(tensors, 4, numel, 0)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        for step in range(4):
            tensors.ask()
            tensors.gradient("weight", gradient)
            tensors.measure(step)
    assert max(event.cpu_memory_usage for event in measured.events()) <= 8 * MOST_ELEMENTS
    (record,) = tensors.records()
    assert len({error for _, error in record.error}) == 4, "other parts each time"


def test_changes_of_bits_are_thinned_and_the_last_is_kept() -> None:
    tensors = Tensors(ONE_OF_TWO)
    for step in range(1001):
        use(tensors, 2 + step % 2, 1000, step)
    (record,) = tensors.records()
    assert len(record.bits) <= MOST_POINTS and record.bits[0][0] == 0 and record.bits[-1][0] == 1000
