"""`gw.Exchange` alone: the bits of `parallelize`, phases alone, states, and wrong use."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import cycle, groupby, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import Threads, here
from worlds import Given, World, Worlds, digest, seeded

import gradwire as gw
from gradwire.core.collectives import COLLECTIVES
from gradwire.core.specs import example_specs
from gradwire.core.tensors import TensorInfo
from gradwire.exchange import Slot, TaskTimes
from gradwire.exchange import exchange as exchanges
from gradwire.exchange.plans import info_of
from gradwire.transport import LanesObserver

SHAPES = list(islice(cycle([(1,), (7,), (123,), (3, 5), (40, 11), (130,), (1, 1), (2, 3, 4), (513,), (33, 9)]), 100))
DTYPES = list(islice(cycle([torch.float32, torch.bfloat16, torch.float16]), 100))
SPECS = [
    gw.Identity(),
    *(spec for spec in example_specs() if spec.id not in ("identity", "truncate")),
    gw.Truncate(4.0, True),
    gw.QSGD(blocks="bucket"),
    gw.ErrorFeedback(gw.QSGD(bits=2, blocks="bucket")),
    gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=1),
]
STEPS = 3


def exchange_of(tensors: Any, plan: Any) -> gw.Exchange:
    return gw.Exchange(tensors, plan, here.group)


def tensors(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = seeded(step, rank)
    pairs = enumerate(zip(SHAPES, DTYPES, strict=True))
    return {f"t{at}": torch.randn(shape, generator=generator).to(dtype) for at, (shape, dtype) in pairs}


class Many(torch.nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in tensors(0, 0).items():
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * gradients[name]).sum().float() for name, p in self.named_parameters()]).sum()


def plans_of(spec: gw.Spec) -> dict[str, gw.Plan]:
    infos = [TensorInfo(f"t{at}", s, str(d)[6:]) for at, (s, d) in enumerate(zip(SHAPES, DTYPES, strict=True))]
    named = {name: each for name, each in COLLECTIVES.items() if (each.plain if not spec.encodes else each.carries(spec))}
    ranks = here.world_size
    return {name: gw.Uniform(spec, scheme=name, bucket_bytes=4000, chunk_bytes=2000).plan(infos, ranks) for name in named}


def both_ways(spec: gw.Spec) -> dict[str, tuple[list[str], list[str]]]:
    """Of each scheme: digests of the means of each step, by `parallelize` and by `gw.Exchange`."""
    found = {}
    for name, plan in plans_of(spec).items():
        model = Many()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        by_handle = []
        for step in range(STEPS):
            model(tensors(step, here.rank)).backward()
            by_handle.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
            optimizer.zero_grad()
        handle.detach()
        exchange = exchange_of(tensors(0, 0), plan=plan)
        alone = []
        for step in range(STEPS):
            means = tensors(step, here.rank)
            exchange.average_(means)
            alone.append(digest(means.values()))
        exchange.close()
        found[name] = (by_handle, alone)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.thorough])])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_the_bits_are_those_of_parallelize(threads: Threads, spec: gw.Spec, ranks: int) -> None:
    first, *others = threads.run(ranks, both_ways, spec, deadline_s=240.0)
    assert first, "no scheme carries this spec"
    for name, (by_handle, alone) in first.items():
        assert alone == by_handle, name
        assert len(set(alone)) == STEPS
    assert all(other == first for other in others)


def vectors_in_payloads(spec: gw.Spec, scheme: str) -> tuple[bool, list[bool], str]:
    """Whether no bucket is uncompressed as a whole, whether vectors have the sum in rank order, and a digest of all means."""
    rank, size = here.rank, here.world_size

    def given(of_rank: int) -> dict[str, torch.Tensor]:
        generator = seeded(7, of_rank)
        return {f"t{at}": torch.randn(shape, generator=generator) for at, shape in enumerate(SHAPES[:40])}

    policy = gw.Policy(default=spec, scheme=scheme, bucket_bytes=4000, chunk_bytes=2000)
    infos = [info_of(name, tensor) for name, tensor in given(0).items()]
    means, plan = given(rank), policy.plan(infos, size)
    exchange = exchange_of(means, plan=plan)
    exchange.average_()
    exchange.close()
    exact = []
    for name, tensor in means.items():
        if tensor.dim() < 2:
            total = given(0)[name] * (1.0 / size)
            for other in range(1, size):
                total = total + given(other)[name] * (1.0 / size)
            exact.append(torch.allclose(tensor, total, atol=1e-6) if scheme in ("ring", "tree") else torch.equal(tensor, total))
    return all(bucket.main_spec.encodes for bucket in plan.buckets), exact, digest(means.values())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("scheme", ["alltoall", "allgather", "ring", "tree", "CGX between nodes"])
@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), gw.ErrorFeedback(gw.TopK(0.05)), gw.FP8()], ids=lambda spec: spec.id)
def test_vectors_in_the_payloads_of_others_are_exact(threads: Threads, spec: gw.Spec, scheme: str, ranks: int) -> None:
    told = threads.run(ranks, vectors_in_payloads, spec, scheme)
    assert all(carried and len(exact) == 20 and all(exact) for carried, exact, _ in told)
    assert len({bits for _, _, bits in told}) == 1


def blocks_of_a_bucket() -> dict[str, list[str]]:
    """By `blocks`, digests of the mean of many tensors in one bucket, and of one tensor with the same elements."""
    generator, found = seeded(3, here.rank), {}
    values = torch.randn(sum(SIZES), generator=generator)
    for blocks in ("bucket", "tensor"):
        found[blocks] = []
        for sizes in (SIZES, [sum(SIZES)]):
            parts = {f"t{at}": part.clone() for at, part in enumerate(values.split(sizes))}
            policy = gw.Policy(default=gw.QSGD(bits=3, block=32, blocks=blocks), scheme="allgather", exempt_vectors=False)
            exchange = exchange_of(parts, plan=policy)
            exchange.average_(parts)
            assert len(exchange.plan.buckets) == 1
            found[blocks].append(digest([torch.cat([parts[name] for name in sorted(parts)])]))
            exchange.close()
    return found


SIZES = [1, 7, 123, 300, 33]


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_of_a_bucket_ignore_where_tensors_end_in_an_exchange(threads: Threads, ranks: int) -> None:
    told = threads.run(ranks, blocks_of_a_bucket)
    assert len(set(told[0]["bucket"])) == 1 and len(set(told[0]["tensor"])) == 2
    assert all(each == told[0] for each in told)


def clipped_whole() -> dict[str, bool]:
    """By scheme, whether means are those of whole tensors that are clipped, where buckets have many pieces and shards."""
    spec, size, found = gw.DGC(1.0, momentum=0.0, clip=1.0), here.world_size, {}

    def given(of_rank: int) -> dict[str, torch.Tensor]:
        generator = seeded(5, of_rank)
        return {"w": torch.randn(1000, generator=generator), "v": torch.randn(7, 43, generator=generator)}

    expected = {name: torch.zeros_like(tensor) for name, tensor in given(0).items()}
    for rank in range(size):
        for name, tensor in given(rank).items():
            expected[name] += tensor / size * min(1.0, 1.0 / math.sqrt(size) / float(tensor.norm()))
    for scheme in (name for name, each in COLLECTIVES.items() if each.carries(spec)):
        means = given(here.rank)
        exchange = exchange_of(means, plan=gw.Uniform(spec, scheme=scheme, chunk_bytes=800))
        exchange.average_()
        exchange.close()
        found[scheme] = all(torch.allclose(means[name], expected[name], atol=1e-6) for name in means)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_dgc_clips_whole_tensors_whatever_the_pieces_and_shards(threads: Threads, ranks: int) -> None:
    for found in threads.run(ranks, clipped_whole):
        assert {"alltoall", "allgather"} <= found.keys() and all(found.values()), found


def owed_residual() -> tuple[bool, bool]:
    """Whether a residual of another plan reaches the mean of an uncompressed vector, once."""
    rank, own = here.rank, {"m": torch.zeros(40, 40), "v": torch.zeros(40)}
    exchange = exchange_of(own, plan=gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2))))
    assert len(exchange.plan.buckets) == 1
    exchange.residuals.take_over({"residual/v": torch.full((40,), float(rank + 1))})
    saved = exchange.state_dict()
    exchange.average_()
    once = torch.equal(own["v"], torch.full((40,), 3.0)) and not own["m"].any()
    own["v"].zero_()
    exchange.average_()
    exchange.close()
    return once and not own["v"].any(), f"rank{rank}/residual/left/v" in saved


@pytest.mark.parametrize("ranks", [2])
def test_a_vector_is_owed_the_residual_of_another_plan(threads: Threads, ranks: int) -> None:
    assert threads.run(ranks, owed_residual) == [(True, True)] * 2


def residual_of_the_own_shard(spec: gw.Spec) -> list[bool]:
    """Whether the first encode has all of a residual that another plan left, and whether the encode of sums has any of it."""
    exchange = exchange_of({"w": torch.zeros(100, 10)}, plan=gw.Uniform(spec, scheme="alltoall"))
    exchange.residuals.take_over({"residual/w": torch.ones(1000)})
    state = exchange.residuals.state()
    exchange.close()
    return [bool(state["residual/0/w"].all()), bool(state["residual/1/w"].any())]


@pytest.mark.parametrize(("spec", "expected"), [(gw.DGC(0.1), [True, False]), (gw.ErrorFeedback(gw.TopK(0.1)), [False, True])])
def test_the_encode_that_has_the_own_shard_takes_its_residual(threads: Threads, spec: gw.Spec, expected: list[bool]) -> None:
    assert threads.run(2, residual_of_the_own_shard, spec) == [expected] * 2


# ---- the interface


def piecemeal() -> dict[str, Any]:
    """Tensors in another order, waited for one by one, others in their place, and only described."""
    rank, found = here.rank, {}
    own = {name: tensor.float() for name, tensor in tensors(1, rank).items()}
    mean = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    for each in range(here.world_size):
        for name, tensor in tensors(1, each).items():
            mean[name] += tensor.float() / here.world_size
    metas = {name: gw.TensorMeta(tuple(tensor.shape)) for name, tensor in own.items()}
    exchange = exchange_of(metas, plan=gw.Uniform(gw.Identity(), scheme="alltoall", bucket_bytes=3000))
    exchange.begin()
    for name in reversed(own):
        exchange.ready(name, own[name])
    for name in own:
        exchange.wait(name)
        found[name] = torch.allclose(own[name], mean[name], atol=1e-6)
    exchange.wait()
    with exchange.recorded() as tasks:
        exchange.average_(own)
    stats = exchange.stats()
    exchange.close()
    words = [stats.steps, len(tasks) == sum(2 * each.chunks for each in stats.buckets), stats.wire_bytes > 0]
    return {"equal": all(found.values()), "words": words, "bits": digest(own.values())}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tensors_may_come_in_any_order_and_be_waited_for_one_by_one(ranks: int, threads: Threads) -> None:
    told = threads.run(ranks, piecemeal)
    assert all(each["equal"] and each["words"][:2] == [2, True] for each in told)
    assert len({each["bits"] for each in told}) == 1


class Watches(LanesObserver):
    """Keeps the names that are sent, and the times of tasks."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.times: list[TaskTimes] = []

    def task_times(self) -> list[TaskTimes]:
        return self.times

    def sends(self, slot: Slot, values: torch.Tensor) -> None:
        self.names.append(slot.name)


