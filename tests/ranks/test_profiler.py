"""The profiler: a model in training on real ranks, lines and curves on made-up times."""

import copy
import itertools
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Worlds

import gradwire as gw
from benchmarks.campaigns.predictions import Predicted, PredictRun, ddp_plan, summary
from gradwire.core import Cluster, CodecCosts, Costs, Link, Profile, TensorInfo, TensorProfile, goes_around
from gradwire.core.provenance import Made
from gradwire.core.specs import Spec
from gradwire.costs.collectives import sum_traffic
from gradwire.costs.fit import fit_points
from gradwire.costs.prices import time_at
from gradwire.errors import FormatError, PlanError, StepStateError
from gradwire.exchange.exchange import Executor
from gradwire.profiler import links
from gradwire.profiler.links import measure_links, measure_processors, measured_links
from gradwire.profiler.model import launch_time_us, model_times, slowest
from gradwire.sim.simulator import Simulator
from gradwire.transport import Grid, LanesObserver


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


class Slow(torch.autograd.Function):
    """The input as it is; its forward and backward take a while."""

    @staticmethod
    def forward(context, values: torch.Tensor, milliseconds: float) -> torch.Tensor:
        context.milliseconds = milliseconds
        _spend(milliseconds)
        return values.clone()

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _spend(2 * context.milliseconds)
        return gradient, None


def _spend(milliseconds: float) -> None:
    time.sleep(milliseconds / 1e3)


