"""plan="auto" on real ranks whose clocks are made up: what is decided is then known, and machines under load change nothing."""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from foretold import foretold
from test_engine_feedback import SIZES, Shuffled, residual_sum
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.api.handle import Handle
from gradwire.auto.driver import Auto
from gradwire.auto.live import Live
from gradwire.auto.planning import words_of
from gradwire.auto.trial import MOST_STEPS
from gradwire.core.specs import Identity


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


Times = Callable[[gw.Plan, int], tuple[float, float]]
"""Milliseconds of a step under a plan, on this rank, as of this step; and of its exchanges."""


class Clocked:
    """A model in training whose clock passes as `times` says."""

    def __init__(self, model: Given, times: Times, compute_ms: float = 1e9, **arguments: object) -> None:
        """compute_ms: what is longer in a step is a wait for exchanges."""
        self.model, self.times, self.now, self.compute_ms = model, times, 0.0, compute_ms
        self.handle: Handle = gw.parallelize(model, **arguments)  # type: ignore[arg-type]
        driver = self.handle.session.driver
        assert isinstance(driver, Auto)
        driver.clock = lambda: self.now

    def step(self, number: int) -> None:
        rank = dist.get_rank()
        self.model.zero_grad()
        loss = self.model(self.model.random_gradients(rank, number))
        step_ms, link_ms = self.times(self.handle.plan, number)
        began, self.now = self.now, self.now + step_ms / 1e3
        known = foretold(lambda plan: self.times(plan, number)[0], link_ms)
        exposed_us = 1e3 * max(0.0, step_ms - self.compute_ms)
        with known, mock.patch.multiple(Live, link_us=1e3 * link_ms, exposed_us=exposed_us, began_s=began):
            loss.backward()
        self.now += 100.0 * (number % 7 == 3)  # an evaluation
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def run_until_decided(job: Clocked) -> int:
    """The number of the next step."""
    for number in range(MOST_STEPS + 1):
        job.step(number)
        if job.handle.decision is not None:
            return number + 1
    raise AssertionError(f"it did not decide in {MOST_STEPS} steps")


def encodes(plan: gw.Plan) -> bool:
    return any(not isinstance(spec, Identity) for bucket in plan.buckets for spec in bucket.specs)


# ---- all ranks decide alike


def decide_apart() -> tuple[str, str, str, float | None, list[str]]:
    """To rank 0 what is compressed seems fast, so it foretells; rank 1 knows better."""
    rank = dist.get_rank()

    def times(plan: gw.Plan, step: int) -> tuple[float, float]:
        return (30.0 if rank == 1 else 9.0, 1.0) if encodes(plan) else (10.0 + rank, 1.0)

    torch.manual_seed(0)
    job, plans = Clocked(Shuffled(SIZES), times), []
    for number in range(40):
        job.step(number)
        plans.append(job.handle.plan.digest())
    decision = job.handle.decision
    assert decision is not None and job.handle.stats().decisions == (decision,)
    told = (
        words_of(job.handle.plan),
        str(decision),
        digest(job.model.parameters()),
        decision.chosen.measured_us,
        plans,
    )
    job.handle.detach()
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_different_clocks_decide_alike_by_the_slowest(worlds: Worlds, world_size: int) -> None:
    first, *others = worlds.run(world_size, decide_apart)
    assert all(other == first for other in others)
    words, said, _, measured_us, plans = first
    assert words.startswith("uncompressed") and "plain all-reduce" in said
    assert measured_us == pytest.approx(1e4 + 1e3 * (world_size - 1))
    assert len(set(plans)) > 1, "nothing was tried"


# ---- nothing is lost when plans change


def test_residuals_go_into_the_next_gradient_where_no_plan_keeps_them(worlds: Worlds) -> None:
    """From error feedback to plain all-reduce and back: what is owed is saved, sent once, and then gone."""
    for sums, owed, kept in worlds.run(2, owe):
        assert sums == pytest.approx([0.0] * len(sums), abs=1e-5)
        assert owed and not kept


