"""All collectives, compressors and schedules, of gradwire and of other packages, as rows for the command line and the docs."""

import json
from collections.abc import Sequence
from typing import Any

from gradwire.core import entry_points
from gradwire.core.collectives import installed_collectives
from gradwire.core.schedules import Schedule, schedule_class, schedule_kinds
from gradwire.core.specs import example_specs, installed_specs

Row = dict[str, Any]


def collective_rows() -> list[Row]:
    """One row for each collective.

    >>> row = collective_rows()[1]
    >>> row["name"], row["phases"], row["package"]
    ('allgather', ['whole'], 'gradwire')
    """
    return [
        {
            "name": each.name,
            "tasks": list(each.tasks),
            "phases": list(each.phases),
            "uncompressed": list(each.uncompressed),
            "needs": list(each.needs),
            "about": each.about,
            "package": entry_points.origin(entry_points.COLLECTIVES, each.name, _module(each.runs)),
        }
        for each in installed_collectives().values()
    ]


def compressor_rows() -> list[Row]:
    """One row for each compressor, with its usual settings.

    >>> next(row["travels by"] for row in compressor_rows() if row["id"] == "powersgd")
    ['allreduce']
    """
    examples = {spec.id: spec for spec in example_specs()}
    return [
        {
            "id": name,
            "spec": repr(examples[name]) if name in examples else f"{cls.__name__}(...)",
            "law": examples[name].law.kind if name in examples else "-",
            "travels by": list(examples[name].schemes) if name in examples else [],
            "remembers": list(examples[name].state) if name in examples else [],
            "package": entry_points.origin(entry_points.SPECS, name, cls.__module__),
        }
        for name, cls in sorted(installed_specs().items())
    ]


def schedule_rows() -> list[Row]:
    """One row for each schedule.

    >>> [row["kind"] for row in schedule_rows()][:3]
    ['backward', 'pipelined', 'delayed']
    """
    usual = {kind: schedule_class(kind)() for kind in schedule_kinds()}
    return [
        {
            "kind": kind,
            "exchange runs": _when(schedule),
            "costs accuracy": "yes" if schedule.costs_accuracy else "no",
            "needs the optimizer": "yes" if schedule.needs_optimizer else "no",
            "about": (type(schedule).__doc__ or "").strip().partition("\n")[0],
            "package": entry_points.origin(entry_points.SCHEDULES, kind, type(schedule).__module__),
        }
        for kind, schedule in usual.items()
    ]


def _when(schedule: Schedule) -> str:
    if schedule.hides_exchange:
        return "beside the next step"
    if schedule.sends_at_end:
        return "after backward"
    return "in backward and in the next forward" if schedule.gathers_in_forward else "in backward"


def rows_as_text(rows: Sequence[Row]) -> str:
    """A line for each row under a header. Only JSON has the longest columns."""
    columns = [column for column in rows[0] if column not in ("about", "uncompressed")]
    cells = [[row[column] for column in columns] for row in rows]
    return aligned([columns, *([_text(value) for value in values] for values in cells)])


def aligned(table: Sequence[Sequence[str]], right: int = 0) -> str:
    """Columns of one width each; the first `right` columns are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    marks = [">" if place < right else "<" for place in range(len(widths))]
    lines = ["  ".join(f"{c:{m}{w}}" for c, m, w in zip(cells, marks, widths, strict=True)) for cells in table]
    return "".join(line.rstrip() + "\n" for line in lines)


def rows_as_json(rows: Sequence[Row]) -> str:
    """A JSON list with one row a line."""
    return "[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n"


def _text(value: object) -> str:
    return " ".join(value) or "-" if isinstance(value, list) else str(value)


def _module(runs: Any) -> str:
    return runs.partition(":")[0] if isinstance(runs, str) else str(getattr(runs, "__module__", runs))
