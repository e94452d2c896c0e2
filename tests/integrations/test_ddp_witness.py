"""The witness under DistributedDataParallel: it sees codecs that distort gradients, says nothing of honest ones, and changes no
bit of a run."""

from typing import Any

import pytest
import torch.distributed as dist
from distorting import DISTORTING, HONEST
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest

import gradwire as gw
from benchmarks.accuracy.jobs import job_of
from gradwire.core import Spec
from gradwire.exchange import BucketStats

STEPS = 50


def watched(spec: Spec, seed: int, steps: int = STEPS, share: float = 1e9) -> tuple[list[str], tuple[BucketStats, ...], str]:
    """One rank of a training: the problem after each step, the statistics of buckets, and a digest of the weights."""
    job = job_of("transformer", seed)
    model = job.make_model(seed)
    optimizer = job.make_optimizer(model)
    run: Any = DistributedDataParallel(model, bucket_cap_mb=0.3)
    state = gw.DDPState(gw.Uniform(spec, bucket_bytes=300_000))
    run.register_comm_hook(state, gw.ddp_hook)
    problems = []
    for step in range(steps):
        witness = state._find_job().witness
        witness.share = share
        job.loss(run, job.batch(dist.get_rank(), dist.get_world_size(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        problems.append(witness.problem)
    return problems, state.stats().buckets, digest(model.parameters())


@pytest.mark.parametrize("spec", DISTORTING.values(), ids=DISTORTING)
def test_a_codec_that_distorts_gradients_is_seen_within_50_steps(worlds: Worlds, spec: Spec) -> None:
    for problems, buckets, _ in worlds.run(2, watched, spec, 0, deadline_s=120.0):
        assert "of the gradients, where" in problems[-1], buckets


@pytest.mark.parametrize("spec", HONEST.values(), ids=HONEST)
def test_nothing_is_said_of_an_honest_run(worlds: Worlds, spec: Spec) -> None:
    for problems, buckets, _ in worlds.run(2, watched, spec, 0, deadline_s=120.0):
        assert not any(problems), next(filter(None, problems))
        measured = [each for each in buckets if each.sent_energy is not None]
        assert measured and all(each.sent_energy > 0.5 and each.error_norm > 0 for each in measured)
        assert any(each.residual_norm > 0 for each in measured) == spec.feedback


def test_a_run_has_the_same_bits_with_and_without_samples(worlds: Worlds) -> None:
    sampled, plain = (worlds.run(2, watched, HONEST["weighted"], 0, 24, share) for share in (1e9, 1e-12))
    for (_, buckets, weights), (_, none, others) in zip(sampled, plain, strict=True):
        assert weights == others
        assert sum(each.sent_energy is not None for each in buckets) > sum(each.sent_energy is not None for each in none)
