"""The size of buckets that is tuned on the live job: the search on known objectives, and real ranks whose clocks are made up."""

import math
import sys
from collections.abc import Callable, Hashable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw
from benchmarks import tuning
from gradwire.auto.sizes import SizeSearch, spaced
from gradwire.auto.tuning import TunedSize, Tuning
from gradwire.plan.adaptive import SEARCHES

MB = 2**20
PLAIN = gw.Uniform(gw.Identity())


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


# ---- the search alone


def peaked(best: float) -> Callable[[int], float]:
    """Throughput that falls by a fifth for each factor of two from the best size."""
    return lambda nbytes: 100 * 0.8 ** abs(math.log2(nbytes / best))


def thirds_of_octaves(nbytes: int) -> Hashable:
    """As if sizes within a quarter of each other made the same buckets."""
    return round(3 * math.log2(nbytes))


def searched(objective: Callable[[int], float], group: Callable[[int], Hashable], **fields: object) -> SizeSearch:
    search, seen = SizeSearch(gw.Tuned(PLAIN, **fields), group), []
    while (nbytes := search.propose()) is not None:
        seen.append(group(nbytes))
        search.took(objective(nbytes))
    assert len(seen) == search.tried
    if fields.get("search", "bayes") != "bayes":
        assert len(set(seen)) == len(seen), "a grouping was tried twice"
    return search