class Model(torch.nn.Module):
    """Two layers with a wait in each: 4 ms of forward and 8 of backward in the first, 2 and 4 in the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 512), torch.nn.Linear(512, 10, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = Slow.apply(self.first(inputs), 4.0)
        return Slow.apply(self.second(hidden), 2.0)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        loss = model(torch.randn(16, 64, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def profiled(folder: str, steps: int, specs: list[Spec]) -> tuple[Profile, Cluster, Costs, list[str], bool]:
    """Profile one model and train another without: what was found, and whether both learned the same."""
    rank, models = torch.distributed.get_rank(), [Model()]
    models.append(copy.deepcopy(models[0]))
    weights = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.QSGD(bits=4), edge_bytes=1024))
        hooks = len(model._forward_hooks), len(model.first._forward_pre_hooks)
        if model is models[0]:
            with handle.profile(folder, steps=steps, specs=specs) as found:
                train(model, optimizer, 3 + 2 * steps, rank)
            assert hooks == (len(model._forward_hooks), len(model.first._forward_pre_hooks))
        else:
            train(model, optimizer, 3 + 2 * steps, rank)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        handle.detach()
    return found.profile, found.cluster, found.costs, sorted(found.fits), torch.equal(*weights)


def measured_with_slow_copies() -> tuple[float, float]:
    """What an all-reduce costs by byte where copies into buckets take a microsecond a byte."""
    handle = gw.parallelize(Model(), plan=gw.Identity())
    lane, grid = handle.session.lanes.data[0], handle.session.group.grid
    measure = partial(measure_links, grid=grid, device=torch.device("cpu"), seconds=0.01)
    usual, links._copies_us_per_byte = links._copies_us_per_byte, lambda: 1.0
    try:
        times = lane.submit(measure).result()
    finally:
        links._copies_us_per_byte = usual
    handle.detach()
    found = measured_links(times, grid, 1.0).cluster.allreduce
    assert found is not None
    return found.cpu_us_per_byte, usual()


def test_an_all_reduce_costs_its_copies_too(worlds: Worlds) -> None:
    for us_per_byte, copies_us_per_byte in worlds.run(2, measured_with_slow_copies):
        assert us_per_byte > 0.9
        assert 1e-6 < copies_us_per_byte < 1.0


def processors_of_a_node() -> float | None:
    """What is measured while all ranks are on one processor."""
    handle = gw.parallelize(Model(), plan=gw.Identity())

    def measure(link: Any) -> float | None:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            return measure_processors(link, torch.distributed.get_world_size())
        finally:
            os.sched_setaffinity(0, before)

    found = handle.session.lanes.data[0].submit(measure).result()
    handle.detach()
    return found


def test_ranks_that_share_a_processor_are_found(worlds: Worlds) -> None:
    found = worlds.run(3, processors_of_a_node)
    assert found[0] == found[1] == found[2]
    assert found[0] is not None and 0 < found[0] < 1.9, "1 processor, or less where others use it"


@pytest.mark.timing
def test_a_profile_of_a_training_loop(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, profiled, str(tmp_path / "out"), 5, [gw.TopK(0.01)])
    assert first[4] and second[4], "a profiled run learns the same, bit for bit"
    assert (first[1].intra, first[1].allreduce) == (second[1].intra, second[1].allreduce), "ranks agree on links"
    assert first[3] == ["allreduce", "ddp", "intra"]
    assert first[1].allreduce is not None and first[1].allreduce.cpu_us_per_byte > 0
    assert first[1].ddp is not None and first[1].ddp.cpu_us_per_byte > 0
    intra = first[1].intra
    assert intra.message_us is not None and 0 <= intra.message_us <= intra.alpha_us
    assert intra.cpu_us + intra.cpu_us_per_byte > 0
    assert first[0].processor_part is not None and first[0].processor_part < 0.8, "the model sleeps"
    profile, cluster, costs, *_ = first
    assert profile == Profile.load(tmp_path / "out" / "profile.json")
    assert cluster == Cluster.load(tmp_path / "out" / "cluster.json")
    assert costs == Costs.load(tmp_path / "out" / "costs.json")
    assert (profile.batch, profile.steps, profile.device) == (16, 5, "cpu")
    assert profile.tensors[0].name == "second.weight"
    by_name = {tensor.name: tensor for tensor in profile.tensors}
    # the wait stands behind each layer, so backward passes it before the layer's gradients
    assert by_name["second.weight"].backward_us > 3500
    layer = [by_name["first.weight"], by_name["first.bias"]]
    assert sum(tensor.backward_us for tensor in layer) > 7500
    assert sorted(tensor.forward_us or 0.0 for tensor in layer)[0] == 0, "a layer's time counts once"
    assert sum(tensor.forward_us or 0.0 for tensor in layer) > 3500
    assert (by_name["second.weight"].forward_us or 0.0) > 1500
    assert profile.optimizer_us and profile.loaded_backward_us and profile.loaded_backward_us > 11_000
    assert (cluster.nodes, cluster.ranks_per_node) == (1, 2)
    assert [codec.spec for codec in costs.codecs] == [gw.QSGD(bits=4), gw.TopK(0.01)]
    for codec in costs.codecs:
        assert codec.encode[-1][1] > codec.encode[0][1] > 0
    plan = gw.Uniform(gw.QSGD(bits=4)).plan(profile.tensor_infos("cpu"))
    assert Simulator(profile, cluster, costs).step_us(plan) > 15_000


def profiled_alone(folder: str) -> tuple[Profile, Cluster | None, Costs]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Identity())
    with handle.profile(folder, steps=2, specs=[gw.QSGD(bits=4)]) as found:
        train(model, optimizer, 7, 0)
    handle.detach()
    return found.profile, found.cluster, found.costs


def test_a_rank_alone_is_profiled_without_links_for_a_cluster_that_is_not_there_yet(worlds: Worlds, tmp_path: Path) -> None:
    ((profile, cluster, costs),) = worlds.run(1, profiled_alone, str(tmp_path))
    assert cluster is None and sorted(path.name for path in tmp_path.iterdir()) == ["costs.json", "profile.json"]
    assert profile == Profile.load(tmp_path / "profile.json") and costs == Costs.load(tmp_path / "costs.json")
    assert {tensor.name for tensor in profile.tensors} == {"first.weight", "first.bias", "second.weight"}
    assert sum(tensor.backward_us for tensor in profile.tensors) > 11_000, "backward waits 12 ms"
    assert profile.optimizer_us is not None and [codec.spec for codec in costs.codecs] == [gw.QSGD(bits=4)]
    link = Link(alpha_us=30, gbps=25)
    planned = Cluster(nodes=16, ranks_per_node=1, intra=link, inter=link)
    plan = gw.Uniform(gw.QSGD(bits=4)).plan(profile.tensor_infos("cpu"), 16)
    assert Simulator(profile, planned, costs).step_us(plan) > 15_000


def too_short(folder: str) -> tuple[str, bool]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.QSGD(bits=4))
    try:
        with handle.profile(folder, steps=5):
            train(model, optimizer, 4, torch.distributed.get_rank())
    except StepStateError as error:
        train(model, optimizer, 2, torch.distributed.get_rank())  # goes on as if nothing had been
        handle.detach()
        return str(error), bool(model.first._forward_pre_hooks)
    raise AssertionError("4 steps were enough")


def test_too_few_steps_are_refused_with_the_number_that_is_needed(worlds: Worlds, tmp_path: Path) -> None:
    for words, hooked in worlds.run(2, too_short, str(tmp_path / "out")):
        assert "made 4 steps" in words and "needs 13" in words
        assert not hooked
    assert not (tmp_path / "out").exists()


def plans_that_change(folder: str) -> list[str]:
    """Profile while auto tries plans, and while another plan is set in the middle."""
    rank, said = torch.distributed.get_rank(), []
    for plan in ("auto", gw.QSGD(bits=4)):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, optimizer, plan=plan)
        try:
            with handle.profile(folder, steps=2):
                train(model, optimizer, 5, rank)
                handle.session.change_to(handle.session.plan_of(gw.Uniform(gw.QSGD(bits=8))))
                train(model, optimizer, 2, rank)
        except (PlanError, StepStateError) as error:
            said.append(str(error))
        train(model, optimizer, 1, rank)
        handle.detach()
    return said


def test_steps_of_several_plans_are_not_profiled(worlds: Worlds, tmp_path: Path) -> None:
    for auto, changed in worlds.run(2, plans_that_change, str(tmp_path / "out")):
        assert "still being tried" in auto and "handle.decision" in auto
        assert "the plan changed inside profile(steps=2)" in changed
    assert not (tmp_path / "out").exists()


class Backwards(torch.nn.Module):
    """Its layers are registered in another order than they are used in, so that the plan is made anew after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


