"""Two ranks whose clocks differ decide alike: the driver on made-up jobs, a thread for each rank."""

import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

import gradwire as gw
from gradwire.auto.driver import Auto
from gradwire.auto.live import Live
from gradwire.auto.measuring import LONG_STEP_US
from gradwire.auto.planning import Offer, Seen, words_of
from gradwire.auto.second_look import PART_STEPS
from gradwire.auto.trial import MOST_STEPS, Candidate
from gradwire.core import Cluster, Identity, Link, TensorInfo
from gradwire.core.specs import QSGD, ErrorFeedback
from gradwire.transport import Grid, MergedValues

TENSORS = [TensorInfo(f"w{index}", (300, 500), "float32") for index in range(4)]
PLANS = [
    gw.Uniform(spec, bucket_bytes=size).plan(TENSORS, 2)
    for spec in (Identity(), QSGD(bits=4), ErrorFeedback(QSGD(bits=2)))
    for size in (2**20, 2**21)
]
STEPS = 80


class Meeting:
    """Where two ranks exchange values."""

    def __init__(self) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=30)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        told = list(self._values)
        self._barrier.wait()
        return told


class MadeUpJob:
    """A job of two ranks. Each plan's steps take its own time, longer on a slow link, with noise; each rank's clock differs."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.seed, self.meeting = seed, Meeting()
        self.long = 5 if seed % 4 == 0 else 1
        self.real_us = {plan.digest(): self.long * chance.uniform(5e4, 2e5) for plan in PLANS}
        self.foretold = {digest: us * chance.uniform(0.85, 1.15) for digest, us in self.real_us.items()}
        self.noise, self.drop = chance.choice((0.0, 0.02, 0.1)), chance.choice((1.0, 10.0))
        self.skew = [chance.uniform(0.9, 1.1) for _ in range(2)]
        self.waits_s = self.optimizer_s = self.gathers_s = 0.0
        """What an exchange of the driver takes, what the script takes after each step, and how long lanes gather after a step."""
        self.plans = PLANS
        self.later_us: dict[str, float] = {}
        """What plans take after step 6, by digest, where that is another time."""
        self.exposed_part = 0.0
        self.compares = False
        """Whether an observer compares all steps."""

    def offers(self) -> list[Offer]:
        made = []
        for plan in self.plans:
            plain = plan is PLANS[0]
            made.append(Offer(Candidate(words_of(plan), self.foretold[plan.digest()], plain), plan))
        return sorted(made, key=lambda offer: offer.candidate.predicted_us)


class MadeUpLive:
    """What the driver sees of the job, on one rank."""

    def __init__(self, job: MadeUpJob, rank: int) -> None:
        self.job, self.rank, self.chance = job, rank, random.Random(job.seed * 2 + rank)
        self.plan, self.step, self.now_s = PLANS[-1], 0, 1000.0 * rank
        self.infos, self.everybody, self.device = TENSORS, True, torch.device("cpu")
        self.group = SimpleNamespace(rank=rank, world_size=2)
        self.session = SimpleNamespace(optimizers=[], parameters={})
        self.codec_problem, self.warms_up, self.queues = "", False, False
        self.is_compared = job.compares
        self.grid = Grid.even(2, 1, rank)
        self.inputs, self.bytes_between_nodes = 64, [(1 - rank) * 10**6 * job.long] * 4  # rank 1 sends inside its node alone
        self.exposed_us = self.link_us = 0.0
        self.began_s: float | None = None
        self.gathered_s = 0.0

    def time_device(self, on: bool) -> None:
        """Times are made up."""

    @property
    def slow(self) -> float:
        return self.job.drop if self.step > STEPS // 2 else 1.0

    def run_step(self) -> None:
        self.step += 1
        noise = max(0.5, self.chance.gauss(1.0, self.job.noise)) * self.job.skew[self.rank]
        digest = self.plan.digest()
        us = (self.job.later_us if self.step > 6 else {}).get(digest, self.job.real_us[digest]) * noise * self.slow
        self.began_s, self.link_us, self.exposed_us = self.now_s, 0.5 * us, self.job.exposed_part * us
        self.now_s = max(self.now_s, self.gathered_s) + us / 1e6
        if self.plan.schedule.gathers_in_forward:
            self.gathered_s = self.now_s + self.job.gathers_s

    def wait(self) -> None: ...

    def hold(self, on: bool) -> None: ...

    def plan_of(self, policy: gw.Policy) -> gw.Plan:
        return policy.plan(TENSORS, 2)

    def change_to(self, plan: gw.Plan) -> None:
        self.plan = plan

    def exchange(self, numbers: list[float]) -> Callable[[], list[list[float]]]:
        self.now_s += self.job.waits_s
        told = self.job.meeting.exchange(self.rank, list(numbers))
        return lambda: told

    def merge(self, most: list[float], sums: list[float]) -> Callable[[], MergedValues]:
        told = self.job.meeting.exchange(self.rank, MergedValues(b"", tuple(most), tuple(sums)))
        return lambda: MergedValues.of_parts(told)

    def merged(self, most: list[float], sums: list[float] = ()) -> MergedValues:  # type: ignore[assignment]
        self.now_s += self.job.waits_s
        return self.merge(most, sums)()

    def from_all(self, text: str) -> list[str]:
        return self.job.meeting.exchange(self.rank, text)

    made_by_first = Live.made_by_first


class NoMoments:
    """No gradients are seen, so the profile is empty of times; offers are made up anyway."""

    def __init__(self, *_: object) -> None:
        self.rows = [[1e4 * (1 + index) for index in range(len(TENSORS))]] * 2

    needed_s = wall_s = 1.0

    def ended(self, *_: float) -> None: ...

    def remove(self) -> None: ...


def run(seed: int, **job_times: Any) -> tuple[list[list[str]], list[list[Any]], MadeUpJob]:
    """The plans and the decisions of both ranks. The digest of a plan in a second look ends with "?"."""
    job = MadeUpJob(seed)
    vars(job).update(job_times)
    plans: list[list[str]] = [[], []]
    drivers = [Auto("safe", ("backward",), 2) for _ in range(2)]
    failures: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            live, driver = MadeUpLive(job, rank), drivers[rank]
            driver.clock = lambda: live.now_s
            for _ in range(STEPS):
                live.run_step()
                driver.finished(live)  # type: ignore[arg-type]
                plans[rank].append(live.plan.digest() + "?" * (driver.searching and bool(driver.decisions)))
                live.now_s += job.optimizer_s
        except BaseException as error:
            failures.append(error)
            job.meeting._barrier.abort()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return plans, [driver.decisions for driver in drivers], job


@pytest.fixture
def made_up() -> Any:
    def cluster_of(live: MadeUpLive, seconds: float) -> Cluster:
        alpha = live.chance.uniform(100.0, 110.0) * live.slow
        slowest = max(live.job.meeting.exchange(live.rank, alpha))  # as the measurement of links does
        link = Link(slowest, 1.0 / live.slow)
        return Cluster(nodes=2, ranks_per_node=1, intra=link, inter=link)

    def made(driver: Auto, live: MadeUpLive, seconds: float, seen: Seen | None) -> Any:
        first, *others = live.job.offers()
        if seen is not None:
            first = first._replace(candidate=first.candidate._replace(seen_us=seen.us))
        return [(offer.candidate, offer.plan.to_dict()) for offer in (first, *others)], [], None

    def profile_of(live: MadeUpLive, *_: object) -> Any:
        return SimpleNamespace(compute_us=0.0)

    with (
        mock.patch("gradwire.auto.driver.Live", lambda session: session),
        mock.patch("gradwire.auto.measuring.StepMoments", NoMoments),
        mock.patch("gradwire.auto.measuring.Clock", mock.MagicMock()),
        mock.patch("gradwire.auto.measuring.profile_of", profile_of),
        mock.patch("gradwire.auto.driver.scaled", lambda profile, factor: profile),
        mock.patch("gradwire.auto.driver.cluster_of", cluster_of),
        mock.patch("gradwire.auto.change_watch.cluster_of", cluster_of),
        mock.patch.object(Auto, "_made", made),
        mock.patch.object(Auto, "_allows", lambda *_: True),  # the made-up plans have specs of no class
        mock.patch("gradwire.auto.driver.say"),
    ):
        yield


def check(seeds: range) -> None:
    worse = []
    for seed in seeds:
        plans, decisions, job = run(seed)
        assert plans[0] == plans[1], f"seed {seed}: ranks ran different plans"
        first, second = ([msgspec.json.encode(repr(each.tried)) for each in made] for made in decisions)
        assert first == second and decisions[0], f"seed {seed}"
        assert decisions[0][0].took_steps <= MOST_STEPS
        best = min(job.real_us.values())
        worse.append(job.real_us[plans[0][STEPS // 2].rstrip("?")] / best)
        trials = [each for each in decisions[0] if each.second_look is None]
        assert len(trials) == (2 if job.drop > 1 else 1), f"seed {seed}: {[each.why for each in decisions[0]]}"
        assert len(decisions[0]) <= 2 * len(trials)
    worse.sort()
    assert worse[len(worse) // 2] <= 1.02 and worse[int(0.9 * len(worse))] <= 1.10, worse[int(0.9 * len(worse))]


def test_waits_of_the_driver_are_no_time_of_the_script(made_up: None) -> None:
    between_us = []

    def profile_of(live: MadeUpLive, infos: Any, rows: Any, own_us: float, part: float) -> Any:
        between_us.append(own_us)
        return SimpleNamespace(compute_us=0.0)

    with mock.patch("gradwire.auto.measuring.profile_of", profile_of):
        run(0, waits_s=0.05, optimizer_s=0.002)
    assert between_us == pytest.approx([2000.0] * 2, abs=1.0)


def test_lanes_do_not_gather_while_ranks_tell_each_other_times_of_a_trial(made_up: None) -> None:
    """The step that the trial measures is the one that training has later."""
    pipelined = gw.Uniform(QSGD(bits=4), schedule="pipelined").plan(TENSORS, 2)
    us = {plan.digest(): 6e4 for plan in PLANS} | {pipelined.digest(): 4.6e4}
    alike = {"noise": 0.0, "skew": [1.0, 1.0], "drop": 1.0, "gathers_s": 0.008, "waits_s": 0.005}
    for foretold in (4e4, 5.9e4):  # the pipelined plan runs first, or after plain all-reduce
        told = {"real_us": us, "foretold": us | {PLANS[0].digest(): 5.8e4, pipelined.digest(): foretold}}
        plans, decisions, _ = run(1, plans=[PLANS[0], pipelined], **told, **alike)
        assert plans[0] == plans[1] and plans[0][-1] == pipelined.digest()
        assert [each[0].chosen.measured_us for each in decisions] == pytest.approx([5.4e4] * 2)


def test_steps_of_a_turn_that_ranks_end_too_late_are_paid(made_up: None) -> None:
    """A pipelined plan that is hopeless in its first step goes on to the end of its turn, where ranks tell times."""
    pipelined = gw.Uniform(QSGD(bits=4), schedule="pipelined").plan(TENSORS, 2)
    us = {plan.digest(): 6e4 for plan in PLANS} | {pipelined.digest(): 2e5}
    told = {"real_us": us, "foretold": us | {PLANS[0].digest(): 5.8e4, pipelined.digest(): 5.9e4}}
    _, decisions, _ = run(1, plans=[PLANS[0], pipelined], noise=0.0, skew=[1.0, 1.0], drop=1.0, **told)
    for (decision,) in decisions:
        assert decision.cost_us > 3 * (2e5 - 6e4)


@pytest.mark.parametrize("rival_us", [1.2e5, 1.45e5])
def test_both_ranks_swap_a_plan_that_is_slower_than_predicted_for_a_faster_rival(made_up: None, rival_us: float) -> None:
    """The chosen plan is slow after the trial, in which the rival did not run. It comes back where the rival is no faster."""
    plain, chosen, rival = PLANS[0], PLANS[2], PLANS[4]
    foretold = {plain.digest(): 5e5, chosen.digest(): 1e5, rival.digest(): 1.2e5}
    real = {"real_us": dict.fromkeys(foretold, 1e5) | {PLANS[-1].digest(): 2e5}, "noise": 0.02, "drop": 1.0, "exposed_part": 0.5}
    later = {chosen.digest(): 1.4e5, rival.digest(): rival_us}
    plans, decisions, _ = run(1, plans=[plain, chosen, rival], foretold=foretold, later_us=later, **real)
    assert plans[0] == plans[1]
    ran = [name for name, steps in itertools.groupby(plans[0][decisions[0][0].step :])]
    stays = rival_us > 1.4e5
    assert ran == [chosen.digest(), f"{rival.digest()}?", chosen.digest(), *([] if stays else [rival.digest()])]
    for first, second in decisions:
        assert (first.step, first.chosen.name) == (6, words_of(chosen)) and second.took_steps == PART_STEPS
        look = second.second_look
        assert (look.before.name, look.rival.name, look.swapped) == (words_of(chosen), words_of(rival), not stays)
        before, other = look.before.measured_us, look.rival.measured_us
        assert before == pytest.approx(1.4e5, rel=0.15) and other == pytest.approx(rival_us, rel=0.15)
        assert second.chosen == (look.before if stays else look.rival) and second.chosen in second.tried
        words = "goes on with" if stays else "from now on"
        assert words in str(second) and f"{before / 1e3:.1f} ms a step, where 100.0 were predicted" in str(second)
        (kept,) = [each.name for each in second.recorded().alternatives if each.kept]
        assert kept == second.chosen.name and str(second) == "; ".join(second.recorded().words)
    assert repr(decisions[0]) == repr(decisions[1])


@pytest.mark.parametrize("compares", [False, True])
def test_no_rival_runs_while_steps_are_compared(made_up: None, compares: bool) -> None:
    plain, chosen, rival = PLANS[0], PLANS[2], PLANS[4]
    foretold = {plain.digest(): 5e5, chosen.digest(): 1e5, rival.digest(): 1.2e5}
    real = {"real_us": dict.fromkeys(foretold, 1e5) | {PLANS[-1].digest(): 2e5}, "noise": 0.02, "drop": 1.0, "exposed_part": 0.5}
    later = {chosen.digest(): 1.4e5, rival.digest(): 1.2e5}
    plans, decisions, _ = run(1, plans=[plain, chosen, rival], foretold=foretold, later_us=later, compares=compares, **real)
    assert len(decisions[0]) == (1 if compares else 2)
    assert plans[0][-1] == (chosen if compares else rival).digest()


def test_a_rival_that_no_rank_can_run_is_left_out(made_up: None) -> None:
    plain, chosen, rival = PLANS[0], PLANS[2], PLANS[4]
    foretold = {plain.digest(): 5e5, chosen.digest(): 1e5, rival.digest(): 1.2e5}
    real = {"real_us": dict.fromkeys(foretold, 1e5) | {PLANS[-1].digest(): 2e5}, "noise": 0.02, "drop": 1.0, "exposed_part": 0.5}
    later = {chosen.digest(): 1.4e5, rival.digest(): 1.2e5}

    def change_to(live: MadeUpLive, plan: gw.Plan) -> None:
        if plan.digest() == rival.digest():
            raise gw.PlanError("made up")
        live.plan = plan

    with mock.patch.object(MadeUpLive, "change_to", change_to):
        plans, decisions, _ = run(1, plans=[plain, chosen, rival], foretold=foretold, later_us=later, **real)
    assert plans[0] == plans[1] and set(plans[0][decisions[0][0].step :]) == {chosen.digest()}
    assert [len(made) for made in decisions] == [1, 1]


def test_where_steps_are_long_fewer_of_them_decide(made_up: None) -> None:
    taken = {True: set(), False: set()}
    for seed in range(40):
        job = MadeUpJob(seed)
        first_us = job.real_us[PLANS[-1].digest()]  # the plan that runs before the first decision
        if abs(first_us / LONG_STEP_US - 1) > 0.5:
            taken[first_us > LONG_STEP_US].add(run(seed)[1][0][0].took_steps)
    assert min(taken[False]) >= 5 and min(taken[True]) == 4


def test_ranks_with_different_clocks_decide_alike(made_up: None) -> None:
    check(range(40))


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_with_different_clocks_decide_alike_a_thousand_times(made_up: None) -> None:
    check(range(1000, 2000))
