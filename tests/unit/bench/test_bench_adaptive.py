"""What `python -m benchmarks adaptive` makes of its runs."""

from collections.abc import Mapping

import pytest

from benchmarks import adaptive
from benchmarks.adaptive import AUTO, BY_BYTES, BY_TIME, METHODS, UNIFORM, found_in, lines_of, verdict
from gradwire.bench.names import MOST_DECIDING_STEPS, check_method
from gradwire.bench.results import BenchRun, Cell, Decided
from gradwire.core.provenance import Made

STEP_US = {"no communication": 100e3, UNIFORM: 300e3, BY_BYTES: 200e3, BY_TIME: 150e3, AUTO: 120e3}


def bench(seed: int, losses: Mapping[str, float]) -> BenchRun:
    """Methods that decide have 15 steps before all others; two turns count. Each seed has a machine of another speed."""
    cells = []
    for name, method in METHODS.items():
        before = 5 if name in ("no communication", UNIFORM) else 5 + MOST_DECIDING_STEPS
        loss = [2.0 - 0.01 * step for step in range(before + 10)]
        cells.append(
            Cell(
                job="transformer",
                link="100mbit",
                gbps=0.1,
                method=method,
                step_us=[1e6] * before + [(1 + seed) * STEP_US[name]] * 9 + [9e9],
                loss=[each * losses.get(name, 1.0) for each in loss],
                counted=(before, before + 10),
                planned_bytes=3_000_000,
                decided=[Decided(chosen="2 bits", plain=False, step=9, cost_us=1.0)] if name == AUTO else [],
            )
        )
    return BenchRun(
        made=Made(host="here", date="2026-11-25", command="made up"),
        torch="2.8",
        cores=2,
        network="namespaces",
        nodes=2,
        ranks_per_node=1,
        steps=10,
        warmup_steps=5,
        turn_steps=5,
        seed=seed,
        cells=cells,
    )


def test_methods_exist() -> None:
    assert [check_method(name) for name in METHODS.values()] == list(METHODS.values())


def test_ratios_pair_turns_and_losses_pair_seeds_at_equal_steps() -> None:
    found = {"100mbit": found_in([bench(seed, {BY_TIME: 1.0 + 0.01 * seed}) for seed in (0, 1)])}
    by_time = found["100mbit"][BY_TIME]
    assert by_time.turns_us == [[150e3, 150e3], [300e3, 300e3]]
    # of 15 steps, the last 10, on every method
    assert by_time.loss[0] == found["100mbit"][UNIFORM].loss[0] == pytest.approx(2.0 - 0.01 * 9.5)
    assert adaptive.ratio_to_uniform(found["100mbit"], BY_TIME).ratio == pytest.approx(2.0)
    mean, around = adaptive.loss_against_uniform(found["100mbit"], BY_TIME)
    assert mean == pytest.approx(0.005) and around > 0.005
    lines = lines_of(found)
    assert len(lines) == 2 + len(METHODS) + 2 and lines[-1] == "100mbit: auto chose 2 bits."
    assert "2.00 (2.00 to 2.00)" in lines[5] and lines[2].endswith("|  |"), lines
    assert verdict(found) == []


def test_what_is_not_as_wanted_is_said() -> None:
    slow = dict.fromkeys((BY_BYTES, BY_TIME), STEP_US[UNIFORM])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.STEP_US", STEP_US | slow)
        found = {"100mbit": found_in([bench(seed, {BY_BYTES: 1.5, BY_TIME: 1.5}) for seed in (0, 1, 2)])}
    not_faster, higher = verdict(found)
    assert "1.00 times as fast" in not_faster and "50.00% ± 0.00% higher" in higher
