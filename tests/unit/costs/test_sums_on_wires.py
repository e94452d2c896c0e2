"""Prices of uncompressed sums on wires: their messages and bytes are those of the lists of operations that ranks run."""

from typing import NamedTuple

import pytest
import torch
from msgspec.structs import replace

from gradwire.collectives.wire_sum import WireSum, even_bounds
from gradwire.core import (
    COLLECTIVES,
    Bucket,
    Cluster,
    CodecCosts,
    Costs,
    Identity,
    Link,
    PowerSGD,
    RandomK,
    TensorInfo,
    goes_around,
    least_ring_bytes,
)
from gradwire.costs.collectives import Line, sum_traffic
from gradwire.costs.fit import fit_link
from gradwire.costs.prices import Prices, fold
from gradwire.costs.steps import steps_of
from gradwire.plan.schemes import tasks_of
from gradwire.sim.rules import rules_of
from gradwire.transport import Grid, Operations

INTRA, INTER = Link(1.0, 80.0), Link(10.0, 8.0)
SHAPES = [(2, 1), (3, 1), (4, 1), (8, 1), (16, 1), (2, 2), (4, 2), (3, 4), (1, 2), (1, 3), (1, 8)]
TWO_PHASES = COLLECTIVES["alltoall"].uncompressed


class Sent(NamedTuple):
    """What a rank sends inside its node and to other nodes: messages and bytes."""

    messages: tuple[int, int]
    nbytes: tuple[int, int]