def plan_made_anew(folder: str) -> bool:
    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), bucket_bytes=64, edge_bytes=64))
    before = handle.plan
    with handle.profile(folder, steps=2):
        for _ in range(7):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    changed = handle.plan != before
    handle.detach()
    return changed


def test_a_plan_made_anew_in_the_warm_up_is_profiled(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, plan_made_anew, str(tmp_path / "out")) == [True, True]
    assert (tmp_path / "out" / "profile.json").exists()


def test_an_executor_that_holds_hands_over_all_buckets_when_the_last_is_ready() -> None:
    streams = SimpleNamespace(mark=lambda: None)
    lane = SimpleNamespace(link=SimpleNamespace(streams=streams), submit=lambda job: Future())
    lanes = SimpleNamespace(data=[lane, lane], offload=0, first_tag=0, observers=[LanesObserver()], times_device=False)
    plan = SimpleNamespace(
        launch=((0, "allreduce"), (1, "allreduce")),
        gate=2,
        buckets=[SimpleNamespace(option=(), link_tasks=("allreduce",))] * 2,
    )
    buckets = [SimpleNamespace(index=i, chunks=[SimpleNamespace(exchanges=1)]) for i in range(2)]
    executor = Executor(plan, buckets, lanes)
    for hold, counts in ((True, ([0, 0], [1, 1])), (False, ([1, 0], [1, 1]))):
        lanes.holds = hold
        executor.start()
        for bucket, count in enumerate(counts):
            executor.ready(bucket)
            told = [arrivals.qsize() for arrivals in executor.running.progress.arrivals]
            assert told == count, "a lane hears of the buckets that it has tasks of"


# ---- times of models, made up


