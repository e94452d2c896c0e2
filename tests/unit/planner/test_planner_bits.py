"""Bits by tensor: the exact assignment against brute force, CGX's two rules, and what is refused."""

import itertools
import math
import random

import pytest

import gradwire as gw
from gradwire.errors import PlanError
from gradwire.planner.bits import Assignment, Sensitivity, error_budget, exact, kmeans, linear


def made_up(count: int, ways: int, chance: random.Random) -> list[Sensitivity]:
    """Whole sizes that tie, errors of many magnitudes; neither need be monotonic."""
    tensors = []
    for index in range(count):
        sizes = tuple(chance.randint(1, 20) for _ in range(ways))
        errors = tuple(math.exp(chance.gauss(0, 3)) for _ in range(ways))
        tensors.append(Sensitivity(str(index), sizes, errors, chance.randint(1, 99), chance.random(), chance.random()))
    return tensors


def layers(count: int, chance: random.Random) -> list[Sensitivity]:
    """Like those of a model: 2 to 8 bits, each a quarter of the error of the one before."""
    tensors = []
    for index in range(count):
        numel, scale = int(math.exp(chance.uniform(4, 12))), math.exp(chance.gauss(0, 1.5))
        norm = scale * math.sqrt(numel)
        sizes = tuple(numel * bits // 8 + 4 * (numel // 128 + 1) for bits in range(2, 9))
        tensors.append(Sensitivity(str(index), sizes, tuple(norm**2 * 4.0**-bits for bits in range(2, 9)), numel, norm, norm / 3))
    return tensors


def least_bytes(tensors: list[Sensitivity], budget: float) -> int:
    return min(
        sum(tensor.sizes[way] for tensor, way in zip(tensors, ways, strict=True))
        for ways in itertools.product(*(range(len(tensor.sizes)) for tensor in tensors))
        if math.fsum(tensor.errors[way] for tensor, way in zip(tensors, ways, strict=True)) <= budget
    )


def check(tensors: list[Sensitivity], found: Assignment, budget: float) -> None:
    """It is what it says, and within the budget."""
    picked = list(zip(tensors, found.choices, strict=True))
    assert found.nbytes == sum(tensor.sizes[way] for tensor, way in picked)
    assert found.error == pytest.approx(math.fsum(tensor.errors[way] for tensor, way in picked))
    assert found.error <= budget


def test_the_exact_assignment_is_the_smallest():
    chance = random.Random(0)
    for _ in range(300):
        tensors = made_up(chance.randint(1, 6), chance.randint(1, 4), chance)
        low, high = (math.fsum(pick(tensor.errors) for tensor in tensors) for pick in (min, max))
        budget = 1.000001 * low + (high - low) * chance.random() ** 3
        found = exact(tensors, budget)
        check(tensors, found, budget)
        assert found.proven
        assert found.nbytes == least_bytes(tensors, budget)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_never_larger_than_the_rules_of_cgx(seed):
    tensors = layers(40, random.Random(seed))
    budget = error_budget(tensors, uniform=2)
    best = exact(tensors, budget)
    for found in (best, kmeans(tensors, budget), linear(tensors, budget)):
        check(tensors, found, budget)
        assert best.nbytes <= found.nbytes
    assert best.nbytes < sum(tensor.sizes[2] for tensor in tensors)  # uniform 4 bits at half the error


def test_rules_give_sensitive_tensors_more_bits():
    """Equal sizes, norms far apart, a budget that needs no repair."""
    tensors = [Sensitivity(str(i), (10, 20, 30), (3.0, 2.0, 1.0), 100, 10.0**i, 10.0**i) for i in range(3)]
    for rule in (kmeans, linear):
        found = rule(tensors, budget=6.0)
        assert list(found.choices) == sorted(found.choices)
        assert found.choices[0] < found.choices[2]


def test_rules_with_a_ladder_give_sensitive_tensors_small_blocks_too():
    """Four ways: 2 and 4 bits in blocks of 128, then both in blocks of 64. The ladder leaves the pairs across out."""
    adaptive = gw.AdaptiveBits(block=128, blocks=(64,), rule="kmeans")
    ways, ladder = adaptive.ways((2, 4)), adaptive.ladder((2, 4))
    assert [(ways[place].bits, ways[place].block) for place in ladder] == [(2, 128), (4, 64)]
    tensors = [Sensitivity(str(i), (10, 20, 11, 22), (8.0, 2.0, 7.0, 1.0), 100, 10.0**i, 10.0**i) for i in range(3)]
    for rule in (kmeans, linear):
        found = rule(tensors, budget=17.0, ladder=ladder)  # 8 + 8 + 1: what the ladder gives keeps it
        assert {found.choices[0], found.choices[2]} == {0, 3} and found.choices[2] == 3
    only = gw.AdaptiveBits()
    assert only.ladder((2, 3, 4)) == (0, 1, 2)


def test_the_same_seed_gives_the_same_clusters():
    tensors = layers(40, random.Random(1))
    budget = error_budget(tensors, uniform=2)
    assert kmeans(tensors, budget, seed=5) == kmeans(tensors, budget, seed=5)


def test_a_budget_for_all_takes_the_smallest_of_each():
    tensors = made_up(5, 3, random.Random(3))
    assert exact(tensors, math.inf).nbytes == sum(min(tensor.sizes) for tensor in tensors)


def test_what_cannot_be_is_refused():
    tensor = Sensitivity("w", (1, 2), (4.0, 1.0))
    with pytest.raises(PlanError, match="at least 1 with any bits"):
        exact([tensor], 0.5)
    with pytest.raises(PlanError, match="0 tensors"):
        linear([], 1.0)
    with pytest.raises(PlanError, match="'w' has 2 sizes and 1 errors"):
        kmeans([tensor._replace(errors=(1.0,))], 1.0)
    with pytest.raises(PlanError, match="not finite"):
        exact([tensor._replace(errors=(math.nan, 1.0))], 1.0)
    with pytest.raises(PlanError, match=r"alpha is 0\.5"):
        error_budget([tensor], 0, alpha=0.5)