def owe() -> tuple[list[float], bool, bool]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Shuffled(SIZES)
    handle = gw.parallelize(model, plan=gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05))))
    plans = [gw.Uniform(gw.Identity()), gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2))), gw.Policy(default=gw.Identity())]
    true = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    received = {name: torch.zeros_like(t) for name, t in true.items()}
    off, owed = [], False
    for number in range(12):
        if number and number % 2 == 0:
            policy = plans[number // 2 % len(plans)]
            handle.session.change_to(handle.session.plan_of(policy))
            saved = handle.session.exchange.residuals.state()
            handle.session.exchange.residuals.check(saved)
            handle.session.exchange.residuals.load(saved)
            owed |= any(key.startswith("residual/left/") for key in saved)
        model.zero_grad()
        model(model.random_gradients(rank, number)).backward()
        means = model.mean_of(lambda r, s=number: model.random_gradients(r, s), world_size)
        for (name, parameter), mean in zip(model.named_parameters(), means, strict=True):
            true[name] += mean
            assert parameter.grad is not None
            received[name] += parameter.grad.double()
        for name in true:
            held = residual_sum(handle.state_dict(), name).expand(true[name].numel()).reshape(true[name].shape).contiguous()
            dist.all_reduce(held)
            off.append(((received[name] + held - true[name]).norm() / true[name].norm()).item())
    handle.session.change_to(handle.session.plan_of(plans[0]))
    model.zero_grad()
    model(model.random_gradients(rank, 99)).backward()
    kept = any("/residual/" in key for key in handle.state_dict())
    handle.detach()
    return off, owed, kept


# ---- exact


LARGE = [70_000] * 12
"""Elements: several buckets."""


def beside_ddp() -> tuple[bool, int]:
    rank = dist.get_rank()
    chance = iter(torch.rand(1000, generator=torch.Generator().manual_seed(rank)).tolist())
    torch.manual_seed(0)
    job = Clocked(Given(LARGE), lambda plan, step: (10.0 + next(chance), 1.0), accuracy="exact")
    torch.manual_seed(0)
    other = Given(LARGE)
    ddp = torch.nn.parallel.DistributedDataParallel(other)
    same, plans = True, set()
    for number in range(80):
        job.step(number)
        plans.add(job.handle.plan.digest())
        other.zero_grad()
        ddp(other.random_gradients(rank, number)).backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter -= 0.1 * parameter.grad
        same &= digest(job.model.parameters()) == digest(other.parameters())
    assert not encodes(job.handle.plan)
    job.handle.detach()
    return same, len(plans)


def test_exact_is_ddp_bit_for_bit_while_it_tries_plans(worlds: Worlds) -> None:
    for same, plans in worlds.run(2, beside_ddp):
        assert same and plans >= 2


# ---- times change


def link_that_drops() -> tuple[list[bool], list[str], list[int]]:
    """At first plain all-reduce is best; from step 120 to 320 exchanges take ten times as long."""

    def times(plan: gw.Plan, step: int) -> tuple[float, float]:
        exchange = 2.0 * (10 if 120 <= step < 320 else 1)
        return max(10.0 + 2.0 * encodes(plan), exchange * (1 if encodes(plan) else 4)), exchange

    torch.manual_seed(0)
    job, encoded = Clocked(Shuffled(SIZES), times), []
    for number in range(420):
        job.step(number)
        encoded.append(encodes(job.handle.plan))
    decisions = job.handle.decisions
    job.handle.detach()
    return encoded, [str(decision) for decision in decisions], [decision.step for decision in decisions]


def test_a_link_that_drops_and_returns_is_answered_within_10_and_20_steps(worlds: Worlds) -> None:
    first, second = worlds.run(2, link_that_drops)
    assert first == second
    encoded, said, steps = first
    assert not any(encoded[15:120]) and all(encoded[130:320]) and not any(encoded[340:]), steps
    assert len(said) == 3 and "10.00 times as long" in said[1]


# ---- resume


def resume() -> tuple[bool, bool, str, int]:
    """Train on; and save, load into another handle, and train there."""

    torch.manual_seed(0)
    job = Clocked(Shuffled(SIZES), feedback_is_fast)
    decided = run_until_decided(job)
    state, weights = job.handle.state_dict(), {name: p.detach().clone() for name, p in job.model.named_parameters()}
    for number in range(decided, decided + 30):
        job.step(number)
    after = digest(job.model.parameters())
    torch.manual_seed(1)
    again = Clocked(Shuffled(SIZES), feedback_is_fast)
    again.model.load_state_dict(weights)
    again.handle.load_state_dict(state)
    same_plan = again.handle.plan == job.handle.plan
    for number in range(decided, decided + 30):
        again.step(number)
    same, words, decisions = (
        digest(again.model.parameters()) == after,
        words_of(again.handle.plan),
        len(again.handle.decisions),
    )
    for each in (job, again):
        each.handle.detach()
    return same_plan, same, words, decisions


def test_a_run_resumed_under_a_decided_plan_goes_on_bit_for_bit(worlds: Worlds) -> None:
    for same_plan, same, words, decisions in worlds.run(2, resume):
        assert same_plan and same, words
        assert decisions == 0, "it decided anew though nothing had changed"


def resume_while_trying() -> tuple[bool, int, str, str]:
    """Save while plans are tried, and load where that is allowed and where it is not."""
    job = Clocked(Shuffled(SIZES), feedback_is_fast)
    for number in range(4):
        job.step(number)
    state, undecided = job.handle.state_dict(), job.handle.decision is None
    job.handle.detach()
    again = Clocked(Shuffled(SIZES), feedback_is_fast)
    again.handle.load_state_dict(state)
    for number in range(10, 130):
        again.step(number)
    decisions = len(again.handle.decisions)
    state, words = again.handle.state_dict(), words_of(again.handle.plan)
    again.handle.detach()
    exact, told = gw.parallelize(Shuffled(SIZES), accuracy="exact"), ""
    try:
        exact.load_state_dict(state)
    except ValueError as error:
        told = str(error)
    exact.detach()
    return undecided, decisions, told, words


def test_what_was_only_being_tried_is_not_kept_and_what_is_not_allowed_is_refused(worlds: Worlds) -> None:
    for undecided, decisions, told, words in worlds.run(2, resume_while_trying):
        assert undecided and decisions == 1, words
        assert "accuracy='exact' does not allow the saved plan's ErrorFeedback" in told, (told, words)


def feedback_is_fast(plan: gw.Plan, step: int) -> tuple[float, float]:
    feedback = any(spec.feedback for bucket in plan.buckets for spec in bucket.specs)
    return (6.0 if feedback else 10.0), 1.0


def warming_up() -> tuple[list[tuple[int, bool]], int]:
    """After each step: the steps of warm-up of what runs next, and whether it sends 2 bits. Then the step of the decision."""
    torch.manual_seed(0)
    job, seen = Clocked(Shuffled(SIZES), feedback_is_fast), []
    for number in range(40):
        job.step(number)
        exchange = job.handle.session.exchange
        specs = {spec for bucket in exchange.plan.buckets for spec in bucket.specs if isinstance(spec, gw.ErrorFeedback)}
        ran = {spec.at_step(exchange.made_for).inner.bits for spec in specs}
        seen.append((max((spec.warm_up_steps for spec in specs), default=-1), ran == {2}))
    decisions = [decision.step for decision in job.handle.decisions]
    job.handle.detach()
    assert len(decisions) == 1, "the end of the warm-up counted as a change of links"
    return seen, decisions[0]


def test_a_warm_up_is_left_out_of_the_trial_and_goes_on_after_it(worlds: Worlds) -> None:
    for seen, decided in worlds.run(2, warming_up):
        tried, later = seen[3 : decided - 1], seen[decided:]
        assert set(seen[:2]) == {(20, False)}
        assert (0, True) in tried and all(warm_up != 20 for warm_up, _ in tried)
        assert later == [(20, number >= 20) for number in range(decided + 1, 41)]


def saved_run() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    job = Clocked(Shuffled(SIZES), feedback_is_fast)
    run_until_decided(job)
    state = job.handle.state_dict()
    job.handle.detach()
    return state


def taken_up(states: dict[str, torch.Tensor]) -> tuple[bool, bool, int, list[str]]:
    torch.manual_seed(0)
    job = Clocked(Shuffled(SIZES), feedback_is_fast)
    job.handle.load_state_dict(states)
    same_plan = job.handle.plan.to_json(None).encode() == bytes(states["rank0/decided"].tolist())
    kept = True
    for name in (name for name, _ in job.model.named_parameters()):
        held = residual_sum(job.handle.state_dict(), name).sum().reshape(1)
        dist.all_reduce(held)
        saved = residual_sum(states, name).sum()
        kept &= torch.allclose(held, saved, atol=1e-6)
    for number in range(60, 180):
        job.step(number)
    told = same_plan, bool(kept), len(job.handle.decisions), sorted(map(repr, job.handle.plan.specs))
    job.handle.detach()
    return told


def of_an_earlier_release() -> tuple[bool, bool, int, list[str]]:
    """As `taken_up`, of a state with 2 bits of error feedback, which no class allows any more; and what runs in the end."""
    torch.manual_seed(0)
    job = Clocked(Shuffled(SIZES), feedback_is_fast)
    decided = run_until_decided(job)
    job.handle.session.change_to(job.handle.session.plan_of(gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)))))
    for number in range(decided, decided + 3):
        job.step(number)
    own = job.handle.state_dict()
    job.handle.detach()
    everybody: list[dict[str, torch.Tensor]] = [{}, {}]
    dist.all_gather_object(everybody, own)
    return taken_up({**everybody[0], **everybody[1]})