def test_gaps_and_forwards_add_up_to_the_medians_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    infos = [TensorInfo(name, (3,), "float32") for name in ("first.weight", "first.bias", "second.weight", "unused")]
    forward = 100 + 10 * torch.rand(9, 3, generator=generator, dtype=torch.float64)
    began = forward.sum(1, keepdim=True)
    ready = began + torch.tensor([[50.0, 40.0, 10.0, math.nan]]) + torch.rand(9, 1, generator=generator)
    rest = torch.tensor([[7.0, 0.5 * (began.median().item() + 50.0)]]).expand(9, 2)
    quiet = torch.cat([forward, began, ready, rest], 1)
    times = model_times(infos, [[0, 1], [2], [3]], quiet, quiet)
    assert [tensor.name for tensor in times.tensors] == ["second.weight", "first.bias", "first.weight", "unused"]
    assert sum(tensor.forward_us for tensor in times.tensors) == pytest.approx(began.median().item())
    middle = began.median().item() + sum(tensor.backward_us for tensor in times.tensors)
    assert middle == pytest.approx(ready[:, 0].median().item())
    assert [tensor.backward_us for tensor in times.tensors][1:] == pytest.approx([30, 10, 0])
    assert times.tensors[2].forward_us == 0, "of two tensors of a module the one that is ready first has its forward"
    assert times.optimizer_us == 7
    assert times.processor_part == pytest.approx(0.5, rel=0.05), "half of the time until the last gradient"
    assert times.tensors[1].backward_iqr_us == pytest.approx(0) and times.tensors[1].forward_iqr_us > 0
    assert times.loaded_backward_us == pytest.approx((ready[:, 0] - began[:, 0]).median().item())


def test_the_slowest_rank_of_each_moment_counts() -> None:
    nan = math.nan
    rows = torch.tensor([[[1.0, 5.0, nan, nan]], [[2.0, 4.0, 3.0, nan]]])
    assert slowest(rows)[0].tolist()[:3] == [2.0, 5.0, 3.0]
    assert math.isnan(slowest(rows)[0, 3])


def test_what_codecs_leave_of_an_exchanges_cpu_time_is_shared_by_its_launches() -> None:
    tensors = [TensorProfile(name="w", shape=(4 * 2**20,), dtype="float32", backward_us=1.0)]
    plan = gw.Uniform(gw.QSGD(bits=4)).plan(Profile(model="m", batch=1, device="cpu", tensors=tensors).tensor_infos("cpu"))
    cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(1.0, 1.0), inter=Link(1.0, 1.0))
    costs = Costs(codecs=[CodecCosts(spec=gw.QSGD(bits=4), device="cpu", encode=[(0, 10.0)], decode=[(0, 5.0)])])
    assert [bucket.chunk_bytes for bucket in plan.buckets] == [8 * 2**20]
    # 2 chunks of 2 exchanges; in each phase an encode of half a chunk, then a decode
    codec_us = 2 * (10.0 + 5.0 + 10.0 + 5.0)
    assert launch_time_us(plan, tensors, cluster, costs, 4 * 30.0 + codec_us) == pytest.approx(30.0)
    assert launch_time_us(plan, tensors, cluster, costs, 1.0) == 0
    known = msgspec.structs.replace(cluster, allreduce=Link(1.0, 1.0, cpu_us=20.0))
    more = TensorProfile(name="v", shape=(1024,), dtype="float32", backward_us=1.0)
    plain = gw.Uniform(gw.Identity()).plan([TensorInfo("v", (1024,), "float32")])
    both = msgspec.structs.replace(plan, buckets=plan.buckets + plain.buckets, launch=(*plan.launch, (1, "allreduce")))
    assert launch_time_us(both, [*tensors, more], known, costs, 4 * 30.0 + codec_us + 20.0) == pytest.approx(30.0)
    assert launch_time_us(plain, [more], known, costs, 25.0) == 0, "no other exchange has a time"


# ---- links and codecs, made up


