"""The page of growth is what its benchmark makes of results, and its slopes are those of power laws."""

import pytest

from benchmarks.growth import (
    CURVES,
    ELEMENTS,
    NOISE,
    RANKS,
    TENSORS,
    draw,
    left_to_do,
    measured,
    slope,
    slopes_of,
    too_fast,
    too_many,
)
from benchmarks.growth_page import COSTS, LATER, page
from benchmarks.growth_simulated import COLUMNS, bert_large, point, section


def points(power):
    """Of every curve, points whose CPU time grows with a power, and what is sent in proportion."""
    usual = {"tensors": 24, "elements": 6_000_000, "ranks": 2, "turns": 3, "floor_ms": 10.0, "step_ms": 12.5}
    return {
        curve: [
            usual
            | {curve: x, "beyond_ms": 2.5, "spread_ms": [2.0, 3.0], "cpu_ms": 0.5 * x**power, "sent_mb": 0.25 * x}
            | {"messages": 18, "sockets": 8, "start_ms": 100.0}
            for x in (2, 8, 32)
        ]
        for curve in CURVES
    }


def test_a_slope_is_the_power_of_a_power_law():
    x = [1.0, 3.0, 10.0, 200.0]
    for power in (-1.0, 0.0, 0.5, 2.0):
        assert slope(x, [7.0 * each**power for each in x]) == pytest.approx(power)
    assert slope(x, [-1.0, 6.0, 20.0, 400.0]) == pytest.approx(1.0), "a point below the floor counts"
    assert slope(x, [0.0, 0.0, 0.0, 1.0]) is None


@pytest.mark.parametrize(("power", "fast"), [(0.7, False), (1.0, False), (1.0 + 2 * NOISE, True)])
def test_what_grows_faster_than_what_is_sent_is_told(power, fast):
    found = points(power)
    slopes = {curve: slopes_of(curve, each) for curve, each in found.items()}
    assert set(slopes["ranks"]) == {*COSTS, *LATER}
    faster = [words for each in slopes.values() for words in too_fast(each)]
    assert len(faster) == (3 if fast else 0)
    made = {"date": "2026-01-01", "cpu": "a CPU", "command": "a command"}
    told = page({"made": made, "cores": 2, "seconds": 9, "curves": found, "slopes": slopes, "faster": faster})
    assert told.count(f"| slope |  |  | 0.00 | {power:.2f} | 1.00 | 0.00 |") == 3
    assert "| 32 | 10.00 | 12.50 | 2.50 (2.00 to 3.00) |" in told
    assert ("\nYes:" in told, "\nCPU time does not:" in told) == (fast, not fast)


def test_rows_have_threads_memory_and_ddp_and_older_ones_a_dash():
    found = points(1.0)
    found["ranks"][1:] = [
        each | {"threads": each["ranks"] + 8, "memory_mb": 50.0, "ddp_step_ms": 8.0 * each["ranks"], "ddp_start_ms": 30.0}
        for each in found["ranks"][1:]
    ]
    found["elements"][2] |= {"threads": 12, "memory_mb": 900.0, "ddp_step_ms": None, "ddp_start_ms": None}
    slopes = {curve: slopes_of(curve, each) for curve, each in found.items()}
    assert slopes["ranks"]["ddp_step_ms"] == pytest.approx(1.0) and slopes["tensors"]["threads"] is None
    made = {"date": "2026-01-01", "cpu": "a CPU", "command": "a command"}
    told = page({"made": made, "cores": 2, "seconds": 9, "curves": found, "slopes": slopes, "faster": []})
    rows = told[told.index("## Ranks") :].splitlines()
    ends = {row.split(" | ")[0]: row.split(" | ")[-5:] for row in rows if row.startswith(("| 2", "| 8", "| 32", "| slope"))}
    assert ends["| 2"] == ["100", "-", "-", "-", "- |"]
    assert ends["| 8"] == ["100", "16", "50", "64.00", "30 |"] and ends["| slope"][3] == "1.00"
    assert "| 100 | 12 | 900 | - | - |" in told


@pytest.mark.slow
@pytest.mark.thorough
def test_a_point_has_all_costs():
    found = measured(2, (4, 4000), 0.1, 120.0)
    assert found is not None and {*COSTS, *LATER} <= found.keys()
    assert found["ddp_step_ms"] > 0 and found["ddp_start_ms"] > 0 and 2 < found["threads"] < 64 and found["memory_mb"] > 0


def test_sockets_messages_and_the_start_are_judged_beyond_what_exchanges_directly():
    def found(power, start):
        return [
            {
                "ranks": n,
                "sockets": n**power,
                "messages": n**power,
                "start_ms": n**start,
                "cpu_ms": 1,
                "beyond_ms": 1,
                "sent_mb": 1,
            }
            for n in (4, 16, 32, 64, 128)
        ]

    assert too_many(found(0.5, 1.0)) == [] and too_many([]) == []
    assert [words.split()[0] for words in too_many(found(1.0, 1.0))] == ["sockets", "messages"]
    assert [words.split()[1] for words in too_many(found(0.5, 1.3))] == ["start"]
    direct = [point | {"sockets": 1000} if point["ranks"] <= 16 else point for point in found(0.5, 1.0)]
    assert too_many(direct) == [], "up to 16 ranks are direct"


def test_the_picture_has_a_panel_for_each_curve(tmp_path):
    for count in (1, 3):
        some = dict(list(points(1.0).items())[:count])
        draw(tmp_path / "pictures" / f"{count}.png", some)
    one, three = ((tmp_path / "pictures" / f"{count}.png").stat().st_size for count in (1, 3))
    assert 1000 < one < three < 100_000


def test_simulated_steps_grow_far_less_than_those_of_all_reduce():
    found = [point(bert_large(), ranks) for ranks in (16, 64, 256)]
    slopes = {name: slope([each["ranks"] for each in found], [each[name] for each in found]) for name in COLUMNS}
    assert slopes["fixed_ms"] < 0.05 < slopes["ddp_ms"] and slopes["joint_ms"] < 0.05
    assert [each["peers"] for each in found] == [15, 14, 30], "beyond 16 ranks a grid"
    assert all(each["quick_ms"] <= each["fixed_ms"] for each in found), "most messages cost less than the first one"
    assert slopes["sent_mb"] < 0.05 and slopes["messages"] < 0.5
    others = [point(bert_large(), 128, 8), point(bert_large(), 67), point(bert_large(), 131)]
    assert [each["peers"] for each in others] == [15 + 7, 66, 21], "between nodes, directly, and with a shorter last row"
    text = section(found, slopes, 389, 334_000_000, others)
    assert "\n| 128 | 8 |" in text and "\n| 67 | 1 |" in text
    assert "to 256 ranks" in text and text.count("\n| 64 |") == 1


def test_a_run_goes_on_with_the_points_that_are_left():
    found = {curve: [] for curve in CURVES}
    every = list(left_to_do(found, CURVES, max(ELEMENTS)))
    assert len(every) == len(TENSORS) + len(ELEMENTS) + len(RANKS)
    assert [ranks for _, ranks, _ in left_to_do(found, ["ranks"], max(ELEMENTS))] == list(RANKS)
    for curve, ranks, (tensors, elements) in every[::2]:
        found[curve].append({"ranks": ranks, "tensors": tensors, "elements": elements})
    assert list(left_to_do(found, CURVES, max(ELEMENTS))) == every[1::2]
    assert all(elements <= 10**7 for *_, (_, elements) in left_to_do(found, CURVES, 10**7))
