"""The table of a run's modules: bytes, errors, and the times of exchanges, measured and predicted."""

import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gradwire.record import Run
from gradwire.report.html import Element, milliseconds, short, size, tag
from gradwire.report.steps import Predicted, a_round
from gradwire.sim import Timeline

MOST_MODULES = 40
"""Number of modules in the table, those with the most bytes."""


class ModuleRow(NamedTuple):
    name: str
    gradient_bytes: float
    wire_bytes: float
    """The share of its tensors in the bytes of their buckets."""
    error: float | None
    """The mean relative error of one encode of its tensors; None if none was measured."""
    measured_us: float | None
    """Time of the exchange of the buckets that hold its tensors, with all that travels with them."""
    predicted_us: float | None


def module_rows(run: Run, timeline: Timeline | None) -> list[ModuleRow]:
    """Return the modules, the ones with the most bytes first. A module holds the tensors with one name before the last dot.

    timeline: the predicted step, if there is one.
    """
    foreseen = _times_by_bucket(timeline)
    tensors = {tensor.name: tensor for tensor in run.tensors}
    parts: dict[str, list[tuple[int, str, float, float]]] = {}
    for at, (bucket, record) in enumerate(zip(run.plan.buckets, run.buckets, strict=True)):
        numels = {name: tensors[name].numel if name in tensors else 1 for name in bucket.tensors}
        bits = {
            name: n * (tensors[name].bits[-1][1] if name in tensors and tensors[name].bits else 1) for name, n in numels.items()
        }
        for name in bucket.tensors:
            gradients = record.gradient_bytes * numels[name] / max(1, sum(numels.values()))
            sent = record.wire_bytes * bits[name] / max(1e-9, sum(bits.values()))
            module = name.rpartition(".")[0] or name
            parts.setdefault(module, []).append((at, name, gradients, sent))
    rows = []
    for module, found in parts.items():
        buckets = {at for at, *_ in found}
        errors = [statistics.fmean(e for _, e in tensors[name].error) for _, name, *_ in found if _measured(tensors, name)]
        rows.append(
            ModuleRow(
                module,
                sum(each[2] for each in found),
                sum(each[3] for each in found),
                statistics.fmean(errors) if errors else None,
                _sum({at: run.buckets[at].exchange_us for at in buckets}),
                _sum({at: run.buckets[at].predicted_us or foreseen.get(at) for at in buckets}),
            )
        )
    return sorted(rows, key=lambda row: -row.gradient_bytes)


def by_module(run: Run, predicted: Predicted) -> Iterator[Element]:
    """Draw the table."""
    rows = module_rows(run, predicted.timeline)
    yield tag(
        "p",
        "Measured and predicted is the time of the exchanges of the buckets with a module's tensors, from the first task to the "
        f"last one. Modules that share a bucket share its time. Bytes are those of {a_round(run)}.",
    )
    names = ("module", "gradients", "sent", "error", "measured", "predicted")
    head = tag("tr", *(tag("th", name) for name in names))
    body = [
        tag(
            "tr",
            tag("th", row.name),
            tag("td", size(round(row.gradient_bytes))),
            tag("td", size(round(row.wire_bytes))),
            tag("td", "none" if row.error is None else f"{short(100 * row.error)} %"),
            *(tag("td", "unknown" if us is None else milliseconds(us)) for us in (row.measured_us, row.predicted_us)),
        )
        for row in rows[:MOST_MODULES]
    ]
    yield tag("table", tag("thead", head), tag("tbody", *body))
    if len(rows) > MOST_MODULES:
        yield tag("p", f"{len(rows) - MOST_MODULES} smaller modules are not in the table.", class_="note")


def _times_by_bucket(timeline: Timeline | None) -> dict[int, float]:
    """Return the time of each bucket's first exchange that begins in the timeline."""
    spans: dict[int, tuple[int, float, float]] = {}
    for event in timeline.events if timeline is not None else ():
        if event.bucket >= 0 and event.step >= 0:
            step, begin, end = spans.setdefault(event.bucket, (event.step, event.start_us, event.end_us))
            if event.step == step:
                spans[event.bucket] = step, min(begin, event.start_us), max(end, event.end_us)
    return {bucket: end - begin for bucket, (_, begin, end) in spans.items()}


def _measured(tensors: Mapping[str, object], name: str) -> bool:
    return bool(getattr(tensors.get(name), "error", ()))


def _sum(times: Mapping[int, float | None]) -> float | None:
    known = [us for us in times.values() if us is not None]
    return sum(known) if len(known) == len(times) else None