@pytest.mark.parametrize(("nodes", "local"), [(1, 2), (1, 4), (2, 1), (3, 1), (2, 2)])
def test_links_are_found_from_times_that_follow_them(nodes: int, local: int) -> None:
    grid, sizes = Grid.even(nodes, local, 0), [1e3, 1e4, 1e5, 1e6, 1e7]
    true = {"intra": Link(5.0, 100.0), "inter": Link(40.0, 10.0), "allreduce": Link(20.0, 8.0)}
    times: dict[str, list[tuple[float, float]]] = {"allreduce": []}
    for m in sizes:
        small, large = sum_traffic("allreduce", nodes, local)
        traffic = large if large is not None and goes_around(m, nodes, nodes * local) else small
        load = traffic.inter if nodes > 1 else traffic.intra
        times["allreduce"].append((m, load.messages * 20.0 + load.factor * m * 1e-3))
    for name, ranks, beta in (("intra", local, 8e-5), ("inter", nodes, 8e-4)):
        if ranks > 1:
            times[name] = [(ranks * m, (ranks - 1) * (true[name].alpha_us + m * beta)) for m in sizes]
    found = measured_links(times | {"cpu": [(m, 150.0 + m * 5e-4) for m in sizes]}, grid)
    assert found.problems == [] and sorted(found.fits) == sorted(times)
    assert found.cluster.allreduce is not None
    cpu = found.cluster.allreduce.cpu_us, found.cluster.allreduce.cpu_us_per_byte
    assert cpu == pytest.approx((150.0, 5e-4))
    for name in times:
        link = getattr(found.cluster, name)
        assert (link.alpha_us, link.gbps) == pytest.approx((true[name].alpha_us, true[name].gbps))
    assert (found.cluster.nodes, found.cluster.ranks_per_node) == (nodes, local)


def test_nodes_of_different_size_are_those_of_the_largest() -> None:
    sizes = [1e4, 1e5, 1e6]
    times = {
        "intra": [(3 * m, 50.0 + 2 * m * 8e-4) for m in sizes],
        "inter": [(2 * m, 100.0 + m * 8e-2) for m in sizes],
        "allreduce": [(m, 300.0 + m * 0.2) for m in sizes],
    }
    cluster = measured_links(times, Grid.of(["a", "a", "a", "b", "b"], 0)).cluster
    assert (cluster.nodes, cluster.ranks_per_node, cluster.uneven, cluster.ranks_per_node_if_even) == (2, 3, True, None)
    assert (cluster.intra.gbps, cluster.inter.gbps) == pytest.approx((10.0, 0.1))
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_an_all_reduce_is_no_faster_than_the_link() -> None:
    """Its messages were so short that a buffer of the network took them."""
    sizes = [1e3, 1e4, 1e5]
    times = {
        "inter": [(2 * m, 100.0 + m * 8e-2) for m in (1e4, 1e5, 1e6)],
        "allreduce": [(m, 200.0 + m * 2e-2) for m in sizes],
        "ddp": [(m, 200.0 + m * 8e-2) for m in sizes],
    }
    cluster = measured_links(times, Grid.even(2, 1, 0)).cluster
    assert cluster.inter.gbps == pytest.approx(0.1)
    assert cluster.allreduce is not None and cluster.allreduce.gbps == pytest.approx(0.1)
    assert cluster.ddp is not None and cluster.ddp.gbps == pytest.approx(0.1)


def test_a_further_message_and_processor_times_of_exchanges_belong_to_their_links() -> None:
    """4 nodes: 3 messages at once take 100 us and 2 * 20 us, besides their bytes; a rank sends 3/4 of what it holds."""
    grid, sizes = Grid.even(4, 1, 0), [1e3, 1e4, 1e5, 1e6]
    times = {
        "inter": [(4 * m, 100.0 + 2 * 20.0 + 3 * m * 8e-3) for m in sizes],
        "inter message": [(0.0, 20.0 + 1024 * 8e-3)],
        "inter cpu": [(4 * m, 3 * 5.0 + 3 * m * 1e-3) for m in sizes],
        "allreduce": [(m, 4 * 100.0 + 1.5 * m * 8e-3) for m in sizes[:3]],
        "ddp": [(m, 6 * 70.0 + 1.5 * m * 4e-3) for m in sizes],
        "ddp cpu": [(m, 300.0 + m * 2e-3) for m in sizes],
        "cpu": [(m, 200.0 + m * 1e-3) for m in sizes],
    }
    cluster = measured_links(times, grid).cluster
    inter, ddp = cluster.inter, cluster.ddp
    assert (inter.alpha_us, inter.gbps, inter.message_us) == pytest.approx((100.0, 1.0, 20.0))
    assert (inter.cpu_us, inter.cpu_us_per_byte) == pytest.approx((5.0, 1e-3))
    assert cluster.allreduce is not None and cluster.allreduce.message_us == pytest.approx(20.0)
    assert ddp is not None and (ddp.alpha_us, ddp.gbps) == pytest.approx((70.0, 2.0)), "a ring of 6 messages"
    assert (ddp.cpu_us, ddp.cpu_us_per_byte) == pytest.approx((300.0, 2e-3))
    assert cluster.of_ddp.allreduce == ddp and cluster.of_ddp.ddp is None


