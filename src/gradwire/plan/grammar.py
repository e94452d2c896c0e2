"""ByteComp's decision tree as a grammar (section 4.2, Figure 7): the tasks that may follow each action task.

A path through the tree is a sequence of eight action tasks (Table 3). A path decides four dimensions: compress or not (Comp or
not), on which device (Comp and Decomp on gpu or cpu), by which scheme (a pattern of steps, and the routine of each), and where
to encode and decode (the places of Comp and Decomp). Three pruning rules say which task may come next:

1. a task is a valid connection of the action before it (`CONNECTIONS`);
2. a link task is the step that is due, on the link on which it is due (`PATTERNS`, `STEPS`);
3. the second step of a divisible scheme pairs with its first (`PAIRS`).

The rules are tables. `branches` applies them, and `endings` follows them to the end. The number of options follows from them.

>>> sum(len(endings(root)) for root in roots())
4341
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from gradwire.core import CODEC_TASKS, LINK_TASKS, ROUTINES, near, show

DEVICES = ("gpu", "cpu")
"""Where Comp and Decomp may run (Dimension 2)."""


class Action(StrEnum):
    """The eight action tasks of Table 3, and the two ends of a path. `_COMP`: the task sends payloads."""

    START = "start"
    COMP = "comp"
    DECOMP = "decomp"
    COMM = "comm"
    COMM1 = "comm1"
    COMM2 = "comm2"
    COMM_COMP = "comm_comp"
    COMM1_COMP = "comm1_comp"
    COMM2_COMP = "comm2_comp"
    END = "end"


STEPS = {
    Action.COMM: "whole",
    Action.COMM_COMP: "whole",
    Action.COMM1: "first",
    Action.COMM1_COMP: "first",
    Action.COMM2: "second",
    Action.COMM2_COMP: "second",
}
"""The step of a scheme that each communication task is. An indivisible scheme has one step, the whole."""

PATTERNS = (
    (("whole", "inter"),),
    (("first", "inter"), ("second", "inter")),
    (("first", "intra"), ("whole", "inter"), ("second", "intra")),
    (("first", "intra"), ("first", "inter"), ("second", "inter"), ("second", "intra")),
)
"""Steps and their links: flat and hierarchical communication, each with an indivisible or a divisible scheme between
nodes; inside a node only a divisible one (Dimension 4). Flat communication knows one link, written as inter."""

UNCOMPRESSED = (Action.COMM, Action.COMM1, Action.COMM2)
"""Communication tasks that carry uncompressed gradients."""
COMPRESSED = (Action.COMM_COMP, Action.COMM1_COMP, Action.COMM2_COMP)
"""Communication tasks that carry payloads."""

WORDS = {
    action: tuple(
        routine.word for routine in ROUTINES.values() if step in (routine.payloads if action in COMPRESSED else routine.gradients)
    )
    for action, step in STEPS.items()
}
"""The collective routines of each communication task (Tables 2 and 3)."""

PAIRS = {routine.word: routine.second for routine in ROUTINES.values() if routine.second}
"""First step of a divisible scheme to its second."""

SCHEMES = (*WORDS[Action.COMM], *WORDS[Action.COMM_COMP], *(f"{first}+{second}" for first, second in PAIRS.items()))
"""Names of schemes: the two indivisible ones, then the pairs. The first words tell pairs of one second step apart."""

CONNECTIONS = {
    Action.START: (Action.COMM, Action.COMM1, Action.COMP),
    Action.COMP: COMPRESSED,
    Action.DECOMP: (Action.END, *UNCOMPRESSED, Action.COMP),
    Action.COMM: (Action.END, Action.COMM2, Action.COMP),
    Action.COMM1: (*UNCOMPRESSED, Action.COMP),
    Action.COMM2: (Action.END, Action.COMM2, Action.COMP),
    Action.COMM_COMP: (Action.COMM2_COMP, Action.DECOMP),
    Action.COMM1_COMP: (*COMPRESSED, Action.DECOMP),
    Action.COMM2_COMP: (Action.COMM2_COMP, Action.DECOMP),
}
"""The actions that may directly follow each action. The paper leaves the table out; decision 9 derives it from the counts."""


class OptionTask(NamedTuple):
    """One action of a path, and the word:where by which a plan names it."""

    action: Action
    name: str


class Place(NamedTuple):
    """A node of the tree: the state that decides which tasks may come next."""

    last: Action
    steps: tuple[tuple[str, str], ...]
    """Steps of the pattern still to come, as (step, link)."""
    opened: tuple[str, ...] = ()
    """Words of the first steps whose second is still to come, the innermost last."""

    @property
    def compressed(self) -> bool:
        """Whether a rank holds payloads here."""
        return self.last is Action.COMP or self.last in COMPRESSED


def roots() -> tuple[Place, ...]:
    """The roots: one for each pattern."""
    return tuple(Place(Action.START, pattern) for pattern in PATTERNS)


def branches(place: Place, devices: Sequence[str] = DEVICES) -> Iterator[tuple[OptionTask, Place]]:
    """Each task that the three rules allow next, and the place after it. A place without an end has empty `endings`."""
    for action in CONNECTIONS[place.last]:  # rule 1
        if action in (Action.COMP, Action.DECOMP):
            for device in devices:
                yield OptionTask(action, f"{action}:{device}"), place._replace(last=action)
        elif place.steps and STEPS.get(action) == place.steps[0][0]:  # rule 2
            for routine in WORDS[action]:
                opened = _opened_after(place, routine)
                if opened is not None:  # rule 3
                    yield OptionTask(action, f"{routine}:{place.steps[0][1]}"), Place(action, place.steps[1:], opened)


def _opened_after(place: Place, routine: str) -> tuple[str, ...] | None:
    """`opened` after this routine has done the step that is due; None if the routine does not pair."""
    step = place.steps[0][0]
    if step == "first":
        return (*place.opened, routine)
    if step == "second":
        return place.opened[:-1] if PAIRS[place.opened[-1]] == routine else None
    return place.opened


@cache
def endings(place: Place, devices: tuple[str, ...] = DEVICES) -> tuple[tuple[OptionTask, ...], ...]:
    """All paths from a place to an end: the sub-tree under the place. () is among them if the path may end at the place."""
    found: list[tuple[OptionTask, ...]] = []
    if not place.steps and Action.END in CONNECTIONS[place.last]:
        found.append(())
    for task, following in branches(place, devices):
        found += [(task, *ending) for ending in endings(following, devices)]
    return tuple(found)


def refusal(tasks: Sequence[str]) -> str:
    """The reason why these tasks are no path. The search follows all patterns at once until none is left."""
    places, before = roots(), "at the start"
    for index, name in enumerate(tasks):
        reached = tuple(following for task, following in _alive(places) if task.name == name)
        if not reached:
            return f"option[{index}] is {show(name)} {before}: {_reason(name, places)}. Possible there: {_names(places)}."
        places, before = reached, f"after {name}"
    return (
        f"option is {show(list(tasks))}: it ends before all ranks have the whole sum, uncompressed. Possible after that: "
        f"{_names(places)}."
    )


def _alive(places: Sequence[Place]) -> list[tuple[OptionTask, Place]]:
    """The branches at these places that lead to an end."""
    return [branch for place in places for branch in branches(place) if endings(branch[1])]


def _names(places: Sequence[Place]) -> str:
    return ", ".join(sorted({task.name for task, _ in _alive(places)})) or "nothing more"


def _reason(name: str, places: Sequence[Place]) -> str:
    """The reason why a task cannot follow at any of these places."""
    routine, _, where = name.partition(":")
    actions = [action for action, words in WORDS.items() if routine in words]
    if routine in (Action.COMP, Action.DECOMP):
        actions = [Action(routine)]
    known = (*CODEC_TASKS, *LINK_TASKS)
    if not actions:
        return f"the tree has no such task{near(routine, known)}"
    possible = DEVICES if routine in CODEC_TASKS else ("intra", "inter")
    if where not in possible:
        return f"{routine} runs on {' or '.join(possible)}"
    if places[0].compressed and set(actions) <= {*UNCOMPRESSED, Action.COMP}:
        return f"{routine} does not take payloads, so they are decoded first"
    if not places[0].compressed and set(actions) <= {*COMPRESSED, Action.DECOMP}:
        return f"{routine} takes payloads, and nothing is encoded there"
    if places[0].last is Action.COMP and actions == [Action.DECOMP]:
        return "what was just encoded would be decoded unsent"
    due = [place.steps[0] for place in places if place.steps]
    if not due:
        return "the exchange is complete before it"
    if ("second", where) in due and any(STEPS.get(action) == "second" for action in actions):
        first = places[0].opened[-1]
        return f"{first} pairs with {PAIRS[first]}"
    return f"due is the {' or the '.join(sorted({f'{step} step on {link}' for step, link in due}))}"
