"""Names of release 0.2 that are spelt otherwise now: where a script writes an old one, the error says the new one.

`docs/how-to/move-from-0.2.md` has the same names, which a test compares.
"""

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["RENAMED", "has_renamed_keywords", "new_spelling", "old_words"]

P = ParamSpec("P")
T = TypeVar("T")

RENAMED: dict[str, dict[str, str]] = {
    "gradwire.planner": {
        **{name: f"gw.{name}" for name in ("AdaptiveBits", "Policy", "Tuned", "Uniform", "Where")},
        **{name: f"gradwire.plan.{name}" for name in ("Option", "option_of")},
    },
    "gradwire.collectives": {
        name: f"gradwire.transport.{name}"
        for name in ("DamagedError", "Grid", "Group", "Lane", "Link", "LinkError", "Meter", "SilentLink", "transfer")
    },
    "Exchange": {
        "begin_step": "begin(step=...)",
        "count": "ready(places)",
        "await_bucket": "wait(bucket)",
        "finish": "wait(others=[...]), then meters",
        "executor": "give_up() in place of executor.give_up()",
        "lent": "release() in place of lent.give_back()",
    },
    "gradwire.integrations.fsdp2.compress": {"spec": "plan"},
    "gradwire.integrations.fsdp2.replicate": {"spec": "plan"},
    "gradwire bench": {
        "--matrix": "python -m benchmarks matrix --measure",
        "--papers": "python -m benchmarks side_by_side --measure",
        "--predict": "python -m benchmarks predict",
        "--what": "python -m benchmarks ceiling, phases, or schemes --measure",
        "--spec": "python -m benchmarks predict --spec, or side_by_side --spec",
        "--out": "python -m benchmarks matrix --out, or side_by_side --results",
        "--again": "python -m benchmarks matrix --again, or side_by_side --again",
        "--loss-steps": "python -m benchmarks matrix --loss-steps",
        **{name: f"python -m benchmarks methods {name}" for name in ("--intra", "--turn", "--alone-steps", "--seed")},
        **dict.fromkeys(("wrong-on-purpose", "rival"), "python -m benchmarks methods --methods"),
    },
    "gradwire plan": {"cupcake": "python -m benchmarks plan"},
}
"""The old names and the new spelling of each, by the place where they were written."""


def new_spelling(place: str, name: str) -> str:
    """Return a sentence with the new spelling, which begins with a space, or '' for a name that was none.

    >>> new_spelling("Exchange", "await_bucket")
    ' Since release 0.3 it is wait(bucket): docs/how-to/move-from-0.2.md.'
    """
    found = RENAMED[place].get(name)
    return "" if found is None else f" Since release 0.3 it is {found}: docs/how-to/move-from-0.2.md."


def has_renamed_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function refuse the old names of its keyword arguments with a TypeError that says the new ones."""
    place = f"{function.__module__}.{function.__name__}"

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if spelling := new_spelling(place, name):
                raise TypeError(f"{function.__name__}() has no argument {name!r}.{spelling}")
        return function(*args, **kwargs)

    return checked


def old_words(words: Iterable[str]) -> str:
    """Return an error about the first old option or method in the words of a command line; '' if there is none.

    >>> old_words(["bench", "--matrix"])
    'gradwire bench has no --matrix. Since release 0.3 it is python -m benchmarks matrix --measure: docs/how-to/move-from-0.2.md.'
    >>> old_words(["bench", "--jobs=mlp"])
    ''
    """
    command, *rest = [*words, ""]
    place = f"gradwire {command}"
    parts = (part for word in rest for part in re.split("[=,:]", word)) if place in RENAMED else ()
    return next((f"{place} has no {part}.{new_spelling(place, part)}" for part in parts if part in RENAMED[place]), "")
