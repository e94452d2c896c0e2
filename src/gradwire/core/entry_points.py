"""Entry points: what other packages add to gradwire. A group is read when something of it is first needed, and once.

A package names in its pyproject.toml what it adds, group by group:

    [project.entry-points."gradwire.collectives"]
    relay = "gradwire_relay:RELAY"
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from gradwire.errors import GradwireError, PlanError

__all__ = ["COLLECTIVES", "COMPRESSORS", "SCHEDULES", "SPECS", "load", "named", "names", "origin"]

SPECS = "gradwire.specs"
"""By a spec's id, its class."""
COMPRESSORS = "gradwire.compressors"
"""By a spec's id, the class that runs it; called with the spec."""
COLLECTIVES = "gradwire.collectives"
"""By a collective's name, its `Collective`."""

SCHEDULES = "gradwire.schedules"
"""By a schedule's kind, its class, a `gradwire.core.schedules.Schedule`."""

T = TypeVar("T")


@cache
def _group(group: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return found


def names(group: str) -> tuple[str, ...]:
    """The names of a group in all installed packages, sorted. Nothing is loaded."""
    return tuple(sorted(_group(group)))


def load(group: str, name: str, use: Callable[[Any], T], error: type[GradwireError]) -> T:
    """What `use` makes of the object that a name of a group stands for.

    Raises `error`, which names the package and the entry point, if the object cannot be loaded or `use` refuses it.
    """
    points = _group(group)[name]
    if len(points) > 1:
        raise error(
            f"{name!r} of {group} is in packages {' and '.join(map(_package, points))}: one name stands for one thing. "
            "Uninstall all but one."
        )
    try:
        return use(points[0].load())
    except Exception as problem:
        raise error(
            f"entry point {name} = {points[0].value!r} of {group} in package {_package(points[0])} cannot be used: "
            f"{type(problem).__name__}: {problem} Repair the package, or uninstall it."
        ) from problem


def origin(group: str, name: str, module: str) -> str:
    """Which package brings what has this name: gradwire itself, an installed package, or else the module that registered it.

    >>> origin("gradwire.specs", "qsgd", "gradwire.core.specs.quantisers")
    'gradwire'
    """
    if module.partition(".")[0] == "gradwire":
        return "gradwire"
    points = _group(group).get(name)
    return _package(points[0]) if points else module


def named(reference: Any) -> Any:
    """The object that "module:name" stands for, imported now; any other object is itself. Raises PlanError if it cannot be."""
    if not isinstance(reference, str):
        return reference
    try:
        return EntryPoint("", reference, "").load()
    except Exception as problem:
        raise PlanError(f"{reference!r} cannot be loaded: {type(problem).__name__}: {problem}") from problem


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
