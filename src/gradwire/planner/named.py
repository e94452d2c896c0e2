"""Options that have names: what known systems do, ByteComp's restricted searches, and what gradwire runs beside the tree.

>>> from gradwire.planner.options import option_of, select
>>> names_of(option_of(["comp:gpu", "allgather:inter", "decomp:gpu"]))
('GRACE', 'gradwire allgather')
>>> len(select(where=RESTRICTED["inter-allgather"]))
17
"""

from collections.abc import Callable, Sequence

from gradwire.planner.grammar import DEVICES, Action
from gradwire.planner.options import Option, option_of

__all__ = ["BESIDE", "RESTRICTED", "SYSTEMS", "beside_tree", "check_known", "names_of"]


def _gathered(device: str) -> tuple[str, ...]:
    return (f"comp:{device}", "allgather:inter", f"decomp:{device}")


def _two_phase(device: str) -> tuple[str, ...]:
    comp, decomp = f"comp:{device}", f"decomp:{device}"
    return (comp, "alltoall:inter", decomp, comp, "allgather:inter", decomp)


def _between_nodes(tasks: tuple[str, ...]) -> tuple[str, ...]:
    return ("reducescatter:intra", *tasks, "allgather:intra")


SYSTEMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DDP": (("allreduce:inter",),),
    "DeAR": (("reducescatter:inter", "allgather:inter"),),
    "GRACE": (_gathered("gpu"),),
    "HiTopKComm": (_between_nodes(_gathered("gpu")),),
    "BytePS-Compress": (_between_nodes(_two_phase("cpu")),),
    "CGX": (_two_phase("gpu"),),
    "CGX between nodes": (_between_nodes(_two_phase("gpu")),),
    "gradwire allreduce": (("allreduce:inter",),),
    "gradwire allgather": tuple(_gathered(device) for device in DEVICES),
    "gradwire alltoall": tuple(_two_phase(device) for device in DEVICES),
}
"""The option of each system that is one path through the tree, as tasks; several where the device is open.
'gradwire ...' are the schemes of `Policy`. 'CGX between nodes' is CGX's heterogeneous form."""


BESIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "ring": tuple(
        (f"comp:{device}", "reducescatter:inter", "allgather:inter", f"decomp:{device}") for device in DEVICES
    ),
    "tree": tuple((f"comp:{device}", "reduce:inter", "broadcast:inter", f"decomp:{device}") for device in DEVICES),
}
"""CGX's other reductions (section 3), which are no options of the tree: payloads are decoded, added and encoded again at every
hop of one collective, which the tree has for gradients only."""


def names_of(option: Option) -> tuple[str, ...]:
    """The systems that do this; mostly none."""
    return tuple(name for name, options in SYSTEMS.items() if option.tasks in options)


def _uses_only(device: str) -> Callable[[Option], bool]:
    return lambda option: set(option.devices) <= {device}


def _compresses_inter_by(scheme: str) -> Callable[[Option], bool]:
    """Uncompressed; or hierarchical, by this scheme between nodes, every exchange there compressed and none inside."""
    return lambda option: (
        not option.compresses
        or (
            not option.flat
            and option.inter == scheme
            and all(exchange.compressed == (exchange.link == "inter") for exchange in option.exchanges)
        )
    )


def _alltoall_twice(option: Option) -> bool:
    """Uncompressed; or compressed all-to-all inside the node, decoded, and encoded again for all-to-all and all-gather
    between nodes. The last all-gather, inside the node, is open."""
    begins = (Action.COMP, Action.COMM1_COMP, Action.DECOMP, Action.COMP)
    return not option.compresses or (
        option.schemes == ("alltoall+allgather", "alltoall+allgather")
        and option.actions[:4] == begins
        and all(exchange.compressed for exchange in option.exchanges if exchange.link == "inter")
    )


RESTRICTED: dict[str, Callable[[Option], bool]] = {
    "all-compressed": lambda option: option.compresses,
    "gpu": _uses_only("gpu"),
    "cpu": _uses_only("cpu"),
    "inter-allgather": _compresses_inter_by("allgather"),
    "inter-alltoall": _compresses_inter_by("alltoall+allgather"),
    "alltoall+alltoall": _alltoall_twice,
}
"""ByteComp's crippled searches (section 5.3) as predicates for `select`. All but all-compressed may leave a tensor
uncompressed. 'myopic' is not here: it has the whole tree, and judges options by their own times alone."""


def beside_tree(tasks: Sequence[str]) -> str:
    """What an option is that gradwire runs and ByteComp's tree does not have; '' if it is none of these.

    >>> beside_tree(["alltoall:inter", "allgather:inter"])
    'reducescatter+allgather, built from all-to-all and a sum in rank order'
    """
    tasks = tuple(tasks)
    if tasks == ("allgather:inter",):
        return "uncompressed gradients of all ranks to every rank, which adds them in rank order"
    if tasks == ("alltoall:inter", "allgather:inter"):
        return "reducescatter+allgather, built from all-to-all and a sum in rank order"
    for name, options in BESIDE.items():
        if tasks in options:
            return f"CGX's {name}: decoded, added and encoded again at every hop"
    rounds = len(tasks) // 2
    for device in DEVICES:
        if rounds and tasks == (f"comp:{device}", "allreduce:inter") * rounds + (f"decomp:{device}",):
            return f"payloads summed on the wire, rounds: {rounds}"
    return ""


def check_known(tasks: Sequence[str]) -> None:
    """Raises PlanError with the first connection that does not exist, unless these are an option or known beside the tree."""
    if not beside_tree(tasks):
        option_of(tasks)
