"""What the convergence benchmark makes of its measurements."""

from typing import Any

import pytest

from benchmarks import paired
from benchmarks.convergence import ARMS, BEGIN, END, PAGE, REFERENCE, differences, interval, table, verdict

NEAR, BROKEN = "k=5", "k=5, skipped (broken on purpose)"


def measured(**losses: list[float]) -> dict[str, Any]:
    arms = {"reference": REFERENCE, "near": NEAR, "broken": BROKEN}
    found = {arms[arm]: {str(s): {"loss": loss, "accuracy": 0.5} for s, loss in enumerate(v)} for arm, v in losses.items()}
    return {"resnet": found}


def test_differences_are_paired_by_seed() -> None:
    finals = measured(reference=[1.0, 2.0, 4.0], near=[1.01, 2.02, 4.04])
    assert differences(finals["resnet"], NEAR, "loss") == pytest.approx([0.01] * 3)
    mean, width = interval([0.01, 0.02, 0.03])
    assert (mean, width) == pytest.approx((0.02, 4.303 * 0.01 / 3**0.5), rel=1e-3)
    assert table(finals)[2:] == ["| resnet | k=5 | 3 | +1.00% ± 0.00% | +0.00 ± 0.00 |"]


def test_staggered_arms_are_beside_those_that_correct_at_once() -> None:
    finals = measured(reference=[1.0, 2.0], near=[2.0, 4.0])
    finals["resnet"]["k=5, staggered"] = {seed: {"loss": loss, "accuracy": 0.51} for seed, loss in (("0", 2.02), ("1", 4.04))}
    assert table(finals)[-4:] == [
        "",
        "| job | arm | seeds | loss against unstaggered | accuracy, points |",
        "| --- | --- | --- | --- | --- |",
        "| resnet | k=5, staggered | 2 | +1.00% ± 0.00% | +1.00 ± 0.00 |",
    ]


def test_the_verdict_sees_what_is_far_and_what_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    good = measured(reference=[1.0, 2.0, 3.0], near=[1.001, 2.003, 3.001], broken=[1.2, 2.5, 3.5])
    assert verdict(good) == 0
    assert verdict(measured(reference=[1.0, 2.0, 3.0], near=[1.02, 2.03, 3.05])) == 1
    assert verdict(measured(reference=[1.0, 2.0, 3.0], near=[float("nan")] * 3)) == 1
    assert verdict(measured(reference=[1.0, 2.0, 3.0], broken=[1.001, 2.001, 3.001])) == 1
    told = capsys.readouterr().out
    assert "resnet, k=5: the interval of loss is beyond 1 %" in told
    assert "does not see that corrections carry nothing" in told


def test_a_whole_name_chooses_one_arm_and_a_part_all_that_contain_it() -> None:
    assert paired.chosen(ARMS, ["k=2"]) == [REFERENCE, "k=2"]
    assert paired.chosen(ARMS, ["k=2", "staggered"]) == [REFERENCE, "k=2", "k=2, staggered", "k=5, staggered"]
    assert paired.chosen(ARMS, ["8-bit"]) == [REFERENCE, "k=2, 8-bit corrections", "k=5, 8-bit corrections"]
    assert paired.chosen(ARMS, [""]) == list(ARMS)


def test_the_page_has_a_place_for_the_table() -> None:
    page = PAGE.read_text()
    assert page.index(BEGIN) < page.index(END)
    assert all(fields.skipped == 0 or "broken" in arm for arm, fields in ARMS.items())
