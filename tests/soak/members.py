"""Members of an elastic job that are killed, leave and join: `python -m soak.members --events 100 --steps 2000`.

Each plan trains with random events, and several times undisturbed with 4 members and as many samples. It passes if

- members that stay go on within the timeout plus 2 s after each event,
- all members have equal weights after each step that counts,
- members that end keep no descriptor and no thread,
- the held-out loss is at most 1 % above the mean of the undisturbed runs.

An event is a member that is killed, leaves, joins, stalls, or joins and is killed while all members meet. After the last one all
4 members train, and the learning rate falls to 0. So losses of runs with other samples and other first weights are nearly equal.

The lines that it prints also have the time of a step, and the pauses of the other members after each kind of event.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

from crowd import LEAST, START_S, Crowd, Member
from elastic_member import PLANS, TIMEOUT_S
from interpreters import Interpreters

from gradwire.testbed import exit_on_termination

MOST = 4
"""Members at a time."""
BATCH = 64
"""Samples of a member's step."""
SILENCE_S = 1.0
"""Of the lighthouse: the default of `gradwire lighthouse`."""
MOST_LOSS = 1.01
"""The loss, over the mean of undisturbed runs."""
FALL = 300
"""The steps in which the rate falls to 0."""
MEETS = "joins and is killed while all meet"
KINDS = ("killed", "leaves", "joins", "stalls", MEETS)
ENDS = (None, 0, -signal.SIGKILL)
"""Exit codes of members that live, leave, or were killed."""


