"""Closed forms against a walk over steps, the papers' own numbers, and each other."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.papers.closed_forms import (
    all_gather_us,
    all_reduce_us,
    bit_sgd_us,
    cd_sgd_mean_us,
    cd_sgd_saves_of_bit_sgd_us,
    cd_sgd_saves_of_local_updates_us,
    cd_sgd_staggered_us,
    cd_sgd_us,
    dear_saving_us,
    dear_us,
    local_update_us,
    max_speedup,
    reduce_scatter_us,
    s_sgd_us,
    wfbp_us,
)
from gradwire.errors import PlanError
from gradwire.planner.partition import FusionCosts, evaluate


def walked_mean_us(
    every: int, compute_us: float, exchange_us: float, codec_us: float, compressed_us: float, on_compute_us: float
) -> float:
    """CD-SGD as two clocks: the exchange of one step runs beside the next step's compute, which then waits for it."""
    rounds = 50
    now = 0.0
    marks = []
    for step in range(every * rounds):
        correction = step % every == 0
        exchanged = now + (exchange_us if correction else codec_us + compressed_us)
        computed = now + compute_us + (0.0 if correction else on_compute_us)
        now = max(exchanged, computed)
        marks.append(now)
    return (marks[-1] - marks[every - 1]) / (every * (rounds - 1))


def test_cd_sgd_is_the_mean_of_its_steps() -> None:
    rng = random.Random(0)
    for _ in range(200):
        every = rng.randint(1, 6)
        compute, exchange, codec, compressed = (rng.choice([0, rng.randint(0, 40)]) for _ in range(4))
        on_compute = rng.choice([0, codec])
        found = cd_sgd_mean_us(every, compute, exchange, codec, compressed, on_compute)
        assert found == pytest.approx(walked_mean_us(every, compute, exchange, codec, compressed, on_compute))
        formula = ((every - 1) * max(compute + on_compute, codec + compressed) + max(compute, exchange)) / every
        assert found == pytest.approx(formula)


def test_staggered_corrections_are_never_slower() -> None:
    rng = random.Random(1)
    faster = 0
    for _ in range(200):
        every = rng.randint(1, 6)
        compute, exchange, codec, compressed = (rng.randint(0, 40) for _ in range(4))
        times = (every, compute, exchange, codec, compressed, rng.choice([0, codec]))
        staggered, at_once = cd_sgd_staggered_us(*times), cd_sgd_mean_us(*times)
        assert staggered <= at_once + 1e-9
        faster += staggered < at_once - 1e-9
    assert faster > 50
    assert cd_sgd_staggered_us(1, 10, 40, 2, 5) == local_update_us(10, 40)


def test_cd_sgd_is_other_methods_at_its_ends() -> None:
    times = {"compute_us": 10, "exchange_us": 40, "codec_us": 2, "compressed_us": 5}
    assert cd_sgd_mean_us(1, **times) == local_update_us(10, 40) == 40  # every step a correction: OD-SGD
    assert cd_sgd_mean_us(None, **times) == 10
    assert [cd_sgd_us(step, 3, **times) for step in range(4)] == [40, 10, 10, 40]
    # the exchange is what counts: the mean that the paper prints in section 3.3
    slow = times | {"compute_us": 1}
    assert cd_sgd_mean_us(5, **slow) == ((5 - 1) * (2 + 5) + 40) / 5
    # never slower than the compressed exchange without overlap, but for the corrections
    assert cd_sgd_us(1, 5, **slow) <= bit_sgd_us(1, 2, 5)


@pytest.mark.parametrize(
    ("compute_us", "codec_us", "compressed_us", "exchange_us", "cd_us", "cd_correction_us"),
    [(10, 2, 5, 8, 10, 10), (10, 4, 9, 40, 13, 40), (10, 2, 8, 10, 10, 10)],
)
def test_the_cases_of_equation_7(
    compute_us: float,
    codec_us: float,
    compressed_us: float,
    exchange_us: float,
    cd_us: float,
    cd_correction_us: float,
) -> None:
    times = (compute_us, exchange_us, codec_us, compressed_us)
    assert cd_sgd_us(1, 4, *times) == cd_us
    assert cd_sgd_us(4, 4, *times) == cd_correction_us


def saved_by_cases(
    step: int, every: int, compute_us: float, exchange_us: float, codec_us: float, compressed_us: float
) -> tuple[float, float]:
    """Equations 8 and 9 case by case, as the paper prints them."""
    corrects = step % every == 0
    own_exchange_us = exchange_us if corrects else codec_us + compressed_us
    if compute_us > own_exchange_us:
        of_local, of_bit = (0 if compute_us > exchange_us else exchange_us - compute_us), codec_us + compressed_us
    elif not corrects:
        of_local, of_bit = exchange_us - codec_us - compressed_us, compute_us
    else:
        of_local, of_bit = 0, compute_us + codec_us + compressed_us - exchange_us
    return of_local, of_bit


