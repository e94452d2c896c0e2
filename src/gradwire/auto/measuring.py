"""A live job's profile, links and codecs, in little time.

The backward is seen in a few steps in which nothing is sent before the last gradient is there. Only moments at which gradients
become ready are taken: what comes before the first one, from the begin of forward on, counts as forward, and is dealt out to
tensors as backward is.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from gradwire.auto.live import Live
from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.profile import Profile, TensorProfile
from gradwire.core.specs import Spec
from gradwire.core.tensors import TensorInfo
from gradwire.engine.seams.hooks import GradientHooks
from gradwire.profiler.clock import Clock
from gradwire.profiler.codecs import measure_codecs
from gradwire.profiler.links import measure_links, measured_links

__all__ = ["StepMoments", "cluster_of", "codecs_of", "profile_of", "scaled"]

_CODEC_SIZES = tuple(2**14 * 8**power for power in range(3))
"""Bytes of gradient: 16 KB to 1 MB."""
_UNKNOWN_GBPS = 100.0
"""Of a link whose times tell no rate: too fast for that."""


class StepMoments:
    """When gradients become ready, as long as it lives or until `remove`."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], clock: Clock) -> None:
        self.rows: list[list[float]] = []
        """Of each step so many microseconds for each parameter, in registration order; NaN where no gradient came."""
        self._seen: dict[int, Any] = {}
        self._count, self._clock = len(parameters), clock
        self._hooks = GradientHooks(self, None, StepMoments._ready, parameters.values())

    def _ready(self, index: int, parameter: torch.nn.Parameter) -> None:
        self._seen[index] = self._clock.mark()

    def ended(self, began_s: float, ended_s: float) -> None:
        """A step is over, now, that lasted from one of these times to the other."""
        now = self._clock.mark()
        us = {index: 1e6 * (ended_s - began_s) - self._clock.us(moment, now) for index, moment in self._seen.items()}
        self.rows.append([us.get(index, math.nan) for index in range(self._count)])
        self._seen = {}

    def remove(self) -> None:
        self._hooks.remove()


def profile_of(live: Live, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]], between_us: float) -> Profile:
    """infos: in registration order. rows: of each rank, the rows of its steps one after another, the same number on all.
    between_us: from the end of a step to the next one's forward.

    An exchange waits for all ranks, so in each step the latest one's moment counts; over steps the median does.
    """
    count = len(infos)
    steps = len(rows[0]) // count
    moments: dict[int, float] = {}
    for index in range(count):
        latest = []
        for step in range(steps):
            found = [row[step * count + index] for row in rows]
            latest += [max(us for us in found if not math.isnan(us))] if not all(map(math.isnan, found)) else []
        moments[index] = median(latest) if latest else math.inf
    order = sorted(range(count), key=lambda index: (moments[index], -index))
    first = at = moments[order[0]] if math.isfinite(moments[order[0]]) else 0.0
    backward_us = max((us for us in moments.values() if math.isfinite(us)), default=first) - first
    between_us = min(between_us, first)
    forward_us = first - between_us
    tensors = []
    for index in order:
        gap = max(0.0, moments[index] - at) if math.isfinite(moments[index]) else 0.0
        at += gap
        info = infos[index]
        part = gap / backward_us if backward_us > 0 else 1 / count
        tensors.append(
            TensorProfile(
                name=info.name, shape=info.shape, dtype=info.dtype, backward_us=gap, forward_us=part * forward_us
            )
        )
    device = "cpu" if live.device.type == "cpu" else torch.cuda.get_device_name(live.device)
    return Profile(model="live", batch=1, device=device, steps=steps, optimizer_us=between_us, tensors=tuple(tensors))


def scaled(profile: Profile, factor: float) -> Profile:
    """The same model when its computation takes so many times as long, as with a larger batch."""
    data = profile.to_dict()
    data["optimizer_us"] = factor * (profile.optimizer_us or 0.0)
    for tensor in data["tensors"]:
        tensor["backward_us"] *= factor
        tensor["forward_us"] *= factor
    return Profile.from_dict(data)


def cluster_of(live: Live, seconds: float) -> Cluster:
    """The links, each watched for about so many seconds. Collective, and the same on all ranks."""
    grid, device = live.grid, live.device
    times = live.on_lane(lambda link: measure_links(link, grid, device, seconds))
    return measured_links(times, grid, _UNKNOWN_GBPS).cluster


def codecs_of(live: Live, specs: Sequence[Spec], seconds: float) -> Costs:
    """Times of encodes and decodes on this rank, measured for about so many seconds in all."""
    calls = max(1, len(specs)) * 2 * len(_CODEC_SIZES)
    return measure_codecs(specs, live.device, _CODEC_SIZES, seconds / calls)
