"""Fusion: the exact search against every partition, Cupcake's own search, and the rules that others use."""

import itertools
import math
import random
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from benchmarks.papers.cupcake import algorithm_1
from benchmarks.papers.oracle import brute_force, pareto
from benchmarks.papers.strawmen import (
    STRATEGIES,
    compare,
    even_split,
    hipress,
    layer_names,
    layer_wise,
    mg_wfbp,
    nearby_layers,
)
from gradwire.costs.prices import AffineCost
from gradwire.errors import PlanError
from gradwire.planner.fusion import optimal
from gradwire.planner.partition import Fusion, FusionCosts, evaluate
from gradwire.planner.starts import close_after, close_before
from gradwire.sim import native_fusion

Pair = tuple[float, float]
Case = tuple[list[float], list[float], Pair, Pair, Pair]


def whole_case(rng: random.Random, tensors: int) -> Case:
    """Small whole numbers, many of them 0 and many equal: ties, and no rounding."""

    def value(high: int) -> int:
        return rng.choice([0, rng.randint(0, 3), rng.randint(0, high)])

    times, sizes = ([value(20) for _ in range(tensors)] for _ in range(2))
    return times, sizes, (value(10), value(3)), (value(10), value(3)), (value(5), value(4))


def real_case(rng: random.Random, tensors: int) -> Case:
    """Times and sizes over many orders of magnitude, as those of a model's biases and embeddings."""

    def value(scale: float) -> float:
        return rng.choice([0.0, scale, scale * rng.lognormvariate(0, 2), scale * rng.paretovariate(0.7)])

    times, sizes = ([value(scale) for _ in range(tensors)] for scale in (100.0, 1e4))
    return times, sizes, (value(50), value(0.01)), (value(50), value(0.01)), (value(50), value(0.01))


def cases(make: Any, count: int, most: int, seed: int = 0) -> Iterator[Case]:
    rng = random.Random(seed)
    for number in range(count):
        yield make(rng, 1 + number % most)


def lengthened(boundaries: tuple[int, ...], case: Case) -> Fraction:
    """The step in exact numbers, written from the definition: not the code under test."""
    times, sizes, encode, exchange, decode = ([Fraction(value) for value in part] for part in case)
    compute = link = start = Fraction(0)
    for end in boundaries:
        nbytes = sum(sizes[int(start) : end])
        compute += sum(times[int(start) : end]) + encode[0] + encode[1] * nbytes
        link = max(link, compute) + exchange[0] + exchange[1] * nbytes
        start = Fraction(end)
    return link + decode[0] + decode[1] * nbytes


@pytest.mark.parametrize(("make", "count"), [(whole_case, 3000), (real_case, 1500)])
def test_no_partition_is_shorter(make: Any, count: int) -> None:
    for number, case in enumerate(cases(make, count, most=12)):
        times, sizes, encode, exchange, decode = case
        found = optimal(times, sizes, encode, exchange, decode, native=number % 2 == 0)
        best = brute_force(times, sizes, FusionCosts(encode=encode, exchange=exchange, decode=decode))
        assert found.step_us == pytest.approx(best.step_us, rel=1e-11, abs=0), case
        if make is whole_case:
            assert found.step_us == best.step_us, case
            assert found.step_us == lengthened(found.boundaries, case), case


@pytest.mark.skipif(native_fusion([0, 1], [0, 1], 0, 0, False, [0]) is None, reason="csrc/planner.cpp was not built (no g++)")
@pytest.mark.parametrize(("make", "count", "most"), [(whole_case, 400, 12), (real_case, 400, 12), (real_case, 60, 300)])
def test_the_library_finds_the_same_boundaries(make: Any, count: int, most: int) -> None:
    for case in cases(make, count, most, seed=5):
        assert optimal(*case) == optimal(*case, native=False), case


