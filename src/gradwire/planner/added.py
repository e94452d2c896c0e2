"""All collectives and compressors, gradwire's own and those of other packages, as rows for the command line and the docs."""

import json
from collections.abc import Sequence
from typing import Any

from gradwire.core import entry_points
from gradwire.core.collectives import installed_collectives
from gradwire.core.specs import example_specs, installed_specs

__all__ = ["collective_rows", "compressor_rows", "rows_as_json", "rows_as_text"]

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


def rows_as_text(rows: Sequence[Row]) -> str:
    """A line for each row under a header, without the longest columns, which JSON has."""
    columns = [column for column in rows[0] if column not in ("about", "uncompressed")]
    table = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
    return "".join(line.rstrip() + "\n" for line in lines)


def rows_as_json(rows: Sequence[Row]) -> str:
    """A JSON list with one row a line."""
    return "[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n"


def _text(value: object) -> str:
    return " ".join(value) or "-" if isinstance(value, list) else str(value)


def _module(runs: Any) -> str:
    return runs.partition(":")[0] if isinstance(runs, str) else str(getattr(runs, "__module__", runs))
