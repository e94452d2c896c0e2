"""Collectives as data: the routines of an exchange, and the named sequences of routines. No torch.

Plans, policies, the grammar of options, costs, the simulator, the engine, the command line and the docs read these tables.
Another package adds a `Collective` in the entry points of `gradwire.collectives`. At least one of its link tasks needs a new
word, so that every plan has one meaning.

>>> collective("ring").on("cpu")
('comp:cpu', 'reducescatter:inter', 'allgather:inter', 'decomp:cpu')
>>> collective_of(("comp:gpu", "allgather:inter", "decomp:gpu")).name
'allgather'
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from gradwire.core import entry_points
from gradwire.core.checks import show
from gradwire.core.specs.base import Spec
from gradwire.errors import PlanError

CODEC_TASKS = ("comp", "decomp")
"""Tasks of an option that run on a device: gpu or cpu."""
LINKS = ("intra", "inter")
"""Where link tasks run: inside a node, or between nodes."""


@dataclass(frozen=True)
class Routine:
    """The collective operation of one link task."""

    word: str
    gets: str
    """Who receives the data of a rank: `everybody` or the `root` receive all, the `owners` receive one shard each."""
    _: KW_ONLY
    gradients: tuple[str, ...] = ()
    """The steps that the routine can perform in an exchange of uncompressed gradients: whole, first or second."""
    payloads: tuple[str, ...] = ()
    """The steps that the routine can perform in an exchange of payloads."""
    adds: bool = False
    """Whether the data of several ranks are added. If not, they are concatenated."""
    second: str = ""
    """For a first step: the word of the second step."""


ROUTINES = {
    routine.word: routine
    for routine in (
        Routine("allreduce", "everybody", gradients=("whole",), adds=True),
        Routine("reducescatter", "owners", gradients=("first",), adds=True, second="allgather"),
        Routine("reduce", "root", gradients=("first",), adds=True, second="broadcast"),
        Routine("alltoall", "owners", payloads=("first",), second="allgather"),
        Routine("gather", "root", payloads=("first",), second="broadcast"),
        Routine("allgather", "everybody", gradients=("second",), payloads=("whole", "second")),
        Routine("broadcast", "everybody", gradients=("second",), payloads=("second",)),
    )
}
"""ByteComp's collective routines (Tables 2 and 3), by the word of their link task."""
LINK_TASKS = tuple(ROUTINES)
"""Words of link tasks; `is_link_word` knows those of other packages too."""
ALL_REDUCE = ("allreduce:inter",)
"""The option of plain DDP."""

_PLAIN_FIRST = {
    coded.word: plain.word
    for coded in ROUTINES.values()
    for plain in ROUTINES.values()
    if "first" in coded.payloads and "first" in plain.gradients and coded.gets == plain.gets
}
"""For each first step of payloads, the first step of gradients with the same effect."""
_ROOTED = ("reduce", "gather", "broadcast")
"""Words of link tasks that go to one rank, or come from it."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A named way to synchronise one bucket. Immutable; `register_collective` checks the fields."""

    name: str
    """The name in a policy's `scheme` and on the command line."""
    about: str
    """Description of the collective, in one sentence without its full stop."""
    tasks: tuple[str, ...]
    """The tasks of a bucket's `option`; comp and decomp have no device here."""
    phases: tuple[str, ...]
    """The phase of each link task: reduce, gather, or whole for a task that does both."""
    runs: str | Callable[..., Any]
    """The class that runs one piece of a bucket, or its "module:name": a `gradwire.collectives.Scheme` with one phase for each
    link task. The engine calls the class with the compressor, the `Piece`, the `Group` and the root's rank."""
    steps: str | Callable[..., Any] = ""
    """The function of the costs, or its "module:name". The function takes the option, the nodes, the ranks of a node and the
    routing, and returns one `gradwire.costs.steps.Step` for each task. "" derives the costs from gradwire's own routines."""
    plain: bool = False
    """Whether `runs` also sends uncompressed gradients, by the same link tasks. If not, other routines of gradwire send them
    over the same links, or all-reduce does if one of the words is no routine."""
    needs: tuple[str, ...] = ("allgather",)
    """The schemes that a spec must name in `schemes`, unless the spec names this collective."""
    encodes_sums: bool = False
    """Whether every encode includes gradients of other ranks. Then a spec may remember nothing but residuals."""
    in_place: bool = False
    """Whether `runs` can work in the gradients' own memory. Then it needs no flat buffer (`Piece.apart`)."""
    in_rounds: bool = False
    """Whether all tasks but the last are repeated in each of the spec's `rounds`."""

    @property
    def link_tasks(self) -> tuple[str, ...]:
        """The tasks that run on links."""
        return tuple(task for task in self.tasks if task not in CODEC_TASKS)

    @property
    def own_words(self) -> tuple[str, ...]:
        """The words of link tasks that are not in `ROUTINES`."""
        words = (task.partition(":")[0] for task in self.link_tasks)
        return tuple(word for word in dict.fromkeys(words) if word not in ROUTINES)

    @property
    def divisible(self) -> bool:
        """Whether the gather phase can run apart from the reduce phase."""
        return "gather" in self.phases

    def on(self, device: str, rounds: int = 1) -> tuple[str, ...]:
        """The option with codecs on 'gpu' or 'cpu'."""
        tasks = tuple(f"{task}:{device}" if task in CODEC_TASKS else task for task in self.tasks)
        return tasks[:-1] * rounds + tasks[-1:] if self.in_rounds else tasks

    def option(self, device: str, spec: Spec) -> tuple[str, ...]:
        """The option of a bucket with this spec on this device."""
        return self.on(device, max(1, spec.rounds)) if spec.encodes else self.uncompressed

    @property
    def uncompressed(self) -> tuple[str, ...]:
        """The option of gradients that are not encoded."""
        if self.plain:
            return self.link_tasks
        return ALL_REDUCE if self.own_words else uncompressed(self.tasks)

    def carries(self, spec: Spec) -> bool:
        """Whether this collective can send payloads of the spec."""
        named = self.name in spec.schemes or set(self.needs) <= set(spec.schemes)
        return named and not (self.encodes_sums and set(spec.state) - {"residual"})


