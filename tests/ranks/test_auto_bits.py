"""Bits by tensor that follow the gradients, on real ranks."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.auto import adaptive_bits as bits
from gradwire.auto.adaptive_bits import Assigned, assign, with_bits
from gradwire.auto.bit_errors import WIDTHS, measured
from gradwire.core import TensorInfo
from gradwire.core.specs import innermost
from gradwire.plan.adaptive import BIT_RULES


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


SIZES = [(64, 300), (40, 500), (300, 70), 50, (20, 90)]
SCALES = (1.0, 0.01, 30.0, 1.0, 0.3)


class Layers(Given):
    """Matrices with gradients of very different scales, and a vector."""

    def __init__(self) -> None:
        super().__init__([])
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(SIZES):
            values = torch.randn(shape, generator=generator)
            self.register_parameter(f"p{index}", torch.nn.Parameter(values))

    def random_gradients(self, *words: int) -> list[torch.Tensor]:
        return [gradient * scale for gradient, scale in zip(super().random_gradients(*words), SCALES, strict=True)]


def train(handle: gw.Handle, model: Layers, steps: range) -> None:
    for number in steps:
        model.zero_grad()
        model(model.random_gradients(dist.get_rank(), number)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def adapt(rule: str) -> tuple[dict[str, int], Assigned, int, int, int, bool, str]:
    model = Layers()
    rules = [("p4", gw.ErrorFeedback(gw.TopK(0.1)))]
    adaptive = gw.AdaptiveBits(period=20, rule=rule, rules=rules)
    handle = gw.parallelize(model, plan=adaptive)
    train(handle, model, range(5))
    before = handle.stats().wire_bytes
    train(handle, model, range(5, 35))
    decision, stats = handle.decision, handle.stats()
    of_rules = [bucket.spec_of("p4") for bucket in handle.plan.buckets if "p4" in bucket.tensors]
    several = [bucket for bucket in handle.plan.buckets if len(set(bucket.specs)) > 1]
    told = (
        dict(decision.bits),
        decision,
        before,
        stats.wire_bytes,
        len(stats.decisions),
        of_rules == [rules[0][1]] and len(several) > 0,
        digest(model.parameters()),
    )
    handle.detach()
    return told


@pytest.mark.parametrize("rule", [rule for rule in BIT_RULES if rule != "time"])
def test_bits_follow_errors_within_the_budget(worlds: Worlds, rule: str) -> None:
    first, second = worlds.run(2, adapt, rule)
    assert first[0] == second[0] and first[-1] == second[-1], "ranks differ"
    bits, decision, before, after, decisions, others_kept, _ = first
    assert set(bits) == {"p0", "p1", "p2"}, "vectors and tensors with a rule are not adapted"
    assert decision.error <= 2.0
    assert decision.nbytes < decision.uniform_nbytes and after < before
    assert bits["p1"] == WIDTHS[0] and bits["p2"] >= max(bits.values()), "small errors count little"
    assert decisions == 2 and others_kept


def test_the_exact_rule_is_at_least_as_small_as_the_others() -> None:
    infos = [TensorInfo(f"t{index}", (1000 * (index + 1),), "float32") for index in range(6)]
    rows = [[(index + 1) * 4.0**-width * 100 for width in WIDTHS] + [index + 1.0, 0.5] for index in range(6)]
    sizes = {rule: assign(gw.AdaptiveBits(rule=rule), infos, rows).nbytes for rule in BIT_RULES}
    assert sizes["exact"] <= min(sizes.values())


def resume(at: int) -> tuple[bool, bool]:
    model, again = Layers(), Layers()
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=15))
    train(handle, model, range(at))
    state, weights = handle.state_dict(), {name: p.detach().clone() for name, p in model.named_parameters()}
    train(handle, model, range(at, at + 20))
    other = gw.parallelize(again, plan=gw.AdaptiveBits(period=15))
    again.load_state_dict(weights)
    other.load_state_dict(state)
    adapted = len({spec for bucket in other.plan.buckets for spec in bucket.specs}) > 2
    train(other, again, range(at, at + 20))
    same = digest(model.parameters()) == digest(again.parameters())
    handle.detach()
    other.detach()
    return adapted, same


@pytest.mark.parametrize("at", [20, 25], ids=["between two choices", "before a step that is measured"])
def test_a_resumed_run_goes_on_with_the_bits_it_had(worlds: Worlds, at: int) -> None:
    assert worlds.run(2, resume, at) == [(True, True)] * 2


def resume_measuring(at: int, fields: dict[str, Any], saved_with: dict[str, Any]) -> tuple[bool, bool, int, list[str]]:
    """A run is saved, goes on, and is resumed from the state: whether the state has a measurement, whether both end alike, how
    many choices the resumed run made, and what it said."""
    said: list[str] = []
    usual, bits.say = bits.say, said.append  # type: ignore[assignment]
    model, again = Layers(), Layers()

    def begun(model: Layers, fields: dict[str, Any]) -> tuple[torch.optim.Optimizer, gw.Handle]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, gw.parallelize(model, optimizer, plan=gw.AdaptiveBits(period=20, **fields))

    def trained(model: Layers, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for number in steps:
            model(model.random_gradients(dist.get_rank(), number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer, handle = begun(model, saved_with)
    trained(model, optimizer, range(at))
    state, weights = handle.state_dict(), {name: p.detach().clone() for name, p in model.state_dict().items()}
    trained(model, optimizer, range(at, 2 * at))  # what the state holds must not change any more
    said.clear()
    later, other = begun(again, fields)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    trained(again, later, range(at, 2 * at))
    same = digest(model.state_dict().values()) == digest(again.state_dict().values())
    measuring = any("/measuring" in key for key in state)
    told = measuring, same, len(other.decisions), list(said)
    handle.detach()
    other.detach()
    bits.say = usual
    return told


MEASURING: dict[str, tuple[int, dict[str, Any]]] = {
    "two of four steps": (12, {"accumulate": 4}),
    "pipelined": (13, {"accumulate": 4, "schedule": "pipelined"}),
    "delayed": (12, {"accumulate": 4, "schedule": gw.Delayed(k=3)}),
    "delayed, all is measured": (14, {"accumulate": 4, "schedule": gw.Delayed(k=3)}),
    "delayed, one step": (11, {"schedule": gw.Delayed(k=3)}),
    "feedback": (11, {"accumulate": 3, "feedback": True}),
    "local, all is measured": (49, {"accumulate": 2, "schedule": gw.LocalSteps(every=4, delay=2)}),
    "fragments": (24, {"accumulate": 2, "schedule": gw.LocalSteps(every=4, fragments=2)}),
}


@pytest.mark.parametrize("name", MEASURING)
def test_a_run_resumed_in_the_middle_of_a_measurement_goes_on_with_it(worlds: Worlds, name: str) -> None:
    at, fields = MEASURING[name]
    for measuring, same, choices, said in worlds.run(2, resume_measuring, at, fields, fields):
        assert (measuring, same, choices) == (True, True, 1)
        assert not any("stay unchanged" in each for each in said)


def test_a_measurement_that_cannot_go_on_is_told(worlds: Worlds) -> None:
    first, second = worlds.run(2, resume_measuring, 12, {"accumulate": 4}, {"accumulate": 5})
    assert first[:3] == second[:3] == (True, False, 0)
    assert "stay unchanged until step 34" in first[3][0] and not second[3]


def damaged_measurements() -> list[str]:
    model, said = Layers(), []
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=20, accumulate=4))
    train(handle, model, range(12))
    state = handle.state_dict()
    prefix = f"rank{dist.get_rank()}"
    for key, value in (
        ("measuring", torch.tensor([91, 93], dtype=torch.uint8)),
        ("measured/0/p0", torch.zeros(3)),
        ("measured/0/other", torch.zeros(3)),
    ):
        try:
            handle.load_state_dict(state | {f"{prefix}/{key}": value})
            said.append("")
        except ValueError as error:
            said.append(str(error))
    handle.load_state_dict(state)
    handle.detach()
    return said


def test_a_damaged_measurement_is_refused(worlds: Worlds) -> None:
    for no_json, too_short, unknown in worlds.run(2, damaged_measurements):
        assert "measuring of the state is no measurement" in no_json
        assert "has measured/0/p0" in too_short and "has measured/0/other" in unknown


def adapt_blocks() -> tuple[gw.Plan, Assigned, bool, str]:
    """Spiky gradients in one matrix: a spike spoils a large block, and no even one. Another has bits of its own."""
    model = Layers()
    rules = [("p4", gw.QSGD(bits=8))]
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=12, block=128, blocks=(32, 1024), rules=rules))
    for number in range(26):
        model.zero_grad()
        gradients = [torch.ones_like(g) * g.sign() for g in model.random_gradients(dist.get_rank(), number)]
        gradients[0].view(-1)[::160] *= 50
        model(gradients).backward()
    told = handle.plan, handle.decision, len(handle.decisions) == 2, digest(p.grad for p in model.parameters())
    handle.detach()
    return told


def test_blocks_are_chosen_too(worlds: Worlds) -> None:
    (plan, decision, twice, sums), other = worlds.run(2, adapt_blocks)
    assert plan == other[0] and sums == other[-1], "ranks differ"
    assert twice and decision.proven and decision.error <= 2.0
    assert decision.blocks["p0"] == 32 and {decision.blocks[name] for name in ("p1", "p2")} == {1024}
    specs = {name: bucket.spec_of(name) for bucket in plan.buckets for name in bucket.tensors}
    assert specs["p3"] == gw.Identity()
    assert specs["p4"] == gw.QSGD(bits=8) and "p4" not in decision.bits
    assert all(specs[name] == gw.QSGD(bits=decision.bits[name], block=decision.blocks[name]) for name in decision.bits)
    assert "in blocks of 32, 1024" in str(decision)


def partly_used(frozen: bool, apart: bool) -> tuple[object, object, int]:
    """A matrix gets no gradient in the step that is measured."""
    model = Layers()
    blocks = {"block": 128, "blocks": (64, 1024)} if apart else {}
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=12, **blocks))
    for number in range(16):
        model.zero_grad()
        gradients: list[torch.Tensor | None] = list(model.random_gradients(dist.get_rank(), number))
        if number == 10:
            gradients[2] = None
            model.p2.requires_grad_(not frozen)
        model(gradients).backward()
        model.p2.requires_grad_(True)
    decision = handle.decision
    spec = next(bucket.spec_of("p2") for bucket in handle.plan.buckets if "p2" in bucket.tensors)
    handle.detach()
    return spec, "p2" in decision.bits, len(decision.bits)


@pytest.mark.parametrize(("frozen", "apart"), [(False, False), (True, False), (False, True)])
def test_what_got_no_gradient_in_the_measured_step_keeps_its_bits(worlds: Worlds, frozen: bool, apart: bool) -> None:
    assert worlds.run(2, partly_used, frozen, apart) == [(gw.QSGD(bits=4), False, 3)] * 2


def changed_meanwhile() -> tuple[int, list[int], bool]:
    """While errors of eight steps are added up, a matrix gets another shape, and another one goes. What `handle.decisions` has
    before and after the next measurement, and whether a state in between has nothing of the first one."""
    model = Layers()
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=20, accumulate=8))
    train(handle, model, range(14))
    model.p0 = torch.nn.Parameter(torch.ones(7, 300))
    del model.p1
    model.random_gradients = partial(Given.random_gradients, model)  # type: ignore[method-assign]
    handle.attach()
    clean = not any("measuring" in key for key in handle.state_dict())
    train(handle, model, range(14, 25))
    before = len(handle.decisions)
    train(handle, model, range(25, 42))
    bits = [each.bits.get("p0", 0) for each in handle.decisions]
    handle.detach()
    return before, bits, clean


def test_a_model_that_changes_during_a_measurement_is_measured_in_the_next_period(worlds: Worlds) -> None:
    for before, chosen, clean in worlds.run(2, changed_meanwhile):
        assert before == 0 and len(chosen) == 1 and chosen[0] and clean


def others_states() -> list[str]:
    """A state of one driver, loaded by others."""
    said = []
    model = Layers()
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=15))
    train(handle, model, range(20))
    state = handle.state_dict()
    handle.detach()
    for plan in (
        gw.Tuned(gw.Uniform(gw.Identity()), search="grid"),
        gw.AdaptiveBits(rules=[("p2", gw.Identity())]),
        gw.AdaptiveBits(alpha=1.5),
    ):
        other = gw.parallelize(Layers(), plan=plan)
        try:
            other.load_state_dict(state)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        other.detach()
    return said


def test_a_plan_that_its_driver_would_not_make_is_refused(worlds: Worlds) -> None:
    for tuned, ruled, alike in worlds.run(2, others_states):
        assert "Identity() here" in tuned and "Load the state with the plan= that it was saved with" in tuned
        assert "'p2' has QSGD" in ruled and alike == ""


def not_finite() -> tuple[int, int]:
    """The measured step has a NaN: bits stay, and the next period's step decides."""
    model = Layers()
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=12))
    for number in range(30):
        model.zero_grad()
        gradients = model.random_gradients(dist.get_rank(), number)
        if number == 10:
            gradients[0][0, 0] = float("nan")
        model(gradients).backward()
        if number == 11:
            between = len(handle.decisions)
    told = between, len(handle.decisions)
    handle.detach()
    return told