def test_a_poor_fit_is_told_with_numbers_and_a_cure_and_a_flat_one_refused() -> None:
    grid, line = Grid.even(2, 1, 0), [(1e3, 10.0), (1e4, 20.0), (1e5, 120.0), (1e6, 1120.0)]
    bent = [(1e3, 10.0), (1e4, 90.0), (1e5, 300.0), (1e6, 500.0), (2e6, 9000.0)]
    problems = measured_links({"inter": bent, "allreduce": line}, grid).problems
    assert len(problems) == 1 and "inter link" in problems[0] and "Gb/s" in problems[0] and "Profile again" in problems[0]
    with pytest.raises(StepStateError, match="rate of the allreduce link cannot be found"):
        measured_links({"inter": line, "allreduce": [(size, 10.0 - size / 1e6) for size, _ in line]}, grid)


def test_batches_in_which_ranks_waited_for_processors_do_not_count() -> None:
    """A machine that is busy with other programs shows half of a link's rate; a link that was measured so alone has a problem."""
    assert links._Batches([10.0, 20.0, 11.0], [1.0] * 3, [0.05, 0.5, 0.1]).calm_us == [10.0, 11.0]
    assert links._Batches([20.0, 21.0, 22.0], [1.0] * 3, [0.5, 0.55, 0.5]).calm_us == [20.0, 21.0, 22.0], "none is better"
    grid, line = Grid.even(2, 1, 0), [(1e3, 10.0), (1e4, 20.0), (1e5, 120.0), (1e6, 1120.0)]
    times = {"inter": line, "allreduce": line}
    assert measured_links(times | {"inter waits": [(1e3, 0.9), (1e6, 0.05)]}, grid).problems == []
    (problem,) = measured_links(times | {"inter waits": [(1e3, 0.1), (1e6, 0.62)]}, grid).problems
    assert "inter link" in problem and "62 %" in problem and "Profile again" in problem


