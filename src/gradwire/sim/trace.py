"""A timeline as a trace for chrome://tracing and ui.perfetto.dev (Trace Event Format)."""

import json
from typing import Any

from gradwire.sim.events import RESOURCES
from gradwire.sim.timeline import Event, Timeline

__all__ = ["as_trace"]


def as_trace(timeline: Timeline) -> str:
    """JSON text of the trace: one row for each resource, one more for what a resource does at the same time, such as the
    tasks of several workers, and one for bubbles. Equal timelines give equal bytes."""
    rows: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    free_at: dict[str, list[float]] = {name: [] for name in RESOURCES}
    for event in timeline.events:
        place = _place(free_at[event.resource], event)
        row = rows.setdefault((event.resource, place), 10 * RESOURCES.index(event.resource) + place)
        events.append(_slice(_name(event), event.start_us, event.end_us, row, _arguments(event)))
    bubble_row = 10 * len(RESOURCES)
    for bubble in timeline.bubbles:
        after = {"buckets sent before": list(bubble.before)}
        events.append(_slice("bubble", bubble.start_us, bubble.end_us, bubble_row, after))
    names = {row: name + f" {place + 1}" * (place > 0) for (name, place), row in rows.items()}
    if timeline.bubbles:
        names[bubble_row] = "bubbles"
    told = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in sorted(names.items())
    ]
    about = {"step_us": timeline.step_us, "schedule": timeline.schedule}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": told + events}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _place(free_at: list[float], event: Event) -> int:
    """The first row of a resource that is free when the event starts."""
    for place, time in enumerate(free_at):
        if time <= event.start_us:
            free_at[place] = event.end_us
            return place
    free_at.append(event.end_us)
    return len(free_at) - 1


def _slice(name: str, start_us: float, end_us: float, row: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": row, "ts": start_us, "dur": end_us - start_us, "args": arguments}


def _name(event: Event) -> str:
    if event.bucket < 0:
        return f"{event.what} {event.tensor}".rstrip()
    return f"{event.what} {event.bucket}" + f".{event.chunk}" * (event.chunk > 0)


def _arguments(event: Event) -> dict[str, Any]:
    if event.bucket < 0:
        return {"tensor": event.tensor, "step": event.step}
    return {"bucket": event.bucket, "chunk": event.chunk, "step": event.step}
