"""What the benchmark of CD-SGD's corrections makes of its measurements."""

from typing import Any

import pytest

from benchmarks.cd_sgd import (
    ARMS,
    BEGIN,
    END,
    PAGE,
    REFERENCE,
    WARMUP_STEPS,
    named,
    seconds_to,
    smoothed,
    steps_to,
    table,
)

ARM = named("fixed t", "sums encoded", 5)
STEPS = 60


def falling(to: float, after: int) -> list[float]:
    """A curve that reaches a loss after so many steps."""
    return smoothed([9.0] * (after - 20) + [to] * (STEPS + 20 - after))[: STEPS - 19]


def measured(after: int, reference: int = 25) -> dict[str, Any]:
    arms = {REFERENCE: (reference, 2.0), ARM: (after, 2.1)}
    return {name: {"0": {"loss": loss, "accuracy": 0.5, "curve": falling(1.0, at)}} for name, (at, loss) in arms.items()}


def test_steps_until_a_loss() -> None:
    assert steps_to(1.0, falling(1.0, 40)) == 40
    assert steps_to(0.5, falling(1.0, 40)) is None


def test_seconds_count_the_warm_up_with_steps_of_synchronous_sgd() -> None:
    times = {REFERENCE: 1000.0, ARM: 100.0}
    found = measured(after=40)
    assert seconds_to(found, times, REFERENCE, STEPS) == pytest.approx(25)
    assert seconds_to(found, times, ARM, STEPS) == pytest.approx(WARMUP_STEPS + (40 - WARMUP_STEPS) * 0.1)
    assert seconds_to(found, {}, ARM, STEPS) is None
    assert seconds_to(measured(after=90), times, ARM, STEPS) is None


def test_a_row_says_what_was_measured() -> None:
    result = {"steps": STEPS, "finals": {"2 ranks": measured(after=90)}, "step_ms": {"2 ranks": {ARM: 100.0}}}
    assert f"| 2 ranks | {ARM} | 1 | +5.0% ± inf% | 100 | not reached |" in table(result)
    result["step_ms"] = {}
    assert f"| 2 ranks | {ARM} | 1 | +5.0% ± inf% | - | - |" in table(result)


def test_every_k_is_there_with_each_threshold_and_pull() -> None:
    for k in (2, 5, 10, 20, None):
        for kind in ("fixed t", "adaptive t"):
            for pull in ("sums as they are", "sums encoded"):
                assert named(kind, pull, k) in ARMS
    page = PAGE.read_text()
    assert page.index(BEGIN) < page.index(END)
