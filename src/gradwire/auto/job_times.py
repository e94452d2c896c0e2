"""Measures the times of a job for `gw.AdaptiveBits(rule="time")`: its profile, its links and its compressors.

They are measured once, in the first steps, and are equal on all ranks. States contain them, so resumed runs choose equal bits.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gradwire.auto.change_watch import seconds_for
from gradwire.auto.changes import StepPace
from gradwire.auto.live import Live
from gradwire.auto.measuring import CODECS_SECONDS, Look, cluster_of, codecs_of
from gradwire.core import Cluster, Costs, Profile, Spec
from gradwire.sim import Simulator, device_of, rules_of


class JobTimes(NamedTuple):
    """The measured times that the simulator needs."""

    profile: Profile
    cluster: Cluster
    costs: Costs

    def to_dict(self) -> dict[str, Any]:
        return {field: document.to_dict() for field, document in self._asdict().items()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "JobTimes":
        """Read the times from a saved state. Raises FormatError if a part is missing or damaged."""
        profile, cluster, costs = (data.get(field) for field in JobTimes._fields)
        return JobTimes(Profile.from_dict(profile), Cluster.from_dict(cluster), Costs.from_dict(costs))

    def simulator(self) -> Simulator:
        """Return a simulator that predicts steps of this job under the rules of gradwire's engine."""
        return Simulator(self.profile, self.cluster, self.costs, rules_of(device_of(self.profile), self.cluster))


class JobTiming:
    """Measures the times of a job once. `times` is None until then, and after a failure."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        """specs: further specs that the plan may come to have."""
        self.times: JobTimes | None = None
        self._specs, self._failed = specs, False
        self._look: Look | None = None
        self._pace = StepPace()
        self._fit: object = None
        """The model's tensors with known times."""

    def finished(self, live: Live) -> None:
        """End a step on every rank. The first step that counts is not measured, because it allocates memory."""
        if live.infos is self._fit or self.times_for(live) is not None:
            self._fit = live.infos
            return
        if self._failed or live.group.world_size == 1:
            return
        if self._look is not None and live.plan.schedule.gathers_in_forward:
            live.job.settle()  # so the next forward waits for nothing
        live.wait()
        now = time.perf_counter()
        began_s = self._pace.step(live.began_s, now)
        if not live.everybody:
            return
        if self._look is None:
            self._look = Look(live)
            return
        if (found := self._look.ended(live, began_s, 1e6 * (now - began_s), self._pace)) is None:
            return
        self._look = None
        profile, step_us = found
        cluster = cluster_of(live, seconds_for(step_us))
        specs = {spec for bucket in live.plan.buckets for spec in bucket.specs if spec.encodes} | {*self._specs}
        costs_json = live.made_by_first(lambda: _costs_of(live, specs).to_json(None), "bits are chosen by bytes")
        self._failed = not costs_json
        self.times = JobTimes(profile, cluster, Costs.from_json(costs_json)) if costs_json else None

    def pause(self) -> None:
        """Leave out a step that does not count."""
        self._pace.pause()

    def times_for(self, live: Live) -> JobTimes | None:
        """Return the times if they belong to this model's tensors; else None."""
        if self.times is None or {info.name for info in live.infos} != {t.name for t in self.times.profile.tensors}:
            return None
        return self.times

    def take(self, live: Live, times: JobTimes | None) -> None:
        """Go on with the times of a saved state. times: None to measure anew."""
        self.stop()
        live.hold(False)
        self.times, self._failed, self._pace, self._fit = times, False, StepPace(), None

    def stop(self) -> None:
        """Remove all hooks from the model."""
        if self._look is not None:
            self._look.remove()
            self._look = None


def _costs_of(live: Live, specs: set[Spec]) -> Costs:
    """Return the times of these specs alone. The machine's file may contain more specs."""
    known = codecs_of(live, sorted(specs, key=repr), CODECS_SECONDS)
    return msgspec.structs.replace(known, codecs=tuple(codec for codec in known.codecs if codec.spec in specs))
