"""How a policy's buckets travel: by a collective's name, by the name of a system, or by an option's tasks."""

from gradwire.core.checks import near, show
from gradwire.core.collectives import collective, installed_collectives, uncompressed
from gradwire.core.specs import Spec
from gradwire.errors import FormatError, PlanError
from gradwire.planner.named import SYSTEMS, check_known

__all__ = ["check_scheme", "tasks_of"]

_SYSTEMS = [name for name in SYSTEMS if not name.startswith("gradwire ")]


def check_scheme(scheme: object) -> None:
    """Raises FormatError unless it is the name of a collective, one of SYSTEMS, or an option's tasks with spaces between."""
    if isinstance(scheme, str) and ":" in scheme:
        try:
            check_known(scheme.split())
        except PlanError as error:
            raise FormatError(f"scheme is {show(scheme)}: {error}") from None
    elif not isinstance(scheme, str) or (collective(scheme) is None and scheme not in _SYSTEMS):
        names = (*installed_collectives(), *_SYSTEMS)
        raise FormatError(
            f"scheme is {show(scheme)}: it must be one of {', '.join(names)}, or the tasks of an option with spaces between"
            f"{near(str(scheme), names)}."
        )


def tasks_of(scheme: str, device: str, spec: Spec) -> tuple[str, ...]:
    """The option of a bucket on this device. What loses nothing is not encoded, and travels by the same links.

    >>> from gradwire.core.specs import Identity
    >>> tasks_of("CGX between nodes", "cpu", Identity())
    ('reducescatter:intra', 'reducescatter:inter', 'allgather:inter', 'allgather:intra')
    """
    if (named := collective(scheme)) is not None:
        return named.option(device, spec)
    if ":" not in scheme and scheme not in _SYSTEMS:
        raise PlanError(
            f"{spec!r} travels by {scheme!r}, and no package that is installed has a collective of this name. Install it, or "
            f"write a scheme that carries the spec."
        )
    possible = (tuple(scheme.split()),) if ":" in scheme else SYSTEMS[scheme]
    option = next((tasks for tasks in possible if f"comp:{device}" in tasks), possible[0])
    if not spec.encodes:
        return uncompressed(option)
    # what is on the CPU can only be encoded there
    return tuple(task.replace(":gpu", ":cpu") if device == "cpu" else task for task in option)