def sent(made: Operations, grid: Grid, pieces: int) -> Sent:
    """Count the sends of a list. `pieces`: of a message."""
    messages, nbytes = [0] * grid.world_size, [0] * grid.world_size
    for operation in made.array:
        if operation.kind == 1:
            messages[operation.peer] += 1
            nbytes[operation.peer] += operation.arguments[0]
    inside, between = grid.split(messages)
    return Sent((inside // pieces, between // pieces), grid.split(nbytes))


def counted(nodes: int, local: int, numel: int, phases: tuple[int, ...], by_node: bool, pieces: int = 1) -> list[Sent]:
    """What each rank sends in these phases of a sum of float32 elements."""
    flat, found = torch.zeros(numel), []
    for rank in range(nodes * local):
        grid = Grid.even(nodes, local, rank)
        sums = WireSum(flat, grid, even_bounds(numel, nodes * local), by_node)
        found.append(sent(sums.operations(phases, 0, ()), grid, pieces))
    return found


@pytest.mark.parametrize(("nodes", "local"), [(20, 1), (4, 2)])
def test_sums_of_payloads_have_the_traffic_of_sums_of_gradients(nodes: int, local: int) -> None:
    option = tasks_of("allreduce", "cpu", PowerSGD())
    sums = [step for step in steps_of(option, nodes, local, PowerSGD.rounds, "wires") if step.traffic is not None]
    assert [(step.traffic, step.large) for step in sums] == [sum_traffic("allreduce", nodes, local)] * PowerSGD.rounds


@pytest.mark.parametrize(("nodes", "local"), SHAPES)
@pytest.mark.parametrize("word", ["allreduce", "alltoall", "allgather"])
def test_small_sums_have_the_messages_and_bytes_of_the_lists(nodes: int, local: int, word: str) -> None:
    world, numel = nodes * local, 16 * nodes * local
    phases = {"allreduce": (0, 1), "alltoall": (0,), "allgather": (1,)}[word]
    ranks = counted(nodes, local, numel, phases, by_node=word == "allreduce")
    assert not goes_around(4 * numel, nodes, world)
    traffic, _ = sum_traffic(word, nodes, local)
    held = 4 * numel / (world if word == "allgather" else 1)
    assert {each.messages for each in ranks} == {(traffic.intra.messages, traffic.inter.messages)}
    assert all(each.nbytes[0] == pytest.approx(traffic.intra.factor * held) for each in ranks)
    of_node = sum(each.nbytes[1] for each in ranks[:local])
    assert of_node == pytest.approx(traffic.inter.factor * held) and sum(ranks[0].nbytes) == pytest.approx(traffic.sent * held)
    assert traffic.in_turn == (nodes > 1 < local)


@pytest.mark.parametrize(("nodes", "local"), [(3, 1), (4, 1), (8, 1), (16, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("word", ["allreduce", "alltoall", "allgather"])
def test_large_sums_have_the_hops_and_bytes_of_a_ring(nodes: int, local: int, word: str) -> None:
    world = nodes * local
    numel = 2**14 * world
    assert goes_around(4 * numel, nodes, world)
    phases = {"allreduce": (0, 1), "alltoall": (0,), "allgather": (1,)}[word]
    ranks = counted(nodes, local, numel, phases, by_node=word == "allreduce")
    _, traffic = sum_traffic(word, nodes, local)
    assert traffic is not None
    held = 4 * numel / (world if word == "allgather" else 1)
    assert {sum(each.messages) for each in ranks} == {traffic.inter.messages}
    assert sum(each.nbytes[1] for each in ranks[:local]) == pytest.approx(traffic.inter.factor * held)


@pytest.mark.parametrize("option", [("allreduce:inter",), TWO_PHASES], ids=["all-reduce", "two phases"])
@pytest.mark.parametrize("world", [4, 6, 8, 16, 24])
def test_the_price_changes_where_the_engine_changes(option: tuple[str, ...], world: int) -> None:
    numel = least_ring_bytes(world) // 4
    assert numel == 2**14 * world * (1 if world <= 16 else world // 4)
    cluster = Cluster(nodes=world, ranks_per_node=1, intra=INTRA, inter=INTER)
    found = []
    for at in (numel - 1, numel):
        tensors = [TensorInfo("w", (at,), "float32")]
        bucket = Bucket(tensors=("w",), spec=Identity(), option=option)
        tasks = Prices(tensors, cluster, Costs(codecs=()), rules_of("cpu").routing).of(bucket).tasks
        latency_us = sum(task.us for task in tasks) - 2 * (world - 1) / world * 4 * at * 0.001
        found.append(round(latency_us / INTER.alpha_us))
        if world <= 16:  # larger messages are cut into pieces
            ran = counted(world, 1, at, (0, 1), by_node=len(option) == 1)
            assert found[-1] == sum(ran[0].messages)
    assert found[0] < found[1] == 2 * (world - 1)


def test_sums_of_many_ranks_halve_unless_bytes_take_long() -> None:
    """In a ring of 256 ranks the latency of 510 hops would be most of the time of a bucket of 25 MiB."""
    bucket = 25 * 2**20
    around = [goes_around(bucket, world, world) for world in (16, 32, 64, 256, 1024)]
    assert around == [True, True, False, False, False]
    sums = WireSum(torch.zeros(bucket // 4), Grid.even(64, 1, 5), even_bounds(bucket // 4, 64), True)
    assert sums.operations((0, 1), 0, ()).peers == {5 ^ 2**bit for bit in range(6)}


def test_on_a_gpu_all_reduce_is_a_ring_of_any_size() -> None:
    cluster = Cluster(nodes=8, ranks_per_node=1, intra=INTRA, inter=INTER)
    bucket = Bucket(tensors=("w",), spec=Identity(), option=("allreduce:inter",))
    prices = Prices([TensorInfo("w", (250,), "float32")], cluster, Costs(codecs=()), rules_of("gpu").routing)
    assert prices.of(bucket).tasks[0].us == pytest.approx(14 * 10 + 2 * 7 / 8 * 1000 * 0.001)


def test_stages_inside_nodes_and_between_them_follow_each_other() -> None:
    traffic, _ = sum_traffic("allreduce", 2, 4)
    (line,) = traffic.lines(INTRA, [INTER])
    # 2 x 2 stages inside at 1 us, 2 between at 10 us; of 1000 bytes 1500 inside at 10 GB/s, of all 4 ranks 1000 between at 1 GB/s
    assert isinstance(line, Line) and traffic.time_us(1000.0, INTRA, INTER) == pytest.approx(4 + 20 + 0.15 + 1.0)


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (8, 2), (8, 4)])
def test_hops_inside_a_node_are_no_latency_of_the_link_between_nodes(ranks: int, per_node: int) -> None:
    """Where the time of a further message is known: of each ring's hops so many leave a node."""
    nodes, message_us = ranks // per_node, 2.0
    near, far = replace(INTRA, alpha_us=0.001), replace(INTER, alpha_us=50_000.0, message_us=message_us)
    small, large = sum_traffic("allreduce", nodes, per_node)
    assert large is not None and large.rounds is not None
    assert large.rounds[1] == -(-2 * (ranks - 1) // per_node) < large.inter.messages
    points = []
    for nbytes in (1024.0, 2.0**20):
        traffic = large if goes_around(nbytes, nodes, ranks) else small
        points += [(nbytes, traffic.time_us(nbytes, near, far))] * 3
    link, _ = fit_link(points, "allreduce", ranks, "wires", per_node, message_us)
    assert (link.alpha_us, link.gbps) == (pytest.approx(far.alpha_us, rel=0.01), pytest.approx(far.gbps, rel=0.05))


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (4, 1), (8, 1), (12, 1), (8, 8)])
def test_the_link_is_found_from_sums_of_any_size(ranks: int, per_node: int) -> None:
    nodes = ranks // per_node
    small, large = sum_traffic("allreduce", nodes, per_node)
    points = []
    for nbytes in (1024 * 4**power for power in range(8)):
        traffic = large if large is not None and goes_around(nbytes, nodes, ranks) else small
        points.append((float(nbytes), traffic.time_us(nbytes, INTER, INTER)))
    link, fit = fit_link(points, "allreduce", ranks, "wires", per_node)
    assert (link.alpha_us, link.gbps) == (pytest.approx(INTER.alpha_us), pytest.approx(INTER.gbps)) and not fit.problem


def test_curves_bend_where_sums_change() -> None:
    cluster = Cluster(nodes=16, ranks_per_node=1, intra=INTRA, inter=INTER)
    exchange = fold(("allreduce:inter",), Identity(), Prices([], cluster, Costs(codecs=()), "wires")).exchange
    at = 16 * 2**16
    assert exchange(at) - exchange(at - 4) == pytest.approx((30 - 8) * 10, abs=0.1)


def test_curves_of_payloads_bend_where_the_payloads_are_as_large() -> None:
    cluster, spec = Cluster(nodes=16, ranks_per_node=1, intra=INTRA, inter=INTER), RandomK(0.05)
    flat = ((0, 1.0), (2**30, 1.0))
    times = Costs(codecs=[CodecCosts(spec=spec, device="cpu", encode=flat, decode=flat)])
    exchange = fold(("comp:cpu", "allreduce:inter", "decomp:cpu"), spec, Prices([], cluster, times, "wires")).exchange
    at = 16 * 2**16 * 20
    assert exchange(at) - exchange(at - 4096) == pytest.approx((30 - 8) * 10, abs=1.0)


def test_a_further_message_that_takes_more_than_the_times_leave_is_a_message_that_waits() -> None:
    points = [(4.0 * n, 250 + 3 * n * 8 / 100) for n in (1024, 4096, 16384, 65536)]
    link, _ = fit_link(points, "alltoall", 4, "wires", 1, message_us=100.0)
    whole, _ = fit_link(points, "alltoall", 4, "wires", 1)
    assert (link.alpha_us, link.gbps, link.message_us) == (whole.alpha_us, whole.gbps, whole.alpha_us)
