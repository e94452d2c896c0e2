"""Every option of the tree runs and gives the right sum, on 2 nodes of 2 ranks: here all ranks are threads of one process, but
for a sample on real ones. `python -m benchmarks options` runs the whole tree on real ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from options import Ranks, all_in_one, gradients, on_grid, plan_for, true_mean
from test_engine_feedback import resume, telescope
from threads import Threads, built, here
from torch import nn
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.collectives.ops import Decode, DecodeSum, Encoding
from gradwire.core import Spec
from gradwire.core.collectives import COLLECTIVES
from gradwire.core.plan import RESIDUAL_DTYPES
from gradwire.engine.prepare import prepare
from gradwire.errors import PlanError
from gradwire.exchange import layout
from gradwire.exchange.host_codec import HostCodec
from gradwire.exchange.residual_store import added_up
from gradwire.kernels import Compressor
from gradwire.plan.grammar import SCHEMES
from gradwire.plan.options import Option, tree
from gradwire.transport import Grid

OPTIONS = tree(("cpu",))
TWO_BY_TWO = [Grid.even(2, 2, rank) for rank in range(4)]
ONE_ENCODE = 0.166
"""Relative error of 4 bits with blocks of 128 and their maximum, on Gaussian data; of 1003 elements it
varies by a fifth."""
SAMPLE = OPTIONS[6::9]
COMPRESSING = [option for option in SAMPLE if option.compresses]
TWO_ENCODES = "reducescatter:intra comp:cpu alltoall:inter decomp:cpu comp:cpu allgather:inter decomp:cpu allgather:intra"
FOUR_ENCODES = (
    "comp:cpu alltoall:intra decomp:cpu comp:cpu alltoall:inter decomp:cpu comp:cpu allgather:inter decomp:cpu comp:cpu "
    "allgather:intra decomp:cpu"
)
ROOTED = (
    "comp:cpu gather:intra decomp:cpu comp:cpu gather:inter decomp:cpu comp:cpu broadcast:inter decomp:cpu comp:cpu "
    "broadcast:intra decomp:cpu"
)
WHOLE_SUMS_GO_ON = (
    "comp:cpu alltoall:intra decomp:cpu comp:cpu alltoall:inter decomp:cpu comp:cpu allgather:inter allgather:intra decomp:cpu"
)
SPEC = gw.ErrorFeedback(gw.QSGD(bits=2))
WEIGHTED = gw.ErrorFeedback(gw.QSGD(bits=3, scale="ls", levels="lloyd"), weights=0.9)
SKIPPING = "comp:cpu alltoall:intra alltoall:inter allgather:inter allgather:intra decomp:cpu"


def ids(option: Option) -> str:
    return " ".join(option.tasks)


def run(tasks: Any, spec: Spec, grid: list[Grid], step: int = 0) -> tuple[Ranks, float]:
    """One step: what ranks hold, and the relative error. All must have the same bits and send what they say they do."""
    ranks = Ranks(plan_for(tasks, spec), grid)
    links = ranks.step(step, [gradients(rank, step) for rank in range(len(grid))])
    results = ranks.results()
    assert all(torch.equal(result, results[0]) for result in results), "ranks have other bits"
    assert [link.sent_to for link in links] == [bucket.chunks[0].bytes_to for bucket in ranks.buckets]
    true = true_mean(len(grid), step)
    return ranks, float((results[0].double() - true).norm() / true.norm())


@pytest.mark.parametrize("option", OPTIONS[1:], ids=ids)
def test_the_sum_is_exact_without_loss_and_off_by_the_encodes_with(option: Option) -> None:
    """Errors of encodes are independent, so their squares add up; some of an encode may be spared, as the own part."""
    _, off = run(option.tasks, gw.Identity(), TWO_BY_TWO)
    assert off < 2e-7
    if option.compresses:
        _, off = run(option.tasks, gw.QSGD(bits=4), TWO_BY_TWO)
        assert 0.5 * ONE_ENCODE < off < 1.2 * ONE_ENCODE * math.sqrt(option.encodes)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("option", [option for option in OPTIONS[1:] if option.flat], ids=ids)
def test_means_of_one_and_of_three_ranks(option: Option, world_size: int) -> None:
    grid = [Grid.even(1, world_size, rank) for rank in range(world_size)]
    _, off = run(option.tasks, gw.Identity(), grid)
    assert off < 2e-7
    if option.compresses:
        _, off = run(option.tasks, gw.QSGD(bits=4), grid)
        assert off < 1.2 * ONE_ENCODE * math.sqrt(option.encodes)


@pytest.mark.parametrize("tasks", [TWO_ENCODES, FOUR_ENCODES, ROOTED, SKIPPING])
def test_nodes_of_other_shapes(tasks: str) -> None:
    """3 nodes of 2, 2 of 3, and ranks that do not stand in the order of their nodes."""
    for names in ("aabbcc", "aaabbb", "abcabc", "abba"):
        grid = [Grid.of(names, rank) for rank in range(len(names))]
        assert run(tasks.split(), gw.Identity(), grid)[1] < 3e-7
        assert run(tasks.split(), gw.QSGD(bits=8), grid)[1] < 0.025


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("option", OPTIONS[1::5], ids=ids)
def test_narrow_gradients_are_added_in_float32(option: Option, dtype: str) -> None:
    rounded = getattr(torch, dtype)
    ranks = Ranks(plan_for(option.tasks, gw.Identity(), dtype=dtype), TWO_BY_TWO, dtype=rounded)
    given = [[gradient.to(rounded) for gradient in gradients(rank, 0)] for rank in range(4)]
    ranks.step(0, given)
    true = torch.stack([torch.cat(own).double() for own in given]).mean(0)
    for result in ranks.results():
        assert torch.equal(result, ranks.results()[0])
        # one rounding of a sum in float32; quarters are exact
        assert bool(((result.double() - true).abs() <= torch.finfo(rounded).eps * true.abs() + 1e-6).all())


def test_chunks_and_tensors_smaller_than_the_world() -> None:
    for tasks in (TWO_ENCODES, FOUR_ENCODES, ROOTED, SKIPPING):
        ranks = Ranks(plan_for(tasks.split(), gw.QSGD(bits=8), (1, 0, 2), chunk_bytes=4), TWO_BY_TWO, (1, 0, 2))
        given = [gradients(rank, 0, (1, 0, 2)) for rank in range(4)]
        ranks.step(0, given)
        true = torch.stack([torch.cat(own) for own in given]).mean(0)
        assert torch.allclose(ranks.results()[3], true, atol=0.05)


def test_roots_rotate_over_buckets() -> None:
    tasks, senders = ("reduce:inter", "broadcast:inter"), []
    for root in range(4):
        ranks = Ranks(plan_for(tasks, gw.Identity()), TWO_BY_TWO, root=root)
        most = [sum(bucket.chunks[0].bytes_to) for bucket in ranks.buckets]
        senders.append(most.index(max(most)))
    assert senders == [0, 1, 2, 3]


BATCHED = {
    "3 nodes of 2": ["aabbcc", TWO_ENCODES, gw.QSGD(bits=4), 4],
    "2 nodes of 3": ["aaabbb", FOUR_ENCODES, SPEC, 8],
    "4 nodes of 2, without feedback": ["aabbccdd", FOUR_ENCODES, gw.QSGD(bits=3, scale="minmax"), 8],
    "ranks in another order": ["abcabc", TWO_ENCODES, SPEC, 4],
    "a root": ["aabbcc", ROOTED, SPEC, 6],
    "payloads of whole sums go on": ["aaabbb", WHOLE_SUMS_GO_ON, SPEC, 6],
    "payloads of terms go on": ["aabbcc", SKIPPING, gw.QSGD(bits=4), None],
    "the own part is encoded": ["aabbcc", TWO_ENCODES, gw.EFSignSGD(), None],
}
"""Nodes, tasks, spec, and the most calls of codecs that a piece has on a rank."""


@pytest.mark.parametrize(("names", "tasks", "spec", "most"), BATCHED.values(), ids=BATCHED)
def test_few_calls_for_many_payloads_give_the_bits_of_a_call_for_each(
    names: str, tasks: str, spec: Spec, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, here on CPUs."""
    grid = [Grid.of(names, rank) for rank in range(len(names))]
    sizes = (7003, 1, 2999)
    plan = plan_for(tasks.split(), spec, sizes, chunk_bytes=16384)
    each = Ranks(plan, grid, sizes)
    monkeypatch.setattr(layout, "launches", lambda device: True)
    together = Ranks(plan, grid, sizes)
    for step in range(3):
        sent = [ranks.step(step, [gradients(rank, step, sizes) for rank in range(len(names))]) for ranks in (each, together)]
        assert all(torch.equal(one, other) for one, other in zip(each.results(), together.results(), strict=True))
        assert [link.sent_to for link in sent[0]] == [link.sent_to for link in sent[1]]
    states = [[memory.state for rank in ranks.buckets for memory in rank.chunks[0].memory] for ranks in (each, together)]
    assert all(torch.equal(*pair) for one, other in zip(*states, strict=True) for pair in zip(one, other, strict=True))
    if most is not None:
        for rank in together.buckets:
            transfers = [transfer for phase in rank.chunks[0].phases for transfer in phase]
            works = [
                work for every in transfers for works in (every.before, *every.arrivals.values(), every.after) for work in works
            ]
            assert sum(isinstance(work, (Encoding, Decode, DecodeSum)) for work in works) <= most


