"""The timeline of one step: the tasks of every resource, and the exposed time.

>>> from gradwire.core import Costs, Identity, Link, TensorProfile
>>> from gradwire.plan import Uniform
>>> tensor = TensorProfile(name="w", shape=(250,), dtype="float32", backward_us=100.0, forward_us=50.0)
>>> profile = Profile(model="one", batch=1, device="V100", tensors=[tensor])
>>> cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
>>> timeline = simulate(Uniform(Identity()).plan(profile.tensor_infos("gpu")), profile, cluster, Costs(codecs=()))
>>> [(event.what, event.resource, event.start_us, event.end_us) for event in timeline.events]
[('forward', 'compute', 0.0, 50.0), ('backward', 'compute', 50.0, 150.0), ('allreduce', 'inter link', 150.0, 171.0)]
>>> timeline.step_us, timeline.exposed_comm_us
(171.0, 21.0)
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import msgspec

from gradwire.core import (
    CODEC_TASKS,
    Cluster,
    Costs,
    Document,
    Plan,
    Profile,
    flags,
    freeze,
    number,
    numbers,
    only_version,
    show,
    text,
    whole,
    word,
)
from gradwire.errors import FormatError
from gradwire.sim.events import RESOURCES, Span
from gradwire.sim.rules import Rules, device_of, rules_of
from gradwire.sim.simulator import FS_PER_US, SimulatedSteps, Simulator

Interval: TypeAlias = tuple[int, int]
"""Start and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of the intervals, which may overlap and have any order.

    >>> union([(5, 6), (0, 2), (2, 3)])
    [(0, 3), (5, 6)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def minus(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The moments in the first set and not in the second; both as `union` gives them.

    >>> minus([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    result: list[Interval] = []
    cuts = list(others)
    at = 0
    for start, end in intervals:
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        index = at
        while index < len(cuts) and cuts[index][0] < end:
            if start < cuts[index][0]:
                result.append((start, cuts[index][0]))
            start = max(start, cuts[index][1])
            index += 1
        if start < end:
            result.append((start, end))
    return result


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The gaps between the intervals of a set as `union` gives it.

    >>> gaps([(0, 2), (5, 6)])
    [(2, 5)]
    """
    return [(end, start) for (_, end), (start, _) in pairwise(intervals)]


def total(intervals: Iterable[Interval]) -> int:
    """The length of all intervals together."""
    return sum(end - start for start, end in intervals)


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task of the timeline."""

    what: str
    """optimizer, forward, backward, or the word of a task: comp, decomp, allreduce, ..., or launch (a lane's work on a processor
    for an exchange)."""
    resource: str
    """compute, cpu pool, intra link or inter link."""
    start_us: float
    end_us: float
    bucket: int = -1
    """-1 for computation."""
    chunk: int = -1
    index: int = -1
    """Place of the task in the bucket's option, with launches."""
    tensor: str = ""
    """The tensor, for computation."""
    step: int = 0
    """The event's step: 0 for the first one of the timeline, -1 for the step before, with gathers that still run."""

    def problem(self) -> str:
        """The field whose value no event has, in words; '' for none. Timelines ask, since they have thousands of events."""
        if not self.what:
            return "what is '': it must be the word of a task."
        if self.resource not in RESOURCES:
            return f"resource is {show(self.resource)}: it must be one of {', '.join(RESOURCES)}."
        if not self.start_us <= self.end_us:
            return f"end_us is {show(self.end_us)}, before start_us, {show(self.start_us)}. Correct one of them."
        if min(self.bucket, self.chunk, self.index) < -1:
            return f"bucket, chunk and index are {self.bucket}, {self.chunk} and {self.index}: each is a place, or -1 for none."
        return ""


class Resource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Use of one resource over the timeline."""

    name: str
    busy_us: float
    exposed_us: float
    """Busy time without computation (optimizer, forward, backward) at the same time."""

    def __post_init__(self) -> None:
        word("name", self.name, RESOURCES)
        numbers(self, "a time in microseconds", "busy_us", "exposed_us")


class Bubble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An interval between the exchanges of two buckets in which all links idle. Compressing buckets sent before gains nothing."""

    start_us: float
    end_us: float
    before: tuple[int, ...]
    """Buckets whose exchange was over when the bubble began."""

    def __post_init__(self) -> None:
        number("start_us", self.start_us, "a time in microseconds")
        if not self.start_us <= self.end_us:
            raise FormatError(f"end_us is {show(self.end_us)}, before start_us, {show(self.start_us)}. Correct one of them.")


class Timeline(Document, frozen=True, kw_only=True):
    """One step in the long run. If steps differ, as in the `delayed` and the `local` schedule, one period of `steps` steps.

    step = optimizer + forward + backward + exposed communication + exposed codec + idle, as ByteComp's section 3.
    """

    what: ClassVar[str] = "timeline"
    remedy: ClassVar[str] = "Simulate the plan again."
    omit_at_default: ClassVar[tuple[str, ...]] = ("optimizer_us",)

    version: int = 1
    schedule: str
    """backward, pipelined, delayed or local."""
    steps: int
    """Steps in the timeline and in its sums: 1, or the steps of a period."""
    simulated_steps: int
    """Number of steps that were simulated until they repeated."""
    steady: bool
    """Whether steps repeated exactly. Else the timeline shows the later half of the steps, and step_us is their mean."""
    step_us: float
    optimizer_us: float = 0.0
    """Microseconds of all optimizer steps of the timeline; 0 if the profile has no optimizer."""
    forward_us: float
    """Microseconds of all forwards of the timeline. `backward_us` and the sums below are over the whole timeline too."""
    backward_us: float
    exposed_comm_us: float
    """ByteComp's communication overhead: some link is busy, and neither forward nor backward runs."""
    exposed_codec_us: float
    """ByteComp's compression overhead: codec tasks run, no link is busy, and neither forward nor backward runs."""
    idle_us: float
    """Microseconds in which nothing runs."""
    cupcake_comm_us: float
    """Cupcake's communication overhead: some link is busy, and neither computation nor codec runs."""
    sent_bytes: float
    """Bytes that the busiest rank sends. Roots of collectives may send more than other ranks."""
    intra_bytes: float
    """Bytes over a rank's intra link."""
    inter_bytes: float
    """Bytes over a node's inter link, from all ranks of the node."""
    resources: tuple[Resource, ...]
    bubbles: tuple[Bubble, ...]
    events: tuple[Event, ...]
    """Events that begin in the timeline, by start, then resource. The last ones may end in the next step."""

    def __post_init__(self) -> None:
        only_version(self.version)
        text("schedule", self.schedule, "a schedule")
        whole("steps", self.steps, "the steps of the timeline", low=1)
        whole("simulated_steps", self.simulated_steps, "the simulated steps, 0 for a measured timeline")
        flags(self, "steady")
        names = self.__struct_fields__
        numbers(self, "a time in microseconds", *(name for name in names if name.endswith("_us")))
        numbers(self, "a number of bytes", *(name for name in names if name.endswith("_bytes")))
        freeze(self, "resources", "bubbles", "events")
        for index, event in enumerate(self.events):
            if problem := event.problem():
                raise FormatError(f"events[{index}].{problem}")

    @property
    def length_us(self) -> float:
        """Microseconds of the whole timeline."""
        return self.step_us * self.steps

    def to_json(self, indent: int | None = None) -> str:
        """Canonical JSON: keys sorted, no spaces, so that equal timelines are equal bytes; `indent` for people."""
        if indent is not None:
            return super().to_json(indent)
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def sums_of(
    computing: list[Interval],
    coding: list[Interval],
    links: list[Interval],
    busy: Mapping[str, Sequence[Interval]],
    length: int,
    units: int,
) -> dict[str, Any]:
    """The fields of a timeline that follow from when what works. The three lists are unions. `length`: of the whole timeline.
    `units`: of the numbers in a microsecond."""
    exposed = minus(links, computing)
    return {
        "exposed_comm_us": total(exposed) / units,
        "exposed_codec_us": total(minus(minus(coding, computing), links)) / units,
        "idle_us": max(0, length - total(union(computing + coding + links))) / units,
        "cupcake_comm_us": total(minus(exposed, coding)) / units,
        "resources": tuple(
            Resource(name, total(spans) / units, total(minus(union(spans), computing)) / units) for name, spans in busy.items()
        ),
    }


def simulate(plan: Plan, profile: Profile, cluster: Cluster, costs: Costs, rules: Rules | None = None) -> Timeline:
    """The timeline of a plan. rules: None is gradwire's engine on the profile's device.

    Raises PlanError if the plan was made for another model, if a codec was not measured, if an option cannot be priced, or if
    the schedule is pipelined and the profile has no forward times.
    """
    device = device_of(profile) if rules is None else rules.device
    plan.check_against(profile.tensor_infos(device))
    simulator = Simulator(profile, cluster, costs, rules or rules_of(device, cluster))
    outcome = simulator.outcome(plan, record=True)
    return _Reader(simulator, plan, outcome).timeline()


class _Reader:
    """Reads a timeline from the spans of the event loop."""

    def __init__(self, simulator: Simulator, plan: Plan, outcome: SimulatedSteps) -> None:
        self.simulator, self.plan, self.outcome = simulator, plan, outcome
        self.begin, self.end = outcome.window
        self.first_step = max(span.step for span in outcome.run.spans if span.row < 0) + 1 - outcome.cycle

    def timeline(self) -> Timeline:
        computing: list[Interval] = []
        coding: list[Interval] = []
        links: list[Interval] = []
        busy: dict[str, list[Interval]] = {name: [] for name in RESOURCES}
        events: list[Event] = []
        for span in self.outcome.run.spans:
            if self._is_of_scripts(span):
                continue
            begin = self.begin if span.row >= 0 else self.outcome.computes_from
            clipped = (max(span.start, begin), min(span.end, self.end))
            resource, codec, free = self._resource(span)
            if clipped[0] < clipped[1]:
                busy[resource].append((clipped[0], max(clipped[0], min(clipped[1], span.end - free))))
                (computing if span.row < 0 else coding if codec else links).append(clipped)
            if self._shown(span):
                events += self._events(span, resource)
        events.sort(key=lambda e: (e.start_us, RESOURCES.index(e.resource), e.end_us, e.bucket, e.chunk, e.index))
        computing, coding, links = union(computing), union(coding), union(links)
        length, outcome = self.end - self.begin, self.outcome
        lengths = outcome.layouts[0].work.lengths
        half, cycles = len(lengths) // 2, outcome.cycle
        cycle = outcome.layouts * (outcome.cycle // len(outcome.layouts))
        prices = [(p, b.pieces) for layout in cycle for b in layout.priced for p in b.tasks]
        return Timeline(
            schedule=str(self.plan.schedule.__struct_config__.tag),
            steps=outcome.cycle,
            simulated_steps=outcome.steps,
            steady=outcome.steady,
            step_us=length / outcome.cycle / FS_PER_US,
            optimizer_us=self.simulator.optimizer * outcome.cycle / FS_PER_US,
            forward_us=(sum(lengths[:half]) - self.simulator.optimizer) * cycles / FS_PER_US,
            backward_us=sum(lengths[half:]) * cycles / FS_PER_US,
            sent_bytes=sum(p.sent_bytes * pieces for p, pieces in prices),
            intra_bytes=sum(p.intra_bytes * pieces for p, pieces in prices),
            inter_bytes=sum(p.inter_bytes * pieces for p, pieces in prices),
            bubbles=tuple(self._bubbles(links, events)),
            events=tuple(events),
            **sums_of(computing, coding, links, busy, length, FS_PER_US),
        )

    def _is_of_scripts(self, span: Span) -> bool:
        """Whether the span is work of scripts on a processor that ranks share, which no row of buckets has."""
        return span.row >= len(self.outcome.layouts[span.step % len(self.outcome.layouts)].labels)

    def _resource(self, span: Span) -> tuple[str, bool, int]:
        """The resource, whether the span is work on a processor, and the femtoseconds at its end in which its link is free."""
        if span.row < 0:
            return "compute", False, 0
        layout = self.outcome.layouts[span.step % len(self.outcome.layouts)]
        price, task = layout.labels[span.row][span.first].price, layout.work.rows[span.row][span.first]
        if span.until:
            return RESOURCES[task.cpu_on], True, 0
        codec = price.task.partition(":")[0] in (*CODEC_TASKS, "launch", "fetch", "put")
        return RESOURCES[task.resource], codec, task.free

    def _shown(self, span: Span) -> bool:
        if span.row < 0:
            return span.step >= self.first_step
        return self.begin <= span.start < self.end or span.start == span.end == self.end

    def _events(self, span: Span, resource: str) -> Iterator[Event]:
        step = span.step - self.first_step
        layout = self.outcome.layouts[span.step % len(self.outcome.layouts)]
        if span.row >= 0:
            label = layout.labels[span.row][span.first]
            word = "launch" if span.until else label.price.task.partition(":")[0]
            start, end = self._us(span.start), self._us(span.end)
            yield Event(word, resource, start, end, label.bucket, label.chunk, label.place, step=step)
            return
        at, tensors = span.start, self.simulator.profile.tensors
        count = len(tensors)
        if span.first == 0 and self.simulator.optimizer:
            at += self.simulator.optimizer
            yield Event("optimizer", resource, self._us(span.start), self._us(at), step=step)
        for part in range(span.first, span.until):
            end = at + layout.work.lengths[part] - (0 if part else self.simulator.optimizer)
            forward = part < count
            if not forward or tensors[count - 1 - part].forward_us is not None:
                name = tensors[count - 1 - part if forward else part - count].name
                what = "forward" if forward else "backward"
                yield Event(what, resource, self._us(at), self._us(end), tensor=name, step=step)
            at = end

    def _us(self, fs: int) -> float:
        return (fs - self.begin) / FS_PER_US

    def _bubbles(self, links: list[Interval], events: list[Event]) -> Iterator[Bubble]:
        """Gaps of the links, except inside the exchange of one bucket."""
        sent = [event for event in events if event.resource.endswith("link")]
        for start, end in gaps(links):
            start_us, end_us = self._us(start), self._us(end)
            before = {(e.step, e.bucket) for e in sent if e.end_us <= start_us}
            after = {(e.step, e.bucket) for e in sent if e.start_us >= end_us}
            if before and after and not before & after:
                yield Bubble(start_us, end_us, tuple(sorted({bucket for _, bucket in before})))
