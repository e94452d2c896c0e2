"""Compares local steps at equal samples with synchronous SGD: held-out loss, for 5 to 100 steps between exchanges,
paired by seed.

    python -m benchmarks local --equal [--jobs transformer] [--ranks 2] [--seeds 0 1 2] [--steps 300] [--only WORD ...] [--again]

Trained as `benchmarks.paired` says, and evaluated once, at the end: then all ways have just exchanged. What is measured goes to
benchmarks/results/local-equal.json at once (of 4 ranks local-equal-4.json), and is not measured again while it stands there
(--again does). `python -m benchmarks page` writes the tables into docs/local_steps.md.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import gradwire as gw
from benchmarks import paired
from benchmarks.common import RESULTS
from benchmarks.markdown import table
from benchmarks.paired import DESIGN, PLAIN, REFERENCE, Arm, Finals, differences, interval
from gradwire.auto.accuracy import SPARSELOCO
from gradwire.auto.local_losses import EVERY, averaged, streamed
from gradwire.core.schedules import Schedule

LOOKS = 1
FOUR, TWO = gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))
NEAR = gw.Nesterov(radius=1.0)


def _mean(way: Callable[[int], gw.LocalSteps]) -> Callable[[int], gw.LocalSteps]:
    """The same, with the second moments of the mean gradient."""
    return lambda every: msgspec.structs.replace(way(every), second_moment="mean")


WAYS: Mapping[str, tuple[gw.Spec, Callable[[int], Schedule]]] = {
    "4 bits": (FOUR, gw.LocalSteps),
    "nothing encoded": (gw.Identity(), gw.LocalSteps),
    "SparseLoCo's spec": (SPARSELOCO, gw.LocalSteps),
    "4 bits, streaming": (FOUR, _mean(streamed)),
    "2 bits with feedback": (TWO, gw.LocalSteps),
    "4 bits, own": (FOUR, averaged),
    "nothing encoded, own": (gw.Identity(), averaged),
    "SparseLoCo, own": (SPARSELOCO, gw.LocalSteps.sparseloco),
    "4 bits, streaming, own": (FOUR, streamed),
    "2 bits with feedback, own": (TWO, averaged),
    "4 bits, near the mean, own": (FOUR, lambda every: gw.LocalSteps(every, NEAR, second_moment="own")),
    "4 bits, outer momentum, own": (FOUR, gw.LocalSteps.diloco),
}
"""The most wanted first, for runs that are cut short. "own": with Adam's second moments of each rank's own gradients, and not of
the mean gradient."""


def path_of(ranks: int) -> Path:
    """The file of the results on so many ranks."""
    return RESULTS / ("local-equal.json" if ranks == 2 else f"local-equal-{ranks}.json")


def arm_of(way: str, every: int) -> str:
    """Its name in the results."""
    return f"{way}, every {every}"


ARMS = {REFERENCE: PLAIN[REFERENCE]} | {
    arm_of(way, every): Arm(gw.Uniform(spec, schedule=schedule(every)))
    for way, (spec, schedule) in WAYS.items()
    for every in EVERY
}


def run(arguments: list[str]) -> int:
    """Measure what is missing, print the table."""
    parser = paired.parser_of("local --equal", seeds=3)
    parser.set_defaults(jobs=["transformer"])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    if uneven := [every for every in EVERY if options.steps % every]:
        parser.error(f"--steps {options.steps} must be a multiple of {uneven[0]}: all ways are to end with an exchange")
    chosen = paired.chosen(ARMS, options.only)
    train = partial(paired.on_ranks, "benchmarks.local_equal", world=options.ranks)
    about = DESIGN | {"looks": LOOKS, "fused": True, "ranks": options.ranks}
    finals = paired.measure(path_of(options.ranks), options, chosen, train, about, together=2)
    print(equal_table({"finals": finals, "steps": options.steps, "ranks": options.ranks}))
    return 0


def equal_table(result: Mapping[str, Any]) -> str:
    """Return the table of the results: a row for each way, a column for each number of steps between exchanges."""
    finals: Finals = result.get("finals", {})
    if not finals:
        return "Not measured yet.\n"
    rows, seeds = [], set()
    for job, found in finals.items():
        seeds.update(found.get(REFERENCE, {}))
        rows += [
            (f"{job}, {way}", *(_cell(found, arm_of(way, every)) for every in EVERY))
            for way in WAYS
            if any(arm_of(way, every) in found for every in EVERY)
        ]
    head = ("held-out loss against S-SGD", *(f"every {every} steps" for every in EVERY))
    about = (
        f"{result['ranks']} ranks on loopback, {result['steps']} steps each, {len(seeds)} seeds: the mean of the differences "
        "paired by seed, with its 95 % interval by Student's t. The learning rate falls to 0 in the last half. Global weights "
        "are the mean of local ones, but for the arms with outer momentum and near the mean (`gw.Nesterov(radius=1.0)`). A dash "
        "was not measured."
    )
    return "\n".join([about, "", *table(head, rows, left=1)]) + "\n"


def _cell(found: dict[str, dict[str, paired.Found]], arm: str) -> str:
    if not (values := differences(found, arm, "loss") if arm in found else []):
        return "-"
    mean, width = interval(values)
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:+.1%} ± {width:.1%}" if len(values) > 1 else f"{mean:+.1%}"


if __name__ == "__main__":
    paired.train_on_rank(ARMS, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]), looks=LOOKS, fused=True)
