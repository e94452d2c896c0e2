"""Where ranks share nodes, what a policy leaves open is hierarchical: exact inside nodes, compressed between them."""

import logging
import threading
from typing import Any

import pytest
import torch
from options import on_grid
from test_engine_feedback import SIZES, Shuffled
from test_options_run import train
from threads import Threads, here
from worlds import Given, digest

import gradwire as gw
from gradwire.auto.trial import MOST_STEPS
from gradwire.transport import lanes


@pytest.mark.parametrize("schedule", ["backward", "pipelined", "delayed"])
@pytest.mark.parametrize("spec", [gw.Identity(), gw.QSGD(bits=4), gw.ErrorFeedback(gw.TopK(0.1))], ids=repr)
def test_default_sends_fewer_bytes_between_nodes(threads: Threads, spec: gw.Spec, schedule: str) -> None:
    """Half; but exact sums leave a node once already, by halving or around a ring."""
    flat, usual = (threads.run(4, train, scheme, spec, schedule) for scheme in ("flat", None))
    exact = isinstance(spec, gw.Identity)
    sent, sent_flat = (sum(between for _, (_, _, between) in each) for each in (usual, flat))
    assert sent <= sent_flat if exact and schedule != "pipelined" else sent < 0.53 * sent_flat
    for (weights, _), (others, (_, inside, _)) in zip(flat, usual, strict=True):
        assert inside and all(torch.equal(one, first) for one, first in zip(others, usual[0][0], strict=True))
        if exact:
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(weights, others, strict=True))


def options_of(spec: gw.Spec, schedule: Any, names: str, **fields: Any) -> tuple[set[tuple[str, ...]], list[str]]:
    """The options of the plan, where this rank says that it is on the node of its letter; and what was logged."""
    told: list[str] = []
    handler = logging.Handler()
    own = threading.get_ident()
    handler.addFilter(lambda record: record.thread == own)  # all ranks log to one logger
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    lanes.log.addHandler(handler)
    with here.on_node(names[here.rank]):
        model = Given([300, 7])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = gw.Uniform(spec, schedule, **fields)
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        model(model.random_gradients(here.rank)).backward()
        optimizer.step()
        handle.flush()
        found = {bucket.option for bucket in handle.plan.buckets}
        handle.detach()
    lanes.log.removeHandler(handler)
    return found, told


SHARDED = gw.Pipelined(shard_optimizer=True)


@pytest.mark.parametrize(
    ("names", "spec", "schedule", "hierarchical"),
    [
        ("aabb", gw.QSGD(bits=4), "backward", True),
        ("abab", gw.QSGD(bits=4), "pipelined", True),
        ("aaaa", gw.QSGD(bits=4), "backward", False),
        ("abcd", gw.QSGD(bits=4), "pipelined", False),
        ("aabb", gw.SignSGD(), "backward", False),
        ("aabb", gw.PowerSGD(rank=1), "backward", False),
        ("aabb", gw.DGC(0.1), "backward", False),
        ("aabb", gw.Identity(), SHARDED, False),
    ],
    ids=repr,
)
def test_only_what_can_be_added_inside_nodes_is(
    threads: Threads, names: str, spec: gw.Spec, schedule: Any, hierarchical: bool
) -> None:
    for options, told in threads.run(4, options_of, spec, schedule, names):
        assert all(("reducescatter:intra" in option) == hierarchical for option in options) and told == []


def test_uneven_nodes_run_flat_and_one_rank_says_so(threads: Threads) -> None:
    (first, said), *others = threads.run(4, options_of, gw.QSGD(bits=4), "backward", "aaab")
    assert not any("reducescatter:intra" in option for option in first)
    assert len(said) == 1 and said[0].startswith("nodes have 1 to 3 ranks") and not any(told for _, told in others)


def decided(names: str) -> tuple[bool, str]:
    """Whether auto decided, where this rank says that it is on the node of its letter; and a digest of the weights."""
    with here.on_node(names[here.rank]):
        model = Given([300, 7])
        handle = gw.parallelize(model, process_group=here.group)
        step_on(model, range(MOST_STEPS + 1))
        found = handle.decision is not None, digest(model.parameters())
        handle.detach()
    return found


def test_auto_decides_on_uneven_nodes(threads: Threads) -> None:
    """Links inside and between nodes cannot be measured apart, and plans are flat."""
    first, *others = threads.run(3, decided, "aab")
    assert first[0] and others == [first] * 2


def resumed() -> tuple[list[str], bool, bool]:
    """What of another plan a state still has to send, and whether a run that takes it up ends as the first one: its weights
    and its state."""
    with on_grid(2):
        plan = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), bucket_bytes=4000)
        first, second, ends = Shuffled(SIZES, seed=0), Shuffled(SIZES, seed=1), []
        handles = [gw.parallelize(model, plan=plan, process_group=here.group) for model in (first, second)]
        step_on(first, range(3))
        state = handles[0].state_dict()
        second.load_state_dict(first.state_dict())
        handles[1].load_state_dict(state)
        for model, handle in zip((first, second), handles, strict=True):
            step_on(model, range(3, 6))
            ends.append((digest(model.parameters()), handle.state_dict()))
            handle.detach()
    (weights, saved), (others, again) = ends
    alike = saved.keys() == again.keys() and all(torch.equal(value, again[key]) for key, value in saved.items())
    return [key for key in state if "/left/" in key], weights == others, alike


def step_on(model: Given, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        model(model.random_gradients(here.rank, step)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def test_what_was_sent_after_a_change_of_plan_is_not_saved(threads: Threads) -> None:
    """The plan is made again after the first step, and residuals that no encode of a rank takes over travel with the next one."""
    assert threads.run(4, resumed) == [([], True, True)] * 4
