"""Options: all ways in which one bucket may be synchronised. Constraints select options; their tasks identify them.

The tree is ByteComp's (section 4.2); `gradwire.plan.grammar` has its rules, docs/options.md its picture.

>>> len(tree()), len(tree(devices=("gpu",)))
(4341, 174)
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from gradwire.core import text, whole, word
from gradwire.errors import PlanError
from gradwire.plan.grammar import COMPRESSED, DEVICES, SCHEMES, STEPS, Action, endings, refusal, roots


class ExchangeChoice(NamedTuple):
    """One link task of an option."""

    word: str
    """One of LINK_TASKS."""
    link: str
    """'intra' or 'inter'; 'inter' in flat options."""
    compressed: bool
    """Whether payloads travel."""


class Option(msgspec.Struct, frozen=True):
    """One path through the tree.

    >>> option = option_of("reducescatter:intra comp:gpu allgather:inter decomp:gpu allgather:intra".split())
    >>> option.intra, option.inter, option.encodes, option.flat
    ('reducescatter+allgather', 'allgather', 1, False)
    """

    tasks: tuple[str, ...]
    """The tasks as in `Bucket.option` of a plan: word:where, in order. No two options have the same tasks."""
    actions: tuple[Action, ...]
    """The action of each task, which says whether an 'allgather' carries payloads, and which step it is."""

    @property
    def exchanges(self) -> tuple[ExchangeChoice, ...]:
        """The link tasks, in order."""
        named = ((*task.split(":"), action) for task, action in zip(self.tasks, self.actions, strict=True) if action in STEPS)
        return tuple(ExchangeChoice(word, link, action in COMPRESSED) for word, link, action in named)

    @property
    def flat(self) -> bool:
        """Whether all ranks exchange as one group, without regard to nodes."""
        return not any(task.endswith(":intra") for task in self.tasks)

    @property
    def intra(self) -> str:
        """The scheme inside a node, one of SCHEMES; '' if flat."""
        return self._scheme("intra")

    @property
    def inter(self) -> str:
        """The scheme between nodes, or between all ranks if flat; one of SCHEMES."""
        return self._scheme("inter")

    def _scheme(self, link: str) -> str:
        return "+".join(exchange.word for exchange in self.exchanges if exchange.link == link)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes used: (inter,), or (intra, inter)."""
        return (self.inter,) if self.flat else (self.intra, self.inter)

    @property
    def encodes(self) -> int:
        """Number of Comp tasks, 0 to 4. Each adds an error, and a biased compressor needs a residual for each."""
        return self.actions.count(Action.COMP)

    decodes = encodes
    """Number of Decomp tasks: every payload is decoded before the next encode."""

    @property
    def compresses(self) -> bool:
        """Whether anything is encoded."""
        return Action.COMP in self.actions

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that encode or decode, in the order of DEVICES."""
        used = {task.partition(":")[2] for task in self.tasks}
        return tuple(device for device in DEVICES if device in used)

    @property
    def forwards(self) -> int:
        """Number of times that a link task sends on, undecoded, the payloads of the link task before."""
        return sum(before in COMPRESSED and after in COMPRESSED for before, after in pairwise(self.actions))

    @property
    def skips(self) -> int:
        """Number of the `forwards` that send on payloads of several senders, which no rank has added. All these payloads travel,
        and the next Decomp decodes and adds them (ByteComp's footnote 2)."""
        count, lists = 0, False
        for before, after in pairwise(self.actions):
            if before is Action.COMP:
                lists = False
            elif before in (Action.COMM_COMP, Action.COMM1_COMP):
                lists = True
            count += lists and before in COMPRESSED and after in COMPRESSED
        return count


@cache
def tree(devices: tuple[str, ...] = DEVICES) -> tuple[Option, ...]:
    """All options, flat before hierarchical, in a fixed order. 4341 with two devices, 174 with one."""
    paths = (path for place in roots() for path in endings(place, devices))
    return tuple(Option(tuple(task.name for task in path), tuple(task.action for task in path)) for path in paths)


def select(
    *,
    devices: Sequence[str] = DEVICES,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    max_encodes: int | None = None,
    schemes: Sequence[str] | None = None,
    flat: bool | None = None,
    compressed: bool | None = None,
    where: Callable[[Option], bool] | None = None,
) -> tuple[Option, ...]:
    """The options that keep all given constraints, in the order of `tree`.

    devices: the devices that may encode and decode. nodes, ranks_per_node: the shape of the cluster. One node, or one rank on
    each node, has one link: only flat options apply. One rank has no option. max_encodes: the most encodes. schemes: the allowed
    schemes, of SCHEMES. flat, compressed: True selects only such options, False only the others. where: a predicate.

    Raises PlanError for an unknown value.

    >>> [option.tasks for option in select(flat=True, compressed=False)][:2]
    [('allreduce:inter',), ('reducescatter:inter', 'allgather:inter')]
    >>> len(select(nodes=4, ranks_per_node=1, max_encodes=1))
    31
    """
    for index, device in enumerate(devices):
        word(f"devices[{index}]", device, DEVICES, error=PlanError)
    for index, scheme in enumerate(schemes or ()):
        word(f"schemes[{index}]", scheme, SCHEMES, error=PlanError)
    for field, value, what, low in (
        ("nodes", nodes, "how many nodes there are", 1),
        ("ranks_per_node", ranks_per_node, "how many ranks a node has", 1),
        ("max_encodes", max_encodes, "how many encodes an option may have", 0),
    ):
        if value is not None:
            whole(field, value, what, low=low, error=PlanError)
    if nodes == ranks_per_node == 1:
        return ()
    one_link = 1 in (nodes, ranks_per_node)
    return tuple(
        option
        for option in tree(tuple(device for device in DEVICES if device in devices))
        if (option.flat or not one_link)
        and (flat is None or option.flat == flat)
        and (compressed is None or option.compresses == compressed)
        and (max_encodes is None or option.encodes <= max_encodes)
        and (schemes is None or set(option.schemes) <= set(schemes))
        and (where is None or where(option))
    )


@cache
def _by_tasks() -> dict[tuple[str, ...], Option]:
    return {option.tasks: option for option in tree()}


def is_option(tasks: Sequence[str]) -> bool:
    """Whether the tasks are a path through the tree."""
    return tuple(tasks) in _by_tasks()


def option_of(tasks: Sequence[str]) -> Option:
    """The option with these tasks. Raises PlanError that names the first connection that the tree does not have.

    >>> option_of(["alltoall:inter", "allgather:inter"])
    Traceback (most recent call last):
    gradwire.errors.PlanError: option[0] is 'alltoall:inter' at the start: alltoall takes payloads, and nothing is encoded \
there. Possible there: allreduce:inter, comp:cpu, comp:gpu, reduce:inter, reduce:intra, reducescatter:inter, \
reducescatter:intra.
    """
    for index, task in enumerate(tasks):
        text(f"option[{index}]", task, "a task as word:where", error=PlanError)
    found = _by_tasks().get(tuple(tasks))
    if found is None:
        raise PlanError(refusal(tuple(tasks)))
    return found