def test_a_plan_of_an_earlier_release_is_left_and_its_residuals_are_kept(worlds: Worlds) -> None:
    for same_plan, kept, decisions, specs in worlds.run(2, of_an_earlier_release):
        assert same_plan and kept and decisions == 1 and repr(gw.ErrorFeedback(gw.QSGD(bits=2))) not in specs, specs


def test_other_ranks_take_up_plan_and_residuals_and_decide_anew(worlds: Worlds) -> None:
    states = {key: value for state in worlds.run(3, saved_run) for key, value in state.items()}
    for same_plan, kept, decisions, _ in worlds.run(2, taken_up, states):
        assert same_plan and kept and decisions == 1


# ---- a second look


def slow_later(plan: gw.Plan, step: int) -> tuple[float, float]:
    """Error feedback is fast in a trial and slow afterwards: as slow as 4 bits were foretold, and slower than they are."""
    feedback, lossy = (any(getattr(spec, what) for b in plan.buckets for spec in b.specs) for what in ("feedback", "encodes"))
    return (6.0 if step < 16 else 10.0) if feedback else 8.0 if lossy else 30.0, 1.0


def saved_in_a_second_look() -> list[tuple[str, int, str, int, int]]:
    """States of three moments: the chosen plan runs, its rival runs, the chosen plan runs again. For each one the specs that ran,
    "searching" in the state, the specs of a run that loads it, and its decisions; and the decisions of the run that saved it."""
    torch.manual_seed(0)
    job = Clocked(Shuffled(SIZES), slow_later, 5.0)
    states = {}
    for number in range(100):
        job.step(number)
        driver = job.handle.session.driver
        assert isinstance(driver, Auto)
        name = ("rival" if driver.searching else "again" if "rival" in states else "before") if job.handle.decisions else ""
        if name and len(job.handle.decisions) == 1 and encodes(job.handle.plan):
            weights = {key: p.detach().clone() for key, p in job.model.named_parameters()}
            states[name] = (job.handle.state_dict(), weights, words_of(job.handle.plan))
    decisions, last = len(job.handle.decisions), words_of(job.handle.plan)
    assert job.handle.stats().decided == decisions and job.handle.decision is job.handle.decisions[-1]
    job.handle.detach()
    told = []
    for state, weights, words in states.values():
        again = Clocked(Shuffled(SIZES), lambda plan, step: slow_later(plan, step + 50), 5.0)
        again.model.load_state_dict(weights)
        again.handle.load_state_dict(state)
        for number in range(40):
            again.step(number)
        searching = int(f"rank{dist.get_rank()}/searching" in state)
        told.append((words.split("(")[0], searching, words_of(again.handle.plan).split("(")[0], len(again.handle.decisions)))
        again.handle.detach()
    return [(*each, decisions, last.split("(")[0]) for each in told]