def whole_buckets(spec: gw.Spec) -> tuple[list[bool], list[list[int]], int]:
    """For each step, whether a caller that counts steps and fills whole buckets gets the means of `average_`; what two observers
    saw of the second and of the last two steps; and the number of the last step."""
    policy, names = gw.Uniform(spec, bucket_bytes=4000, chunk_bytes=2000), [f"t{at}" for at in range(0, 30, 3)]
    by_name, by_place = (exchange_of({n: t for n, t in tensors(0, 0).items() if n in names}, policy) for _ in range(2))
    alike, seen = [], [Watches(), Watches()]
    for step in range(STEPS):
        given = {name: tensor for name, tensor in tensors(step, here.rank).items() if name in names}
        means = {name: tensor.clone() for name, tensor in given.items()}
        by_name.average_(means)
        by_place.lanes.observe(seen[0], on=step == 1)
        by_place.lanes.observe(seen[1], on=step > 0)
        by_place.begin(step=step)
        slots = sorted(by_place.slots.values(), key=lambda slot: slot.bucket)
        for bucket, of_bucket in groupby(slots, key=lambda slot: slot.bucket):
            filled = list(of_bucket)
            for slot in filled:
                by_place.place(slot, given[slot.name])
            by_place.ready(filled)
            by_place.wait(bucket)
        by_place.wait()
        found = {slot.name: by_place._lent.of(slot) if slot.apart else slot.view for slot in slots}
        alike.append(all(torch.equal(found[name], means[name]) for name in names))
        by_place.release()
    counts = [[len(each.names), len(each.times)] for each in seen]
    last = by_place.step
    for exchange in (by_name, by_place):
        exchange.close()
    return alike, counts, last


