"""A timeline as text for `gradwire simulate`, and as a trace for chrome://tracing and ui.perfetto.dev (Trace Event Format)."""

import json
from typing import Any

from gradwire.sim.events import RESOURCES
from gradwire.sim.timeline import Timeline


def as_table(timeline: Timeline) -> str:
    """Lines of text: the work of each resource, then the parts of the step. docs/simulator.md says how to read them."""
    length = timeline.length_us
    lines = [f"{'resource':<12} {'busy ms':>10} {'of step':>8} {'exposed ms':>11}"]
    for resource in timeline.resources:
        share = 100 * resource.busy_us / length if length else 0.0
        lines.append(f"{resource.name:<12} {_ms(resource.busy_us):>10} {share:>6.1f} % {_ms(resource.exposed_us):>11}")
    steps = timeline.steps
    parts = (
        *([("optimizer", timeline.optimizer_us)] if timeline.optimizer_us else []),
        ("forward", timeline.forward_us),
        ("backward", timeline.backward_us),
        ("exposed communication", timeline.exposed_comm_us),
        ("exposed codec", timeline.exposed_codec_us),
        ("idle", timeline.idle_us),
    )
    lines.append("")
    mean = f", mean of {steps} steps" if steps > 1 else ""
    lines.append(f"step {_ms(timeline.step_us)} ms ({timeline.schedule}{mean})")
    lines += [f"  {name:<22} {_ms(us / steps):>10} ms" for name, us in parts]
    lines.append(f"Cupcake's communication overhead: {_ms(timeline.cupcake_comm_us / steps)} ms")
    lines.append(
        f"A rank sends {_mb(timeline.sent_bytes / steps)} MB a step; its intra link carries "
        f"{_mb(timeline.intra_bytes / steps)} MB, its node's inter link {_mb(timeline.inter_bytes / steps)} MB."
    )
    bubbles_us = sum(bubble.end_us - bubble.start_us for bubble in timeline.bubbles)
    lines.append(f"Bubbles on the links: {len(timeline.bubbles) / steps:.3g}, {_ms(bubbles_us / steps)} ms.")
    if not timeline.steady:
        lines.append(f"The steps did not settle within {timeline.simulated_steps}; all numbers are means of the later half.")
    return "\n".join(lines) + "\n"


def _ms(us: float) -> str:
    return f"{us / 1000:.3f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.3f}"


def as_trace(timeline: Timeline) -> str:
    """JSON text of the trace: one row for each resource, one more for what a resource does at the same time, such as the
    tasks of several workers, and one for bubbles. Equal timelines give equal bytes."""
    free_at: dict[str, list[float]] = {name: [] for name in RESOURCES}
    """When each row of a resource is free again."""
    places: list[tuple[str, int]] = []
    for event in timeline.events:
        free = free_at[event.resource]
        place = next((place for place, time in enumerate(free) if time <= event.start_us), len(free))
        free[place : place + 1] = [event.end_us]
        places.append((event.resource, place))
    numbered = [(name, place) for name, free in free_at.items() for place in range(len(free))]
    rows = {place: row for row, place in enumerate(numbered)}
    events: list[dict[str, Any]] = []
    for event, place_of_event in zip(timeline.events, places, strict=True):
        if event.bucket < 0:
            name, about = f"{event.what} {event.tensor}".rstrip(), {"tensor": event.tensor, "step": event.step}
        else:
            name = f"{event.what} {event.bucket}" + f".{event.chunk}" * (event.chunk > 0)
            about = {"bucket": event.bucket, "chunk": event.chunk, "step": event.step}
        events.append(_slice(name, event.start_us, event.end_us, rows[place_of_event], about))
    names = [name + f" {place + 1}" * (place > 0) for name, place in numbered]
    for bubble in timeline.bubbles:
        after = {"buckets sent before": list(bubble.before)}
        events.append(_slice("bubble", bubble.start_us, bubble.end_us, len(rows), after))
    if timeline.bubbles:
        names.append("bubbles")
    row_names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}} for row, name in enumerate(names)
    ]
    step = {"step_us": timeline.step_us, "schedule": timeline.schedule}
    document = {"displayTimeUnit": "ms", "otherData": step, "traceEvents": row_names + events}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _slice(name: str, start_us: float, end_us: float, row: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": row, "ts": start_us, "dur": end_us - start_us, "args": arguments}