@pytest.mark.parametrize("decoding", ["exposed", "lumped"])
def test_decode_counts_where_it_is_said_to(decoding: Any) -> None:
    for case in cases(whole_case, 300, most=8, seed=1):
        times, sizes, encode, exchange, decode = case
        costs = FusionCosts(encode=encode, exchange=exchange, decode=decode, decoding=decoding)
        found = optimal(times, sizes, encode, exchange, decode, decoding)
        assert found.step_us == brute_force(times, sizes, costs).step_us == evaluate(found.boundaries, times, sizes, costs)
        if decoding == "lumped":
            both = (encode[0] + decode[0], encode[1] + decode[1])
            assert found.step_us == optimal(times, sizes, both, exchange).step_us


@pytest.mark.parametrize("make", [whole_case, real_case])
def test_the_two_truths_agree_and_so_does_the_search_on_longer_lists(make: Any) -> None:
    for case in cases(make, 200, most=9, seed=2):
        costs = FusionCosts(encode=case[2], exchange=case[3], decode=case[4])
        assert pareto(case[0], case[1], costs).step_us == pytest.approx(brute_force(case[0], case[1], costs).step_us, rel=1e-12)
    rng = random.Random(3)
    for _ in range(30):
        case = make(rng, 45)
        costs = FusionCosts(encode=case[2], exchange=case[3], decode=case[4])
        assert optimal(*case).step_us == pytest.approx(pareto(case[0], case[1], costs).step_us, rel=1e-11)


def test_the_truth_tries_every_partition() -> None:
    times, sizes, encode, exchange, decode = whole_case(random.Random(7), 6)
    costs = FusionCosts(encode=encode, exchange=exchange, decode=decode)
    partitions = [(*inner, 6) for count in range(6) for inner in itertools.combinations(range(1, 6), count)]  # 2^5 of them
    assert len(partitions) == 32
    assert brute_force(times, sizes, costs).step_us == min(evaluate(ends, times, sizes, costs) for ends in partitions)


def test_many_tensors_of_one_kind_are_split_as_theory_says() -> None:
    """Where link and compute are equally fast, all buckets are as large: step = work + n/y + y, best at y = sqrt(n)."""
    tensors = 10_000
    found = optimal([1.0] * tensors, [1] * tensors, encode=(1, 0), exchange=(1, 1))
    assert len(found.boundaries) == math.isqrt(tensors)
    assert found.step_us == tensors + tensors / 100 + 100 + 1


def test_extremes() -> None:
    assert optimal([3.0], [4], (1, 1), (2, 0.5)) == Fusion((1,), 12.0)
    assert optimal([0, 0, 0], [0, 0, 0], (0, 0), (0, 0)).step_us == 0
    # constants that dwarf everything: one bucket; free constants: no bucket waits
    assert optimal([1] * 50, [1] * 50, (1e6, 0), (1e6, 0)).boundaries == (50,)
    assert optimal([10] * 50, [1] * 50, (0, 0), (0, 1)).step_us == 501


def test_dearer_costs_and_longer_backward_never_shorten_the_step() -> None:
    for case in cases(whole_case, 90, most=30, seed=4):
        step_us = optimal(*case).step_us
        times, sizes, *costs = case
        for position, index in itertools.product(range(3), range(2)):
            dearer = [list(pair) for pair in costs]
            dearer[position][index] += 1
            assert optimal(times, sizes, *(tuple(pair) for pair in dearer)).step_us >= step_us  # type: ignore[arg-type]
        longer = [time + 1 for time in times]
        assert optimal(longer, sizes, *costs).step_us >= step_us
        encode, exchange, (start_us, _) = costs  # with a decode that grows, a small last bucket can shorten the step
        without_us = optimal(times, sizes, encode, exchange, (start_us, 0)).step_us
        assert optimal([*times, 1], [*sizes, 1], encode, exchange, (start_us, 0)).step_us >= without_us


