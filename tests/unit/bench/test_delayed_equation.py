"""What `python -m benchmarks delayed` makes of its measurements."""

from typing import Any

import pytest

from benchmarks import delayed
from benchmarks.campaigns.requests import RepositoryRequest

PARTS = {
    "floor_us": 9e3,
    "compute_us": 10e3,
    "usual_exchange_us": 7e3,
    "usual_cpu_us": 2e3,
    "usual_codec_us": 1e3,
    "correction_us": 40e3,
    "correction_cpu_us": 5e3,
    f"correction{delayed.EIGHT_BITS}_us": 14e3,
    f"correction{delayed.EIGHT_BITS}_cpu_us": 6e3,
}


def bench(step_us: float) -> dict[str, Any]:
    """A run in which every method takes so long in each step that counts, and a second in each that does not."""
    turn = [1e6, *[step_us - 500.0, step_us + 500.0] * (delayed.PERIOD // 2), 1e6]
    cell = {
        "link": "500mbit",
        "step_us": [1e6] * 4 + turn * 2,
        "step": {"median_us": step_us},
        "cpu_us": 1e3,
        "codec_us": 500.0,
        "attainable_us": 9e3,
    }
    methods = ["floor", delayed.COMPUTE, delayed.USUAL, *delayed.CORRECTIONS.values(), delayed.BACKWARD]
    facts = {"torch": "2.13", "cores": 2, "network": "namespaces", "nodes": 2, "steps": 44, "turn_steps": delayed.TURN}
    return facts | {
        "warmup_steps": 4,
        "cells": [cell | {"method": method} for method in (*methods, *delayed.SCHEDULES)],
    }


def test_methods_exist_and_turns_hold_whole_periods() -> None:
    names = [delayed.COMPUTE, delayed.USUAL, *delayed.CORRECTIONS.values(), delayed.BACKWARD, *delayed.SCHEDULES]
    assert RepositoryRequest(jobs=[delayed.JOB], links=["unlimited"], methods=names).methods == names
    assert all(delayed.PERIOD % k == 0 for k, _, _ in delayed.SCHEDULES.values() if k)


def test_the_equation_counts_what_the_cores_do() -> None:
    assert delayed.equation_us(PARTS, None, "", True) == 12e3  # compute and what the exchange takes of its core
    assert delayed.equation_us(PARTS, 5, "", False) == pytest.approx((4 * 12e3 + 40e3) / 5)
    assert delayed.equation_us(PARTS, 2, delayed.EIGHT_BITS, False) == pytest.approx((12e3 + 16e3) / 2)
    slow = PARTS | {"usual_exchange_us": 30e3}
    assert delayed.equation_us(slow, None, "", True) == 30e3


def test_staggered_corrections_share_the_exchange_out_evenly() -> None:
    assert delayed.equation_us(PARTS, 2, "", True) == pytest.approx((7e3 + 40e3) / 2)
    assert delayed.equation_us(PARTS, 5, "", True) == pytest.approx((4 * 7e3 + 40e3) / 5)
    # the cores count where the wire does not
    assert delayed.equation_us(PARTS, 20, "", True) == pytest.approx(10e3 + (19 * 2e3 + 5e3) / 20)
    for k in delayed.CORRECTED:
        for words in delayed.CORRECTIONS:
            assert delayed.equation_us(PARTS, k, words, True) <= delayed.equation_us(PARTS, k, words, False)


def test_only_steps_inside_turns_count() -> None:
    of = delayed.of_link(bench(10e3), "500mbit")
    assert of["backward_us"] == of["parts"]["compute_us"] == pytest.approx(10e3)
    assert of["steps"]["gradwire:qsgd4@delayednone"] == {"mean_us": pytest.approx(10e3), "equation_us": 11e3}


def test_the_verdict_sees_what_is_not_as_promised() -> None:
    of = delayed.of_link(bench(10e3), "500mbit")
    k5 = "gradwire:qsgd4@delayed5+qsgd8"
    assert delayed.verdict({"500mbit": of}) == [
        "500mbit: k=None takes 1.11 times what is attainable",
        "500mbit: k=5 with 8-bit corrections takes 1.00 times the backward schedule's step",
    ]
    good = of | {"attainable_us": 9.5e3, "backward_us": 11e3}
    assert delayed.verdict({"500mbit": good}) == []
    late = good | {"steps": of["steps"] | {k5: {"mean_us": 10.9e3, "equation_us": 9e3}}}
    assert delayed.verdict({"100mbit": late}) == [
        f"100mbit, {k5}: the mean step is 1.21 times that of equation 7",
        f"100mbit, {k5}: the mean step is 1.09 times that of unstaggered corrections",
    ]


def test_the_table_has_a_row_for_each_schedule_and_the_page_a_place_for_it() -> None:
    lines = delayed.table({"500mbit": delayed.of_link(bench(10e3), "500mbit")})
    assert lines[0] == "| milliseconds | 500mbit |"
    assert "| k=5, 8-bit corrections: measured / equation 7 | 10.0 / 11.0 = 0.91 |" in lines
    assert "| k=5, 8-bit corrections, staggered: measured / equation 7 | 10.0 / 11.0 = 0.91 |" in lines
    assert len(lines) == 2 + 7 + 1 + len(delayed.SCHEDULES)
    page = delayed.PAGE.read_text()
    assert page.index(delayed.BEGIN) < page.index(delayed.END)
