"""Staggered corrections of the delayed schedule: each bucket is corrected in another step of the period."""

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from delayed_steps import Reference, Sent, dealt_out, gradient, momentum, tanh_layers
from threads import Threads, here
from worlds import Worlds, digest

import gradwire as gw

STEPS = 13
TWO_BITS = gw.ErrorFeedback(gw.QSGD(bits=2, block=32))
SMALL = {"bucket_bytes": 160, "edge_bytes": 32, "chunk_bytes": 160}


def make_model() -> torch.nn.Module:
    return tanh_layers(6, 9, 8, 3)


def step_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    after = []
    for step in steps:
        gradient(model, step, here.rank)
        optimizer.step()
        optimizer.zero_grad()
        after.append(digest(model.state_dict().values()))
    return after


# ---- the recurrences


def beside_recurrences(schedule: gw.Delayed) -> tuple[list[str], list[str], int]:
    """W after each step by the recurrences and by the engine, and in how many steps of a period some bucket is corrected."""
    model = make_model()
    optimizer = momentum(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(TWO_BITS, schedule=schedule, **SMALL), process_group=here.group)
    plan = handle.plan
    sent = Sent(schedule, plan, make_model)
    expected = Reference(schedule, make_model, momentum, gradient, here.world_size, sent.mean)
    expected.run(STEPS)
    sent.handle.detach()
    after = step_on(model, optimizer, range(STEPS))
    handle.detach()
    return [digest(weights) for weights in expected.history], after, sum(map(bool, sent.shares))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "schedule",
    [
        gw.Delayed(k=2),
        gw.Delayed(k=3, flush=True),
        gw.Delayed(k=4, warmup_steps=2),
        gw.Delayed(k=3, local_update=False),
        gw.Delayed(k=20),
    ],
    ids=repr,
)
def test_steps_are_those_of_the_recurrences(threads: Threads, ranks: int, schedule: gw.Delayed) -> None:
    assert schedule.k is not None
    for expected, after, corrected in threads.run(ranks, beside_recurrences, schedule):
        assert after == expected
        assert corrected == min(schedule.k, 3), "nothing was staggered"


@pytest.mark.parametrize("flush", [False, True])
def test_the_papers_form_corrects_all_in_one_step(threads: Threads, flush: bool) -> None:
    schedule = gw.Delayed(k=3, flush=flush, stagger=False)
    ends = []
    for expected, after, corrected in threads.run(2, beside_recurrences, schedule):
        assert after == expected
        assert corrected == 1
        ends.append(after[-1])
    staggered = threads.run(2, beside_recurrences, gw.Delayed(k=3, flush=flush))
    assert [after[-1] for _, after, _ in staggered] != ends


# ---- what a step sends


def sent_in_steps(schedule: gw.Delayed) -> tuple[list[set[str]], list[int], list[set[str]], float]:
    """Of each step of a period after the warm-up: the uncompressed tensors and the wire bytes; what the recurrences correct; and
    the mean bytes that the handle tells."""
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(11)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = gw.Policy(default=gw.QSGD(bits=4), schedule=schedule, bucket_bytes=6400, edge_bytes=6400)
    handle = gw.parallelize(model, optimizer, plan=policy, process_group=here.group)
    found, nbytes = [], []
    for step in range(schedule.warmup_steps + schedule.period):
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < schedule.warmup_steps:
            continue
        running = handle.session.reducer.running
        corrected = [not bucket.main_spec.encodes for bucket in running.plan.buckets]
        found.append({n for b, c in zip(running.plan.buckets, corrected, strict=True) if c for n in b.tensors})
        nbytes.append(sum(sum(chunk.bytes_to) for each in running._buckets for chunk in each.chunks))
    plan, told = handle.plan, handle.stats().wire_bytes
    handle.detach()
    return found, nbytes, dealt_out(plan, schedule.period), told


def test_every_step_sends_about_as_much(threads: Threads) -> None:
    schedule = gw.Delayed(k=5, warmup_steps=2)
    (found, nbytes, dealt, told), other = threads.run(2, sent_in_steps, schedule)
    assert other[0] == found == dealt
    assert sorted(itertools.chain(*found)) == sorted(set(itertools.chain(*found))), "a tensor was corrected twice"
    assert len(set().union(*found)) == 22
    largest = max(nbytes)
    assert largest < 1.4 * sum(nbytes) / len(nbytes)
    assert abs(told - sum(nbytes) / len(nbytes)) <= len(dealt)
    at_once, unstaggered, _, as_told = threads.run(2, sent_in_steps, gw.Delayed(k=5, stagger=False))[0]
    assert [len(names) for names in at_once] == [22, 0, 0, 0, 0]
    assert sum(unstaggered) == sum(nbytes) and as_told == told
    assert unstaggered[0] > 2 * largest


# ---- going on in the middle of a period