def test_gradients_that_are_not_finite_decide_nothing(worlds: Worlds) -> None:
    assert worlds.run(2, not_finite) == [(0, 1)] * 2


def many_decisions() -> tuple[int, int, bool]:
    """How many decisions are kept, how many there were, and whether the last one is in force."""
    model = Layers()
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=2))
    for number in range(221):
        model.zero_grad()
        model(model.random_gradients(dist.get_rank(), number)).backward()
    stats = handle.stats()
    told = len(stats.decisions), stats.decided, handle.decision.step == handle.session.reducer.step - 1
    handle.detach()
    return told


def test_the_last_decisions_are_kept_and_all_are_counted(worlds: Worlds) -> None:
    assert worlds.run(2, many_decisions) == [(100, 110, True)] * 2


def test_a_plan_with_bits_is_the_same_plan_otherwise() -> None:
    adaptive = gw.AdaptiveBits()
    infos = [
        TensorInfo("a", (100, 10), "float32"),
        TensorInfo("b", (10,), "float32"),
        TensorInfo("c", (30, 10), "float32"),
    ]
    plan = adaptive.policy.plan(infos)
    other = with_bits(plan, adaptive, {"a": 2, "c": 7})
    assert [bucket.tensors for bucket in other.buckets] == [bucket.tensors for bucket in plan.buckets]
    assert other.launch == plan.launch
    assert {name: bucket.spec_of(name) for bucket in other.buckets for name in bucket.tensors} == {
        "a": gw.QSGD(bits=2),
        "b": gw.Identity(),
        "c": gw.QSGD(bits=7),
    }
    assert with_bits(other, adaptive, {"a": 4, "c": 4}).digest() == plan.digest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.5},
        {"period": 1},
        {"rule": "best"},
        {"block": 100},
        {"blocks": (100,)},
        {"blocks": (128, 256)},
        {"accumulate": 0},
        {"accumulate": 30, "period": 20},
        {"accumulate": 2, "period": 3, "schedule": gw.LocalSteps(every=4, fragments=2)},
        {"feedback": "yes"},
        {"scheme": "best"},
        {"schedule": "best"},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((gw.PlanError, gw.SpecError, gw.FormatError), match=next(iter(wrong)).rstrip("s")):
        gw.AdaptiveBits(**wrong)