def test_more_ranks_than_connect_at_once_exchange_in_parts() -> None:
    for ranks in [*range(1, 100), 1000]:
        together = links._together(ranks)
        assert together <= 16 and -(-ranks // together) == -(-ranks // 16), "as few parts as there may be"
        assert together == ranks or ranks > 16
    grid, sizes = Grid.even(32, 1, 0), [1e3, 1e4, 1e5, 1e6]
    times = {"inter": [(16 * m, 15 * (40.0 + m * 8e-3)) for m in sizes], "allreduce": [(m, 100.0 + 2 * m * 8e-3) for m in sizes]}
    inter = measured_links(times, grid).cluster.inter
    assert (inter.alpha_us, inter.gbps) == pytest.approx((40.0, 1.0))


def test_a_link_whose_times_tell_no_rate_spoils_no_other() -> None:
    grid, sizes = Grid.even(2, 2, 0), [1e3, 1e4, 1e5, 1e6]
    times = {
        "intra": [(2 * size, 9.0) for size in sizes],
        "inter": [(2 * size, 200.0 + 8e-2 * size) for size in sizes],
        "allreduce": [(size, 900.0 + 0.5 * size) for size in sizes],
        "cpu": [(1e3, 9.0)] * 3,
    }
    cluster = measured_links(times, grid, unknown_gbps=100.0).cluster
    assert (cluster.intra.alpha_us, cluster.intra.gbps) == (9.0, 100.0)
    assert (cluster.inter.alpha_us, cluster.inter.gbps) == pytest.approx((200.0, 0.1))
    assert cluster.allreduce is not None and cluster.allreduce.gbps < 1


def test_one_size_tells_no_processor_time_and_stops_nothing() -> None:
    one = {"allreduce": [(1e3, 90.0)] * 3, "inter": [(2e3, 90.0)] * 3, "cpu": [(1e3, 40.0)] * 3}
    cluster = measured_links(one, Grid.even(2, 1, 0), unknown_gbps=100.0).cluster
    assert cluster.allreduce == Link(90.0, 100.0)


sizes = st.lists(st.integers(1, 10**8), min_size=2, max_size=6, unique=True).map(sorted)


@settings(max_examples=50, deadline=None)
@given(corners=sizes, data=st.data())
def test_a_curve_of_straight_pieces_is_found_from_its_points(corners: list[int], data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(1, 1e6), min_size=len(corners), max_size=len(corners)))
    curve = tuple(zip(corners, times, strict=True))
    between = [(low + high) // 2 for low, high in itertools.pairwise(corners)]
    found = fit_points([(size, time_at(curve, size)) for size in [*corners, *between]], corners)
    assert [size for size, _ in found] == corners
    assert [us for _, us in found] == pytest.approx(times, rel=1e-6)


def test_a_curve_goes_between_times_that_no_curve_meets_and_needs_its_corners() -> None:
    samples = [(0, 10.0), (50, 16.0), (100, 20.0)]
    (_, low), (_, high) = fit_points(samples, [0, 100])

    def errors(low: float, high: float) -> float:
        fitted = (low, (low + high) / 2, high)
        return sum(((us - fit) / us) ** 2 for (_, us), fit in zip(samples, fitted, strict=True))

    assert errors(low, high) < min(errors(low * a, high * b) for a in (0.99, 1, 1.01) for b in (0.99, 1, 1.01) if a * b != 1)
    with pytest.raises(FormatError, match="no time was measured of"):
        fit_points(samples, [0, 70])
    with pytest.raises(FormatError, match="must be a time in microseconds"):
        fit_points([(0, 1.0), (100, -1.0)], [0, 100])


# ---- predictions


def test_the_plan_of_ddp_has_its_buckets() -> None:
    mib = 2**18  # elements of float32
    sizes = [mib // 2, mib // 2, 20 * mib, 6 * mib, mib]
    tensors = [TensorProfile(name=f"t{i}", shape=(n,), dtype="float32", backward_us=1.0) for i, n in enumerate(sizes)]
    plan = ddp_plan(Profile(model="m", batch=1, device="cpu", tensors=tensors))
    assert [bucket.tensors for bucket in plan.buckets] == [("t0", "t1"), ("t2", "t3"), ("t4",)]
    assert plan.launch == ((0, "allreduce"), (1, "allreduce"), (2, "allreduce"))


def test_the_errors_of_a_run_are_summed_up_and_its_file_round_trips() -> None:
    times = {"computation_us": 5.0, "wire_us": 4.0, "codec_us": 1.0}
    cells = [
        Predicted(job="mlp", link="1gbit", method="ddp", predicted_us=predicted, measured_us=measured, **times)
        for predicted, measured in ((90.0, 100.0), (105.0, 100.0), (150.0, 100.0), (10.0, None))
    ]
    made = Made(host="h", date="d", command="c")
    run = PredictRun(made=made, torch="2", cores=2, nodes=2, ranks_per_node=1, profile_steps=5, steps=9, cells=tuple(cells))
    assert run.with_errors().median_error == pytest.approx(0.1)
    assert run.with_errors().worst_error == pytest.approx(0.5)
    assert "median 10.0 %, worst 50.0 %" in summary(run.with_errors())
    assert PredictRun.from_json(run.with_errors().to_json()) == run.with_errors()