def test_the_cases_of_equations_8_and_9() -> None:
    # two steps by hand: compute 10, exchange 40, codec 4, compressed 9; step 1 compresses, and step 4 corrects
    times = (10, 40, 4, 9)
    assert [cd_sgd_saves_of_local_updates_us(step, 4, *times) for step in (1, 4)] == [40 - 13, 40 - 40]
    assert [cd_sgd_saves_of_bit_sgd_us(step, 4, *times) for step in (1, 4)] == [23 - 13, 23 - 40]
    rng, seen = random.Random(2), set()
    for _ in range(500):
        step, every = rng.randint(0, 9), rng.randint(1, 5)
        # odd and even, so that compute and exchange are never equal, of which the paper prints no case
        compute, codec, compressed = 2 * rng.randint(0, 20) + 1, 2 * rng.randint(0, 5), 2 * rng.randint(0, 20)
        exchange = codec + compressed + 2 * rng.randint(0, 20)  # a compressed exchange is not longer than the whole one
        found = tuple(
            saves(step, every, compute, exchange, codec, compressed)
            for saves in (cd_sgd_saves_of_local_updates_us, cd_sgd_saves_of_bit_sgd_us)
        )
        assert found == saved_by_cases(step, every, compute, exchange, codec, compressed)
        seen.add((compute > exchange, compute > codec + compressed, step % every == 0))
    assert len(seen) == 6


def test_sums() -> None:
    assert s_sgd_us(10, 40) == 50
    assert bit_sgd_us(10, 2, 5) == 17
    assert local_update_us(10, 7) == 10
    assert wfbp_us(5, 10, 7) == 15
    assert wfbp_us(5, 10, 70) == 75


def test_wfbp_is_below_the_timeline_and_equal_to_it_in_the_limit_of_many_tensors() -> None:
    costs = FusionCosts(encode=(0, 0), exchange=(0, 1))
    for backward_us, exchange_us in ((1000.0, 300.0), (1000.0, 4000.0)):
        last = float("inf")
        for tensors in (1, 10, 1000):
            ends = range(1, tensors + 1)
            parts = [backward_us / tensors] * tensors, [exchange_us / tensors] * tensors
            found = evaluate(ends, *parts, costs)
            assert wfbp_us(0, backward_us, exchange_us) < found < last
            last = found
        assert last == pytest.approx(wfbp_us(0, backward_us, exchange_us), rel=2e-3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64])
def test_a_ring_moves_each_part_to_all_but_one(world_size: int) -> None:
    found = all_reduce_us(world_size, 1200, 10, 0.5)
    assert found == pytest.approx(2 * (world_size - 1) * 10 + 2 * (world_size - 1) * 1200 / world_size * 0.5)
    assert found == reduce_scatter_us(world_size, 1200, 10, 0.5) + all_gather_us(world_size, 1200, 10, 0.5)
    assert all_reduce_us(1, 1200, 10, 0.5) == 0


def test_equation_9_follows_from_7_and_8() -> None:
    for forward, phase in itertools.product((1.0, 10.0, 100.0), (0.0, 0.5, 1.0, 9.0, 15.0, 20.0, 21.0, 500.0)):
        saved = wfbp_us(forward, 2 * forward, 2 * phase) - dear_us(forward, 2 * forward, phase, phase)
        assert dear_saving_us(forward, phase) == pytest.approx(saved)


def test_equation_6_is_equation_7_over_one_worker() -> None:
    rng = random.Random(1)
    for _ in range(100):
        ff, bp, rs, ag = (rng.uniform(1, 100) for _ in range(4))
        printed = 64 * (ff + bp) / (ff + bp + rs + ag - min(rs, bp) - min(ag, ff))
        assert max_speedup(64, ff, bp, rs, ag) == pytest.approx(printed)
        assert max_speedup(64, ff, bp, rs, ag) <= 64


def test_table_2_of_dear() -> None:
    """10 Gb/s, 64 GPUs: 61.6 for ResNet-50 (25.6 million parameters), at the 220 ms of compute that the table's row implies."""
    phase_us = 25.6e6 * 4 * 8 / 10e9 * 1e6
    assert max_speedup(64, 220e3 / 3, 220e3 * 2 / 3, phase_us, phase_us) == pytest.approx(61.6, abs=0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: s_sgd_us(-1, 2), "compute_us is -1: it must be a time"),
        (lambda: dear_us(1, 2, float("nan"), 2), "reduce_scatter_us is nan"),
        (lambda: all_reduce_us(0, 10, 1, 1), "world_size is 0: it must be ranks"),
        (lambda: all_reduce_us(2, 10, 1, float("inf")), "us_per_element is inf"),
        (lambda: cd_sgd_us(0, 0, 1, 2, 3, 4), "correct_every is 0: it must be steps from one correction"),
        (lambda: cd_sgd_us(-1, 2, 1, 2, 3, 4), "step is -1"),
        (lambda: cd_sgd_mean_us(2, 1, 2, 3, 4, 5), "codec_on_compute_us is 5, and codec_us is 3"),
        (lambda: cd_sgd_staggered_us(2, 1, 2, 3, 4, 5), "codec_on_compute_us is 5, and codec_us is 3"),
        (lambda: max_speedup(4, 0, 0, 1, 1), "forward_us and backward_us are both 0"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()