CORRECTED = gw.ErrorFeedback(gw.QSGD(bits=6, block=32))
RESUMED = {
    "uncompressed": gw.Delayed(k=4),
    "8 bits with feedback": gw.Delayed(k=4, correction=CORRECTED),
    "flush": gw.Delayed(k=4, flush=True, correction=CORRECTED),
    "after a warm-up": gw.Delayed(k=4, warmup_steps=3, correction=CORRECTED),
}


def resumed(
    schedule: gw.Delayed | gw.LocalSteps, residual_dtype: str, at: int, spec: gw.Spec = TWO_BITS
) -> tuple[list[str], list[str]]:
    """W after the steps that follow `at`, of a run that went through and of one that was taken up from a saved state."""

    def begun() -> tuple[torch.nn.Module, torch.optim.Optimizer, gw.Handle]:
        model = make_model()
        optimizer = momentum(model.parameters())
        policy = gw.Uniform(spec, schedule=schedule, residual_dtype=residual_dtype, **SMALL)
        return model, optimizer, gw.parallelize(model, optimizer, plan=policy, process_group=here.group)

    model, optimizer, handle = begun()
    step_on(model, optimizer, range(at))
    saved = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "handle": handle.state_dict(),
    }
    through = step_on(model, optimizer, range(at, STEPS))
    handle.detach()
    model, optimizer, handle = begun()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["handle"])
    after = step_on(model, optimizer, range(at, STEPS))
    handle.detach()
    return through, after


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize(("residual_dtype", "at"), [("float32", 6), ("float32", 7), ("int8", 6)])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(threads: Threads, name: str, residual_dtype: str, at: int) -> None:
    for through, after in threads.run(2, resumed, RESUMED[name], residual_dtype, at):
        assert after == through


@pytest.mark.parametrize("schedule", [gw.Delayed(k=3), gw.Delayed(k=None), gw.LocalSteps(every=1)], ids=repr)
@pytest.mark.parametrize("begins", [5, 6, 7])
def test_a_spec_that_begins_about_where_a_run_is_resumed(threads: Threads, schedule: Any, begins: int) -> None:
    spec = gw.PowerSGD(rank=1, start_step=begins)
    for through, after in threads.run(2, resumed, schedule, "float32", 6, spec):
        assert after == through


def lanes_of_scratch() -> list[list[set[int]]]:
    """In each step, the scratch memories that narrow residuals of each lane's pieces use."""
    model = make_model()
    optimizer = momentum(model.parameters())
    policy = gw.Uniform(TWO_BITS, schedule=gw.Delayed(k=3, correction=CORRECTED), residual_dtype="int8", **SMALL)
    handle = gw.parallelize(model, optimizer, plan=policy, process_group=here.group)
    found = []
    for step in range(9):
        step_on(model, optimizer, range(step, step + 1))
        running = handle.session.reducer.running
        pieces = [[running._buckets[t.bucket].chunks[t.chunk] for t in tasks] for tasks in running._executor.tasks]
        found.append([{id(m._scratch) for piece in lane for m in piece.memory} for lane in pieces])
    handle.detach()
    return found


def test_lanes_never_share_scratch_memory(threads: Threads) -> None:
    for first, second in threads.run(2, lanes_of_scratch)[0]:
        assert len(first) == len(second) == 1 and first != second


# ---- steps that do not count


def void_step(flush: bool, feedback: bool) -> tuple[float, float, int]:
    """What is not sent yet, over ranks and elements, before a staggered correction that rank 1 leaves, how much it is off after
    it, and how many buckets that step corrected."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = gw.Delayed(k=3, flush=flush, correction=CORRECTED if feedback else None, local_update=False)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(TWO_BITS, schedule=schedule, **SMALL), process_group=here.group)

    def unsent() -> torch.Tensor:
        memories = handle.session.exchange.residuals, handle.session.schedule._corrections.memory  # type: ignore[attr-defined]
        found = []
        for name, parameter in model.named_parameters():
            total = torch.zeros(parameter.numel())
            for memory in memories:
                total += memory.carried().get(f"residual/{name}", 0.0) if memory is not None else 0.0
            found.append(total)
        return torch.cat(found)

    step_on(model, optimizer, range(4))
    before = unsent()
    loss = model(torch.zeros(1, 6)).sum() * 0.0
    if here.rank == 1:
        handle.reset()
    else:
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
            handle.flush()
    running, usual = handle.session.reducer.running, handle.session.exchange
    corrected = sum(a is not b for a, b in zip(running._buckets, usual._buckets, strict=True))
    off = unsent() - before
    here.add_up(off)
    handle.detach()
    return float(before.norm()), float(off.norm()), corrected


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("flush", [False, True])
def test_a_void_step_neither_loses_nor_doubles_what_is_kept_back(worlds: Worlds, flush: bool, feedback: bool) -> None:
    for held, off, corrected in worlds.run(2, void_step, flush, feedback):
        assert held > 0.1
        assert off < 1e-4
        assert corrected == 1
