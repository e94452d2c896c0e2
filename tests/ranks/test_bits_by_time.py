"""Bits by tensor for the shortest step, on real ranks: what is measured, what is chosen, and what a resumed run knows of it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.auto import job_times
from gradwire.auto.live import Live
from gradwire.core import Cluster, CodecCosts, Costs, Link
from gradwire.core.profile import Profile

ROWS = 6
SLOW = Cluster(nodes=2, ranks_per_node=1, intra=Link(50.0, 0.05), inter=Link(50.0, 0.05))
LONG_US = 60_000.0
"""Longer than any exchange of a matrix."""


class Matrices(Given):
    """Matrices of a megabyte each with gradients of one scale, and a vector."""

    def __init__(self) -> None:
        super().__init__([])
        generator = torch.Generator().manual_seed(0)
        for index in range(ROWS):
            values = 0.1 * torch.randn((500, 540), generator=generator)
            self.register_parameter(f"p{index}", torch.nn.Parameter(values))
        self.register_parameter("vector", torch.nn.Parameter(torch.zeros(40)))


@contextlib.contextmanager
def foretold(made_up: bool = True, **others: Any) -> Iterator[list[int]]:
    """Links are slow; where times are made up, forward and backward of each matrix are long. others: what else `job_times` takes.
    Counts looks."""
    looks: list[int] = []

    class LookAtOther(job_times.Look):
        def ended(self, live: Live, *arguments: Any) -> Any:
            found = super().ended(live, *arguments)
            if found is None:
                return None
            looks.append(1)
            profile, step_us = found
            assert isinstance(profile, Profile) and all(tensor.backward_us < 1e6 for tensor in profile.tensors)
            if not made_up:
                return found
            names = [name for bucket in live.plan.buckets for name in bucket.tensors]
            tensors = [
                msgspec.structs.replace(tensor, backward_us=us, forward_us=us)
                for tensor in sorted(profile.tensors, key=lambda tensor: names.index(tensor.name))
                for us in [0.0 if tensor.name == "vector" else LONG_US]
            ]
            return msgspec.structs.replace(profile, tensors=tensors), step_us

    with mock.patch.multiple(
        job_times, **({"Look": LookAtOther, "cluster_of": lambda *_: SLOW, "codecs_of": fast_codecs} | others)
    ):
        yield looks


def fast_codecs(live: Live, specs: Iterable[gw.Spec], seconds: float) -> Costs:
    """The same times for all, so that the links decide."""
    points = ((4096, 5.0), (2**20, 100.0))
    return Costs(codecs=[CodecCosts(spec=spec, device="cpu", encode=points, decode=points) for spec in specs])


def begun(model: Matrices, **fields: Any) -> tuple[torch.optim.Optimizer, gw.Handle]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, gw.parallelize(model, optimizer, plan=gw.AdaptiveBits(rule="time", **fields))


def trained(model: Matrices, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        model(model.random_gradients(dist.get_rank(), number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def chosen(fields: dict[str, Any], made_up: bool) -> tuple[list[int], Any, list[int], bool, str]:
    """Bits in the order of gradients."""
    model = Matrices()
    with foretold(made_up) as looks:
        optimizer, handle = begun(model, period=12, **fields)
        trained(model, optimizer, range(13))
    decision = handle.decision
    session = handle.session
    # the witness takes its samples in steps that depend on how long the others took
    clean = {*session.lanes.observers} <= {session.witness} and len(handle.decisions) == 1
    bits = [decision.bits[name] for bucket in handle.plan.buckets for name in bucket.tensors if name in decision.bits]
    told = bits, decision, looks, clean, digest(model.state_dict().values())
    handle.detach()
    return told


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_what_the_step_waits_for_gets_the_fewest_bits(worlds: Worlds, schedule: str) -> None:
    fields = {"schedule": schedule, "alpha": 2.0}
    first, second = worlds.run(2, chosen, fields, True)
    assert first[0] == second[0] and first[-1] == second[-1], "ranks differ"
    bits, decision, looks, clean, _ = first
    assert looks == [1] and clean
    assert decision.rule == "time" and decision.error <= 2.0
    assert len(bits) == ROWS and bits[-1] == min(bits) < 4 <= min(bits[:2])
    assert decision.predicted_us < 0.998 * decision.uniform_us
    assert f"predicted {decision.predicted_us / 1e3:.1f} ms a step" in str(decision)


def test_times_are_measured_once_and_alike_on_all_ranks(worlds: Worlds) -> None:
    first, second = worlds.run(2, chosen, {"alpha": 2.0}, False)
    assert first[0] == second[0] and first[-1] == second[-1], "ranks differ"
    assert first[1].predicted_us == second[1].predicted_us > 0
    assert first[2] == second[2] == [1] and first[1].error <= 2.0


def resumed(at: int) -> tuple[bool, bool, list[int]]:
    """Whether a resumed run ends as the one that went on, whether bits were chosen by time, and how often times were measured."""
    model, again = Matrices(), Matrices()
    with foretold() as looks:
        optimizer, handle = begun(model, period=8, alpha=1.0)
        trained(model, optimizer, range(at))
        state, weights = handle.state_dict(), {name: p.detach().clone() for name, p in model.state_dict().items()}
        trained(model, optimizer, range(at, at + 9))
    handle.detach()
    with foretold(cluster_of=None):  # a resumed run measures no links
        later, other = begun(again, period=8, alpha=1.0)
        again.load_state_dict(weights)
        other.load_state_dict(state)
        trained(again, later, range(at, at + 9))
    same = digest(model.state_dict().values()) == digest(again.state_dict().values())
    by_time = None is not handle.decision.predicted_us == other.decision.predicted_us
    other.detach()
    return same, by_time, looks


@pytest.mark.parametrize("at", [5, 7, 9], ids=["before a choice", "before the measured step", "after a choice"])
def test_a_resumed_run_has_the_times_of_the_one_that_saved(worlds: Worlds, at: int) -> None:
    assert worlds.run(2, resumed, at) == [(True, True, [1])] * 2


def cannot_be_priced() -> list[float | None]:
    """Measuring compressors fails on rank 0: the predictions of both choices."""
    model = Matrices()
    with foretold(codecs_of=mock.Mock(side_effect=RuntimeError("no times today"))):
        optimizer, handle = begun(model, period=12)
        trained(model, optimizer, range(26))
    told = [decision.predicted_us for decision in handle.decisions]
    handle.detach()
    return told


def test_without_times_bytes_decide(worlds: Worlds) -> None:
    assert worlds.run(2, cannot_be_priced) == [[None, None]] * 2


def test_schedules_whose_exchanges_hide_elsewhere_are_refused() -> None:
    for schedule in (gw.Delayed(k=3), gw.LocalSteps(every=4)):
        with pytest.raises(gw.PlanError, match=r"rule is 'time' and schedule is .*\. Use rule='exact'"):
            gw.AdaptiveBits(rule="time", schedule=schedule)
    with pytest.raises(gw.PlanError, match="blocks is"):
        gw.AdaptiveBits(rule="time", blocks=(64,))


def damaged() -> list[str]:
    """Times of a state that are no times."""
    model, said = Matrices(), []
    with foretold():
        optimizer, handle = begun(model, period=12)
        trained(model, optimizer, range(5))
    state = handle.state_dict()
    key = f"rank{dist.get_rank()}/measuring"
    kept = msgspec.json.decode(bytes(state[key].tolist()))
    for times in ({}, kept["times"] | {"cluster": {"nodes": 2}}, kept["times"] | {"costs": 3}):
        text = bytearray(msgspec.json.encode(kept | {"times": times}))
        try:
            handle.load_state_dict(state | {key: torch.frombuffer(text, dtype=torch.uint8)})
            said.append("")
        except ValueError as error:
            said.append(str(error))
    handle.load_state_dict(state)
    handle.detach()
    return said


def test_damaged_times_are_refused(worlds: Worlds) -> None:
    for said in worlds.run(2, damaged):
        assert len(said) == 3 and all("is no measurement" in each for each in said)


def test_a_period_without_a_step_for_the_times_is_refused() -> None:
    with pytest.raises(gw.PlanError, match=r"rule is 'time' and accumulate is 2, so .* all 2 steps .* use rule='exact'"):
        gw.AdaptiveBits(rule="time", period=2, accumulate=2)
    gw.AdaptiveBits(rule="exact", period=2, accumulate=2)


def measured_in_short_periods(period: int) -> tuple[list[int], bool]:
    """How often times were measured, and whether sends still wait for the last gradient in the end."""
    model = Matrices()
    with foretold() as looks:
        optimizer, handle = begun(model, period=period)
        trained(model, optimizer, range(12))
    told = looks, any(each.holds for each in handle.session.lanes.observers)
    handle.detach()
    return told


@pytest.mark.parametrize("period", [2, 3])
def test_times_are_measured_in_the_steps_that_errors_leave(worlds: Worlds, period: int) -> None:
    assert worlds.run(2, measured_in_short_periods, period) == [([1], False)] * 2