def test_a_rival_replaces_a_plan_that_is_slower_than_predicted_and_states_saved_meanwhile_are_right(worlds: Worlds) -> None:
    """A run that resumes goes on with the chosen plan, also where the state is of its rival, which was only being tried."""
    first, second = worlds.run(2, saved_in_a_second_look)
    assert (
        first
        == second
        == [
            ("ErrorFeedback", 0, "ErrorFeedback", 0, 2, "QSGD"),
            ("QSGD", 0, "ErrorFeedback", 0, 2, "QSGD"),
            ("ErrorFeedback", 0, "ErrorFeedback", 0, 2, "QSGD"),
        ]
    )


# ---- words


def refused() -> list[str]:
    said = []
    for arguments in (
        {"accuracy": "save"},
        {"schedules": ("pipelined",)},
        {"schedules": "pipelined"},
        {"plan": gw.QSGD(bits=4), "accuracy": "exact"},
        {"plan": gw.QSGD(bits=4), "schedules": ("backward", "pipelined")},
    ):
        with pytest.raises(gw.PlanError) as error:
            gw.parallelize(Given([3]), **arguments)
        said.append(str(error.value))
    handle = gw.parallelize(Given([3]))
    state = handle.state_dict()
    key = f"rank{dist.get_rank()}/decided"
    with pytest.raises(ValueError) as damaged:
        handle.load_state_dict(state | {key: state[key][:-5]})
    handle.detach()
    return [*said, str(damaged.value)]


