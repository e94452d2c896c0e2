"""Bits by tensor for the shortest step: against brute force, and on simulated steps of a plan."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from test_planner_bits import check, layers

from gradwire.core import Cluster, Costs, Link, Profile, TensorProfile
from gradwire.core.costs import CodecCosts
from gradwire.core.specs import innermost
from gradwire.plan import AdaptiveBits
from gradwire.planner.bits import Sensitivity, error_budget, exact, shortest, step_times, with_specs
from gradwire.sim.simulator import Simulator

WIDTHS = tuple(range(2, 9))
FOUR = WIDTHS.index(4)


def on_a_link(
    tensors: Sequence[Sensitivity], buckets: Sequence[int], ready: Sequence[float], us_per_byte: float
) -> Callable[[Sequence[int]], float]:
    """Steps of one link that sends bucket after bucket, none before it is ready; backward ends with the last one."""

    def step_us(choices: Sequence[int]) -> float:
        now = 0.0
        for bucket, ready_us in enumerate(ready):
            size = sum(tensor.sizes[way] for tensor, way, own in zip(tensors, choices, buckets, strict=True) if own == bucket)
            now = max(now, ready_us) + us_per_byte * size
        return now

    return step_us


@pytest.mark.parametrize("seed", range(30))
def test_steps_are_nearly_the_shortest_and_never_longer_than_with_the_fewest_bytes(seed: int) -> None:
    chance = random.Random(seed)
    tensors = [each._replace(sizes=each.sizes[1:5], errors=each.errors[1:5]) for each in layers(6, chance)]
    buckets = [0, 0, 1, 1, 2, 2]
    budget = error_budget(tensors, 1, 2.0)
    whole = sum(tensor.sizes[1] for tensor in tensors)
    ready = sorted(chance.uniform(0, 1000.0) for _ in range(3))
    step_us = on_a_link(tensors, buckets, ready, chance.choice([0.3, 1.0, 3.0]) * ready[-1] / whole)
    found = shortest(tensors, budget, buckets, step_us)
    check(tensors, found, budget)
    least_us = min(
        step_us(ways)
        for ways in itertools.product(range(4), repeat=len(tensors))
        if math.fsum(tensor.errors[way] for tensor, way in zip(tensors, ways, strict=True)) <= budget
    )
    assert least_us <= step_us(found.choices) <= 1.1 * least_us
    assert step_us(found.choices) <= 1.001 * step_us(exact(tensors, budget).choices)
    assert found == shortest(tensors, budget, buckets, step_us), "not the same for the same arguments"


def alike(count: int) -> list[Sensitivity]:
    """Of the same size and norm, so that bytes alone prefer none."""
    sizes = tuple(1000 * bits for bits in WIDTHS)
    return [Sensitivity(f"w{i}", sizes, tuple(4.0**-bits for bits in WIDTHS), 8000, 1.0, 0.3) for i in range(count)]


def test_a_bucket_that_hides_gets_the_bits_that_one_which_is_waited_for_gives_up() -> None:
    tensors, buckets = alike(4), [0, 1, 2, 3]
    budget = error_budget(tensors, FOUR, 1.1)  # one of 3 bits and three of 5 are within it, by fewest bytes none
    # three come early and have long backward to hide behind; the last has none
    step_us = on_a_link(tensors, buckets, [0.0, 10_000.0, 20_000.0, 90_000.0], 1.0)
    found, smallest = shortest(tensors, budget, buckets, step_us), exact(tensors, budget)
    assert smallest.choices == (FOUR,) * 4
    assert found.choices[3] < FOUR < min(found.choices[:3])
    assert found.error <= budget and found.nbytes > smallest.nbytes
    assert step_us(found.choices) == 90_000.0 + 1000 * WIDTHS[found.choices[3]] < step_us(smallest.choices)


def test_where_all_is_hidden_or_all_is_waited_for_bytes_decide() -> None:
    chance = random.Random(5)
    tensors = layers(12, chance)
    buckets = [index // 4 for index in range(12)]
    budget = error_budget(tensors, FOUR, 2.0)
    least = exact(tensors, budget).nbytes
    for ready, us_per_byte in (([0.0, 1e9, 2e9], 0.0), ([0.0, 0.0, 0.0], 1.0)):
        assert shortest(tensors, budget, buckets, on_a_link(tensors, buckets, ready, us_per_byte)).nbytes == least


def test_a_tensor_without_gradient_takes_nothing_of_the_budget() -> None:
    still = Sensitivity("still", tuple(1000 * bits for bits in WIDTHS), (0.0,) * len(WIDTHS), 8000)
    tensors, buckets = [*alike(2), still], [0, 1, 1]
    budget = error_budget(tensors, FOUR, 1.0)
    found = shortest(tensors, budget, buckets, on_a_link(tensors, buckets, [0.0, 50_000.0], 1.0))
    assert found.choices[2] == 0 and found.error <= budget


# ---- a plan and the simulator


def job(schedule: str) -> tuple[AdaptiveBits, Simulator, list[str]]:
    """Eight matrices and a vector: the first gradients have long backward behind them, and long forward, the last ones none."""
    gaps = [*[30_000.0] * 7, 1000.0, 0.0]
    shapes = [*[(400, 500)] * 8, (500,)]
    tensors = [
        TensorProfile(name=f"w{i}", shape=shape, dtype="float32", backward_us=gap, forward_us=gap)
        for i, (shape, gap) in enumerate(zip(shapes, gaps, strict=True))
    ]
    adaptive = AdaptiveBits(schedule=schedule)
    link = Link(50.0, 0.1)
    times = [
        CodecCosts(spec=spec, device="cpu", encode=((4096, 5.0), (2**20, 200.0)), decode=((4096, 5.0), (2**20, 200.0)))
        for spec in adaptive.ways(WIDTHS)
    ]
    simulator = Simulator(
        Profile(model="made up", batch=1, device="cpu", optimizer_us=1000.0, tensors=tensors),
        Cluster(nodes=2, ranks_per_node=1, intra=link, inter=link),
        Costs(codecs=times),
    )
    return adaptive, simulator, [f"w{i}" for i in range(8)]


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_on_simulated_steps_the_exposed_buckets_get_fewer_bits(schedule: str) -> None:
    adaptive, simulator, names = job(schedule)
    plan = adaptive.policy.plan(simulator.profile.tensor_infos("cpu"))
    tensors, ways = alike(8), adaptive.ways(WIDTHS)
    place = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket.tensors}
    buckets = [place[name] for name in names]
    assert len(set(buckets)) > 2
    step_us = step_times(plan, simulator, names, ways)
    budget = error_budget(tensors, FOUR, 1.2)
    found = shortest(tensors, budget, buckets, step_us)
    uniform = [FOUR] * 8
    specs = {name: ways[choice] for name, choice in zip(names, uniform, strict=True)}
    assert [with_specs(bucket, specs) for bucket in plan.buckets] == list(plan.buckets)
    assert step_us(uniform) == simulator.step_us(plan)
    assert step_us(found.choices) < 0.995 * step_us(uniform) and found.error <= budget
    bits = [innermost(ways[choice]).element_bits for choice in found.choices]
    assert min(bits[-2:]) < 4 < max(bits[:6])
    assert step_us(found.choices) < step_us(exact(tensors, budget).choices)