@pytest.mark.parametrize("spec", [gw.Identity(), gw.ErrorFeedback(gw.QSGD(bits=4))], ids=repr)
def test_a_caller_may_count_steps_and_fill_whole_buckets_and_observers_do_not_meet(threads: Threads, spec: gw.Spec) -> None:
    for alike, ((names, tasks), (names_of_two, tasks_of_two)), last in threads.run(2, whole_buckets, spec):
        assert alike == [True] * STEPS
        assert (names, names_of_two) == (10, 20) and tasks > 0 and tasks_of_two == 2 * tasks
        assert last == STEPS - 1


def by_phases(spec: gw.Spec, schedule: str) -> list[bool]:
    """Whether a reduce phase and a gather phase give what a whole step gives."""
    plan = gw.Uniform(spec, scheme="alltoall", schedule=schedule, bucket_bytes=3000, chunk_bytes=1000)
    whole, parts = ({f"t{at}": torch.randn(301, generator=seeded(at, here.rank)) for at in range(9)} for _ in "ab")
    one, other = exchange_of(whole, plan=plan), exchange_of(parts, plan=plan)
    equal = []
    for _ in range(2):
        one.average_()
        other.begin("reduce")
        for name in parts:
            other.ready(name)
        other.wait()
        runs = other.own_shards
        if not spec.encodes:
            shards = [(name, slice(*run)) for name, each in runs.items() for run in each]
            equal.append(all(torch.equal(parts[name][part], whole[name][part]) for name, part in shards))
        other.begin("gather")
        for name in parts:
            other.ready(name)
        other.wait()
        if not spec.encodes:
            equal.append(all(torch.equal(parts[name], whole[name]) for name in whole))
    equal.append(sum(end - first for each in runs.values() for first, end in each) <= 9 * 301)
    equal.append(len(set(here.gather(digest(parts.values())))) == 1)
    one.close()
    other.close()
    return equal


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
@pytest.mark.parametrize("spec", [gw.Identity(), gw.QSGD(bits=4)], ids=["identity", "qsgd"])
def test_the_reduce_and_the_gather_phase_alone(threads: Threads, spec: gw.Spec, schedule: str, ranks: int) -> None:
    for told in threads.run(ranks, by_phases, spec, schedule):
        assert all(told)