def affine_costs(case: Case) -> FusionCosts:
    """Without an exposed decode that grows: what Algorithm 1 is proven for."""
    return FusionCosts(encode=case[2], exchange=case[3], decode=(case[4][0], 0))


@pytest.mark.parametrize("make", [whole_case, real_case])
@pytest.mark.parametrize(("pruning_1", "pruning_2"), [(True, True), (True, False), (False, True)])
def test_cupcakes_search_agrees_on_affine_costs(make: Any, pruning_1: bool, pruning_2: bool) -> None:
    for case in cases(make, 200, most=9, seed=5):
        found = algorithm_1(case[0], case[1], affine_costs(case), pruning_1=pruning_1, pruning_2=pruning_2)
        assert found.finished
        best = optimal(*case[:4], (case[4][0], 0))
        assert found.fusion.step_us == pytest.approx(best.step_us, rel=1e-11), case


def test_cupcakes_prunings_prune() -> None:
    case = real_case(random.Random(8), 12)
    calls = {
        flags: algorithm_1(case[0], case[1], affine_costs(case), pruning_1=flags[0], pruning_2=flags[1]).calls
        for flags in itertools.product((True, False), repeat=2)
    }
    assert calls[False, False] == 2**11  # every partition once, by its last bucket
    assert calls[True, True] <= min(calls[True, False], calls[False, True]) <= max(calls[True, False], calls[False, True])
    assert calls[True, True] < 2**11


def flat_then_linear(nbytes: float) -> float:
    """Encode as in Cupcake's figure 2, flat up to a size, and steep from there: two small buckets take less than one."""
    return 5 + 3 * max(0.0, nbytes - 10)


def test_cupcakes_search_warns_and_can_miss_the_best_where_its_prunings_are_not_proven() -> None:
    costs = FusionCosts(encode=flat_then_linear, exchange=(1, 1))
    rng = random.Random(9)
    worse = 0
    for _ in range(100):
        times, sizes = ([rng.choice([0, rng.randint(0, 15)]) for _ in range(6)] for _ in range(2))
        with pytest.warns(UserWarning, match="proven for affine costs"):
            found = algorithm_1(times, sizes, costs)
        best = pareto(times, sizes, costs).step_us
        assert best == brute_force(times, sizes, costs).step_us <= found.fusion.step_us
        worse += found.fusion.step_us > best
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            unpruned = algorithm_1(times, sizes, costs, pruning_1=False, pruning_2=False)
        assert unpruned.fusion.step_us == best
    assert worse > 0
    with pytest.warns(UserWarning, match="exposed decode"):
        algorithm_1([1], [1], FusionCosts(encode=(1, 1), exchange=(1, 1), decode=(0, 1)))


def test_cupcakes_search_stops_in_time() -> None:
    case = real_case(random.Random(10), 60)
    found = algorithm_1(case[0], case[1], affine_costs(case), pruning_1=False, pruning_2=False, seconds=0.01)
    assert not found.finished
    assert found.fusion.step_us == evaluate(found.fusion.boundaries, case[0], case[1], affine_costs(case))


def test_no_rule_is_better_than_the_best() -> None:
    for make in (whole_case, real_case):
        for case in cases(make, 150, most=40, seed=6):
            best = optimal(*case).step_us
            costs = FusionCosts(encode=case[2], exchange=case[3], decode=case[4])
            for name, rival in compare(case[0], case[1], costs).items():
                assert rival.step_us >= best * (1 - 1e-11), (name, case)


FREE = FusionCosts(encode=(0, 0), exchange=(0, 1))
MB = 2**20


def test_bucket_by_bytes_has_two_meanings() -> None:
    sizes = [2, 2, 9, 1, 1, 1]
    nothing = [0] * len(sizes)
    assert close_before(nothing, sizes, FREE, limit=4) == (2, 3, 6)
    assert close_after(nothing, sizes, FREE, limits=[4]) == (3, 6)
    assert close_before([0], [9], FREE, limit=4) == (1,)
    # equal to the limit is not above it
    assert close_after([0] * 4, [2] * 4, FREE, limits=[4]) == (3, 4)


