"""Delayed steps that are interrupted, resumed, looked at by one rank alone, or cut off by a dead rank: nobody hangs."""

import io
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_steps import gradient, momentum
from interpreters import Interpreters
from script_ends import End, ends_of
from test_delayed import FOUR_BITS, make_model
from test_pipelined_ends import TIMEOUT_S
from worlds import World, Worlds, digest

import gradwire as gw

CD_SGD = gw.Uniform(FOUR_BITS, schedule=gw.Delayed(k=3, warmup_steps=1, correction=gw.ErrorFeedback(gw.QSGD(bits=8))))


class Run:
    """A training that can be saved and taken up."""

    def __init__(self, plan: gw.Policy = CD_SGD) -> None:
        self.model = make_model()
        self.optimizer = momentum(self.model.parameters())
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            gradient(self.model, step, dist.get_rank())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def end(self) -> list[str]:
        state = self.optimizer.state_dict()["state"]
        ends = [
            digest(self.model.state_dict().values()),
            digest(value["momentum_buffer"] for value in state.values()),
            digest(self.handle.state_dict().values()),
        ]
        self.handle.detach()
        return ends


def interrupted(pause: int, handle_first: bool) -> list[list[str]]:
    whole, first, second = Run(), Run(), Run()
    whole.steps(0, 9)
    first.steps(0, pause)
    parts = ["model", "optimizer", "handle"]
    saved = io.BytesIO()
    torch.save({part: getattr(first, part).state_dict() for part in parts}, saved)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    for part in reversed(parts) if handle_first else parts:
        getattr(second, part).load_state_dict(states[part])
    second.steps(pause, 9)
    first.handle.detach()
    return [whole.end(), second.end()]


@pytest.mark.parametrize(("pause", "handle_first"), [(0, False), (1, True), (4, False), (5, True)])
def test_a_resumed_run_equals_an_uninterrupted_one(worlds: Worlds, pause: int, handle_first: bool) -> None:
    for whole, resumed in worlds.run(2, interrupted, pause, handle_first):
        assert whole == resumed


def trained() -> dict[str, torch.Tensor]:
    run = Run()
    run.steps(0, 4)
    state = run.handle.state_dict()
    run.handle.detach()
    return state


