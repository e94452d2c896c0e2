"""Where ranks share nodes, what a policy leaves open is hierarchical: exact inside nodes, compressed between them."""

import logging
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from options import on_grid
from test_engine_feedback import SIZES, Shuffled, residual_sum
from test_options_run import train
from threads import Threads, here
from worlds import Given, digest

import gradwire as gw
from gradwire.auto.trial import MOST_STEPS
from gradwire.core import COLLECTIVES, pairs_ranks
from gradwire.plan import between_nodes
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


LEADERS = [
    (gw.QSGD(bits=4), "backward"),
    (gw.QSGD(bits=4), "pipelined"),
    (gw.ErrorFeedback(gw.QSGD(bits=2)), "delayed"),
    (gw.ErrorFeedback(gw.TopK(0.1)), "backward"),
    (gw.Identity(), "pipelined"),
]


@pytest.mark.parametrize(("spec", "schedule"), LEADERS, ids=repr)
@pytest.mark.parametrize("names", ["aaab", "abbca"])
def test_of_uneven_nodes_one_rank_exchanges_and_one_says_so(threads: Threads, names: str, spec: gw.Spec, schedule: str) -> None:
    (first, said), *others = threads.run(len(names), options_of, spec, schedule, names)
    assert all(option[0] == "reduce:intra" and "broadcast:intra" in option for option in first)
    assert len(said) == 1 and said[0].startswith(f"nodes have 1 to {3 if names == 'aaab' else 2} ranks")
    assert not any(told for _, told in others)


def test_what_needs_pairs_is_refused_on_uneven_nodes(threads: Threads) -> None:
    for said in threads.run(3, refused, "aab"):
        assert "nodes have 1 and 2 ranks" in said and "scheme='leaders'" in said


def refused(names: str) -> str:
    with here.on_node(names[here.rank]), pytest.raises(gw.PlanError) as caught:
        gw.parallelize(Given([300]), plan=gw.Uniform(gw.QSGD(bits=4), scheme="hierarchical"), process_group=here.group)
    return str(caught.value)


def summed(names: str, spec: gw.Spec, scheme: str | None) -> tuple[list[torch.Tensor], int]:
    """The gradients of one step, and the bytes that left this rank's node in three."""
    with here.on_node(names[here.rank]):
        model = Given([(300, 128), 7, (40, 128)], seed=0)
        plan = gw.Uniform(spec, scheme=scheme, bucket_bytes=2**15)
        handle = gw.parallelize(model, plan=plan, process_group=here.group)
        for step in range(3):
            model.zero_grad()
            model(model.random_gradients(here.rank, step)).backward()
        found = [parameter.grad for parameter in model.parameters()]
        sent = handle.stats().inter_bytes
        handle.detach()
    return found, sent


@pytest.mark.parametrize("spec", [gw.Identity(), gw.QSGD(bits=8), gw.QSGD(bits=4)], ids=repr)
def test_leaders_of_uneven_nodes_give_the_mean_of_all(threads: Threads, spec: gw.Spec) -> None:
    """Each node of two, and of three, sends as much as one rank would."""
    led, flat = (threads.run(5, summed, "aaabb", spec, scheme) for scheme in (None, "flat"))
    true = list(Given([(300, 128), 7, (40, 128)], seed=0).mean_of(lambda rank: gradients_of(rank), 5))
    for values, _ in led:
        for value, first, mean in zip(values, led[0][0], true, strict=True):
            error = (value.double() - mean).norm() / mean.norm()
            assert torch.equal(value, first) and error < {0: 1e-6, 8: 0.02, 4: 0.3}[getattr(spec, "bits", 0)]
    assert sum(sent for _, sent in led) < 0.55 * sum(sent for _, sent in flat)


@pytest.mark.parametrize("names", ["ab", "aabb", "aaabb"])
def test_two_nodes_give_each_other_whole_payloads(threads: Threads, names: str) -> None:
    """As many bytes cross as in two phases. All ranks decode the same payloads, each of which was encoded once."""
    ranks, spec, option = len(names), gw.QSGD(bits=4), COLLECTIVES["allgather"].on("cpu")
    own = option if ranks == 2 else between_nodes(option, leaders=names == "aaabb")
    one, two = (threads.run(ranks, summed, names, spec, scheme) for scheme in (" ".join(own), None))
    true = list(Given([(300, 128), 7, (40, 128)], seed=0).mean_of(lambda rank: gradients_of(rank), ranks))
    lost = []
    for ends in (one, two):
        assert all(torch.equal(value, first) for values, _ in ends for value, first in zip(values, ends[0][0], strict=True))
        lost.append(max((value.double() - mean).norm() / mean.norm() for value, mean in zip(ends[0][0], true, strict=True)))
    assert lost[0] < 0.9 * lost[1]
    assert sum(sent for _, sent in one) == pytest.approx(sum(sent for _, sent in two), rel=0.02)