def test_rules_are_tuned_as_their_authors_tuned_them() -> None:
    sizes = [MB] * 40
    times = [1000.0] * 40
    late = FusionCosts(encode=(0, 0), exchange=(0, 0.5e-3))  # the last exchange is what counts: small buckets
    assert close_after(times, sizes, late) == close_after(times, sizes, late, limits=[2 * MB])
    dear = FusionCosts(encode=(1e6, 0), exchange=(0, 0))  # each encode costs: few buckets
    assert close_after(times, sizes, dear) == close_after(times, sizes, dear, limits=[64 * MB]) == (40,)
    assert even_split(times, sizes, dear) == (20, 40)
    assert len(even_split(times[:32], sizes[:32], late)) == 32
    ends = even_split([0] * 7, [1] * 7, FREE, groups=[3])
    assert sorted(end - start for start, end in itertools.pairwise((0, *ends))) == [2, 2, 3]


def test_nearby_layers_are_modules_not_tensors() -> None:
    names = ["fc.bias", "fc.weight", "bn.weight", "bn.bias", "conv.weight"]
    layers = layer_names(names)
    assert nearby_layers([0] * 5, [1] * 5, FREE, layers=layers, together=2) == (4, 5)
    assert nearby_layers([0] * 5, [1] * 5, FREE) == (4, 5)
    with pytest.raises(PlanError, match="layers has 4 entries for 5 tensors"):
        nearby_layers([0] * 5, [1] * 5, FREE, layers=layers[:4])


def test_mg_wfbp_merges_what_the_link_waits_for_less_than_a_start() -> None:
    start = FusionCosts(encode=(0, 0), exchange=(10, 1))
    assert mg_wfbp([5, 9, 9], [1, 1, 1], start) == (3,)
    assert mg_wfbp([5, 11, 9], [1, 1, 1], start) == (1, 3)
    assert mg_wfbp([5, 11, 11], [100, 1, 1], start) == (1, 3)  # the link is busy until long after both


def test_hipress_compresses_what_alone_gains() -> None:
    costs = FusionCosts(encode=(5, 0), exchange=(1, 0.1), decode=(2, 0))
    compressed, alone = hipress([1, 1, 1], [1, 8, 100], costs, AffineCost(1, 1))
    assert compressed == [False, True, True]
    # plain: 1 + 2 us; then encode until 2 + 5: 7 + 1.8; then encode until 3 + 10: 13 + 11, and its decode
    assert alone == Fusion((1, 2, 3), 26.0) == compare([1, 1, 1], [1, 8, 100], costs, plain=AffineCost(1, 1))["HiPress"]
    assert "HiPress" not in compare([1], [1], costs)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("tensors", [1, 2, 31, 123])
def test_every_rule_gives_a_partition(name: str, tensors: int) -> None:
    rng = random.Random(tensors)
    case = real_case(rng, tensors)
    ends = STRATEGIES[name](case[0], case[1], affine_costs(case))
    assert ends[-1] == tensors and ends == tuple(sorted(set(ends))) and ends[0] > 0
    assert layer_wise(case[0], case[1], FREE) == tuple(range(1, tensors + 1))


def test_what_is_exponential_refuses_what_it_cannot_do() -> None:
    with pytest.raises(PlanError, match="there are 21 tensors"):
        brute_force([1] * 21, [1] * 21, FREE)
    with pytest.raises(PlanError, match=r"there are 601 tensors.*optimal"):
        algorithm_1([1] * 601, [1] * 601, FREE)


def test_a_pair_becomes_an_affine_cost() -> None:
    assert FREE.exchange == AffineCost(0, 1)
    assert FusionCosts(encode=flat_then_linear, exchange=AffineCost(1, 2)).encode is flat_then_linear
