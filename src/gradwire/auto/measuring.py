"""Measures a live job quickly: its profile, links and codecs.

In a few steps all sends wait for the last gradient, and the moment at which each gradient becomes ready is recorded. The time
from the start of forward to the first gradient counts as forward. Each tensor gets the same share of forward as of backward.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch
from msgspec.structs import replace

from gradwire.auto.changes import StepPace
from gradwire.auto.live import AllRanks, DrivenJob, Live
from gradwire.core import Cluster, Costs, Plan, ProcessorNeed, Profile, Spec, TensorInfo, TensorProfile
from gradwire.costs import us_per_byte
from gradwire.profiler import Clock, cached_codecs, measure_links, measure_processors, measured_links

LOOK_STEPS = 2
LONG_STEP_US = 4e5
"""Steps of at least this length are profiled once. A second one would spend a fifth of the time that a decision may take."""
CODECS_SECONDS = 0.3
"""Longest time, in seconds, for measuring codecs that no earlier run on the machine measured."""
_CODEC_SIZES = tuple(2**14 * 8**power for power in range(3))
"""Bytes of gradient: 16 KB to 1 MB."""
_DEVICE_CODEC_SIZES = tuple(2**16 * 32**power for power in range(3))
"""Bytes of gradient on a GPU: 64 KB to 64 MB. Up to about a megabyte a launch takes as long as the kernel."""
_SPIN_S = 0.01
"""Processor time of each rank, in seconds, for finding how many ranks share a processor."""
_UNKNOWN_GBPS = 100.0
"""Rate assumed for a link that is too fast for its times to show a rate."""


class StepMoments:
    """Records when gradients become ready, until `remove`."""

    def __init__(self, job: DrivenJob, clock: Clock) -> None:
        self.rows: list[list[float]] = []
        """A row for each step: microseconds by parameter, in registration order; NaN for a parameter without gradient."""
        self.needed_s = self.wall_s = 0.0
        """Time for which a processor was needed, and elapsed time, from the end of each step before to the last gradient."""
        self._seen: dict[int, Any] = {}
        self._since = self._last = (ProcessorNeed.now(), time.perf_counter())
        self._count, self._clock = len(job.tensors), clock
        self.remove = job.watch_gradients(self)

    def ready(self, index: int) -> None:
        """The gradient of the parameter with this number is ready."""
        self._seen[index] = self._clock.mark()
        self._last = (ProcessorNeed.now(), time.perf_counter())

    def ended(self, began_s: float, ended_s: float) -> None:
        """End a step that lasted from `began_s` to `ended_s`, in seconds."""
        now = self._clock.mark()
        us = {index: 1e6 * (ended_s - began_s) - self._clock.us(moment, now) for index, moment in self._seen.items()}
        self.rows.append([us.get(index, math.nan) for index in range(self._count)])
        self._seen = {}
        self.needed_s += self._last[0].since(self._since[0])
        self.wall_s += self._last[1] - self._since[1]
        self._since = self._last = (ProcessorNeed.now(), time.perf_counter())


class Look:
    """Measures the profile of a live job in a few steps. In these steps all sends wait for the last gradient."""

    def __init__(self, live: Live, steps: int = LOOK_STEPS, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin with the next step. steps: the number of steps, equal on all ranks."""
        self._moments = StepMoments(live.job, Clock(live.device, clock, live.queues))
        self._infos, self._left = live.infos, steps
        self.speeds: tuple[float, ...] = ()
        """The speed of each rank after the last step, as `speeds_of` returns it."""
        live.hold(True)

    def ended(self, live: Live, began_s: float, us: float, pace: StepPace) -> tuple[Profile, float] | None:
        """End a step that began at `began_s` and took `us` microseconds on this rank. Collective in the last step.

        Returns None before the last step; then the profile and that step's time on the slowest rank, equal on all ranks.
        """
        assert pace.mark_s is not None
        self._moments.ended(began_s, pace.mark_s)
        self._left -= 1
        if self._left:
            return None
        self.remove()
        live.hold(False)
        computes_us = median_low([max((each for each in row if not math.isnan(each)), default=0.0) for row in self._moments.rows])
        part = self._moments.needed_s / max(1e-9, self._moments.wall_s)
        moments = (-math.inf if math.isnan(each) else each for row in self._moments.rows for each in row)
        us, between_us, part, *latest = live.merged([us, 1e6 * pace.usual_s, part, *moments]).most
        row = [math.nan if moment == -math.inf else moment for moment in latest]
        profile = profile_of(live, self._infos, [row], between_us, part)
        self.speeds = measured_speeds(live, computes_us, live.inputs)
        return profile, us

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._moments.remove()


