"""The losses of local steps that `plan="auto"` knows, and the steps that make up for them.

The rows are held-out losses on the bench's transformer, on two ranks after 300 steps, against synchronous SGD at equal samples.
`python -m benchmarks local --equal` measured them on 2026-11-26 on an AMD EPYC. docs/local_steps.md has their intervals. On
more ranks losses end higher, by `DOUBLING`. All rows are of second moments of each rank's own gradients, so auto's schedules have
these.
"""

import math
from collections.abc import Mapping

import msgspec

from gradwire.auto.accuracy import SPARSELOCO
from gradwire.core import QSGD, ErrorFeedback, Identity, LocalSteps, Spec

EVERY = (5, 10, 30, 100)
"""Numbers of steps between exchanges, the columns of the rows."""
_STREAMED = LocalSteps(every=5, fragments=4, delay=1, mixing=0.5, second_moment="own")
_LONGEST_DELAY = 5
_IN_ONE_PIECE: Mapping[Spec, tuple[float, ...]] = {
    QSGD(bits=4): (-0.0009, 0.0060, 0.0183, 0.0306),
    ErrorFeedback(QSGD(bits=2)): (0.0010, 0.0075, 0.0263, 0.0592),
    SPARSELOCO: (0.0171, 0.0273, 0.0540, 0.1339),
    Identity(): (-0.0001, 0.0050, 0.0187, 0.0310),
}
_IN_FRAGMENTS: Mapping[Spec, tuple[float, ...]] = {QSGD(bits=4): (0.0047, 0.0112, 0.0228, 0.0394)}
DOUBLING = 0.0267
"""How much higher the loss ends on twice as many ranks: by 4 bits in one piece every 5 steps, from 2 to 4 ranks, with three
seeds. Every 10 steps it is 0.036, every 30 0.050. The small transformer of `python -m benchmarks outer` ends 0.014 to 0.018
higher, whatever the number of steps."""
STEEPNESS = 0.0668
"""Where DDP's loss falls as steps ** -p, the p of that transformer between 150 and 300 steps (`python -m benchmarks losses`)."""
AT_CONSTANT_RATE, SPARSE_AT_CONSTANT_RATE = 1.30, 0.85
"""How many times as many steps races at a constant rate took as follows from p and the rows, which end at a rate of 0: means of
weights, and SparseLoCo. Geometric means on two ranks, every 5 and 30 steps, for what 250, 500 and 1,000 steps of synchronous SGD
learn (`python -m benchmarks local`). The single numbers are 0.80 to 1.29 times as large."""


def averaged(every: int) -> LocalSteps:
    """Return the schedule that averages all weights after so many steps.

    >>> averaged(30)
    LocalSteps(second_moment='own')
    """
    return LocalSteps(every=every, second_moment="own")


def streamed(every: int) -> LocalSteps:
    """Return the schedule that averages the weights in fragments, while some of the steps run.

    >>> streamed(30)
    LocalSteps(fragments=4, delay=5, mixing=0.5, second_moment='own')
    """
    delay = min(_LONGEST_DELAY, every // _STREAMED.fragments)
    return msgspec.structs.replace(_STREAMED, every=every, delay=delay)


def loss_above(schedule: LocalSteps, spec: Spec, ranks: int = 2) -> float | None:
    """Return how far the loss ends above synchronous SGD's at equal samples, as a share of it. None if that was not measured on
    two ranks.

    >>> loss_above(averaged(30), QSGD(bits=4)), loss_above(LocalSteps.diloco(30), QSGD(bits=4))
    (0.0183, None)
    >>> loss_above(averaged(5), QSGD(bits=4), ranks=4), loss_above(averaged(5), QSGD(bits=4), ranks=8)
    (0.0258, 0.0525)
    """
    more = DOUBLING * math.ceil(math.log2(max(2, ranks) / 2))
    for way, rows in ((averaged, _IN_ONE_PIECE), (streamed, _IN_FRAGMENTS)):
        if schedule.every in EVERY and schedule == way(schedule.every) and spec in rows:
            return round(rows[spec][EVERY.index(schedule.every)] + more, 4)
    return None


def steps_to_make_up(above: float) -> float:
    """Return about how many steps bring the progress of one step of plain DDP, where the loss ends this share above.

    >>> round(steps_to_make_up(0.0183), 2), steps_to_make_up(-0.001)
    (1.31, 1.0)
    """
    return float((1 + max(0.0, above)) ** (1 / STEEPNESS))


def at_constant_rate(steps: float, spec: Spec) -> float:
    """Return about how many steps with this spec it is at a constant learning rate, from `steps_to_make_up`.

    >>> round(at_constant_rate(1.31, QSGD(bits=4)), 2), at_constant_rate(1.0, SPARSELOCO)
    (1.7, 1.0)
    """
    return max(1.0, steps * (SPARSE_AT_CONSTANT_RATE if spec == SPARSELOCO else AT_CONSTANT_RATE))
