"""Entry points, by which other packages extend gradwire. The packages are read once, when a name is first needed.

The pyproject.toml of a package names its additions, group by group:

    [project.entry-points."gradwire.collectives"]
    relay = "gradwire_relay:RELAY"
"""

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from gradwire.core.checks import error_words, show
from gradwire.errors import GradwireError, PlanError

SPECS = "gradwire.specs"
"""Spec classes by id."""
COMPRESSORS = "gradwire.compressors"
"""Compressor classes by the id of the spec; called with the spec."""
COLLECTIVES = "gradwire.collectives"
"""`Collective`s by name."""
SCHEDULES = "gradwire.schedules"
"""Subclasses of `gradwire.core.schedules.Schedule` by kind."""

T = TypeVar("T")

_TARGET = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[.*\]\s*)?")


@cache
def _groups() -> dict[str, dict[str, list[EntryPoint]]]:
    found: dict[str, dict[str, list[EntryPoint]]] = {SPECS: {}, COMPRESSORS: {}, COLLECTIVES: {}, SCHEDULES: {}}
    installed = entry_points()
    for group, points in found.items():
        for point in installed.select(group=group):
            points.setdefault(point.name, []).append(point)
    return found


def names(group: str) -> tuple[str, ...]:
    """The names of a group in all installed packages, sorted. Nothing is loaded."""
    return tuple(sorted(_groups()[group]))


def absent(group: str, name: object) -> str:
    """The end of the error for an unknown word: ' No installed package ...', or '' if the name is not a word."""
    return f" No installed package has an entry point {show(name)} in {group}." if isinstance(name, str) else ""


def load(group: str, name: str, use: Callable[[Any], T], error: type[GradwireError]) -> T:
    """Load the object of a name in a group, and return `use(object)`.

    Raises `error`, which names the package and the entry point, if the object cannot be loaded or `use` refuses it.
    """
    points = _groups()[group][name]
    if len(points) > 1:
        raise error(
            f"{name!r} of {group} is in packages {' and '.join(map(_package, points))}: a name stands for one object. "
            "Uninstall all packages but one."
        )
    try:
        return use(_object_of(points[0]))
    except (Exception, SystemExit) as problem:
        raise error(
            f"entry point {name} = {points[0].value!r} of {group} in package {_package(points[0])} cannot be used: "
            f"{error_words(problem).removesuffix('.')}. Repair the package, or uninstall it."
        ) from problem


def origin(group: str, name: str, module: str) -> str:
    """The package of a name: gradwire itself, an installed package, or else the module that registered the name.

    >>> origin("gradwire.specs", "qsgd", "gradwire.core.specs.quantisers")
    'gradwire'
    """
    if module.partition(".")[0] == "gradwire":
        return "gradwire"
    points = _groups()[group].get(name)
    return _package(points[0]) if points else module


def named(reference: Any) -> Any:
    """Import the object of "module:name"; any other object is returned. Raises PlanError if the import fails."""
    if not isinstance(reference, str):
        return reference
    try:
        return _object_of(EntryPoint("", reference, ""))
    except (Exception, SystemExit) as problem:
        raise PlanError(
            f"{reference!r} cannot be loaded: {error_words(problem).removesuffix('.')}. Correct the name, or repair its module."
        ) from problem


def _object_of(point: EntryPoint) -> Any:
    if not _TARGET.fullmatch(point.value):
        raise ValueError('it does not have the form "module:name"')
    return point.load()


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
