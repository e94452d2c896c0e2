"""Options that have names: what known systems do, ByteComp's restricted searches, and collectives beside the tree.

>>> from gradwire.planner.options import option_of, select
>>> names_of(option_of(["comp:gpu", "allgather:inter", "decomp:gpu"]))
('GRACE', 'gradwire allgather')
>>> len(select(where=RESTRICTED["inter-allgather"]))
17
"""

from collections.abc import Callable, Sequence

from gradwire.core.collectives import ALL_REDUCE, COLLECTIVES, collective_of
from gradwire.planner.grammar import DEVICES, Action
from gradwire.planner.options import Option, is_option, option_of


def _everywhere(name: str) -> tuple[tuple[str, ...], ...]:
    """A collective with its codecs on each device."""
    return tuple(COLLECTIVES[name].on(device) for device in DEVICES)


def _between_nodes(tasks: tuple[str, ...]) -> tuple[str, ...]:
    return ("reducescatter:intra", *tasks, "allgather:intra")


SYSTEMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DDP": (ALL_REDUCE,),
    "DeAR": (COLLECTIVES["ring"].uncompressed,),
    "GRACE": (COLLECTIVES["allgather"].on("gpu"),),
    "HiTopKComm": (_between_nodes(COLLECTIVES["allgather"].on("gpu")),),
    "BytePS-Compress": (_between_nodes(COLLECTIVES["alltoall"].on("cpu")),),
    "CGX": (COLLECTIVES["alltoall"].on("gpu"),),
    "CGX between nodes": (_between_nodes(COLLECTIVES["alltoall"].on("gpu")),),
    "gradwire allreduce": (ALL_REDUCE,),
    "gradwire allgather": _everywhere("allgather"),
    "gradwire alltoall": _everywhere("alltoall"),
}
"""The option of each system that is one path through the tree, as tasks; several where the device is open.
'gradwire ...' are gradwire's own collectives. 'CGX between nodes' is CGX's heterogeneous form."""


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
    """The name of the collective that has these tasks, if ByteComp's tree does not have them; else ''.

    >>> beside_tree(["alltoall:inter", "allgather:inter"]), beside_tree(["reducescatter:inter", "allgather:inter"])
    ('alltoall', '')
    """
    named = collective_of(tuple(tasks))
    return "" if named is None or is_option(tasks) else named.name


def check_known(tasks: Sequence[str]) -> None:
    """Raises PlanError with the first connection that does not exist, unless these are an option or known beside the tree."""
    if not beside_tree(tasks):
        option_of(tasks)