@pytest.mark.parametrize("best", [1.5 * MB, 5 * MB, 60 * MB])
def test_bayes_finds_the_peak_in_ten_trials_from_the_far_end(best: float) -> None:
    objective = peaked(best)
    found = searched(objective, thirds_of_octaves, trials=10, start_bytes=100 * MB)
    assert objective(found.best) >= 0.95 * 100
    drawn = [
        objective(searched(objective, thirds_of_octaves, search="random", trials=found.tried, seed=seed).best)
        for seed in range(10)
    ]
    assert objective(found.best) >= sorted(drawn)[len(drawn) // 2]


def test_bayes_stops_where_nothing_promises_more() -> None:
    assert searched(peaked(5 * MB), lambda nbytes: nbytes).tried < 10
    assert searched(lambda nbytes: 50.0, lambda nbytes: nbytes, trials=60).tried < 30


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_ends_when_all_groupings_are_known(search: str) -> None:
    def few(nbytes: int) -> Hashable:
        return nbytes > 5 * MB, nbytes > 12 * MB

    found = searched(lambda nbytes: 2.0 if few(nbytes) == (True, False) else 1.0, few, search=search)
    assert found.tried == (5 if search == "bayes" else 3) and 5 * MB < found.best <= 12 * MB


def test_bayes_tries_again_what_looks_best_and_believes_the_mean() -> None:
    lucky, seen = 20 * MB, list[int]()

    def objective(nbytes: int) -> float:
        seen.append(nbytes)
        first_of_lucky = thirds_of_octaves(nbytes) == thirds_of_octaves(lucky) and len(alike(nbytes)) == 1
        return 130.0 if first_of_lucky else peaked(5 * MB)(nbytes)

    def alike(nbytes: int) -> list[int]:
        return [each for each in seen if thirds_of_octaves(each) == thirds_of_octaves(nbytes)]

    found = searched(objective, thirds_of_octaves, trials=10, start_bytes=lucky)
    assert len(alike(lucky)) > 1, "the lucky one was believed at once"
    assert peaked(5 * MB)(found.best) >= 80 > peaked(5 * MB)(lucky) and found.tried <= 10
    assert len(alike(found.best)) > 1


def test_random_follows_the_seed_and_a_grid_the_range() -> None:
    def tried(**fields: object) -> list[int]:
        seen: list[int] = []
        searched(lambda nbytes: seen.append(nbytes) or 1.0, lambda nbytes: nbytes, **fields)
        return seen

    assert tried(search="random", trials=6, seed=3) == tried(search="random", trials=6, seed=3)
    assert tried(search="random", trials=6, seed=3) != tried(search="random", trials=6, seed=4)
    start, *grid = tried(search="grid", trials=4, start_bytes=2 * MB)
    assert (start, grid[0], grid[-1]) == (2 * MB, MB, 100 * MB)
    assert spaced(MB, 100 * MB, 3)[1] == 10 * MB


# ---- on ranks


SIZES = [7_000] * 8
"""Elements: 27 KB each, so that sizes from 10 KB to 1 MB make 1, 2, 3, 4 or 8 buckets."""
SHORT = {"trial_steps": 2, "discard_steps": 1, "start_bytes": MB, "low_bytes": 10 * 1024, "high_bytes": MB}
BEST = 4
"""Buckets at which the made-up clock is fastest."""


class Clocked:
    """A model in training whose clock passes by the number of buckets, more slowly on rank 1."""

    def __init__(self, **fields: object) -> None:
        torch.manual_seed(0)
        self.model = Given(SIZES)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        schedule = fields.pop("schedule", "pipelined")
        policy = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=8)), schedule=schedule, edge_bytes=MB)
        plan = gw.Tuned(policy, **SHORT | fields)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan)
        self.now = 0.0
        assert isinstance(self.handle.session.driver, Tuning)
        self.handle.session.driver.clock = lambda: self.now

    def steps(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            gradients = [torch.full((size,), float(number + dist.get_rank())) for size in SIZES]
            loss = self.model(gradients)
            self.now += (0.1 + 0.02 * abs(len(self.handle.plan.buckets) - BEST)) * (1 + dist.get_rank())
            self.now += 60.0 * (number == 5)  # an evaluation
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def tune(schedule: str, search: str) -> tuple[TunedSize, int, str, str, bool]:
    job = Clocked(schedule=schedule, search=search, trials=6)
    job.steps(0, 24)
    told = (
        job.handle.decision,
        len(job.handle.plan.buckets),
        str(job.handle.decision),
        digest(job.model.state_dict().values()),
        bool(torch.isfinite(job.model.p0).all()),
    )
    job.handle.detach()
    return told


@pytest.mark.parametrize(("schedule", "search"), [("pipelined", "bayes"), ("backward", "grid"), ("delayed", "random")])
def test_ranks_find_the_best_size_together_and_stay_alike(worlds: Worlds, schedule: str, search: str) -> None:
    first, second = worlds.run(2, tune, schedule, search)
    assert first == second
    decision, buckets, said, _, finite = first
    assert finite
    assert buckets == decision.chosen.buckets
    for tried in decision.tried:
        expected_us = 2e6 * (0.1 + 0.02 * abs(tried.buckets - BEST))
        assert tried.step_us == pytest.approx(expected_us), "it is not the slowest rank's, or counts the pause"
    assert decision.chosen.step_us == pytest.approx(min(tried.step_us for tried in decision.tried))
    assert 3 <= len(decision.tried) <= 6
    again = len(decision.tried) - len({tried.nbytes for tried in decision.tried})
    assert again == (2 if search == "bayes" else 0)
    assert (f"sizes in {len(decision.tried)} trials and " in said) == (search == "bayes")
    assert decision.tried[0].nbytes == MB and decision.tried[0].buckets == 1
    assert decision.tried[0].cost_us == pytest.approx(3 * (decision.tried[0].step_us - decision.chosen.step_us))
    assert decision.took_steps == 3 * len(decision.tried) and "tried first: 1 MB (1 bucket): 320.0 ms" in said


def resume() -> tuple[bool, bool, bool, bool]:
    """A state saved in the midst of the search, and one that was saved after it."""
    job = Clocked(search="grid", trials=4)
    job.steps(0, 5)
    midst = job.handle.state_dict()
    job.steps(5, 15)
    state, weights = job.handle.state_dict(), {name: p.detach().clone() for name, p in job.model.named_parameters()}
    found = job.handle.plan
    job.steps(20, 4)
    after = digest(job.model.state_dict().values())
    job.handle.detach()
    again = Clocked(search="grid", trials=4)
    again.model.load_state_dict(weights)
    again.handle.load_state_dict(state)
    kept = again.handle.plan == found
    again.steps(20, 4)
    same = digest(again.model.state_dict().values()) == after and again.handle.decisions == ()
    again.handle.load_state_dict(midst)
    tried_only = again.handle.plan != found
    again.steps(5, 15)
    anew = again.handle.plan == found and len(again.handle.decisions) == 1
    again.handle.detach()
    return kept, same, tried_only, anew


def test_a_resumed_run_keeps_the_size_that_was_found_and_no_other(worlds: Worlds) -> None:
    assert worlds.run(2, resume) == [(True,) * 4] * 2


# ---- words


def without_the_library() -> str:
    """Rank 1 has no scikit-learn."""
    missing = {name: None for name in sys.modules if name.startswith("sklearn")} if dist.get_rank() else {}
    with mock.patch.dict(sys.modules, missing | ({"sklearn": None} if dist.get_rank() else {})):
        with pytest.raises(gw.GradwireError) as error:
            gw.parallelize(Given([3]), plan=gw.Tuned(PLAIN))
        handle = gw.parallelize(Given([3]), plan=gw.Tuned(PLAIN, search="grid"))
    handle.detach()
    return str(error.value)


def test_a_missing_library_ends_all_ranks_with_the_cure(worlds: Worlds) -> None:
    first, second = worlds.run(2, without_the_library)
    assert "rank 1: PlanError" in first
    assert "pip install scikit-learn" in first and "pip install scikit-learn" in second


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"search": "best"}, "search is 'best'"),
        ({"trials": 0}, "trials is 0"),
        ({"start_bytes": 1000}, "start_bytes is 1000"),
        ({"high_bytes": MB}, "high_bytes is 1048576"),
        ({"trial_steps": 0}, "trial_steps is 0"),
        ({"policy": gw.QSGD()}, "gw.Uniform"),
        ({"policy": gw.Uniform(gw.QSGD(), bucket_bytes=MB)}, "start_bytes=1048576"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(gw.PlanError, match=told):
        gw.Tuned(**{"policy": PLAIN} | wrong)


def alone() -> tuple[object, bool]:
    job = Clocked(search="grid")
    job.steps(0, 6)
    told = job.handle.decision, job.handle.session.driver.searching
    job.handle.detach()
    return told


def test_a_rank_alone_tunes_nothing(worlds: Worlds) -> None:
    assert worlds.run(1, alone) == [(None, False)]


# ---- what the benchmark makes of its measurements


def cell(chosen_ms: float, chosen_bytes: int) -> dict[str, object]:
    grid = [
        {"nbytes": MB, "step_ms": 100.0},
        {"nbytes": 4 * MB, "step_ms": 80.0},
        {"nbytes": 16 * MB, "step_ms": 120.0},
    ]
    return {
        "grid": grid,
        "trials": [{}] * 4,
        "cost_s": 1.0,
        "chosen_bytes": chosen_bytes,
        "chosen_buckets": 3,
        "best_bytes": 4 * MB,
        "beside_ms": {"chosen": chosen_ms, "best": 80.0, "start": 120.0},
        "random": [[16 * MB, 2 * MB], [16 * MB, MB], [16 * MB, 8 * MB]],
    }


def test_the_benchmark_sees_what_is_far_from_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.random_ms(cell(80.0, 4 * MB)) == pytest.approx([90.0, 100.0, 100.0])
    assert tuning.verdict({"mlp, 100mbit": cell(83.0, 4 * MB)}) == 0
    assert tuning.verdict({"mlp, 100mbit": cell(85.0, 4 * MB)}) == 1
    assert tuning.verdict({"mlp, 100mbit": cell(80.0, 12 * MB)}) == 1
    assert "100 by random search's median" in capsys.readouterr().out
    assert "| mlp, 100mbit | 120 ms | 4.0 MB, 3 buckets, 83 ms |" in tuning.table({"mlp, 100mbit": cell(83.0, 4 * MB)})[2]
    page = tuning.PAGE.read_text()
    assert page.index(tuning.BEGIN) < page.index(tuning.END)