def profile_of(
    live: Live, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]], between_us: float, processor_part: float
) -> Profile:
    """Return the profile from recorded moments. In each step the moments of the latest rank count, because exchanges
    wait for it. The profile has the lower medians over steps.

    infos: in registration order. rows: for each rank the rows of its steps, one after another, equally many on all
    ranks. between_us: from where the script goes on after a step to the next forward. processor_part: as in `Profile`, on CPUs.
    """
    count = len(infos)
    steps = len(rows[0]) // count
    moments: dict[int, float] = {}
    for index in range(count):
        latest = []
        for step in range(steps):
            found = [us for row in rows if not math.isnan(us := row[step * count + index])]
            latest += [max(found)] if found else []
        moments[index] = median_low(latest) if latest else math.inf
    order = sorted(range(count), key=lambda index: (moments[index], -index))
    first = at = moments[order[0]] if math.isfinite(moments[order[0]]) else 0.0
    backward_us = max((us for us in moments.values() if math.isfinite(us)), default=first) - first
    between_us = min(between_us, first)
    forward_us = first - between_us
    tensors = []
    for index in order:
        gap = max(0.0, moments[index] - at) if math.isfinite(moments[index]) else 0.0
        at += gap
        info, part_us = infos[index], (gap / backward_us if backward_us > 0 else 1 / count) * forward_us
        times = {"backward_us": gap, "forward_us": part_us}
        tensors.append(TensorProfile(name=info.name, shape=info.shape, dtype=info.dtype, embedding=info.embedding, **times))
    on_cpu = live.device.type == "cpu"
    return Profile(
        model="live",
        batch=1,
        device="cpu" if on_cpu else torch.cuda.get_device_name(live.device),
        steps=steps,
        optimizer_us=between_us,
        processor_part=processor_part if on_cpu else None,
        tensors=tuple(tensors),
    )


def measured_speeds(live: Live, compute_us: float, inputs: float) -> tuple[float, ...]:
    """Return the speed of each rank, as `speeds_of` does, from what each rank passes. Collective."""
    return speeds_of(*zip(*live.exchange([compute_us, inputs])(), strict=True))


def speeds_of(computes_us: Sequence[float], inputs: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of each rank: elements of a step's inputs for each microsecond of its computation.

    If a rank's inputs were not seen, batches count as equal. Empty if the time of a rank is unknown.

    >>> speeds_of([100.0, 200.0], [8, 8]), speeds_of([100.0, 200.0], [8, 0]), speeds_of([100.0, 0.0], [8, 8])
    ((0.08, 0.04), (0.01, 0.005), ())
    """
    if min(computes_us) <= 0:
        return ()
    counts = inputs if min(inputs) > 0 else [1.0] * len(computes_us)
    return tuple(count / us for count, us in zip(counts, computes_us, strict=True))


def scaled(profile: Profile, factor: float) -> Profile:
    """Return the profile with all times multiplied by `factor`, for a larger or smaller batch."""
    tensors = (
        replace(tensor, backward_us=factor * tensor.backward_us, forward_us=factor * (tensor.forward_us or 0.0))
        for tensor in profile.tensors
    )
    return replace(profile, optimizer_us=factor * (profile.optimizer_us or 0.0), tensors=tuple(tensors))


def cluster_of(live: AllRanks, seconds: float) -> Cluster:
    """Measure the links, for about `seconds` each. Collective; all ranks return the same cluster."""
    grid, device = live.grid, live.device
    times = live.on_lane(lambda link: measure_links(link, grid, device, seconds, far_lanes=live.far_lanes))
    cluster = measured_links(times, grid, _UNKNOWN_GBPS).cluster
    if device.type != "cpu":
        return cluster
    processors = live.on_lane(lambda link: measure_processors(link, cluster.ranks_per_node, _SPIN_S))
    return replace(cluster, processors=processors)


def wire_us(cluster: Cluster, plan: Plan, nbytes: Sequence[float]) -> float:
    """Return the time of a step's messages on the slowest node's link. nbytes: bytes that a node sends to others, by
    bucket; with one node, those that a rank sends."""
    total_us = 0.0
    for bucket, size in zip(plan.buckets, nbytes, strict=True):
        task = "alltoall:inter" if any(spec.encodes for spec in bucket.specs) else "allreduce:inter"
        intra, nodes = cluster.links_for(task)
        links = nodes if cluster.nodes > 1 else (intra,)
        total_us += max(link.alpha_us + size * us_per_byte(link) for link in links)
    return total_us


def codecs_of(live: AllRanks, specs: Sequence[Spec], seconds: float) -> Costs:
    """Return the times of codecs on this machine. Specs that no earlier run measured are measured in about `seconds`."""
    sizes = _CODEC_SIZES if live.device.type == "cpu" else _DEVICE_CODEC_SIZES
    return cached_codecs(specs, live.device, sizes, seconds)