def uncompressed(option: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks that exchange uncompressed gradients over the same links.

    >>> uncompressed(("comp:cpu", "alltoall:inter", "allgather:inter", "decomp:cpu"))
    ('reducescatter:inter', 'allgather:inter')
    """
    exchanges = [task.partition(":") for task in option if task.partition(":")[2] in LINKS]
    words = [_PLAIN_FIRST.get(word, word) for word, _, _ in exchanges]
    if len(words) % 2:  # of an odd number of tasks the one in the middle is the whole exchange
        words[len(words) // 2] = "allreduce"
    return tuple(f"{word}:{link}" for word, (_, _, link) in zip(words, exchanges, strict=True))


COLLECTIVES = {
    each.name: each
    for each in (
        Collective(
            name="allreduce",
            about="Payloads are added on the wire, round after round",
            tasks=("comp", *ALL_REDUCE, "decomp"),
            phases=("whole",),
            runs="gradwire.collectives.schemes:Summing",
            plain=True,
            needs=("allreduce",),
            in_rounds=True,
        ),
        Collective(
            name="allgather",
            about="Every payload goes to every rank, and each adds them in rank order",
            tasks=("comp", "allgather:inter", "decomp"),
            phases=("whole",),
            runs="gradwire.collectives.schemes:AllGather",
            plain=True,
            in_place=True,
        ),
        Collective(
            name="alltoall",
            about="Each shard goes to its owner, which adds in rank order and encodes again; the sums go to all (CGX's SRA)",
            tasks=("comp", "alltoall:inter", "decomp", "comp", "allgather:inter", "decomp"),
            phases=("reduce", "gather"),
            runs="gradwire.collectives.schemes:TwoPhase",
            plain=True,
            needs=("alltoall",),
            in_place=True,
        ),
        Collective(
            name="ring",
            about="CGX's ring: each shard goes around, decoded, added and encoded again at every hop",
            tasks=("comp", "reducescatter:inter", "allgather:inter", "decomp"),
            phases=("reduce", "gather"),
            runs="gradwire.collectives.hops:Ring",
            steps="gradwire.costs.steps:ring_steps",
            needs=("alltoall", "allgather"),
            encodes_sums=True,
        ),
        Collective(
            name="tree",
            about="CGX's tree: sums go up to a root and down again, decoded, added and encoded again at every hop up",
            tasks=("comp", "reduce:inter", "broadcast:inter", "decomp"),
            phases=("reduce", "gather"),
            runs="gradwire.collectives.hops:Tree",
            steps="gradwire.costs.steps:tree_steps",
            needs=("alltoall", "allgather"),
            encodes_sums=True,
        ),
        Collective(
            name="grid",
            about="Two phases over a grid of about sqrt(n) x sqrt(n) ranks: sums go through rows, then columns, and back",
            tasks=(
                *("comp", "rowscatter:inter", "decomp", "comp", "columnscatter:inter", "decomp"),
                *("comp", "columngather:inter", "rowgather:inter", "decomp"),
            ),
            phases=("reduce", "reduce", "gather", "gather"),
            runs="gradwire.collectives.virtual_grid:VirtualGrid",
            steps="gradwire.costs.steps:grid_steps",
            needs=("alltoall", "allgather"),
            in_place=True,
        ),
    )
}
"""Gradwire's own collectives, by name."""

_REGISTRY = dict(COLLECTIVES)
_BY_WORD: dict[str, Collective] = {word: each for each in COLLECTIVES.values() for word in each.own_words}
"""Collectives by each of their words that is not in `ROUTINES`; `register_collective` adds those of other packages."""


def register_collective(added: Collective) -> Collective:
    """Register a collective by its name and by its new words. Raises PlanError if a field is wrong or the name is taken."""
    if not isinstance(added, Collective):
        raise PlanError(f"{show(added)} is a {type(added).__name__}: it must be a gradwire.core.collectives.Collective.")
    has = f"collective {added.name!r}"
    if _REGISTRY.get(added.name, added) != added or not added.name:
        raise PlanError(f"{has} has a name that is empty or taken: a name stands for one collective. Choose another name.")
    for task in added.tasks:
        word, _, link = task.partition(":")
        if not (task in CODEC_TASKS or (word and word not in CODEC_TASKS and link in LINKS)):
            raise PlanError(f"{has} has task {task!r}: it must be comp, decomp, or word:inter or word:intra.")
    if not added.own_words or any(_BY_WORD.get(word, added) != added for word in added.own_words):
        raise PlanError(
            f"{has} has link tasks {', '.join(added.link_tasks)}: at least one needs a word that no other collective has, "
            "or a plan with these tasks would have two meanings. Choose another word."
        )
    gathers = added.phases.count("gather")
    if (
        len(added.phases) != len(added.link_tasks)
        or set(added.phases) - {"reduce", "gather", "whole"}
        or set(added.phases[len(added.phases) - gathers :]) - {"gather"}
        or gathers == len(added.phases)
    ):
        raise PlanError(
            f"{has} has phases {list(added.phases)} for link tasks {list(added.link_tasks)}: each task needs one phase, reduce, "
            "gather or whole. The gather phases come last, after at least one other phase."
        )
    if not added.steps:
        raise PlanError(f"{has} has no `steps`: the costs of new words are unknown. Give a function that returns the costs.")
    _REGISTRY[added.name] = added
    _BY_WORD.update(dict.fromkeys(added.own_words, added))
    collective_of.cache_clear()
    return added


def installed_collectives() -> dict[str, Collective]:
    """All collectives by name: gradwire's own, then those of other packages."""
    for name in entry_points.names(entry_points.COLLECTIVES):
        _installed(name)
    return dict(_REGISTRY)


def collective(name: str) -> Collective | None:
    """The collective of this name, or None. Raises PlanError if the collective's package cannot be loaded."""
    if name not in _REGISTRY and name in entry_points.names(entry_points.COLLECTIVES):
        _installed(name)
    return _REGISTRY.get(name)


def _installed(name: str) -> None:
    def use(added: Collective) -> None:
        if getattr(added, "name", name) != name:
            raise PlanError(f"the collective's name is {added.name!r}. The entry point must have the same name.")
        register_collective(added)

    if name not in _REGISTRY:
        entry_points.load(entry_points.COLLECTIVES, name, use, PlanError)


def is_link_word(word: str) -> bool:
    """Whether a link task of this word exists, here or in an installed package."""
    if word not in ROUTINES and word not in _BY_WORD and word not in CODEC_TASKS:
        installed_collectives()
    return word in ROUTINES or word in _BY_WORD


def link_words() -> tuple[str, ...]:
    """All words of link tasks, those of installed packages too."""
    installed_collectives()
    return (*ROUTINES, *_BY_WORD)


@lru_cache(maxsize=4096)
def collective_of(option: tuple[str, ...]) -> Collective | None:
    """The collective with these tasks, encoded on one device or not at all. None if no collective has these tasks."""
    words = [task.partition(":")[0] for task in option]
    brought = next((word for word in words if word not in ROUTINES and word not in CODEC_TASKS), None)
    candidates = list(_REGISTRY.values())
    if brought is not None:
        candidates = [_BY_WORD[brought]] if is_link_word(brought) else []
    if "comp" not in words:
        return next((each for each in candidates if each.plain and option == each.link_tasks), None)
    device = option[words.index("comp")].partition(":")[2]
    return next((each for each in candidates if option == each.on(device, words.count("comp"))), None)


def words_on_links(option: Sequence[str]) -> tuple[str, ...]:
    """The words of an option's link tasks, in its order.

    >>> words_on_links(("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu"))
    ('alltoall', 'allgather')
    """
    words = (task.partition(":")[0] for task in option)
    return tuple(word for word in words if word not in CODEC_TASKS)


def pairs_ranks(option: Sequence[str]) -> bool:
    """Whether several ranks of a node exchange with other nodes, each with its partner there. So nodes must have equally many.

    >>> pairs_ranks(("reducescatter:intra", "allreduce:inter", "allgather:intra"))
    True
    >>> pairs_ranks(("reduce:intra", "allreduce:inter", "broadcast:intra")), pairs_ranks(("allreduce:inter",))
    (False, False)
    """
    return any(task.endswith(":intra") and task.partition(":")[0] not in _ROOTED for task in option)


def gathers_of(option: tuple[str, ...]) -> int:
    """The number of link tasks of an option's gather phase, which are the last ones. 0: the option is indivisible.

    >>> gathers_of(("reducescatter:inter", "allgather:inter")), gathers_of(("allreduce:inter",))
    (1, 0)
    """
    if (named := collective_of(option)) is not None:
        return named.phases.count("gather")
    words = words_on_links(option)
    gathering = list(takewhile(lambda word: "second" in ROUTINES[word].gradients, reversed(words)))
    return len(gathering) if len(gathering) < len(words) else 0
