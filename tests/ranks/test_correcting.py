"""`gw.Delayed(k="auto")`: k follows the residuals of the live job."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.auto import correcting
from gradwire.auto.correcting import POSSIBLE, CorrectionPeriods, k_for

STEPS, PERIOD, MEASURED_AT = 19, 8, 6
EIGHT_BITS = gw.ErrorFeedback(gw.QSGD(bits=8, block=32))
SPECS = {
    "nearly exact": EIGHT_BITS,
    "2 bits": gw.ErrorFeedback(gw.QSGD(bits=2, block=32)),
    "almost nothing is sent": gw.TwoBit(threshold=1000.0),
}


def make_model() -> torch.nn.Module:
    generator = seeded(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(4)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def begun(spec: gw.Spec, **fields: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, gw.Handle]:
    correcting.PERIOD, correcting.MEASURED_AT = PERIOD, MEASURED_AT
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    schedule = gw.Delayed(k="auto", **fields)
    policy = gw.Uniform(spec, schedule=schedule, bucket_bytes=700, edge_bytes=100)
    return model, optimizer, gw.parallelize(model, optimizer, plan=policy)


def step_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    after = []
    for step in steps:
        generator = seeded(step, dist.get_rank())
        inputs, targets = (torch.randn(6, 12, generator=generator) for _ in range(2))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        after.append(digest(model.state_dict().values()))
    return after


def chosen(spec: gw.Spec) -> tuple[list[tuple[int, int, float]], Any, float]:
    """What was chosen, the schedule in the end, and the measured residual again, of all ranks by hand."""
    model, optimizer, handle = begun(spec)
    seen: list[float] = []
    usual = correcting.squares

    def by_hand(session: Any) -> Any:
        found = usual(session)
        state = handle.session.exchange.residuals.state()
        own = sum(float(v.double().square().sum()) for key, v in state.items() if key.startswith("residual/"))
        gradients = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) / 4
        both: list[Any] = [None, None]
        dist.all_gather_object(both, (own, gradients))
        seen.append(math.sqrt(sum(a for a, _ in both) / sum(b for _, b in both)))
        return found

    correcting.squares = by_hand
    step_on(model, optimizer, range(STEPS))
    correcting.squares = usual
    found = [(each.step, each.k, each.residual) for each in handle.decisions]
    schedule = handle.plan.schedule
    handle.detach()
    return found, schedule, seen[0]


@pytest.mark.parametrize("name", SPECS)
def test_k_follows_the_residual_and_is_the_same_on_all_ranks(worlds: Worlds, name: str) -> None:
    (found, schedule, by_hand), other = worlds.run(2, chosen, SPECS[name])
    assert other[:2] == (found, schedule)
    assert [step for step, _, _ in found] == [MEASURED_AT, MEASURED_AT + PERIOD]
    assert [k for _, k, _ in found] == [k_for(residual) for _, _, residual in found]
    assert schedule == gw.Delayed(k=found[-1][1])
    residual = found[0][2]
    assert residual == pytest.approx(by_hand, rel=1e-5)
    if name == "nearly exact":
        assert residual < 0.1 and schedule.k in (50, 100)
    elif name == "2 bits":
        assert 0.2 < residual < 4 and schedule.k in (2, 5, 10)
    else:
        assert residual > 3 and schedule.k == 2, "all of several gradients waits"


def test_k_is_the_largest_that_keeps_what_is_held_back_within_some_gradients() -> None:
    assert [k_for(5.0 / k) for k in POSSIBLE] == list(POSSIBLE)
    assert [k_for(5.0 / k * 1.01) for k in POSSIBLE] == [2, *POSSIBLE[:-1]]


def resumed(at: int) -> tuple[list[str], list[str], Any]:
    model, optimizer, handle = begun(SPECS["2 bits"], flush=True)
    step_on(model, optimizer, range(at))
    states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, handle)]
    through = step_on(model, optimizer, range(at, STEPS))
    handle.detach()
    model, optimizer, handle = begun(SPECS["2 bits"], flush=True)
    for each, state in zip((model, optimizer, handle), states, strict=True):
        each.load_state_dict(state)
    schedule = handle.plan.schedule
    after = step_on(model, optimizer, range(at, STEPS))
    handle.detach()
    return through, after, schedule


def test_a_run_that_is_resumed_keeps_its_k(worlds: Worlds) -> None:
    for through, after, schedule in worlds.run(2, resumed, MEASURED_AT + 3):
        assert after == through
        assert schedule.k in POSSIBLE and schedule.flush


def test_without_a_residual_it_is_refused() -> None:
    auto = gw.Delayed(k="auto")
    with pytest.raises(gw.PlanError, match=r"QSGD\(bits=4, block=128\) keeps none"):
        CorrectionPeriods(gw.Uniform(gw.QSGD(bits=4), schedule=auto))
    with pytest.raises(gw.PlanError, match="its residuals would be lost when k changes"):
        CorrectionPeriods(gw.Uniform(EIGHT_BITS, schedule=gw.Delayed(k="auto", correction=EIGHT_BITS)))
    with pytest.raises(gw.FormatError, match="chosen on a live job"):
        gw.Uniform(EIGHT_BITS, schedule=auto).plan([gw.TensorInfo("w", (3, 4), "float32")])


def test_k_is_not_measured_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompressed steps leave no residual, which would look like a compressor without an error."""
    monkeypatch.setattr(correcting, "PERIOD", 200)
    monkeypatch.setattr(correcting, "MEASURED_AT", 20)
    monkeypatch.setattr(correcting, "squares", lambda job: (1.0, 1.0))
    monkeypatch.setattr(correcting, "Live", lambda job: job)
    driver = CorrectionPeriods(gw.Uniform(EIGHT_BITS, schedule=gw.Delayed(k="auto", warmup_steps=300)))
    steps: list[int] = []
    monkeypatch.setattr(driver, "_choose", lambda live, *sums: steps.append(live.step))
    plan = SimpleNamespace(schedule=gw.Delayed(k=5, warmup_steps=300))
    for step in range(1, 800):
        live: Any = SimpleNamespace(step=step, plan=plan, merged=lambda *_: SimpleNamespace(sums=()))
        driver.finished(live)
    assert steps == [320, 520, 720]