def weighed_later() -> list[float]:
    """The mean of 1 and 2 of ranks with the weights 0 and 2: after a change of plans, after the warm-up of a spec, and after
    a state was loaded."""
    mine = {"w": torch.empty(64, 8)}
    exchange, found = exchange_of(mine, plan=gw.QSGD(bits=8)), []
    exchange.weigh(2.0 * here.rank)
    warming = gw.ErrorFeedback(gw.QSGD(bits=2), warm_up_steps=1)
    for act in (
        lambda: exchange.change_to(gw.Uniform(warming).plan([info_of("w", mine["w"])], here.world_size)),
        lambda: None,
        lambda: exchange.load_state_dict(exchange.state_dict()),
    ):
        act()
        mine["w"].fill_(1.0 + here.rank)
        exchange.average_()
        found.append(float(mine["w"].mean()))
    exchange.close()
    return found


def test_the_weight_of_a_rank_stays_over_changes(threads: Threads) -> None:
    for found in threads.run(2, weighed_later):
        assert found == pytest.approx([2.0, 2.0, 2.0], abs=0.01)


def resumed() -> bool:
    plan = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)))

    def run(exchange: gw.Exchange, steps: range) -> list[str]:
        found = []
        for step in steps:
            means = {"w": torch.randn(2000, generator=seeded(step, here.rank))}
            exchange.average_(means)
            found.append(digest(means.values()))
        return found

    first = exchange_of({"w": gw.TensorMeta((2000,))}, plan=plan)
    run(first, range(3))
    state = {key: value.clone() for key, value in first.state_dict().items()}
    expected = run(first, range(3, 6))
    second = exchange_of({"w": gw.TensorMeta((2000,))}, plan=plan)
    second.load_state_dict(state)
    found = run(second, range(3, 6))
    other = exchange_of({"w": gw.TensorMeta((2000,))}, plan=gw.Uniform(gw.QSGD(bits=4)))
    with pytest.raises(ValueError, match="the state was saved under plan"):
        other.load_state_dict(state)
    for each in (first, second, other):
        each.close()
    return found == expected


def test_a_saved_exchange_goes_on_bit_for_bit(threads: Threads) -> None:
    assert threads.run(2, resumed) == [True, True]


LOW_RANK = {rank: gw.Uniform(gw.PowerSGD(rank=rank, start_step=0)) for rank in (1, 2)}