def test_wrong_words_are_refused(worlds: Worlds) -> None:
    accuracy, schedules, word, exact, scheduled, damaged = worlds.run(2, refused)[0]
    assert "'save'" in accuracy and "safe" in accuracy
    assert "pipelined" in schedules
    assert "Write schedules=('backward', 'pipelined')" in word
    for told in (exact, scheduled):
        assert told.startswith("plan is QSGD(bits=4, block=128)") and "would have no effect" in told
    assert "rank0/decided is no plan" in damaged


def alone() -> tuple[bool, object, bool, bool]:
    model = Given([30, 30])
    handle = gw.parallelize(model)
    exact = True
    for number in range(30):
        model.zero_grad()
        gradients = model.random_gradients(0, number)
        model(gradients).backward()
        exact = exact and all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    told = handle.decision
    searching = handle.session.driver.searching or any("/searching" in key for key in handle.state_dict())  # type: ignore[union-attr]
    handle.detach()
    return exact, told, searching, encodes(handle.plan)


def test_a_rank_alone_decides_nothing_and_loses_nothing(worlds: Worlds) -> None:
    assert worlds.run(1, alone) == [(True, None, False, False)]


# ---- what passes between turns


def hours_between_steps(pauses: bool) -> tuple[float | None, int]:
    job = Clocked(Shuffled(SIZES), lambda plan, step: (2.0 if encodes(plan) else 10.0, 1.0))
    for number in range(80):
        job.step(number)
        job.now += 3600.0
        if pauses:
            job.handle.session.driver.pause()  # type: ignore[union-attr]
    decision = job.handle.decision
    assert decision is not None
    told = decision.chosen.measured_us, len(job.handle.decisions)
    job.handle.detach()
    return told


@pytest.mark.parametrize(("pauses", "measured_us"), [(True, 2e3), (False, 3.6e9)])
def test_a_pause_is_no_part_of_a_step(worlds: Worlds, pauses: bool, measured_us: float) -> None:
    """Without it, the median of what comes before a step becomes an hour. Neither asks for another plan."""
    for counted_us, decisions in worlds.run(2, hours_between_steps, pauses):
        assert counted_us == pytest.approx(measured_us, rel=1e-3) and decisions == 1


# ---- planning fails


def without_planner() -> tuple[bool, bool, int, int]:
    """Rank 0's planner raises what nobody foresaw."""
    torch.manual_seed(0)
    model = Given([70_000] * 4)
    handle = gw.parallelize(model)
    same = True
    for number in range(12):
        model.zero_grad()
        with mock.patch("gradwire.auto.driver.offers", side_effect=ZeroDivisionError("made up")):
            model(model.random_gradients(dist.get_rank(), number)).backward()
        means = model.mean_of(lambda r, s=number: model.random_gradients(r, s), dist.get_world_size())
        if number > 6:
            same &= all(torch.allclose(p.grad, m.float(), atol=1e-6) for p, m in zip(model.parameters(), means, strict=True))
    told = same, encodes(handle.plan), len(handle.decisions), handle.plan.schedule.period
    handle.detach()
    return told


def test_a_planner_that_fails_leaves_plain_all_reduce_on_all_ranks(worlds: Worlds) -> None:
    assert worlds.run(3, without_planner) == [(True, False, 0, 1)] * 3