def gradients_of(rank: int) -> list[torch.Tensor]:
    return Given([(300, 128), 7, (40, 128)], seed=0).random_gradients(rank, 2)


def drained() -> list[torch.Tensor]:
    """What arrived of the gradients of two steps, after many more without any."""
    with here.on_node("aaabb"[here.rank]):
        model = Given([(40, 64), (30, 64)], seed=0)
        plan = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.1)), bucket_bytes=2**12)
        handle = gw.parallelize(model, plan=plan, process_group=here.group)
        arrived = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in model.parameters()]
        for step in range(30):
            model.zero_grad()
            gradients = model.random_gradients(here.rank, step)
            model([each * (step < 2) for each in gradients]).backward()
            for total, parameter in zip(arrived, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        handle.detach()
    return arrived


def mean_of(draw: Callable[..., list[torch.Tensor]], step: int) -> Iterator[torch.Tensor]:
    return Given([]).mean_of(lambda rank: draw(rank, step), 5)


def test_residuals_of_leaders_are_sent_in_the_end(threads: Threads) -> None:
    for arrived in threads.run(5, drained):
        draw = Given([(40, 64), (30, 64)], seed=0).random_gradients
        means = [mean_of(draw, step) for step in range(2)]
        for total, first, second in zip(arrived, *means, strict=True):
            assert torch.allclose(total, first + second, atol=1e-5)


def decided(names: str) -> tuple[bool, bool, str]:
    """Whether auto decided, where this rank says that it is on the node of its letter, and by which plans; and a digest of the
    weights."""
    with here.on_node(names[here.rank]):
        model = Given([300, 7])
        handle = gw.parallelize(model, process_group=here.group)
        step_on(model, range(MOST_STEPS + 1))
        tried = handle.decision is not None and any("hierarchical" in each.name for each in handle.decision.tried)
        found = handle.decision is not None, tried, digest(model.parameters())
        handle.detach()
    return found


def test_auto_decides_on_uneven_nodes(threads: Threads) -> None:
    """It measures both links, and prices plans in which one rank of a node exchanges."""
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


def saved_in_pairs() -> dict[str, torch.Tensor]:
    """The state of plan="auto" on two nodes of two ranks, where each rank has its partner on the other node."""
    with here.on_node("aabb"[here.rank]):
        model = Given([(300, 128), 7], seed=0)
        handle = gw.parallelize(model, plan="auto", process_group=here.group)
        step_on(model, range(2))
        assert any(map(pairs_ranks, (bucket.option for bucket in handle.plan.buckets)))
        state = handle.state_dict()
        handle.detach()
    return state


def taken_up_on(names: str, states: list[dict[str, torch.Tensor]], together: bool) -> tuple[int, bool, torch.Tensor, int]:
    """A run goes on from these states, each rank with its own or with all. Returns the step, whether ranks have partners, what is
    not sent yet of the first tensor, and the number of decisions in the end."""
    with here.on_node(names[here.rank]):
        model = Given([(300, 128), 7], seed=0)
        handle = gw.parallelize(model, plan="auto", process_group=here.group)
        handle.load_state_dict(dict(ChainMap(*states)) if together else states[here.rank])
        begun = handle.session.step
        paired = any(map(pairs_ranks, (bucket.option for bucket in handle.plan.buckets)))
        kept = residual_sum(handle.state_dict(), "p0")
        step_on(model, range(MOST_STEPS + 1))
        decided = len(handle.decisions)
        handle.detach()
    return begun, paired, kept, decided


@pytest.mark.parametrize(("names", "together"), [("aab", True), ("aaab", False), ("aaab", True), ("aabb", False)])
def test_auto_decides_anew_where_ranks_of_a_node_have_lost_their_partners(threads: Threads, names: str, together: bool) -> None:
    """What was not sent yet is kept."""
    states = threads.run(4, saved_in_pairs)
    sent_later = sum(residual_sum(state, "p0") for state in states)
    ends = threads.run(len(names), taken_up_on, names, states, together)
    assert [(begun, paired) for begun, paired, _, _ in ends] == [(2, names == "aabb")] * len(names)
    assert torch.allclose(sum(kept for _, _, kept, _ in ends), sent_later, atol=1e-6) and sent_later.norm() > 0
    assert all(decided for *_, decided in ends)
