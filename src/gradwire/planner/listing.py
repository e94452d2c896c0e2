"""Options as text and as JSON, for `gradwire options`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from gradwire.core.checks import word
from gradwire.errors import PlanError
from gradwire.planner.added import aligned, rows_as_json
from gradwire.planner.named import RESTRICTED, names_of
from gradwire.planner.options import Option, select, tree


def choose(*, restrict: str | None = None, named: bool = False, **constraints: Any) -> tuple[Option, ...]:
    """`select` with these constraints; restrict: a key of RESTRICTED; named: only options with a name.

    Raises PlanError for an unknown value.

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
    """A scheme's routines; a star marks those that carry payloads."""
    steps = [exchange for exchange in option.exchanges if exchange.link == link]
    return "+".join(step.word + "*" * step.compressed for step in steps) or "-"


def as_table(options: Sequence[Option]) -> str:
    """One line for each option under a header: index in the whole tree, encodes, schemes, tasks, names in brackets.

    >>> print(as_table(choose(named=True, max_encodes=0)), end="")
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


def as_json(options: Sequence[Option]) -> str:
    """A JSON list with all properties of each option, one option a line."""
    return rows_as_json(
        [
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
    )


def shape_note(nodes: int | None, ranks_per_node: int | None) -> str:
    """How many options apply to a shape, and why the others do not. None: any number.

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
