"""One rank of `python -m benchmarks offload`: profiles a sleeping model, plans, and runs the plans in turns.

Executed as `python -m benchmarks.campaigns.offload_worker TURNS`; rank 0 prints the result as JSON.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import gradwire as gw
from benchmarks.sleeping import SleepingAccelerator
from benchmarks.sleeping_model import LayerTimes, SleepingModel
from gradwire.bench.ranks import Ranks
from gradwire.core import LANES
from gradwire.core.launch import codes_on_cpu
from gradwire.core.plan import Plan
from gradwire.exchange.host_codec import OFFLOAD_WORKERS
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.methods import make_plan
from gradwire.profiler.recorder import WARMUP_STEPS
from gradwire.sim.rules import Rules
from gradwire.sim.timeline import simulate
from gradwire.transport.devices import OFFLOAD_LANES, stand_in

TURN_STEPS, PROFILE_STEPS, SETTLING_STEPS = 5, 10, 3
SPEC = gw.ErrorFeedback(gw.QSGD(bits=4))
"""A spec with a residual. An offloaded encode copies the residual to the host and back."""
LAYERS = (LayerTimes(1_000_000, 3750.0, 10_000.0),) * 8
"""Times that are long compared with the host's work meanwhile. Ranks of one machine share its processors: if copies,
sockets and codecs of two ranks fill two processors, each takes longer than measured. Steps of 90 ms were 20 to 30 %
above their predictions."""
ENCODE = ((2**16, 600.0), (2**21, 3600.0), (2**23, 14_250.0))
DECODE = ((2**16, 450.0), (2**21, 1950.0), (2**23, 7500.0))
"""Decode times of the sleeping accelerator. They are longer than on the host, so that the host's work is done before
the device wakes up, and short enough that not all codecs belong on CPUs."""
DEVICES = {"gpu": ("gpu",), "cpu": ("cpu",), "both": ("gpu", "cpu")}
RULES = Rules(device="gpu", lanes=LANES, offload_lanes=OFFLOAD_LANES, cpu_workers=OFFLOAD_WORKERS)
"""The rules of a rank with a stand-in for an accelerator."""


class Asleep:
    """A model with its handle."""

    def __init__(self, accelerator: SleepingAccelerator, plan: Any) -> None:
        self.model = SleepingModel(accelerator, LAYERS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan, drift_check_steps=0)
        self.steps = 0

    def step(self) -> float:
        """Microseconds of forward, backward and exchange."""
        value = torch.tensor([1.0 + 0.1 * dist.get_rank() + 0.01 * self.steps])
        began = time.perf_counter()
        self.model(value).backward()
        took_us = (time.perf_counter() - began) * 1e6
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return took_us


def profiled(accelerator: SleepingAccelerator) -> PlanningJob:
    """Return the job from which the plans are made. A step is timed without the optimizer, so the profile has none either."""
    trained = Asleep(accelerator, gw.Uniform(gw.Identity()))
    with tempfile.TemporaryDirectory() as name:
        with trained.handle.profile(Path(name), PROFILE_STEPS, [SPEC]) as found:
            for _ in range(WARMUP_STEPS + 2 * PROFILE_STEPS):
                trained.step()
        trained.handle.detach()
    assert found.cluster is not None  # of two ranks
    profile = msgspec.structs.replace(found.profile, optimizer_us=0.0)
    return PlanningJob(profile, found.cluster, found.costs, [SPEC], Limits(exempt_vectors=False), RULES)


def planned(job: PlanningJob) -> dict[str, tuple[str, float]]:
    """The plan with each choice of devices as JSON, and its predicted step in microseconds."""
    found = {}
    for name, devices in DEVICES.items():
        limits = Limits(exempt_vectors=False, devices=devices)
        allowed = PlanningJob(job.profile, job.cluster, job.simulator.prices.costs, job.specs, limits, RULES)
        plan = make_plan(allowed).plan
        step_us = simulate(plan, job.profile, job.cluster, job.simulator.prices.costs, RULES).step_us
        found[name] = (plan.to_json(), step_us)
    return found


def main(turns: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(120.0, communicating=True)
    accelerator = SleepingAccelerator(ENCODE, DECODE)
    with stand_in(accelerator):
        # all ranks plan, and all run the plans of rank 0
        plans = ranks.gather(planned(profiled(accelerator)))[0]
        trained = {name: Asleep(accelerator, Plan.from_json(text)) for name, (text, _) in plans.items()}
        times: dict[str, list[float]] = {name: [] for name in plans}
        for each in trained.values():
            for _ in range(SETTLING_STEPS):
                each.step()
        accelerator.late = accelerator.works = 0
        for turn in range(turns):
            names = list(trained)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                ranks.meet()
                steps = [trained[name].step() for _ in range(TURN_STEPS)]
                # the slowest rank, as each step waits for it
                times[name].append(max(ranks.gather(statistics.median(steps))))
        late = ranks.gather([accelerator.late, accelerator.works])
        if ranks.rank == 0:
            print(json.dumps(_result(plans, times, late)), flush=True)
        for each in trained.values():
            each.handle.detach()
    ranks.close()


def _result(plans: dict[str, Any], times: dict[str, list[float]], late: list[list[int]]) -> dict[str, Any]:
    found = {}
    for name, (text, predicted_us) in plans.items():
        buckets = Plan.from_json(text).buckets
        coded = [bucket for bucket in buckets if bucket.main_spec.encodes]
        on_cpu = sum(codes_on_cpu(bucket.option) for bucket in coded)
        found[name] = {
            "predicted_us": predicted_us,
            "turns_us": times[name],
            "on_gpu": len(coded) - on_cpu,
            "on_cpu": on_cpu,
            "plain": len(buckets) - len(coded),
        }
    return {"plans": found, "late": sum(one for one, _ in late), "works": sum(all_ for _, all_ in late)}


if __name__ == "__main__":
    main(int(sys.argv[1]))
