"""Builds the timeline of a measured step, in the form of the simulator. Pure: no torch.

>>> moments = Moments(ended=0.0, passes=[Pass(forward=0.0, backward=0.002, ready=[("w", 0.005)])], tasks=[], finished=0.006)
>>> [(event.what, event.start_us, event.end_us) for event in _computation(moments)]
[('forward', 0.0, 2000.0), ('backward', 2000.0, 5000.0)]
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from gradwire.core import CODEC_TASKS, LINKS, is_link_word
from gradwire.sim import COMPUTE, RESOURCES, Event, Interval, Timeline, sums_of, union

NS_PER_US = 1000
COMPUTED = ("optimizer", "forward", "backward")
NO_WAIT_US = 20.0
"""Longest gap between two codec calls that counts as overhead. A longer gap is a wait for a link."""


class LaneTask(NamedTuple):
    """One phase of one piece on a lane. All moments are seconds of time.perf_counter."""

    bucket: int
    chunk: int
    phase: int
    option: Sequence[str]
    """The bucket's option, as in the plan."""
    began: float
    ended: float
    codec: Sequence[tuple[float, float]]
    """Start and end of each encode and decode, in order."""
    step: int = 0
    """0 for a task of the step itself, -1 for a task of the step before."""


class Pass(NamedTuple):
    """A forward, and the backward that followed."""

    forward: float
    backward: float
    ready: Sequence[tuple[str, float]]
    """Pairs of a tensor and the moment when its gradient was ready. Empty if no backward followed."""
    resumed: Mapping[str, float] = MappingProxyType({})
    """The moments when backward went on, for tensors whose exchange backward waited for."""


class Moments(NamedTuple):
    """One step. In the `local` schedule: the local steps from one exchange to the next."""

    ended: float
    """The end of the previous exchange. The optimizer and the timeline begin here."""
    passes: Sequence[Pass]
    """One for each local step. Where gradients are accumulated: one for each batch that is added up."""
    tasks: Sequence[LaneTask]
    """The tasks that ran during the step."""
    finished: float
    """The end of the exchange. In the `pipelined` and `delayed` schedules: the end of backward."""
    steps: int = 1
    """Number of local steps; 1 in other schedules."""

    @property
    def forward(self) -> float:
        """The start of the first forward."""
        return self.passes[0].forward

    @property
    def length_us(self) -> float:
        """The time from the end of one exchange to the end of the next."""
        return (self.finished - self.ended) * 1e6


def measured_timeline(moments: Moments, schedule: str, nodes: int, sent: tuple[int, int, int]) -> Timeline:
    """Return the timeline of one rank's step. An exchange occupies its link from the first send to the last arrival.

    In the `local` schedule the timeline has all local steps from one exchange to the next, and `step_us` is their mean.

    sent: bytes in all, inside the node, and between nodes. Codec tasks of lanes may overlap the computation. Events
    that begin after the step are left out. The timeline has no bubbles.
    """
    events = [*_computation(moments), *(e for task in moments.tasks for e in _lane_events(task, nodes, moments))]
    events = [event for event in events if event.start_us <= moments.length_us]
    events.sort(key=lambda e: (e.start_us, RESOURCES.index(e.resource), e.end_us, e.bucket, e.chunk, e.index))
    links, coding, computing = (
        union(_ns(event) for event in events if kind(event.what))
        for kind in (is_link_word, CODEC_TASKS.__contains__, COMPUTED.__contains__)
    )

    def spent(what: str) -> float:
        return sum(event.end_us - event.start_us for event in events if event.what == what)

    busy = {name: union(_ns(event) for event in events if event.resource == name) for name in RESOURCES}
    return Timeline(
        schedule=schedule,
        steps=moments.steps,
        simulated_steps=0,
        steady=True,
        step_us=moments.length_us / moments.steps,
        optimizer_us=spent("optimizer"),
        forward_us=spent("forward"),
        backward_us=spent("backward"),
        sent_bytes=sent[0],
        intra_bytes=sent[1],
        inter_bytes=sent[2],
        bubbles=(),
        events=tuple(events),
        **sums_of(computing, coding, links, busy, round(moments.length_us * NS_PER_US), NS_PER_US),
    )


def _computation(moments: Moments) -> Iterator[Event]:
    def event(what: str, start: float, end: float, tensor: str = "") -> Event:
        start_us, end_us = ((moment - moments.ended) * 1e6 for moment in (start, end))
        return Event(what, RESOURCES[COMPUTE], start_us, end_us, tensor=tensor)

    at, in_a_step = moments.ended, max(1, len(moments.passes) // moments.steps)
    for number, each in enumerate(moments.passes):
        if each.forward > at and number % in_a_step == 0:
            yield event("optimizer", at, each.forward)
        yield event("forward", each.forward, each.backward)
        at = each.backward
        for name, ready in sorted(each.ready, key=lambda pair: pair[1]):
            if ready >= at:
                yield event("backward", at, ready, name)
                at = max(ready, each.resumed.get(name, ready))


def _lane_events(task: LaneTask, nodes: int, moments: Moments) -> Iterator[Event]:
    """Yield the encodes before the first send, the exchange, and the decodes."""
    option = task.option
    places = [index for index, each in enumerate(option) if each.partition(":")[2] in LINKS]
    place = places[min(task.phase, len(places) - 1)]
    word, _, where = option[place].partition(":")
    codec = list(task.codec)
    sent = codec[0][1] if codec else task.began
    waits = [(start, end) for (_, start), (end, _) in pairwise(codec)]
    waits += [(codec[-1][1], task.ended)] if codec else [(task.began, task.ended)]
    arrived = max((end for start, end in waits if (end - start) * 1e6 > NO_WAIT_US), default=sent)

    def event(what: str, resource: str, start: float, end: float, index: int) -> Event:
        start_us, end_us = ((moment - moments.ended) * 1e6 for moment in (start, end))
        return Event(what, resource, start_us, end_us, task.bucket, task.chunk, index, step=task.step)

    yield event(word, "intra link" if nodes == 1 else f"{where} link", sent, arrived, place)
    for number, (start, end) in enumerate(codec):
        what = "decomp" if number else "comp"
        nearest = range(place, len(option)) if number else range(place, -1, -1)
        index = next((index for index in nearest if option[index].startswith(what + ":")), None)
        if index is not None and end > start:  # tasks may have ended before the step began
            yield event(what, RESOURCES[COMPUTE], start, end, index)


def _ns(event: Event) -> Interval:
    return round(event.start_us * NS_PER_US), round(event.end_us * NS_PER_US)