def of_another_rank(by_handle: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What was not sent before and after a change of PowerSGD's rank."""
    if by_handle:
        model = Given([(40, 30)], seed=0)
        handle = gw.parallelize(model, plan=LOW_RANK[1], process_group=here.group)
        model(model.random_gradients(here.rank)).backward()
        before = handle.session.exchange.residuals.carried()
        handle.session.change_to(handle.session.plan_of(LOW_RANK[2]))
        after = handle.session.exchange.residuals.carried()
        model(model.random_gradients(here.rank)).backward()
        handle.detach()
        return before["residual/p0"], after["residual/p0"]
    values = torch.randn(40, 30, generator=seeded(here.rank))
    exchange = exchange_of({"w": values}, LOW_RANK[1])
    exchange.average_()
    before = exchange.residuals.carried()
    exchange.change_to(LOW_RANK[2].plan([info_of("w", values)], here.world_size))
    after = exchange.residuals.carried()
    exchange.average_()
    exchange.close()
    return before["residual/w"], after["residual/w"]


@pytest.mark.parametrize("by_handle", [False, True])
def test_a_change_of_the_rank_of_factors_keeps_residuals(threads: Threads, by_handle: bool) -> None:
    for before, after in threads.run(2, of_another_rank, by_handle):
        assert before.any() and torch.equal(before, after)


# ---- wrong use


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except (gw.GradwireError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misused() -> list[str]:
    mine = {"a": torch.ones(9), "b": torch.ones(2, 3)}
    told = [
        refused(lambda: exchange_of({}, plan=gw.QSGD())),
        refused(lambda: exchange_of({"a": [1.0]}, plan=gw.QSGD())),  # type: ignore[dict-item]
        refused(lambda: exchange_of(mine, plan="auto")),
        refused(lambda: exchange_of({"a": torch.ones(3, dtype=torch.int64)}, plan=gw.Identity())),
    ]
    exchange = exchange_of(mine, plan=gw.Uniform(gw.QSGD(bits=4), scheme="allgather"))
    told += [
        refused(lambda: exchange.ready("a")),
        refused(lambda: exchange.wait("a")),
        refused(lambda: exchange.begin("all")),
        refused(lambda: exchange.begin("reduce")),
        refused(lambda: exchange.own_shards),
    ]
    exchange.begin()
    exchange.ready("a")
    told += [
        refused(exchange.begin),
        refused(lambda: exchange.ready("a")),
        refused(lambda: exchange.ready("c")),
        refused(lambda: exchange.ready("b", torch.ones(6))),
        refused(lambda: exchange.ready("b", torch.ones(2, 3, dtype=torch.float64))),
        refused(exchange.wait),
        refused(exchange.state_dict),
    ]
    exchange.ready("b")
    exchange.wait()
    assert torch.equal(mine["a"], torch.ones(9)) and exchange.step == 1
    exchange.close()
    told.append(refused(exchange.average_))
    return told


SAID = [
    "PlanError: tensors is {}", "PlanError: tensors['a'] is a list", "PlanError: plan is 'auto'", "PlanError: tensor 'a'",
    "StepStateError: ready('a') was called and no step runs", "StepStateError: wait('a') was called and no step runs",
    "PlanError: phases is 'all'", "PlanError: 'reduce' needs two phases", "PlanError: 'own_shards' needs two phases",
    "StepStateError: begin() was called while step 0 runs", "StepStateError: ready('a') was called twice in step 0",
    "StepStateError: the exchange has no tensor c", "StepStateError: tensor 'b' has shape (6,)",
    "StepStateError: tensor 'b' has shape (2, 3) and dtype torch.float64", "StepStateError: wait() was called before 'b'",
    "StepStateError: state_dict() was called while step 0 runs", "StepStateError: this exchange was closed",
]  # fmt: skip


def test_wrong_use_is_refused_and_the_step_goes_on(threads: Threads) -> None:
    for told in threads.run(2, misused):
        assert [words[: len(said)] for words, said in zip(told, SAID, strict=True)] == SAID


def disagreeing() -> list[str]:
    rank = here.rank
    return [
        refused(lambda: exchange_of({"a": torch.ones(9)}, plan=gw.QSGD(bits=4 + rank))),
        refused(lambda: exchange_of({"a": torch.ones(9 + rank)}, plan=gw.QSGD(bits=4))),
        refused(lambda: exchange_of({"a": torch.ones(9)}, plan=[gw.QSGD(bits=4), 3][rank])),  # type: ignore[arg-type]
    ]


def test_ranks_that_disagree_are_told_so_on_all_ranks(threads: Threads) -> None:
    first, second = threads.run(2, disagreeing)
    for told in (first, second):
        assert told[0].startswith("DisagreementError: ranks disagree on the plan")
        assert told[1].startswith("DisagreementError: ranks disagree on the names, shapes")
    assert first[2].startswith("DisagreementError: all ranks stop, because some of them failed: rank 1")
    assert second[2].startswith("PlanError: plan is a int")


def left_alone() -> str:
    exchange = exchange_of({"a": torch.ones(90)}, plan=gw.QSGD(bits=4))
    exchange.average_()
    if here.rank == 1:
        import os

        os._exit(3)
    time.sleep(0.5)
    return refused(exchange.average_)


def test_a_rank_that_died_is_named() -> None:
    with World(2, group_timeout_s=8.0) as world:
        world.start(left_alone)
        first, second = world.collect(40.0)
    assert second.kind == "died"
    assert first.kind == "returned" and "CommunicationError: step 1: rank 0 waited for bucket 0 (a)" in first.value
    assert "rank 1 did not answer" in first.value


def beside_a_model() -> bool:
    """Two exchanges and a handle, one after another in each step."""
    model = Given([50])
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4), process_group=here.group)
    two = [exchange_of({"w": torch.full((30,), float(here.rank))}, plan=gw.Identity()) for _ in range(2)]
    for step in range(3):
        model(model.random_gradients(here.rank, step)).backward()
        for each in two:
            each.begin()
            each.ready("w", torch.full((30,), float(here.rank + step)))
        for each in two:
            each.wait()
    handle.detach()
    for each in two:
        each.close()
    return True


