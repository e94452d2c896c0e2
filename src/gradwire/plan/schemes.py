"""Names of options: collectives, systems, ByteComp's restricted searches. Also specs that options carry, and correction steps.

>>> from gradwire.plan.options import option_of, select
>>> names_of(option_of(["comp:gpu", "allgather:inter", "decomp:gpu"]))
('GRACE', 'gradwire allgather')
>>> len(select(where=RESTRICTED["inter-allgather"]))
17
"""

from collections.abc import Callable, Sequence

import msgspec

from gradwire.core import (
    ALL_REDUCE,
    COLLECTIVES,
    Bucket,
    Delayed,
    Identity,
    Plan,
    Spec,
    TensorInfo,
    collective,
    collective_of,
    entry_points,
    installed_collectives,
    near,
    show,
    uncompressed,
)
from gradwire.errors import FormatError, PlanError
from gradwire.plan.grammar import DEVICES, Action
from gradwire.plan.options import Option, is_option, option_of


def _everywhere(name: str) -> tuple[tuple[str, ...], ...]:
    """The options of a collective, with its codecs on each device."""
    return tuple(COLLECTIVES[name].on(device) for device in DEVICES)


def between_nodes(tasks: tuple[str, ...], leaders: bool = False) -> tuple[str, ...]:
    """The option that runs these tasks between nodes, and sums uncompressed gradients inside each node.

    leaders: whether one rank of each node does so for the node, and gives the payloads of the mean to the others.

    >>> between_nodes(("comp:cpu", "allgather:inter", "decomp:cpu"))
    ('reducescatter:intra', 'comp:cpu', 'allgather:inter', 'decomp:cpu', 'allgather:intra')
    >>> between_nodes(("comp:cpu", "allgather:inter", "decomp:cpu"), leaders=True)
    ('reduce:intra', 'comp:cpu', 'allgather:inter', 'broadcast:intra', 'decomp:cpu')
    """
    if not leaders:
        return ("reducescatter:intra", *tasks, "allgather:intra")
    end = len(tasks) - tasks[-1].startswith("decomp:")
    return ("reduce:intra", *tasks[:end], "broadcast:intra", *tasks[end:])


FLAT, HIERARCHICAL, LEADERS = "flat", "hierarchical", "leaders"
"""Words for a policy's `scheme`: each spec travels by its own collective, between all ranks, or only between nodes. There all
ranks of a node exchange a part each, or one rank exchanges for the whole node."""

SYSTEMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DDP": (ALL_REDUCE,),
    "DeAR": (COLLECTIVES["ring"].uncompressed,),
    "GRACE": (COLLECTIVES["allgather"].on("gpu"),),
    "HiTopKComm": (between_nodes(COLLECTIVES["allgather"].on("gpu")),),
    "BytePS-Compress": (between_nodes(COLLECTIVES["alltoall"].on("cpu")),),
    "CGX": (COLLECTIVES["alltoall"].on("gpu"),),
    "CGX between nodes": (between_nodes(COLLECTIVES["alltoall"].on("gpu")),),
    "CD-SGD": (("comp:gpu", "alltoall:inter", "decomp:gpu", "allgather:inter"),),
    "gradwire allreduce": (ALL_REDUCE,),
    "gradwire allgather": _everywhere("allgather"),
    "gradwire alltoall": _everywhere("alltoall"),
}
"""The option of each system that is one path through the tree; several if the device is open. 'gradwire ...' are gradwire's own
collectives. 'CGX between nodes' is CGX's heterogeneous form. 'CD-SGD' sends sums uncompressed, as its server does."""
_SYSTEMS = [name for name in SYSTEMS if not name.startswith("gradwire ")]


def names_of(option: Option) -> tuple[str, ...]:
    """The systems with this option; for most options none."""
    return tuple(name for name, options in SYSTEMS.items() if option.tasks in options)


def _uses_only(device: str) -> Callable[[Option], bool]:
    return lambda option: set(option.devices) <= {device}


def _compresses_inter_by(scheme: str) -> Callable[[Option], bool]:
    """Predicate of options that are uncompressed, or hierarchical with this scheme between nodes. In the latter every exchange
    between nodes is compressed, and none inside a node."""
    return lambda option: (
        not option.compresses
        or (
            not option.flat
            and option.inter == scheme
            and all(exchange.compressed == (exchange.link == "inter") for exchange in option.exchanges)
        )
    )


def _alltoall_twice(option: Option) -> bool:
    """Whether an option is uncompressed, or consists of a compressed all-to-all inside the node, a decode, and a second encode
    for all-to-all and all-gather between nodes. The last all-gather, inside the node, may have either form."""
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
uncompressed. 'myopic' is not here: it searches the whole tree, and judges options by their own times alone."""


def beside_tree(tasks: Sequence[str]) -> str:
    """The name of the collective that has these tasks, if ByteComp's tree does not have them; else ''.

    >>> beside_tree(["alltoall:inter", "allgather:inter"]), beside_tree(["reducescatter:inter", "allgather:inter"])
    ('alltoall', '')
    """
    named = collective_of(tuple(tasks))
    return "" if named is None or is_option(tasks) else named.name


def check_known(tasks: Sequence[str]) -> None:
    """Raise PlanError with the first connection that does not exist, unless the tasks are an option or a collective's."""
    if not beside_tree(tasks):
        option_of(tasks)


