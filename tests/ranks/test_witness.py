"""The witness: it sees codecs that distort gradients, says nothing of honest ones, and changes no bit of a run."""

import warnings
from collections import deque
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distorting import DISTORTING, HONEST
from threads import Threads, built, here
from torch import Tensor

import gradwire as gw
from benchmarks.accuracy.jobs import job_of
from gradwire.auto.driver import Auto
from gradwire.core import Spec
from gradwire.engine.witness import Witness

STEPS = 50


class Made(SimpleNamespace):
    """A job with these parts, which can be referred to weakly."""


def watched(job_name: str, spec: Spec, seed: int, steps: int = STEPS, share: float = 1e9) -> tuple[list[str], Any, list[Tensor]]:
    """One rank of a training: the problem after each step, the statistics of buckets, and the weights."""
    job = job_of(job_name, seed)
    model = built(seed, lambda: job.make_model(seed))
    optimizer = job.make_optimizer(model)
    plan = gw.Uniform(spec, bucket_bytes=300_000)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    handle.session.witness.share = share
    problems = []
    for step in range(steps):
        job.loss(model, job.batch(here.rank, here.world_size, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        problems.append(handle.session.witness.problem)
    buckets = handle.stats().buckets
    handle.detach()
    return problems, buckets, [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("spec", DISTORTING.values(), ids=DISTORTING)
def test_a_codec_that_distorts_gradients_is_seen_within_50_steps(threads: Threads, spec: Spec) -> None:
    for problems, buckets, _ in threads.run(2, watched, "transformer", spec, 0, deadline_s=120.0):
        assert "of the gradients, where" in problems[-1], buckets


def check_honest(threads: Threads, job: str, spec: Spec, seed: int) -> None:
    """Run a training, of which the witness says nothing, and which it measures."""
    for problems, buckets, _ in threads.run(2, watched, job, spec, seed, deadline_s=300.0):
        assert not any(problems), (job, spec, seed, next(filter(None, problems)))
        measured = [each for each in buckets if each.sent_energy is not None]
        assert measured and all(each.sent_energy > 0.5 for each in measured)
        assert any(each.residual_norm > 0 for each in measured) == spec.feedback
        assert all(each.error_norm > 0 for each in measured)


@pytest.mark.parametrize("spec", HONEST.values(), ids=HONEST)
def test_nothing_is_said_of_an_honest_run(threads: Threads, spec: Spec) -> None:
    check_honest(threads, "transformer", spec, 0)


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_is_said_of_20_honest_runs(threads: Threads) -> None:
    for job, spec, seed in product(("transformer", "tied"), HONEST.values(), range(5)):
        check_honest(threads, job, spec, seed)


def test_a_run_has_the_same_bits_with_and_without_samples(threads: Threads) -> None:
    sampled, plain = (threads.run(2, watched, "transformer", HONEST["weighted"], 0, 24, share) for share in (1e9, 1e-12))
    for (_, buckets, weights), (_, none, others) in zip(sampled, plain, strict=True):
        assert all(map(torch.equal, weights, others))
        assert sum(each.sent_energy is not None for each in buckets) > sum(each.sent_energy is not None for each in none)


def judged(samples: int, energy: float, residual: float) -> str:
    """The problem of a run of one bucket with these samples."""
    job = Made()
    witness = Witness(job)  # type: ignore[arg-type]
    witness._numels[0] = 100
    witness._squares[0] = deque([[1.0, energy, 0.1, residual**2, 1.0, energy]] * samples, maxlen=8)
    return witness._judged()


def test_large_residuals_and_wrong_energies_are_a_problem_after_a_few_samples() -> None:
    assert "1.50 times the norm of the gradients, where at most 1.0 is usual" in judged(8, 1.0, 1.5)
    assert "0.70 times the energy" in judged(8, 0.7, 0.5) and "1.60 times the energy" in judged(8, 1.6, 0.5)
    assert judged(8, 0.85, 0.9) == judged(8, 1.45, 0.0) == judged(5, 3.0, 3.0) == ""


def steps_of_samples(step_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], float]:
    """The steps in which samples of 3 ms are asked for, in 1000 steps of one plan, and their part of the time."""
    now = [0.0]
    monkeypatch.setattr("gradwire.engine.witness.time.perf_counter", lambda: now[0])
    lanes = SimpleNamespace(observe=lambda *_, **__: None)
    job = Made(step=0, last_exchange=None, searching=False, group=SimpleNamespace(world_size=2), lanes=lanes)
    witness, samples, spent_s = Witness(job), [], 0.0  # type: ignore[arg-type]

    def asks(exchange: Any) -> None:
        samples.append(job.step)
        witness._sample = exchange or ()

    def measures(*_: Any) -> None:
        nonlocal spent_s
        now[0] += 0.003
        spent_s += 0.003

    monkeypatch.setattr(witness, "_ask", asks)
    monkeypatch.setattr(witness, "_measure", measures)
    for job.step in range(1, 1001):
        now[0] += step_s
        witness.finished(0.0)
    return samples, spent_s / now[0]


def test_the_time_of_samples_is_a_small_share_of_the_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, part = steps_of_samples(0.01, monkeypatch)
    assert samples[0] == 5 and len(samples) > 10 and part <= 0.006


def test_samples_are_rarer_after_the_first_ones_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = steps_of_samples(1.0, monkeypatch)
    assert {after - before for before, after in pairwise(samples[:24])} == {5}
    assert {after - before for before, after in pairwise(samples[23:])} == {20}


def test_auto_warns_once_with_the_cure_and_never_in_the_aggressive_class() -> None:
    plan = SimpleNamespace(buckets=[SimpleNamespace(specs={gw.QSGD(bits=4)})], schedule=gw.Backward())
    live: Any = SimpleNamespace(group=SimpleNamespace(rank=0), codec_problem="it is wrong", plan=plan, step=7)
    auto = Auto("safe", ("backward",), 2)
    with pytest.warns(UserWarning, match=r"in step 7, with QSGD\(bits=4, block=128\), it is wrong\. .* accuracy='exact'"):
        auto._warn_of_codecs(live)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto._warn_of_codecs(live)
        Auto("aggressive", ("backward",), 2)._warn_of_codecs(live)
        live.group.rank = 1
        Auto("safe", ("backward",), 2)._warn_of_codecs(live)
        live.group.rank, plan.schedule = 0, gw.LocalSteps()
        Auto("safe", ("backward", "local"), 2)._warn_of_codecs(live)