def taken_up(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    run = Run()
    run.handle.load_state_dict(states)
    state = run.handle.state_dict()
    run.steps(4, 5)
    run.end()
    return state


def kept_back(states: list[dict[str, torch.Tensor]], what: str) -> torch.Tensor:
    """The sum over ranks and encodes."""
    return sum(
        (v for state in states for k, v in state.items() if f"/{what}/" in k and k.endswith("/2.weight")),
        torch.zeros(27),
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_keeps_what_was_not_sent(worlds: Worlds, ranks: int) -> None:
    before = worlds.run(2, trained)
    after = worlds.run(ranks, taken_up, before[0] | before[1])
    for what in ("residual", "correction_residual"):
        assert kept_back(before, what).norm() > 1e-3
        assert torch.allclose(kept_back(before, what), kept_back(after, what), atol=1e-6)


def refused_states() -> list[str]:
    run, told = Run(), []
    run.steps(0, 2)
    state = run.handle.state_dict()
    rank = dist.get_rank()
    for key, value in (
        (f"rank{rank}/local/0/0.weight", torch.zeros(1)),
        (f"rank{rank}/local/0/other", torch.zeros(1)),
        (f"rank{rank}/weights", torch.zeros(1, dtype=torch.int64)),
        (f"rank{rank}/correction_residual/0/2.weight", None),
    ):
        wrong = {k: v for k, v in (state | {key: value}).items() if v is not None}
        with pytest.raises(ValueError) as caught:
            run.handle.load_state_dict(wrong)
        told.append(str(caught.value))
    assert digest(run.handle.state_dict().values()) == digest(state.values())
    run.handle.detach()
    return told


def test_states_that_do_not_fit_are_refused(worlds: Worlds) -> None:
    for size, extra, sums, missing in worlds.run(2, refused_states):
        assert "local/0/0.weight has 1 elements where the model's tensor has 54" in size
        assert "weights of 5 tensors" in extra and "4 trainable" in extra
        assert "checksums of 1" in sums
        assert "correction_residual/0/2.weight" in missing or "no residual/0/2.weight" in missing


def one_rank_saves() -> list[str]:
    run, saved = Run(), []
    for step in range(5):
        run.steps(step, step + 1)
        if dist.get_rank() == 0:
            saved.append(digest(run.model.state_dict().values()))
        dist.barrier()
        saved.append(digest(run.model.state_dict().values()))
    run.handle.detach()
    return saved


def test_one_rank_may_save_before_a_barrier(worlds: Worlds) -> None:
    first, second = worlds.run(2, one_rank_saves)
    assert first[1::2] == second and len(set(second)) == 5
    assert first[0::2] == first[1::2]


def go_on_while_the_other_rank_is_late() -> bool:
    """Rank 0 computes its next step while rank 1 has not begun to send; the barrier would never end otherwise."""
    run = Run(gw.Uniform(FOUR_BITS, schedule=gw.Delayed(k=None)))
    run.steps(0, 1)
    if dist.get_rank() == 0:
        run.steps(1, 2)
        gradient(run.model, 2, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        run.steps(1, 2)
        gradient(run.model, 2, 1)
    run.optimizer.step()
    same = run.handle.stats().steps == 2
    run.handle.flush()
    same &= run.handle.stats().steps == 3
    run.handle.detach()
    return same


def test_a_step_does_not_wait_for_its_exchange(worlds: Worlds) -> None:
    assert worlds.run(2, go_on_while_the_other_rank_is_late) == [True, True]


def uneven(batches: list[int]) -> tuple[str, int]:
    run = Run()
    with run.handle.join():
        run.steps(0, batches[dist.get_rank()])
    weights, steps = digest(run.model.state_dict().values()), run.handle.stats().steps
    run.handle.detach()
    return weights, steps


@pytest.mark.parametrize("batches", [[3, 5, 4], [3, 4, 3], [4, 4, 4], [0, 2, 2]])
def test_ranks_may_have_different_numbers_of_batches(worlds: Worlds, batches: list[int]) -> None:
    ends = worlds.run(3, uneven, batches)
    assert len({weights for weights, _ in ends}) == 1
    assert {steps for _, steps in ends} == {max(batches) + 1}


def left_backward(plan: gw.Policy, at: int, by: list[int]) -> tuple[list[str], list[str], list[str]]:
    """The ranks of `by` raise in backward `at`, catch it and call reset(). W after every step, and what was told."""
    run, after = Run(plan), []
    told, warned = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            fails = step == at and dist.get_rank() in by
            hook = run.model[1].register_full_backward_hook(_raise) if fails else None
            try:
                run.steps(step, step + 1)
            except MemoryError as error:
                told.append(str(error))
                run.handle.reset()
                assert all(parameter.grad is None for parameter in run.model.parameters())
            if hook is not None:
                hook.remove()
            after.append(digest(run.model.state_dict().values()))
        warned = [str(each.message) for each in caught if "is void on all ranks" in str(each.message)]
    run.handle.detach()
    return after, told, warned


def _raise(*gradients: Any) -> None:
    raise MemoryError("as ordered")


@pytest.mark.parametrize("by", [[1], [0, 1]])
@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_left_backward_voids_the_step_on_all_ranks(worlds: Worlds, at: int, by: list[int]) -> None:
    plan = gw.Uniform(FOUR_BITS, schedule=gw.Delayed(k=2, flush=True))
    (after, first, warned), (same, second, _) = worlds.run(2, left_backward, plan, at, by)
    assert after == same and (first, second) == ([] if 0 not in by else ["as ordered"], ["as ordered"])
    assert len(warned) == 1 and warned[0].startswith(f"step {at} is void on all ranks: rank {by[0]} left it")
    assert (after[at] == after[at - 1]) if at else True
    assert len(set(after)) == (5 if at else 6)


def thaw(on: list[int]) -> tuple[list[str], str]:
    """A layer is frozen at first and trains from step 2 on, on some ranks."""
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = momentum(model[2].parameters())
    handle = gw.parallelize(model, optimizer, plan=CD_SGD)
    told = []
    try:
        for step in range(5):
            if step == 2 and dist.get_rank() in on:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
            gradient(model, step, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
    except gw.StepStateError as error:
        told.append(str(error))
    weights = digest(model.state_dict().values())
    handle.detach()
    return told, weights


def test_parameters_may_be_thawed_on_all_ranks_or_none(worlds: Worlds) -> None:
    (told, weights), (other, same) = worlds.run(2, thaw, [0, 1])
    assert told == other == [] and weights == same
    for told, _ in worlds.run(2, thaw, [0]):
        assert len(told) == 1 and "step 2 is void on all ranks: trainable parameters of rank 0's" in told[0]


def drift() -> str:
    run = Run(gw.Uniform(gw.Identity(), schedule="delayed"))
    run.handle.detach()
    run.handle = gw.parallelize(run.model, run.optimizer, plan=CD_SGD, drift_check_steps=3)
    run.steps(0, 2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            run.model.get_parameter("2.weight")[0, 0] += 1
    with pytest.raises(gw.DisagreementError) as caught:
        run.steps(2, 9)
    run.handle.detach()
    return str(caught.value)


def test_global_weights_that_differ_are_found(worlds: Worlds) -> None:
    for words in worlds.run(2, drift):
        assert "found in step 4" in words and "'2.weight'" in words


def die(victim: int) -> list[str]:
    run, told = Run(), []
    run.steps(0, 4)
    before = run.handle.state_dict()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    run.steps(4, 5)  # its exchange fails
    started = time.monotonic()
    for use in (run.model.state_dict, run.optimizer.step, lambda: run.steps(5, 6)):
        try:
            use()
        except gw.GradwireError as error:
            told.append(f"{type(error).__name__}: {error}")
    assert time.monotonic() - started < TIMEOUT_S + 15
    kept = digest(run.model.state_dict().values())  # an emergency checkpoint of the last step that counted
    run.handle.detach()
    assert before and kept
    return told


def test_a_rank_that_dies_is_named_at_the_next_call() -> None:
    with World(3, TIMEOUT_S) as world:
        world.start(die, 1)
        for rank, outcome in enumerate(world.collect(TIMEOUT_S + 25, needed={0, 2})):
            if rank != 1:
                assert outcome.kind == "returned", outcome.value
                assert len(outcome.value) == 3 and len(set(outcome.value)) == 1
                assert outcome.value[0].startswith("CommunicationError")


SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import gradwire as gw

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ending = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.QSGD(), schedule="delayed"))
for step in range(3):
    if step == 2 and ending == "slow":
        handle.flush()
        for bucket in handle.session.exchange._buckets if rank == 1 else ():
            for chunk in bucket.chunks:
                chunk.run = lambda phase, *a, run=chunk.run: (time.sleep(1.2 * phase), run(phase, *a))
    model(torch.ones(4, 100)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if ending == "save":
    if rank == 0:
        torch.save(model.state_dict(), Path(sys.argv[0]).with_name("model.pt"))
    dist.barrier()
if ending == "slow" and rank == 1:
    handle.flush()
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def ends(interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    return ends_of(interpreters, SCRIPT, ["save", "slow"], tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize("ending", ["save", "slow"])
def test_a_script_may_end_right_after_a_step(ends: dict[str, End], ending: str) -> None:
    """slow: the other rank's exchange takes longer than interpreters wait for threads."""
    for rank in range(2):
        end = ends[f"{ending}.{rank}"]
        assert (end["exit"], end["out"]) == (0, "done\n"), end["err"]
        assert "Error" not in end["err"]