def check_scheme(scheme: object) -> None:
    """Raise FormatError unless the scheme is FLAT, HIERARCHICAL, a collective, one of SYSTEMS, or tasks with spaces."""
    if isinstance(scheme, str) and ":" in scheme:
        try:
            check_known(scheme.split())
        except PlanError as error:
            raise FormatError(f"scheme is {show(scheme)}: {error}") from None
    elif scheme not in (FLAT, HIERARCHICAL, LEADERS, *_SYSTEMS) and (not isinstance(scheme, str) or collective(scheme) is None):
        names = (FLAT, HIERARCHICAL, LEADERS, *installed_collectives(), *_SYSTEMS)
        raise FormatError(
            f"scheme is {show(scheme)}: it must be one of {', '.join(names)}, or the tasks of an option with spaces between"
            f"{near(str(scheme), names)}.{entry_points.absent(entry_points.COLLECTIVES, scheme)}"
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
    # a tensor on the CPU can only be encoded on the CPU
    return tuple(task.replace(":gpu", ":cpu") if device == "cpu" else task for task in option)


def codes_own_gradient(option: tuple[str, ...]) -> bool:
    """Whether the first encode comes before any sum, so that it encodes a rank's own gradient."""
    return option[0].startswith("comp")


def encodes_again(option: tuple[str, ...]) -> bool:
    """Whether sums are encoded too, once or at every hop, after the encode of each rank's own gradient.

    >>> from gradwire.core.collectives import COLLECTIVES
    >>> [encodes_again(COLLECTIVES[name].on("cpu")) for name in ("allgather", "alltoall", "ring")]
    [False, True, True]
    """
    named = collective_of(option)
    if named is not None and named.encodes_sums:
        return True
    return sum(task.startswith("comp:") for task in option) > 1 and "allreduce:inter" not in option


def carries(option: tuple[str, ...], spec: Spec, device: str) -> bool:
    """Whether a compressing option can carry this spec's payloads of tensors on this device.

    Sums on the wire (PowerSGD, Random-k with common indices) need all-reduce, in as many rounds as the spec has. State of a
    rank's own gradient other than a residual, such as momentum, needs an encode before any sum.

    >>> from gradwire.core import PowerSGD, QSGD
    >>> two_phase = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")
    >>> carries(two_phase, QSGD(bits=4), "cpu"), carries(two_phase, PowerSGD(rank=4), "cpu")
    (True, False)
    """
    named = collective_of(option)
    if named is not None and option == named.on(device, spec.rounds):
        return named.carries(spec)
    return set(spec.schemes) >= {"alltoall", "allgather"} and (not set(spec.state) - {"residual"} or codes_own_gradient(option))


def correction_plan(plan: Plan, schedule: Delayed, tensors: Sequence[TensorInfo]) -> Plan:
    """The plan of a correction step: the same buckets, with the spec that the `delayed` schedule gives to corrections. Buckets
    that the plan does not compress stay uncompressed.

    `tensors` are the plan's. Raises FormatError if the correction's spec needs tasks that neither option nor scheme gives.

    >>> from gradwire.core import QSGD
    >>> from gradwire.plan import Uniform
    >>> tensors = [TensorInfo("weight", (4, 4), "float32")]
    >>> plan = Uniform(QSGD(bits=4)).plan(tensors)
    >>> corrections = correction_plan(plan, Delayed(), tensors)
    >>> corrections.buckets[0].spec, corrections.buckets[0].option
    (Identity(), ('alltoall:inter', 'allgather:inter'))
    """
    of = {tensor.name: tensor for tensor in tensors}
    return with_buckets(plan, [_corrected(b, schedule.correction, of[b.tensors[0]]) for b in plan.buckets])


def with_buckets(plan: Plan, buckets: Sequence[Bucket]) -> Plan:
    """The plan with other buckets of the same tensors. If the link tasks differ, the new buckets are launched one by one."""
    order = dict.fromkeys(index for index, _ in plan.launch)
    launch = tuple((index, task) for index in order for task in buckets[index].link_tasks)
    if all(new.link_tasks == old.link_tasks for new, old in zip(buckets, plan.buckets, strict=True)):
        launch = plan.launch
    return msgspec.structs.replace(plan, buckets=tuple(buckets), launch=launch, prediction=None)


def _corrected(bucket: Bucket, correction: Spec | None, first: TensorInfo) -> Bucket:
    usual = bucket.main_spec
    if not usual.encodes:
        return bucket
    spec = Identity() if correction is None else correction
    named = collective_of(bucket.option)
    if not spec.encodes and named is not None:
        option = named.uncompressed
    elif not spec.encodes:
        option = uncompressed(bucket.option)
    elif usual.rounds or spec.rounds:
        option = tasks_of(spec.schemes[0], first.device, spec)
    else:
        option = bucket.option
    return msgspec.structs.replace(
        bucket,
        spec=bucket.specs_with(spec),
        option=option,
        reduce_dtype=first.dtype if option == ALL_REDUCE else "float32",
        residual_dtype=bucket.residual_dtype if spec.feedback else "float32",
    )
