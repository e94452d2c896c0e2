"""Rows of options, collectives, compressors and schedules for the command line and the docs, with those of other packages."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from gradwire.core import (
    Schedule,
    entry_points,
    example_specs,
    installed_collectives,
    installed_specs,
    required_fields,
    schedule_class,
    schedule_kinds,
    word,
)
from gradwire.errors import PlanError
from gradwire.plan import RESTRICTED, Option, names_of, select, tree

Row = dict[str, Any]


def collective_rows() -> list[Row]:
    """One row for each collective.

    >>> row = collective_rows()[1]
    >>> row["name"], row["phases"], row["package"]
    ('allgather', ('whole',), 'gradwire')
    """
    return [
        {
            **{field: getattr(each, field) for field in ("name", "tasks", "phases", "uncompressed", "needs", "about")},
            "package": entry_points.origin(entry_points.COLLECTIVES, each.name, _module(each.runs)),
        }
        for each in installed_collectives().values()
    ]


def compressor_rows() -> list[Row]:
    """One row for each compressor, with its usual settings.

    >>> next(row["travels by"] for row in compressor_rows() if row["id"] == "powersgd")
    ('allreduce',)
    """
    examples = {spec.id: spec for spec in example_specs()}
    return [
        {
            "id": name,
            "spec": repr(examples[name]) if name in examples else f"{cls.__name__}(...)",
            "law": examples[name].law.kind if name in examples else "-",
            "travels by": examples[name].schemes if name in examples else (),
            "remembers": examples[name].state if name in examples else (),
            "package": entry_points.origin(entry_points.SPECS, name, cls.__module__),
        }
        for name, cls in sorted(installed_specs().items())
    ]


def schedule_rows() -> list[Row]:
    """One row for each schedule.

    >>> [row["kind"] for row in schedule_rows()][:3]
    ['backward', 'pipelined', 'delayed']
    """
    return [_schedule_row(kind, schedule_class(kind)) for kind in schedule_kinds()]


def _schedule_row(kind: str, cls: type[Schedule]) -> Row:
    schedule = None if required_fields(kind) else cls()

    def shown(cell: Callable[[Schedule], str]) -> str:
        return "-" if schedule is None else cell(schedule)

    return {
        "kind": kind,
        "exchange runs": shown(_when),
        "costs accuracy": shown(lambda usual: "yes" if usual.costs_accuracy else "no"),
        "needs the optimizer": shown(lambda usual: "yes" if usual.needs_optimizer else "no"),
        "about": (cls.__doc__ or "").strip().partition("\n")[0],
        "package": entry_points.origin(entry_points.SCHEDULES, kind, cls.__module__),
    }


def _when(schedule: Schedule) -> str:
    if schedule.period > 1 and not schedule.corrects:
        return "after every H-th step"
    if schedule.hides_exchange:
        return "during the next step"
    if schedule.sends_at_end:
        return "after backward"
    return "in backward and in the next forward" if schedule.gathers_in_forward else "in backward"


def rows_as_text(rows: Sequence[Row]) -> str:
    """A line for each row under a header. The longest columns are left out; JSON has them."""
    columns = [column for column in rows[0] if column not in ("about", "uncompressed")]
    values = ((row[column] for column in columns) for row in rows)
    cells = [[" ".join(v) or "-" if isinstance(v, tuple) else str(v) for v in of_row] for of_row in values]
    return aligned([columns, *cells])


def aligned(table: Sequence[Sequence[str]], right: int = 0) -> str:
    """Columns of one width each; the first `right` columns are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    marks = [">" if place < right else "<" for place in range(len(widths))]
    lines = ["  ".join(f"{c:{m}{w}}" for c, m, w in zip(cells, marks, widths, strict=True)) for cells in table]
    return "".join(line.rstrip() + "\n" for line in lines)


def rows_as_json(rows: Sequence[Row]) -> str:
    """A JSON list with one row a line."""
    return "[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n"


def _module(runs: Any) -> str:
    return runs.partition(":")[0] if isinstance(runs, str) else str(getattr(runs, "__module__", runs))


def choose_options(*, restrict: str | None = None, named: bool = False, **constraints: Any) -> tuple[Option, ...]:
    """`select` with these constraints; restrict: a key of RESTRICTED; named: only options with a name.

    Raises PlanError for an unknown value.

    >>> [option.inter for option in choose_options(restrict="gpu", named=True, flat=False)]
    ['allgather', 'alltoall+allgather']
    """
    if restrict is not None:
        word("restrict", restrict, RESTRICTED, error=PlanError)
    keeps = RESTRICTED[restrict] if restrict is not None else lambda option: True
    return select(where=lambda option: keeps(option) and (not named or bool(names_of(option))), **constraints)


_PROPERTIES = ("tasks", "flat", "intra", "inter", "encodes", "decodes", "devices", "forwards", "skips")


@cache
def _indices() -> dict[Option, int]:
    return {option: index for index, option in enumerate(tree())}


def _scheme(option: Option, link: str) -> str:
    """A scheme's routines; a star marks those that carry payloads."""
    steps = [exchange for exchange in option.exchanges if exchange.link == link]
    return "+".join(step.word + "*" * step.compressed for step in steps) or "-"


def options_table(options: Sequence[Option]) -> str:
    """One line for each option under a header: index in the whole tree, encodes, schemes, tasks, names in brackets.

    >>> print(options_table(choose_options(named=True, max_encodes=0)), end="")
    index  encodes  intra  inter                    tasks
        0        0  -      allreduce                allreduce:inter  [DDP, gradwire allreduce]
        5        0  -      reducescatter+allgather  reducescatter:inter allgather:inter  [DeAR]
    """
    table = [["index", "encodes", "intra", "inter", "tasks"]]
    for option in options:
        names = names_of(option)
        tasks = " ".join(option.tasks) + (f"  [{', '.join(names)}]" if names else "")
        schemes = _scheme(option, "intra"), _scheme(option, "inter")
        table.append([str(_indices()[option]), str(option.encodes), *schemes, tasks])
    return aligned(table, right=2)


def options_json(options: Sequence[Option]) -> str:
    """A JSON list with all properties of each option, one option a line."""
    return rows_as_json(
        [
            {"index": _indices()[option], **{field: getattr(option, field) for field in _PROPERTIES}, "names": names_of(option)}
            for option in options
        ]
    )


def shape_note(nodes: int | None, ranks_per_node: int | None) -> str:
    """A sentence on how many options apply to a shape, and why the others do not. None: any number.

    >>> shape_note(4, 1)
    '63 of 4341 options apply to 4 nodes with 1 rank each: there is one link, so only flat options apply.'
    """
    if nodes is None and ranks_per_node is None:
        return f"The tree has {len(tree())} options. Give --nodes and --ranks-per-node to list those of a cluster."
    applicable = len(select(nodes=nodes, ranks_per_node=ranks_per_node))
    shape = f"{_number(nodes, 'node')} with {_number(ranks_per_node, 'rank')} each"
    if nodes == ranks_per_node == 1:
        why = ": one rank exchanges nothing"
    elif 1 in (nodes, ranks_per_node):
        why = ": there is one link, so only flat options apply"
    else:
        why = ""
    return f"{applicable} of {len(tree())} options apply to {shape}{why}."


def _number(count: int | None, what: str) -> str:
    return f"{'any number of' if count is None else count} {what}{'s' * (count != 1)}"
