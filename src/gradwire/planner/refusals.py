"""Why a sequence of tasks is no path through the tree."""

from collections.abc import Sequence

from gradwire.core.checks import near, show
from gradwire.core.plan import CODEC_TASKS, LINK_TASKS
from gradwire.planner.grammar import (
    COMPRESSED,
    DEVICES,
    PAIRS,
    STEPS,
    UNCOMPRESSED,
    WORDS,
    Action,
    OptionTask,
    Place,
    branches,
    endings,
    roots,
)


def refusal(tasks: Sequence[str]) -> str:
    """Why these tasks are no path: found by following all patterns at once until none is left."""
    places, before = roots(), "at the start"
    for index, name in enumerate(tasks):
        reached = tuple(following for task, following in _alive(places) if task.name == name)
        if not reached:
            return (
                f"option[{index}] is {show(name)} {before}: {_reason(name, places)}. Possible there: {_names(places)}."
            )
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
    """What is wrong with a task at all of these places, in words."""
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
