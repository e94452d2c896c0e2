"""What is no plan is refused with the cure."""

from pathlib import Path

import pytest

import gradwire as gw
from gradwire import TensorInfo
from gradwire.exchange.plans import plan_for

TENSORS = [TensorInfo(name="weight", shape=(64, 64), dtype="float32", device="cpu")]


@pytest.mark.parametrize("given", ["", "qsgd", "Auto", "QSGD(bits=4)"])
def test_a_text_that_is_no_file(given: str) -> None:
    with pytest.raises(gw.PlanError, match=r"no such file.*plan=gw.QSGD\(bits=4\)"):
        plan_for(given, TENSORS, 2)


def test_a_class() -> None:
    with pytest.raises(gw.PlanError, match=r"plan is the class QSGD\. Pass an object"):
        plan_for(gw.QSGD, TENSORS, 2)


def test_files_of_any_name_are_read(tmp_path: Path) -> None:
    plan, _ = plan_for(gw.QSGD(bits=4), TENSORS, 2)
    plan.save(tmp_path / "mine")
    assert plan_for(str(tmp_path / "mine"), TENSORS, 2)[0] == plan
    with pytest.raises(gw.FormatError, match=r"gone\.json: cannot be read"):
        plan_for(str(tmp_path / "gone.json"), TENSORS, 2)


def test_a_schedule() -> None:
    with pytest.raises(gw.PlanError, match=r"LocalSteps\(.*every=10.*goes into a policy.*gw\.Uniform\("):
        plan_for(gw.LocalSteps(every=10), TENSORS, 2)  # type: ignore[arg-type]