def test_several_exchanges_work_beside_a_handle(threads: Threads) -> None:
    assert threads.run(2, beside_a_model) == [True, True]


def weighed(spec: gw.Spec, together: bool) -> bool:
    """Whether a step is the weighted mean, of ranks with the weights 0 and 2."""
    rank, mine = here.rank, {"w": torch.full((64, 8), 1.0 + here.rank), "v": torch.full((40,), 3.0 + here.rank)}
    exchange = exchange_of(mine, plan=spec)
    exchange.weigh(2.0 * rank)
    if rank == 0:
        mine["v"].fill_(float("nan"))  # a rank of weight 0 sends zeros, whatever it has
    if together:
        exchange.begin()
        exchange.ready_all(mine)
        exchange.wait()
    else:
        exchange.average_()
    exchange.close()
    return torch.allclose(mine["w"], torch.full((64, 8), 2.0)) and torch.allclose(mine["v"], torch.full((40,), 4.0))


@pytest.mark.parametrize(("together", "launches"), [(False, False), (True, True)])
@pytest.mark.parametrize("spec", [gw.Identity(), gw.QSGD(bits=8)], ids=["copied", "in place"])
def test_weights_of_ranks_count_wherever_tensors_are_exchanged(
    threads: Threads, spec: gw.Spec, launches: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "launches", lambda device: launches)
    assert threads.run(2, weighed, spec, together) == [True, True]


def two_buckets() -> tuple[gw.Exchange, dict[str, torch.Tensor]]:
    """An exchange of two tensors, each in a bucket of its own."""
    mine = {"a": torch.full((3000,), float(here.rank)), "b": torch.full((3000,), 7.0)}
    return exchange_of(mine, plan=gw.Uniform(gw.Identity(), scheme="alltoall", bucket_bytes=12_000)), mine


def part_of_a_step() -> list[str]:
    """What is said of a tensor whose bucket is not in the step."""
    exchange, mine = two_buckets()
    bucket = {name: slot.bucket for name, slot in exchange.slots.items()}
    exchange.begin(buckets=[bucket["a"]])
    told = [refused(lambda: exchange.ready("b")), refused(lambda: exchange.ready_all({"b": mine["b"]}))]
    told += [refused(lambda: exchange.wait("b")), refused(lambda: exchange.wait(bucket["b"]))]
    exchange.ready("a")
    exchange.wait()
    assert torch.equal(mine["a"], torch.full((3000,), 0.5)) and torch.equal(mine["b"], torch.full((3000,), 7.0))
    exchange.average_()  # the next step has both
    exchange.close()
    return told


def test_a_tensor_whose_bucket_is_not_in_the_step_is_refused(threads: Threads) -> None:
    for told in threads.run(2, part_of_a_step):
        for words, call in zip(told, ("ready('b')", "ready('b')", "wait('b')", "wait(1)"), strict=True):
            assert words.startswith(f"StepStateError: {call}") and "bucket 1 (b)" in words and "begin(buckets=[0])" in words


def owed_beside_a_part() -> tuple[float, float, float]:
    """The means of zeros with residuals of another plan: of the bucket of a first step of one bucket, of the other bucket in a
    whole step, and of that bucket in one more."""
    exchange, mine = two_buckets()
    for tensor in mine.values():
        tensor.zero_()
    exchange.residuals.take_over({f"residual/{name}": torch.full((3000,), float(here.rank + 1)) for name in mine})
    exchange.begin(buckets=[exchange.slots["a"].bucket])
    exchange.ready("a")
    exchange.wait()
    found = [mine["a"].mean().item()]
    for _ in range(2):
        mine["b"].zero_()
        exchange.average_()
        found.append(mine["b"].mean().item())
    exchange.close()
    return found[0], found[1], found[2]