# ---- any schedule, scheme and feedback


def adapt_in(fields: dict[str, object]) -> tuple[Assigned, str, list[str], str]:
    """The last assignment, the schedule's word, how the compressed buckets travel, and the weights."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.AdaptiveBits(period=14, **fields))
    for number in range(70 if isinstance(fields.get("schedule"), gw.LocalSteps) else 36):
        model(model.random_gradients(dist.get_rank(), number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    decision, plan = handle.decision, handle.plan
    specs = {name: bucket.spec_of(name) for bucket in plan.buckets for name in bucket.tensors}
    assert all(innermost(specs[name]).bits == bits for name, bits in decision.bits.items())
    assert all(specs[name].feedback == bool(fields.get("feedback")) for name in decision.bits)
    options = [" ".join(bucket.link_tasks) for bucket in plan.buckets if bucket.main_spec.encodes]
    told = decision, plan.schedule.word, options, digest(model.parameters())
    handle.detach()
    return told


EVERYWHERE: dict[str, dict[str, object]] = {
    "pipelined": {"schedule": "pipelined"},
    "pipelined, feedback": {"schedule": "pipelined", "feedback": True},
    "delayed": {"schedule": gw.Delayed(k=3)},
    "delayed, feedback": {"schedule": gw.Delayed(k=3, flush=True), "feedback": True},
    "local": {"schedule": gw.LocalSteps(every=2)},
    "local, fragments": {"schedule": gw.LocalSteps(every=2, fragments=2, delay=1), "feedback": True},
    "all-gather": {"scheme": "allgather"},
    "sums as they are": {"scheme": "CD-SGD"},
    "ring": {"scheme": "ring"},
    "feedback": {"feedback": True},
    "three steps": {"accumulate": 3},
    "three steps, delayed": {"accumulate": 3, "schedule": gw.Delayed(k=None)},
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_bits_adapt_in_every_schedule_and_scheme(worlds: Worlds, name: str) -> None:
    fields = EVERYWHERE[name]
    first, second = worlds.run(2, adapt_in, fields)
    assert (dict(first[0].bits), *first[1:]) == (dict(second[0].bits), *second[1:]), "ranks differ"
    decision, word, options, _ = first
    assert set(decision.bits) == {"p0", "p1", "p2", "p4"} and decision.error <= 2.0
    assert decision.bits["p1"] == WIDTHS[0] and decision.bits["p2"] == max(decision.bits.values())
    assert word == gw.AdaptiveBits(**fields).schedule.word
    expected = {"all-gather": "allgather", "ring": "reducescatter allgather"}.get(name, "alltoall allgather")
    assert set(options) == {expected}


def rows_by_hand(fields: dict[str, object]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """What rank 0 chose from, and the same by hand."""
    model, taken = Layers(), {}
    adaptive = gw.AdaptiveBits(period=20, **fields)
    usual = bits.assign

    def looked_at(adaptive, infos, rows):  # type: ignore[no-untyped-def]
        taken.update({info.name: list(row) for info, row in zip(infos, rows, strict=True)})
        return usual(adaptive, infos, rows)

    bits.assign = looked_at  # type: ignore[assignment]
    rank, steps = dist.get_rank(), adaptive.accumulate
    handle = gw.parallelize(model, plan=adaptive)
    own = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for number in range(10 + steps):
        model.zero_grad()
        gradients = model.random_gradients(number)  # alike on both ranks, but for one tensor of opposite signs
        gradients[0] *= 1 - 2 * rank
        model([gradient.clone() for gradient in gradients]).backward()
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            if number >= 10:
                own[name] += gradient
    bits.assign = usual
    handle.detach()
    step = 9 + steps
    found = {}
    adapting = [name for bucket in handle.plan.buckets for name in bucket.tensors if name != "p3"]
    for index, name in enumerate(adapting):
        parts: list[list[float]] = [[], []]
        dist.all_gather_object(parts, measured(adaptive, name, own[name].reshape(-1), step, rank))
        row = [a + b for a, b in zip(*parts, strict=True)]
        if adaptive.scheme is None:
            # an owner adds half of its own as it is; the sum that it encodes has the noise of the other half
            exact = own[name].clone()
            dist.all_reduce(exact)
            of_sum = measured(adaptive, name, exact.reshape(-1), step + 1, index % 2)[:-2]
            noise = [error / row[-2] * error / 2 for error in row[:-2]]
            row = [*(a / 2 + b + c for a, b, c in zip(row[:-2], of_sum, noise, strict=True)), *row[-2:]]
        found[name] = row
    return taken, found


@pytest.mark.parametrize("fields", [{}, {"accumulate": 3}, {"feedback": True}, {"scheme": "allgather"}])
def test_the_errors_of_both_encodes_count(worlds: Worlds, fields: dict[str, object]) -> None:
    (taken, found), _ = worlds.run(2, rows_by_hand, fields)
    assert taken.keys() == found.keys() == {"p0", "p1", "p2", "p4"}
    for name, row in taken.items():
        assert row == pytest.approx(found[name], rel=1e-4 if "scheme" in fields else 0.15, abs=1e-9), name
        # no number of bits looks better because it is the present one
        assert 4 < row[WIDTHS.index(3)] / row[WIDTHS.index(4)] < 7 and 4 < row[WIDTHS.index(4)] / row[WIDTHS.index(5)] < 7
    if not fields:
        # where ranks cancel, the sum has little to lose; where they agree it loses as much as both
        share = {name: row[0] / row[-2] for name, row in taken.items()}
        assert share["p0"] < 0.6 * share["p2"]


def telescoped() -> list[float]:
    """How far all that was sent and all that is kept back is from all gradients, by tensor, over a change of bits."""
    model = Layers()
    handle = gw.parallelize(model, plan=gw.AdaptiveBits(period=8, feedback=True))
    totals = [torch.zeros(p.shape) for p in model.parameters()]
    for number in range(20):
        model.zero_grad()
        gradients = model.random_gradients(dist.get_rank(), number)
        model([gradient.clone() for gradient in gradients]).backward()
        for total, gradient, parameter in zip(totals, gradients, model.parameters(), strict=True):
            total += gradient / 2 - parameter.grad / 2
    assert len(handle.decisions) == 2 and len(set(handle.decision.bits.values())) > 1
    kept = handle.session.exchange.residuals.carried()
    off = []
    for (name, _), total, scale in zip(model.named_parameters(), totals, SCALES, strict=True):
        left = total.reshape(-1) - kept.get(f"residual/{name}", 0.0)
        dist.all_reduce(left)
        off.append(float(left.abs().max()) / scale)
    handle.detach()
    return off


def test_residuals_stay_when_bits_change(worlds: Worlds) -> None:
    for off in worlds.run(2, telescoped):
        assert max(off) < 1e-4
