"""Options as text and as JSON, for `gradwire options`."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from gradwire.core.checks import word
from gradwire.errors import PlanError
from gradwire.planner.named import RESTRICTED, names_of
from gradwire.planner.options import Option, select, tree

__all__ = ["as_json", "as_table", "choose", "shape_note"]


def choose(*, restrict: str | None = None, named: bool = False, **constraints: Any) -> tuple[Option, ...]:
    """`select` with these constraints; `restrict` is a key of RESTRICTED, `named` leaves only options with a name.

    Raises PlanError for a value that is none.

    >>> [option.inter for option in choose(restrict="gpu", named=True, flat=False)]
    ['allgather', 'alltoall+allgather']
    """
    if restrict is not None:
        word("restrict", restrict, RESTRICTED, error=PlanError)
    keeps = RESTRICTED[restrict] if restrict is not None else lambda option: True
    return select(where=lambda option: keeps(option) and (not named or bool(names_of(option))), **constraints)


@cache
def _indices() -> dict[Option, int]:
    return {option: index for index, option in enumerate(tree())}


def _scheme(option: Option, link: str) -> str:
    """A scheme's routines, those that carry payloads with a star."""
    steps = [exchange for exchange in option.exchanges if exchange.link == link]
    return "+".join(step.word + "*" * step.compressed for step in steps) or "-"


def as_table(options: Sequence[Option]) -> str:
    """One line for each option under a header: index in the whole tree, encodes, schemes, tasks, names in brackets.

    >>> print(as_table(choose(named=True, max_encodes=0)), end="")
    index  encodes  intra  inter                    tasks
        0        0  -      allreduce                allreduce:inter  [DDP, gradwire allreduce]
        5        0  -      reducescatter+allgather  reducescatter:inter allgather:inter  [DeAR]
    """
    header = ("index", "encodes", "intra", "inter")
    rows = [
        (str(_indices()[option]), str(option.encodes), _scheme(option, "intra"), _scheme(option, "inter"))
        for option in options
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    tasks = ["tasks"]
    for option in options:
        names = names_of(option)
        tasks.append(" ".join(option.tasks) + (f"  [{', '.join(names)}]" if names else ""))
    lines = []
    for (index, encodes, intra, inter), last in zip([header, *rows], tasks, strict=True):
        left = f"{index:>{widths[0]}}  {encodes:>{widths[1]}}  {intra:<{widths[2]}}  {inter:<{widths[3]}}"
        lines.append(f"{left}  {last}\n")
    return "".join(lines)


def as_json(options: Sequence[Option]) -> str:
    """A JSON list on one line for each option: all that it knows of itself."""
    values = [
        {
            "index": _indices()[option],
            "tasks": list(option.tasks),
            "flat": option.flat,
            "intra": option.intra,
            "inter": option.inter,
            "encodes": option.encodes,
            "decodes": option.decodes,
            "devices": list(option.devices),
            "forwards": option.forwards,
            "skips": option.skips,
            "names": list(names_of(option)),
        }
        for option in options
    ]
    return "[" + ",\n ".join(json.dumps(value) for value in values) + "]\n"


def shape_note(nodes: int | None, ranks_per_node: int | None) -> str:
    """How many options apply to a shape, and why not all. None: not told.

    >>> shape_note(4, 1)
    '63 of 4341 options apply to 4 nodes with 1 rank each: there is one link, so only flat ones do.'
    """
    if nodes is None and ranks_per_node is None:
        return f"The tree has {len(tree())} options. --nodes and --ranks-per-node tell which apply to a cluster."
    applicable = len(select(nodes=nodes, ranks_per_node=ranks_per_node))
    shape = f"{_number(nodes, 'node')} with {_number(ranks_per_node, 'rank')} each"
    if nodes == ranks_per_node == 1:
        why = ": one rank has nobody to exchange with"
    elif 1 in (nodes, ranks_per_node):
        why = ": there is one link, so only flat ones do"
    else:
        why = ""
    return f"{applicable} of {len(tree())} options apply to {shape}{why}."


def _number(count: int | None, what: str) -> str:
    if count is None:
        return f"any number of {what}s"
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