def come_and_go(
    interpreters: Interpreters, plan: str, events: int, seed: int = 0, size: int = MOST, steps: int = 0, fall: int = 0
) -> dict[str, Any]:
    """Let so many random events happen to a job of at least so many steps, and check what must hold. fall: the steps after the
    events in which the rate falls. Returns what was seen."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gradwire-members-") as folder:
        crowd = Crowd(interpreters, plan, folder, BATCH, SILENCE_S)
        try:
            crowd.await_steps([crowd.join() for _ in range(size)], 3, START_S)
            pauses: dict[str, list[float]] = {}
            for left in range(events, 0, -1):
                living = crowd.living
                kind = chance.choice(KINDS)
                kind = "joins" if len(living) <= LEAST else "killed" if len(living) >= size and kind == "joins" else kind
                one, began_s = chance.choice(living), time.monotonic()
                if kind == "joins":
                    crowd.await_steps([crowd.join()], 2, START_S)
                elif kind == MEETS:
                    crowd.join_and_die()
                elif kind == "stalls":
                    one.process.send_signal(signal.SIGSTOP)
                    time.sleep(chance.uniform(0.2, 3.0))
                    one.process.send_signal(signal.SIGCONT)
                else:
                    crowd.go(one, signal.SIGKILL if kind == "killed" else signal.SIGTERM)
                most = max(8, 2 * (steps - crowd.last_step) // left)
                crowd.await_steps(crowd.living, chance.randint(1, most), TIMEOUT_S + 2)
                others = [each for each in living if each is not one or kind in ("joins", MEETS)]
                pauses.setdefault(kind, []).append(max(longest_gap(each, began_s) for each in others))
                time.sleep(chance.random() * 0.1)
            while fall and len(crowd.living) < size:
                crowd.await_steps([crowd.join()], 2, START_S)
            ending = crowd.finish(steps, fall)
            return {
                "plan": plan,
                "events": {kind: len(each) for kind, each in sorted(pauses.items())},
                "median step, s": round(statistics.median(times_of_steps(crowd)), 3),
                "median and longest pause, s": {
                    kind: [round(statistics.median(each), 2), round(max(each), 2)] for kind, each in sorted(pauses.items())
                },
                **seen_of(crowd, ending),
            }
        finally:
            crowd.close()


def undisturbed(
    interpreters: Interpreters, plan: str, samples: int, seed: int, size: int = MOST, fall: int = FALL
) -> dict[str, Any]:
    """Train on so many samples before the rate falls, with no event. seed: of the first member. Returns what was seen."""
    with tempfile.TemporaryDirectory(prefix="gradwire-members-") as folder:
        crowd = Crowd(interpreters, plan, folder, BATCH, SILENCE_S, seed=seed)
        try:
            crowd.await_steps([crowd.join() for _ in range(size)], 3, START_S)
            return seen_of(crowd, crowd.finish(round(samples / BATCH / size), fall))
        finally:
            crowd.close()


def seen_of(crowd: Crowd, ending: list[Member]) -> dict[str, Any]:
    """What can be seen of a job that has ended with these members."""
    last = {(each.steps[-1]["step"], each.steps[-1]["weights"]) for each in ending}
    # a member that leaves while it waits for others may be killed at the end of the run
    ended = [each for each in crowd.all if each.process.returncode == 0]
    return {
        "steps": max(step for step, _ in last),
        "samples": crowd.samples_before_the_fall(),
        "ended": [each.process.returncode for each in ending],
        "crashed": [each.process.returncode for each in crowd.all if each.process.returncode not in ENDS],
        "last": len(last),
        "unequal": crowd.unequal_steps(),
        "left": [each.end for each in ended if each.end is None or each.end["before"] != each.end["after"]],
        "loss": sum(each.end["loss"] for each in ending if each.end) / len(ending),
        "logs": crowd.logs() if any(each.process.returncode not in ENDS for each in crowd.all) else "",
    }


def times_of_steps(crowd: Crowd) -> list[float]:
    """The times between two steps of a member, of all members."""
    return [after["at_s"] - before["at_s"] for each in crowd.all for before, after in pairwise(each.steps)]


def longest_gap(member: Member, since_s: float) -> float:
    """The longest time between two steps of a member, from a moment on."""
    times = [since_s, *(said["at_s"] for said in member.steps if said["at_s"] >= since_s)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def passed(seen: dict[str, Any]) -> bool:
    return (
        not any(seen["ended"])
        and not seen["crashed"]
        and seen["last"] == 1
        and not seen["unequal"]
        and not seen["left"]
        and seen.get("loss over undisturbed", 1.0) <= MOST_LOSS
    )


def compared(loss: float, others: list[float]) -> dict[str, Any]:
    """The loss over the mean of undisturbed runs, and their spread: the largest difference over the mean.

    >>> compared(1.03, [0.99, 1.01])
    {'loss over undisturbed': 1.03, 'spread of undisturbed': 0.02, 'undisturbed losses': [0.99, 1.01]}
    """
    mean = statistics.fmean(others)
    return {
        "loss over undisturbed": round(loss / mean, 4),
        "spread of undisturbed": round((max(others) - min(others)) / mean, 4),
        "undisturbed losses": [round(each, 4) for each in others],
    }


def trial(interpreters: Interpreters, plan: str, events: int, steps: int, seed: int, baselines: int) -> dict[str, Any]:
    """All runs of a plan."""
    seen = come_and_go(interpreters, plan, events, seed, steps=steps, fall=FALL)
    alone = [undisturbed(interpreters, plan, seen["samples"], 1000 * (number + 1)) for number in range(baselines)]
    if not alone:
        return seen
    return {**seen, **compared(seen["loss"], [each["loss"] for each in alone]), "undisturbed passed": all(map(passed, alone))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.members")
    parser.add_argument("--events", type=int, default=100, help="of each plan")
    parser.add_argument("--steps", type=int, default=2000, help="of each plan, at least")
    parser.add_argument("--plans", default="exact,4 bits,2 bits with feedback,local", help=f"of {', '.join(PLANS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baselines", type=int, default=3, help="undisturbed runs of each plan")
    options = parser.parse_args()
    interpreters, good = Interpreters(), True
    try:
        for plan in options.plans.split(","):
            began = time.monotonic()
            try:
                seen = trial(interpreters, plan, options.events, options.steps, options.seed, options.baselines)
                well = passed(seen) and seen.get("undisturbed passed", True)
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                seen, well = {"plan": plan, "hung": str(error)}, False
            good &= well
            took = timedelta(seconds=round(time.monotonic() - began))
            print(f"{'passed' if well else 'FAILED'} in {took}: {json.dumps(seen)}", flush=True)
    finally:
        interpreters.close()
    return 0 if good else 1


if __name__ == "__main__":
    with exit_on_termination():
        sys.exit(main())