def test_a_step_of_some_buckets_keeps_what_is_owed_to_the_others(threads: Threads) -> None:
    assert threads.run(2, owed_beside_a_part) == [(3.0, 3.0, 0.0)] * 2


def waited_for_by_number() -> list[float]:
    """The mean of a tensor after a wait for its bucket, and at the end of the step the tensor, which the script has changed."""
    exchange, mine = two_buckets()
    exchange.begin()
    for name in mine:
        exchange.ready(name)
    exchange.wait(exchange.slots["a"].bucket)
    found = [mine["a"].mean().item()]
    mine["a"].fill_(9.0)
    exchange.wait()
    exchange.close()
    return [*found, mine["a"].mean().item()]


def test_a_wait_for_a_bucket_gives_its_tensors_their_means(threads: Threads) -> None:
    assert threads.run(2, waited_for_by_number) == [[0.5, 9.0]] * 2


def chosen_otherwise() -> tuple[list[str], list[float]]:
    """What is said of numbers that no bucket has, and the mean of a tensor after steps whose buckets are an iterator and a list
    that names a bucket twice."""
    exchange, mine = two_buckets()
    said = [refused(partial(exchange.begin, buckets=[number])) for number in (99, -1)]
    found = []
    for buckets in (iter([exchange.slots["a"].bucket]), [exchange.slots["a"].bucket] * 2):
        exchange.begin(buckets=buckets)
        said.append(refused(lambda: exchange.wait(99)))
        exchange.ready("a", mine["a"].fill_(float(here.rank)))
        exchange.wait()
        found.append(mine["a"].mean().item())
    exchange.close()
    return said, found


def test_the_buckets_of_a_step_are_numbers_of_the_plan_in_any_collection(threads: Threads) -> None:
    for said, means in threads.run(2, chosen_otherwise):
        calls = ("begin(buckets=[99])", "begin(buckets=[-1])", "wait(99)", "wait(99)")
        for words, call in zip(said, calls, strict=True):
            assert words.startswith(f"StepStateError: {call} was called, and no bucket has the number") and "plan has 2" in words
        assert means == [0.5, 0.5]


WAITS: dict[str, Callable[[gw.Exchange], Any]] = {
    "the step": gw.Exchange.wait,
    "a tensor": lambda exchange: exchange.wait("a"),
    "the gate": gw.Exchange.await_gate,
    "another result": lambda exchange: exchange.await_result(Future[None]()),
}


def ended_by_another_thread(wait: str, end: str, comes_s: float) -> str:
    """What a wait says when another thread ends the exchange, so long after the wait could begin."""
    exchange, mine = two_buckets()
    exchange.begin(step=0)
    said = ""
    if here.rank == 0:
        for name in mine if wait != "another result" else ():  # rank 1 has nothing ready, so lanes wait for it
            exchange.ready(name)
        other = threading.Timer(comes_s, partial(END[end], exchange))
        other.start()
        if not comes_s:
            other.join()
        said = refused(lambda: WAITS[wait](exchange))
        other.join()
    here.gather(None)
    exchange.close()
    return said


END = {"close": gw.Exchange.close, "abort": gw.Exchange.abort}


@pytest.mark.parametrize("comes_s", [0.0, 0.1])
@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_says_that_another_thread_ended_the_exchange(threads: Threads, wait: str, end: str, comes_s: float) -> None:
    told = threads.run(2, ended_by_another_thread, wait, end, comes_s)
    assert told[0].startswith("StepStateError: step 0 was given up") and "close()" in told[0]


def test_what_a_planner_knows_of_a_tensor() -> None:
    assert info_of("a", torch.ones(2, 3, dtype=torch.bfloat16)) == TensorInfo("a", (2, 3), "bfloat16", "cpu")


# ---- what a review found