@pytest.mark.parametrize(
    ("scheme", "spec"),
    [
        ("alltoall", gw.QSGD(bits=4)),
        ("alltoall", gw.ErrorFeedback(gw.TopK(0.05))),
        ("alltoall", gw.DGC(0.05)),
        ("allgather", gw.ErrorFeedback(gw.QSGD(bits=2))),
        ("allgather", gw.DGC(0.05)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_a_route_does_what_the_fast_way_does(scheme: str, spec: Spec, residual_dtype: str) -> None:
    """Bit for bit and byte for byte, where there is one."""
    grid = [Grid.even(1, 3, rank) for rank in range(3)]
    plan = plan_for(TASKS[scheme], spec, residual_dtype=residual_dtype if spec.feedback else "float32")
    fast, routed = Ranks(plan, grid), Ranks(plan, grid, codecs=lambda codec, rank: {"cpu": codec})
    for step in range(3):
        for ranks in (fast, routed):
            ranks.step(step, [gradients(rank, step) for rank in range(3)])
        assert torch.equal(fast.results()[2], routed.results()[2])
    assert [b.chunks[0].bytes_to for b in fast.buckets] == [b.chunks[0].bytes_to for b in routed.buckets]
    assert torch.equal(fast.held_back(), routed.held_back())


# ---- devices


class Recorder(Compressor):
    """A codec that tells where it was asked to work, and on which encode of the option."""

    def __init__(self, codec: Compressor, device: str, told: set[tuple[str, int]]) -> None:
        super().__init__(codec.spec)
        self.codec, self.device, self.told = codec, device, told

    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: Any) -> None:
        self.told.add((f"comp:{self.device}", int(context.random[2])))
        self.codec.encode(src, state, segments, context, payload)

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None:
        self.told.add((f"decomp:{self.device}", int(context.random[2])))
        self.codec.decode(payload, segments, dtype, add, dst, context)


@pytest.mark.parametrize("option", [option for option in tree() if len(option.devices) == 2][::61], ids=ids)
def test_each_task_runs_on_its_device(option: Option) -> None:
    """With either device what it is on one, bit for bit; only who was asked differs."""
    told: set[tuple[str, int]] = set()

    def recorded(codec: Any, rank: int) -> dict[str, Any]:
        return {device: Recorder(codec, device, told) for device in ("cpu", "gpu")}

    ranks = Ranks(plan_for(option.tasks, gw.QSGD(bits=4)), TWO_BY_TWO, codecs=recorded)
    ranks.step(0, [gradients(rank, 0) for rank in range(4)])
    one, _ = run([task.replace(":gpu", ":cpu") for task in option.tasks], gw.QSGD(bits=4), TWO_BY_TWO)
    assert torch.equal(ranks.results()[0], one.results()[0])
    encodes = [task for task in option.tasks if task.startswith("comp:")]
    decodes = [task for task in option.tasks if task.startswith("decomp:")]
    assert told == {(task, number) for tasks in (encodes, decodes) for number, task in enumerate(tasks)}


@pytest.mark.parametrize("spec", [gw.ErrorFeedback(gw.QSGD(bits=3)), WEIGHTED], ids=repr)
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_a_codec_on_the_host_gives_the_same_bytes(residual_dtype: str, spec: Spec) -> None:
    plan = plan_for(FOUR_ENCODES.split(), spec, residual_dtype=residual_dtype)
    plain = Ranks(plan, TWO_BY_TWO)
    hosted = Ranks(plan, TWO_BY_TWO, codecs=lambda codec, rank: {"cpu": HostCodec(codec)})
    for step in range(3):
        for ranks in (plain, hosted):
            ranks.step(step, [gradients(rank, step) for rank in range(4)])
        assert torch.equal(plain.results()[1], hosted.results()[1])
    for a, b in zip(plain.ranks, hosted.ranks, strict=True):
        assert digest(a.residuals.state().values()) == digest(b.residuals.state().values())


# ---- what is remembered


LOST = {"float32": (0, 1e-6), "bfloat16": (1e-5, 0.005), "int8": (1e-4, 0.02)}
"""How much of what was given goes astray in four steps: at least, since residuals are stored so, and at most."""


@pytest.mark.parametrize("residual_dtype", LOST)
@pytest.mark.parametrize("option", COMPRESSING, ids=ids)
def test_nothing_is_lost_by_any_option_but_what_stores_may_lose(option: Option, residual_dtype: str) -> None:
    """What ranks got and what they hold back is what was given, whosever part an encode lost: own, of a node, of all."""
    least, most = LOST[residual_dtype]
    plan = plan_for(option.tasks, gw.ErrorFeedback(gw.QSGD(bits=2)), residual_dtype=residual_dtype)
    ranks = Ranks(plan, TWO_BY_TWO)
    given, received = torch.zeros(2, sum(ranks.sizes), dtype=torch.float64)
    for step in range(4):
        ranks.step(step, [gradients(rank, step) for rank in range(4)])
        given += true_mean(4, step)
        received += ranks.results()[0].double()
        held, results = ranks.held_back(), ranks.results()
        assert all(torch.equal(result, results[0]) for result in results)
        assert least <= float((received + held - given).norm() / given.norm()) < most
        assert step == 0 or float(held.norm() / given.norm()) > 0.01


@pytest.mark.parametrize("option", COMPRESSING, ids=ids)
def test_all_ranks_learn_the_same_energies_by_any_option(option: Option) -> None:
    ranks = Ranks(plan_for(option.tasks, WEIGHTED), TWO_BY_TWO)
    given, received = torch.zeros(2, sum(ranks.sizes), dtype=torch.float64)
    expected = torch.zeros(sum(ranks.sizes))
    for step in range(3):
        ranks.step(step, [gradients(rank, step) for rank in range(4)])
        results = ranks.results()
        assert all(torch.equal(result, results[0]) for result in results)
        given, received = given + true_mean(4, step), received + results[0].double()
        expected = 0.9 * expected + 0.1 * results[0].square()
    assert float((received + ranks.held_back() - given).norm() / given.norm()) < 1e-6
    for bucket in ranks.buckets:
        assert bucket.energies is not None
        assert torch.allclose(bucket.energies.energy, expected, rtol=1e-5)
        assert len(bucket.energies.weights.unique()) > 2


@pytest.mark.parametrize("residual_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("tasks", [FOUR_ENCODES, ROOTED])
def test_nodes_store_what_they_lose_alike_in_the_same_bits(tasks: str, residual_dtype: str) -> None:
    """Or their next payloads would be of other sums. What each rank loses alone is rounded by numbers of its own."""
    spec = gw.ErrorFeedback(gw.QSGD(bits=3, block=32, scale="l2"))  # what it decodes to loses something when it is encoded again
    ranks = Ranks(plan_for(tasks.split(), spec, residual_dtype=residual_dtype), TWO_BY_TWO)
    given, received = torch.zeros(2, sum(ranks.sizes), dtype=torch.float64)
    for step in range(3):
        ranks.step(step, [gradients(rank, step) for rank in range(4)])
        results = ranks.results()
        assert all(torch.equal(result, results[0]) for result in results)
        given, received = given + true_mean(4, step), received + results[0].double()
    assert float((received + ranks.held_back() - given).norm() / given.norm()) < LOST[residual_dtype][1]
    states = [rank.residuals.state() for rank in ranks.ranks]
    copies = [(rank, key) for rank in (2, 3) for key in states[rank] if key.startswith("residual_copy/")]
    assert any(states[rank][key].any() for rank, key in copies)
    for rank, key in copies:
        assert torch.equal(states[rank - 2][key.replace("_copy", "")], states[rank][key])


def test_no_two_encodes_or_stores_draw_the_same_random_numbers() -> None:
    ranks = Ranks(plan_for(SKIPPING.split(), SPEC, residual_dtype="int8"), TWO_BY_TWO)
    pieces = [bucket.chunks[0].piece for bucket in ranks.buckets]
    contexts = [context for piece in pieces for context in (*piece.contexts, *piece.store_contexts)]
    assert len({tuple(context.random.tolist()) for context in contexts}) == len(contexts) == 4 * (4 + 4)


@pytest.mark.parametrize(("residual_dtype", "part"), [("bfloat16", 0.501), ("int8", 0.258)])
@pytest.mark.parametrize("tasks", [TWO_ENCODES, FOUR_ENCODES, ROOTED, SKIPPING, " ".join(COLLECTIVES["ring"].on("cpu"))])
def test_narrow_residuals_of_options_are_small(tasks: str, residual_dtype: str, part: float) -> None:
    def nbytes(dtype: str) -> int:
        ranks = Ranks(plan_for(tasks.split(), SPEC, (50_003,), residual_dtype=dtype), TWO_BY_TWO, (50_003,))
        return sum(held.nbytes for rank in ranks.ranks for held in rank.residuals.held())

    assert nbytes(residual_dtype) < part * nbytes("float32")


@pytest.mark.parametrize("wired", [False, True])
def test_what_is_left_is_added_once_and_then_takes_no_memory(wired: bool) -> None:
    """And a step that failed puts it back."""
    ranks, given = Ranks(plan_for(TWO_ENCODES.split(), SPEC), TWO_BY_TWO, wired=wired), [gradients(rank, 0) for rank in range(4)]
    for rank, bucket in enumerate(ranks.buckets):
        bucket.chunks[0].take_over("residual", 0, torch.full((bucket.bounds[1],), 1.0 + rank))
    before, put_back = ranks.held_back(), [rank.keep_residuals() for rank in ranks.ranks]
    ranks.step(0, given)
    means = [result.clone() for result in ranks.results()]
    assert torch.allclose(means[0] + ranks.held_back(), true_mean(4, 0) + before, atol=1e-5)
    assert [bucket.chunks[0].left for bucket in ranks.buckets] == [None] * 4
    for back in put_back:
        back()
    assert torch.equal(ranks.held_back(), before)
    ranks.step(0, given)
    assert all(torch.equal(*both) for both in zip(ranks.results(), means, strict=True))


@pytest.mark.parametrize("residual_dtype", LOST)
@pytest.mark.parametrize("before", [TWO_ENCODES, FOUR_ENCODES, ROOTED, SKIPPING, " ".join(COLLECTIVES["ring"].on("cpu"))])
@pytest.mark.parametrize("after", [TWO_ENCODES, FOUR_ENCODES, ROOTED, " ".join(COLLECTIVES["tree"].on("cpu"))])
def test_nothing_is_lost_from_one_option_to_another(before: str, after: str, residual_dtype: str) -> None:
    """Nor when the sum of some elements is void, nor by saving and loading in between."""
    least, most = LOST[residual_dtype]
    old_plan, new_plan = (plan_for(tasks.split(), SPEC, residual_dtype=residual_dtype) for tasks in (before, after))
    old = Ranks(old_plan, TWO_BY_TWO)
    old.step(0, [gradients(rank, 0) for rank in range(4)])
    given, received = true_mean(4, 0), old.results()[0].double()
    for bucket in old.buckets:
        bucket.take_back(bucket.slots[0])
    received[: old.sizes[0]] = 0.0
    new, same = (Ranks(new_plan, TWO_BY_TWO) for _ in range(2))
    for one, other in zip(old.ranks, new.ranks, strict=True):
        carried, expected = one.residuals.carried(), added_up([one.residuals.state()])
        assert carried.keys() == expected.keys()
        assert all(torch.equal(carried[key], expected[key]) for key in carried)
        other.residuals.take_over(carried)
    assert float((received + new.held_back() - given).norm() / given.norm()) < most
    for one, other in zip(new.ranks, same.ranks, strict=True):
        other.residuals.check(one.residuals.state())
        other.residuals.load(one.residuals.state())
    for ranks in (new, same):
        for step in (1, 2):
            ranks.step(step, [gradients(rank, step) for rank in range(4)])
            results = ranks.results()
            assert all(torch.equal(result, results[0]) for result in results)
            if ranks is new:
                given, received = given + true_mean(4, step), received + results[0].double()
    assert torch.equal(new.results()[0], same.results()[0])
    assert least <= float((received + new.held_back() - given).norm() / given.norm()) < most


# ---- beside the tree

MEASURED = {
    "alltoall": (0.205, 0.219, 0.228),
    "ring": (0.205, 0.264, 0.361),
    "tree": (0.204, 0.235, 0.264),
    "allgather": (0.166, 0.166, 0.166),
}
"""Relative error at 2, 4 and 8 ranks."""
TASKS = {
    "alltoall": ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu"),
    "allgather": ("comp:cpu", "allgather:inter", "decomp:cpu"),
    "ring": COLLECTIVES["ring"].on("cpu"),
    "tree": COLLECTIVES["tree"].on("cpu"),
}


@pytest.mark.parametrize(("position", "world_size"), [(0, 2), (1, 4), (2, 8)])
@pytest.mark.parametrize("scheme", MEASURED)
def test_errors_of_the_reductions_are_those_of_the_design(scheme: str, position: int, world_size: int) -> None:
    grid, sizes = [Grid.even(1, world_size, rank) for rank in range(world_size)], (50_003,)
    ranks = Ranks(plan_for(TASKS[scheme], gw.QSGD(bits=4), sizes), grid, sizes)
    given = [gradients(rank, 0, sizes) for rank in range(world_size)]
    ranks.step(0, given)
    true = torch.stack([torch.cat(own).double() for own in given]).mean(0)
    off = float((ranks.results()[0].double() - true).norm() / true.norm())
    assert off == pytest.approx(MEASURED[scheme][position], rel=0.05)
    assert all(torch.equal(result, ranks.results()[0]) for result in ranks.results())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("scheme", ["ring", "tree"])
def test_ring_and_tree_lose_nothing(scheme: str, world_size: int) -> None:
    grid = [Grid.even(1, world_size, rank) for rank in range(world_size)]
    assert run(TASKS[scheme], gw.Identity(), grid)[1] < 3e-7
    ranks = Ranks(plan_for(TASKS[scheme], gw.ErrorFeedback(gw.QSGD(bits=2))), grid, root=1 % world_size)
    given, received = torch.zeros(2, sum(ranks.sizes), dtype=torch.float64)
    for step in range(3):
        ranks.step(step, [gradients(rank, step) for rank in range(world_size)])
        given, received = given + true_mean(world_size, step), received + ranks.results()[0].double()
    assert float((received + ranks.held_back() - given).norm() / given.norm()) < 1e-6


# ---- what is refused


@pytest.mark.parametrize(
    ("tasks", "spec", "words"),
    [
        ("reducescatter:inter allgather:inter", gw.QSGD(), "encodes nothing"),
        (SKIPPING, gw.SignSGD(), "cannot be added as often"),
        (TWO_ENCODES, gw.DGC(0.1), "keeps residual, momentum"),
        ("comp:cpu reducescatter:inter allgather:inter decomp:cpu", gw.DGC(0.1), "keeps residual, momentum"),
        ("comp:gpu allgather:inter decomp:cpu", gw.QSGD(), "no gpu encodes"),
        ("comp:cpu alltoall:inter broadcast:inter decomp:cpu", gw.QSGD(), "alltoall pairs with allgather"),
    ],
)
def test_what_cannot_run_is_refused_in_words(tasks: str, spec: Spec, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Ranks(plan_for(tasks.split(), spec), TWO_BY_TWO)


def test_plans_with_an_option_that_does_not_exist_are_refused_before_anything_is_sent() -> None:
    model = torch.nn.ParameterDict({"t0": torch.nn.Parameter(torch.zeros(3))})
    for tasks in ("comp:cpu alltoall:inter broadcast:inter decomp:cpu", "allgather:inter allgather:inter"):
        with pytest.raises(PlanError, match=r"buckets\[0\].option\[\d\] is .* Possible there"):
            prepare(model, plan_for(tasks.split(), gw.QSGD(), (3,)), ranks=4)
    for tasks in (FOUR_ENCODES, " ".join(COLLECTIVES["ring"].on("cpu"))):
        assert prepare(model, plan_for(tasks.split(), gw.QSGD(), (3,)), ranks=4).policy is None


def test_uneven_nodes_are_refused_where_nodes_matter() -> None:
    grid = [Grid.of("aaab", rank) for rank in range(4)]
    with pytest.raises(PlanError, match="nodes have 1 and 3 ranks"):
        Ranks(plan_for(TWO_ENCODES.split(), gw.QSGD()), grid)
    assert run(["comp:cpu", "gather:inter", "decomp:cpu", "broadcast:inter"], gw.Identity(), grid)[1] < 2e-7


# ---- real ranks


def real_ranks(options: list[tuple[str, ...]]) -> list[str]:
    with on_grid(ranks_per_node=2):
        return [problem for spec in (gw.Identity(), gw.QSGD(bits=4)) for problem in all_in_one(options, spec)]


def test_a_sample_runs_on_real_ranks(worlds: Worlds) -> None:
    """All of them buckets of one plan, so that one group of processes runs them together."""
    for problems in worlds.run(4, real_ranks, [option.tasks for option in SAMPLE]):
        assert problems == []


def test_the_sample_covers_everything() -> None:
    tasks = {task for option in SAMPLE for task in option.tasks}
    words = ("allreduce", "reducescatter", "allgather", "alltoall", "reduce", "broadcast", "gather")
    assert {task.partition(":")[0] for task in tasks} == {*words, "comp", "decomp"}
    assert {option.inter for option in SAMPLE} == set(SCHEMES)
    assert {option.intra for option in SAMPLE if not option.flat} == {scheme for scheme in SCHEMES if "+" in scheme}
    assert {option.encodes for option in SAMPLE} == {0, 1, 2, 3, 4} and {option.skips for option in SAMPLE} == {
        0,
        1,
        2,
        3,
    }
    assert {len(option.exchanges) for option in SAMPLE} == {2, 3, 4} and any(option.flat for option in SAMPLE)


def on_two_nodes(function: Callable[..., Any], *arguments: Any) -> Any:
    with on_grid(ranks_per_node=2):
        return function(*arguments)


@pytest.mark.parametrize(
    ("tasks", "probe_codec", "idle"),
    [(TWO_ENCODES, False, ()), (FOUR_ENCODES, True, ()), (TWO_ENCODES, False, (1, 2, 4)), (ROOTED, True, (1, 2, 4))],
)
def test_hierarchical_options_lose_nothing_in_training(
    threads: Threads, tasks: str, probe_codec: bool, idle: tuple[int, ...]
) -> None:
    """In buckets, in chunks, when the plan is made again after the first step, and when no rank uses a parameter."""
    arguments = (telescope, gw.ErrorFeedback(gw.QSGD(bits=2)), tasks, torch.float32, probe_codec, idle)
    for off, planned_again in threads.run(4, on_two_nodes, *arguments):
        assert planned_again and max(off) < 1e-5


@pytest.mark.parametrize(
    ("tasks", "residual_dtype"),
    [(TWO_ENCODES, "float32"), (FOUR_ENCODES, "float32"), (FOUR_ENCODES, "int8"), (ROOTED, "int8")],
)
def test_a_resumed_run_repeats_a_hierarchical_one(threads: Threads, tasks: str, residual_dtype: str) -> None:
    arguments = (resume, gw.ErrorFeedback(gw.QSGD(bits=4)), tasks, 3, False, residual_dtype)
    for at_once, in_two in threads.run(4, on_two_nodes, *arguments):
        assert in_two == at_once


PLAIN = gw.Identity()


def train(scheme: str, spec: gw.Spec = PLAIN, schedule: Any = "backward") -> tuple[list[torch.Tensor], tuple[int, int, int]]:
    with on_grid(ranks_per_node=2):
        model = built(0, lambda: nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = gw.Uniform(spec, schedule, scheme)
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        inputs = torch.randn(6, 8, 30, generator=torch.Generator().manual_seed(here.rank))
        for batch in inputs:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        handle.flush()
        stats = handle.stats()
        handle.detach()
        return [p.detach().clone() for p in model.parameters()], (
            stats.wire_bytes,
            stats.intra_bytes,
            stats.inter_bytes,
        )


def test_a_model_learns_the_same_by_a_hierarchical_option(threads: Threads) -> None:
    flat, nested = (threads.run(4, train, scheme) for scheme in ("allreduce", "CGX between nodes"))
    for (weights, bytes_flat), (others, bytes_nested) in zip(flat, nested, strict=True):
        assert digest(others) == digest(nested[0][0])
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(weights, others, strict=True))
        assert bytes_flat[0] == sum(bytes_flat[1:]) and bytes_nested[0] == sum(bytes_nested[1:])
        # half a gradient in and out inside the node; a quarter of it each way between nodes
        nbytes = 4 * sum(weight.numel() for weight in weights)
        assert bytes_nested[1:] == pytest.approx((nbytes, nbytes / 2), rel=0.02)


@pytest.mark.parametrize("scheme", ["CGX between nodes", "HiTopKComm"])
def test_uncompressed_corrections_travel_by_a_hierarchical_option(threads: Threads, scheme: str) -> None:
    """With a correction in every step nothing is compressed."""
    delayed, lossy = gw.Delayed(k=1), gw.QSGD(bits=2)
    flat, nested, usual = (
        threads.run(4, train, *how) for how in (("allreduce", gw.Identity(), delayed), (scheme, lossy, delayed), (scheme, lossy))
    )
    for (weights, _), (others, _), (rough, _) in zip(flat, nested, usual, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(weights, others, strict=True))
        assert not all(torch.allclose(a, b, rtol=1e-2) for a, b in zip(weights, rough, strict=True))


def what_is_sent(spec: gw.Spec, scheme: str, ranks_per_node: int) -> list[float]:
    """The mean of gradients that are the same on all ranks."""
    model = Given([6])
    with on_grid(ranks_per_node):
        handle = gw.parallelize(model, plan=gw.Uniform(spec, scheme=scheme), process_group=here.group)
        model([torch.tensor([0.49, 0.51, -0.51, 0.0, 0.9, 0.2])]).backward()
        handle.detach()
    assert model.p0.grad is not None
    return [round(value, 5) for value in model.p0.grad.tolist()]


SENT = [
    (gw.TwoBit(threshold=0.5), [0.0, 0.5, -0.5, 0.0, 0.5, 0.0]),
    (gw.ErrorFeedback(gw.Threshold(0.5, capacity=1.0)), [0.0, 0.51, -0.51, 0.0, 0.9, 0.0]),
    (gw.TopK(1.0, values=gw.Threshold(0.5, capacity=1.0)), [0.0, 0.51, -0.51, 0.0, 0.9, 0.0]),
]


@pytest.mark.parametrize(
    ("world_size", "scheme", "ranks_per_node"),
    [
        (1, "allgather", 1),
        (2, "allgather", 1),
        (3, "alltoall", 1),
        (4, "alltoall", 2),
        (4, "HiTopKComm", 2),
        (4, "CGX between nodes", 2),
        (4, "comp:cpu alltoall:intra decomp:cpu comp:cpu alltoall:inter allgather:inter allgather:intra decomp:cpu", 2),
    ],
)
@pytest.mark.parametrize(("spec", "sent"), SENT, ids=str)
def test_a_threshold_acts_on_gradients_as_scripts_see_them(
    threads: Threads, spec: gw.Spec, sent: list[float], world_size: int, scheme: str, ranks_per_node: int
) -> None:
    assert threads.run(world_size, what_is_sent, spec, scheme, ranks_per_node) == [sent] * world_size


def uneven_nodes() -> str:
    with on_grid(ranks_per_node=3):
        with pytest.raises(PlanError) as caught:
            plan = gw.Uniform(gw.QSGD(), scheme="CGX between nodes")
            gw.parallelize(Given([3]), plan=plan, process_group=here.group)
        return str(caught.value)


def test_all_ranks_are_told_of_uneven_nodes(threads: Threads) -> None:
    assert all("nodes have 1 and 3 ranks" in told for told in threads.run(4, uneven_nodes))
