"""Options of buckets by a scheme: the name of a collective or of a system, or an option's tasks; and which specs they carry."""

from gradwire.core.checks import near, show
from gradwire.core.collectives import collective, collective_of, installed_collectives, uncompressed
from gradwire.core.specs import Spec
from gradwire.errors import FormatError, PlanError
from gradwire.planner.named import SYSTEMS, check_known

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
    """The option of a bucket on this device. An exact spec is not encoded, and travels over the same links.

    >>> from gradwire.core.specs import Identity
    >>> tasks_of("CGX between nodes", "cpu", Identity())
    ('reducescatter:intra', 'reducescatter:inter', 'allgather:inter', 'allgather:intra')
    """
    if (named := collective(scheme)) is not None:
        return named.option(device, spec)
    if ":" not in scheme and scheme not in _SYSTEMS:
        raise PlanError(
            f"{spec!r} travels by {scheme!r}, but no installed package has a collective of this name. Install its package, or "
            "name a scheme that carries the spec."
        )
    possible = (tuple(scheme.split()),) if ":" in scheme else SYSTEMS[scheme]
    option = next((tasks for tasks in possible if f"comp:{device}" in tasks), possible[0])
    if not spec.encodes:
        return uncompressed(option)
    # a tensor on the CPU can only be encoded there
    return tuple(task.replace(":gpu", ":cpu") if device == "cpu" else task for task in option)


def codes_own_gradient(option: tuple[str, ...]) -> bool:
    """Whether the first encode comes before any sum, so that it encodes a rank's own gradient."""
    return option[0].startswith("comp")


def carries(option: tuple[str, ...], spec: Spec, device: str) -> bool:
    """Whether an option that compresses can carry this spec's payloads, of tensors on this device.

    Sums on the wire (PowerSGD, Random-k with common indices) need all-reduce, in as many rounds as the spec has. State of a
    rank's own gradient beside a residual, such as momentum, needs an encode before any sum.

    >>> from gradwire.core import PowerSGD, QSGD
    >>> two_phase = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")
    >>> carries(two_phase, QSGD(bits=4), "cpu"), carries(two_phase, PowerSGD(rank=4), "cpu")
    (True, False)
    """
    named = collective_of(option)
    if named is not None and option == named.on(device, spec.rounds):
        return named.carries(spec)
    return set(spec.schemes) >= {"alltoall", "allgather"} and (
        not set(spec.state) - {"residual"} or codes_own_gradient(option)
    )