def careless(case: str) -> str:
    rank = here.rank
    if case == "memory order":
        values = torch.arange(12.0).reshape(3, 4)
        return refused(lambda: exchange_of({"a": values if rank == 0 else values.t().contiguous().t()}, gw.Identity()))
    if case == "expanded":
        return refused(lambda: exchange_of({"a": torch.ones(1).expand(5)}, gw.Identity()))
    tensors = {f"t{at}": torch.ones(3000) for at in range(4)}
    exchange = exchange_of(tensors, plan=gw.Uniform(gw.Identity(), scheme="alltoall", bucket_bytes=12_000))
    if case == "last first":
        exchange.begin()
        exchange.ready("t3")
        said = refused(lambda: exchange.wait("t3"))
    if case == "one does not fit":
        said = refused(lambda: exchange.average_({**tensors, "t1": torch.ones(2)}))
        exchange.average_()
    if case == "a name left out":
        said = refused(lambda: exchange.average_({name: tensors[name] for name in ("t0", "t1", "t3")}))
        assert "zeros" in said and "'t0'" in refused(lambda: exchange.average_({}))
        exchange.average_(dict(reversed(tensors.items())))
    if case == "no gradient":
        said = refused(lambda: exchange.average_({**tensors, "t1": None}))  # type: ignore[dict-item]
    if case == "only described":
        exchange.close()
        exchange = exchange_of({"a": gw.TensorMeta((3,))}, gw.Identity())
        assert "'a' was not given" in refused(exchange.average_)
        exchange.begin()
        said = refused(lambda: exchange.ready("a", None))
        exchange.ready("a", torch.ones(3))
        exchange.wait()
    exchange.close()
    exchange.close()
    return said


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("memory order", "DisagreementError: ranks disagree on the memory formats"),
        ("expanded", "PlanError: tensors['a'] has elements that share memory"),
        ("last first", "StepStateError: wait() was called before 't0' and 2 more became ready"),
        ("one does not fit", "StepStateError: tensor 't1' has shape (2,)"),
        ("a name left out", "StepStateError: tensor 't2' was not given in this step"),
        ("no gradient", "StepStateError: tensor 't1' was not given in this step"),
        ("only described", "StepStateError: tensor 'a' was not given in this step"),
    ],
)
def test_careless_use_is_refused_before_it_hangs_or_adds_wrongly(threads: Threads, case: str, words: str) -> None:
    assert [said[: len(words)] for said in threads.run(2, careless, case)] == [words] * 2


def waited_for_early() -> tuple[list[str], bool]:
    """What waits for single tensors say under a plan that sends means after all sums, and whether all means arrive."""
    mine = {f"t{at}": torch.full((3000,), float(here.rank + at)) for at in range(4)}
    plan = gw.Uniform(gw.Identity(), scheme="alltoall", schedule="pipelined", bucket_bytes=12_000)
    exchange, said = exchange_of(mine, plan=plan), list[str]()

    def step(phases: str, first: str) -> None:
        exchange.begin(phases)
        exchange.ready(first)
        said.append(refused(lambda: exchange.wait(first)))
        for name in mine:
            if name != first:
                exchange.ready(name)
        exchange.wait()

    step("both", "t0")
    means = all(torch.equal(mine[f"t{at}"], torch.full((3000,), at + 0.5)) for at in range(4))
    step("reduce", "t0")  # alone, the reduce phase takes t0 first
    step("gather", "t3")  # and the gather phase t3
    exchange.close()
    return said, means


def test_a_wait_for_a_tensor_whose_mean_is_sent_after_sums_that_are_not_ready_does_not_hang(threads: Threads) -> None:
    for (whole, reduced, gathered), means in threads.run(2, waited_for_early):
        assert whole.startswith("StepStateError: wait() was called before 't1' and 2 more became ready") and "Pipelined" in whole
        assert (reduced, gathered) == ("", "") and means


def owed_once() -> list[float]:
    """Means of zeros after a residual was loaded that the plan keeps nowhere."""
    first = exchange_of({"w": torch.full((100,), 2.0)}, plan=gw.ErrorFeedback(gw.TopK(0.1)))
    first.average_()
    own = here.gather(first.state_dict())
    alone = dist.new_group([here.rank], use_local_synchronization=True)
    second = gw.Exchange({"w": torch.zeros(100)}, gw.Identity(), alone)
    second.load_state_dict({key: value for each in own for key, value in each.items()})
    sums = []
    for _ in range(3):
        zeros = {"w": torch.zeros(100)}
        second.average_(zeros)
        sums.append(zeros["w"].sum().item())
    first.close()
    second.close()
    return sums


def test_what_is_owed_is_sent_once(worlds: Worlds) -> None:
    for sums in worlds.run(2, owed_once):
        assert sums[0] > 0 and sums[1:] == [0.0, 0.0]


def dropped(busy: bool) -> int:
    import gc
    import threading

    def lanes() -> int:
        return sum(thread.name.startswith("gradwire-") for thread in threading.enumerate())

    before = lanes()
    exchange = exchange_of({"w": torch.ones(100)}, gw.QSGD(bits=4))
    if busy:
        exchange.begin()
    del exchange
    gc.collect()
    deadline = time.monotonic() + 10
    while lanes() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return lanes() - before


@pytest.mark.parametrize("busy", [False, True])
def test_threads_end_with_an_exchange_that_is_dropped(worlds: Worlds, busy: bool) -> None:
    assert worlds.run(2, dropped, busy) == [0, 0]
