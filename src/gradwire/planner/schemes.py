"""How a policy's buckets travel: by a word, by the name of a system, or by an option's tasks."""

from gradwire.core.checks import near, show
from gradwire.core.specs import Identity, Spec
from gradwire.errors import FormatError, PlanError
from gradwire.planner.grammar import DEVICES
from gradwire.planner.named import BESIDE, SYSTEMS, check_known

__all__ = ["SCHEMES", "check_scheme", "tasks_of"]

SCHEMES = ("allreduce", "allgather", "alltoall")
"""allreduce: summed on the wire; allgather: every payload to every rank; alltoall: two phases, re-encoded between."""


def check_scheme(scheme: object) -> None:
    """Raises FormatError unless it is one of SCHEMES, a name of SYSTEMS or BESIDE, or an option's tasks with spaces between."""
    names = (*SCHEMES, *BESIDE, *(name for name in SYSTEMS if not name.startswith("gradwire ")))
    if isinstance(scheme, str) and ":" in scheme:
        try:
            check_known(scheme.split())
        except PlanError as error:
            raise FormatError(f"scheme is {show(scheme)}: {error}") from None
    elif scheme not in names:
        raise FormatError(
            f"scheme is {show(scheme)}: it must be one of {', '.join(names)}, or the tasks of an option with spaces between"
            f"{near(str(scheme), names)}."
        )


def tasks_of(scheme: str, device: str, spec: Spec) -> tuple[str, ...]:
    """The option of a bucket on this device. What loses nothing is not encoded, and travels by the same links.

    >>> tasks_of("CGX between nodes", "cpu", Identity())
    ('reducescatter:intra', 'reducescatter:inter', 'allgather:inter', 'allgather:intra')
    """
    comp, decomp = f"comp:{device}", f"decomp:{device}"
    by_word = {
        "allreduce": (comp, "allreduce:inter") * max(1, spec.rounds) + (decomp,),
        "allgather": (comp, "allgather:inter", decomp),
        "alltoall": (comp, "alltoall:inter", decomp, comp, "allgather:inter", decomp),
    }
    if scheme in by_word:
        option = by_word[scheme]
        return tuple(task for task in option if task.endswith(":inter")) if isinstance(spec, Identity) else option
    possible = (tuple(scheme.split()),) if ":" in scheme else {**SYSTEMS, **BESIDE}[scheme]
    option = next((tasks for tasks in possible if f"comp:{device}" in tasks), possible[0])
    if isinstance(spec, Identity):
        return _uncompressed(option)
    # what is on the CPU can only be encoded there
    return tuple(task.replace(":gpu", ":cpu") if device == "cpu" else task for task in option)


def _uncompressed(option: tuple[str, ...]) -> tuple[str, ...]:
    """The same exchanges of gradients as they are: what gathered payloads then adds on the way."""
    exchanges = [task for task in option if task.partition(":")[2] not in DEVICES]
    if len(exchanges) % 2:  # an odd one is the whole exchange in the middle
        middle = exchanges[len(exchanges) // 2]
        exchanges[len(exchanges) // 2] = f"allreduce:{middle.partition(':')[2]}"
    first = {"alltoall:inter": "reducescatter:inter", "alltoall:intra": "reducescatter:intra"}
    first |= {"gather:inter": "reduce:inter", "gather:intra": "reduce:intra"}
    return tuple(first.get(task, task) for task in exchanges)
