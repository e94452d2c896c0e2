"""Compares the choices of `accuracy="safe"` with plain synchronous SGD: specs under `backward`, and the delayed schedule.

Held-out loss and accuracy, transformer and CNN, paired by seed.

    python -m benchmarks convergence [--jobs transformer resnet] [--seeds 0 1 2 3 4] [--steps 300] [--only k=5]

Trained and evaluated as `benchmarks.paired` says. The table gives the mean over seeds of the difference to S-SGD (exact sums,
backward schedule) with its 95 % interval by Student's t. In the arm `skipped` corrections carry nothing: the test must see that.
What is measured goes to benchmarks/results/convergence.json at once, and is not measured again while it stands there (--again
does); the table is written into docs/schedules_measured.md.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gradwire as gw
from benchmarks import paired
from benchmarks.common import RESULTS, write_between
from benchmarks.paired import DESIGN, PLAIN, REFERENCE, Arm, Finals, differences, interval

__all__ = ["ARMS", "BEGIN", "END", "PAGE", "REFERENCE", "differences", "interval", "run", "table", "verdict"]

PATH = RESULTS / "convergence.json"
PAGE = Path(__file__).parent.parent / "docs" / "schedules_measured.md"
BEGIN, END = "<!-- convergence: made by `python -m benchmarks convergence` -->", "<!-- end of convergence -->"
SPEC = gw.ErrorFeedback(gw.QSGD(bits=4))


def delayed(expected: bool = False, skipped: int = 0, **fields: Any) -> Arm:
    """An arm of the delayed schedule, with a warm-up of 5 % of the steps. Corrections are staggered only if `fields` say so."""
    schedule = gw.Delayed(**({"warmup_steps": 15, "stagger": False} | fields))
    return Arm(gw.Uniform(SPEC, schedule=schedule), skipped, expected)


EIGHT_BITS = gw.QSGD(bits=8)
ARMS = {
    REFERENCE: PLAIN[REFERENCE],
    "k=2": delayed(True, k=2),
    "k=5": delayed(True, k=5),
    "k=5, skipped (broken on purpose)": delayed(skipped=5, k=5),
    "k=2, 8-bit corrections": delayed(True, k=2, correction=EIGHT_BITS),
    "k=5, 8-bit corrections": delayed(True, k=5, correction=EIGHT_BITS),
    "k=2, staggered": delayed(True, k=2, stagger=True),
    "k=5, staggered": delayed(True, k=5, stagger=True),
    "BIT-SGD (no local update)": delayed(k=None, local_update=False, warmup_steps=0),
    "never corrects (k=None)": delayed(k=None),
    "backward, 4 bits": Arm(gw.Uniform(gw.QSGD(bits=4)), expected=True),
    "backward, 2 bits with error feedback": Arm(gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)))),
    **{name: arm for name, arm in PLAIN.items() if name != REFERENCE},
    "OD-SGD (k=1)": delayed(k=1),
    "k=5, residual flushed": delayed(k=5, flush=True),
    "k=5, no warm-up": delayed(k=5, warmup_steps=0),
}
"""The most wanted first, for runs that are cut short."""


def run(arguments: list[str]) -> int:
    """Measure what is missing, write the table; 1 if an arm that should be near S-SGD is not, or the broken one is."""
    options = paired.parser_of("convergence", seeds=5).parse_args(arguments)
    chosen = paired.chosen(ARMS, options.only)
    train = partial(paired.on_ranks, "benchmarks.convergence")
    finals = paired.measure(PATH, options, chosen, train, DESIGN | {"spec": repr(SPEC)})
    lines = table(finals)
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return verdict(finals)


def table(finals: Finals) -> list[str]:
    """Return Markdown: a row for every job and arm, then the staggered arms next to those that correct everything at once."""
    staggered = paired.table(finals, ARMS, lambda arm: arm.removesuffix(", staggered"), "unstaggered")
    return [*paired.table(finals, ARMS), *(["", *staggered] if staggered else [])]


def verdict(finals: Finals) -> int:
    """1 if an interval that should lie within the bounds does not, or that of the broken arm does."""
    return paired.verdict(finals, ARMS)


if __name__ == "__main__":
    paired.train_on_rank(ARMS, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
