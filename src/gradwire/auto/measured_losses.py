"""The losses of compressors that `plan="auto"` knows, by the number of ranks.

The rows are held-out losses after 200 steps over those of exact sums, on two small transformers with AdamW: the mean over seeds
and the upper end of its 95 % interval. `python -m benchmarks accuracy` measured them from 2026-11-27 to 29. docs/measured.md has
each row's interval. WEIGHTED_3 and so on are named by their levels. Trainings of the CNN end several percent apart by chance, so
that they decide nothing. On 8 ranks four levels end 1.2 % above on the second job with one seed, and have no row there. On two
ranks three levels end 0.8 % above after 200 steps, but 1.7 % after 600 (docs/measured.md), and have no row either.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from gradwire.core import QSGD, ErrorFeedback, Spec


class LossRow(NamedTuple):
    """The loss of one job over that of exact sums, as a share of it."""

    mean: float
    upper: float


EIGHT_BITS: Spec = QSGD(bits=8)
FOUR_BITS: Spec = QSGD(bits=4)
WEIGHTED_3: Spec = ErrorFeedback(QSGD(bits=2, scale="ls"), weights=0.98, warm_up_steps=20)
WEIGHTED_4: Spec = ErrorFeedback(QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20)
WEIGHTED_8: Spec = ErrorFeedback(QSGD(bits=3, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20)

ROWS: Mapping[Spec, Mapping[int, Mapping[str, LossRow]]] = {
    EIGHT_BITS: {32: {"tied": LossRow(0.0003, 0.0009)}},
    FOUR_BITS: {
        2: {"transformer": LossRow(0.003, 0.0046), "tied": LossRow(0.0028, 0.0036)},
        4: {"transformer": LossRow(0.003, 0.0036), "tied": LossRow(0.0038, 0.0047)},
        8: {"transformer": LossRow(0.0044, 0.0049), "tied": LossRow(0.006, 0.0079)},
        16: {"transformer": LossRow(0.0028, 0.0053), "tied": LossRow(0.0095, 0.0149)},
        32: {"tied": LossRow(0.012, 0.0146)},
    },
    WEIGHTED_3: {
        4: {"transformer": LossRow(0.0058, 0.0078), "tied": LossRow(0.0133, 0.0182)},
    },
    WEIGHTED_4: {
        2: {"transformer": LossRow(0.0032, 0.0046), "tied": LossRow(0.0049, 0.0064)},
        4: {"transformer": LossRow(0.0031, 0.0038), "tied": LossRow(0.0057, 0.007)},
    },
    WEIGHTED_8: {
        8: {"transformer": LossRow(0.0025, 0.0052), "tied": LossRow(0.0046, 0.006)},
        16: {"transformer": LossRow(0.0014, 0.0017), "tied": LossRow(0.0078, 0.0115)},
    },
}


GROWTH = 1.6
"""How many times as much is lost on twice as many ranks: the most by which a row of 4 bits grew from one number to the next."""
COUNTS = sorted({count for rows in ROWS.values() for count in rows})
"""The numbers of ranks that have rows."""


def bound(spec: Spec, ranks: int) -> LossRow | None:
    """Return the worst row of a spec on this number of ranks: that of the next larger number of ranks with rows. None if there is
    no such number. Specs without feedback have the last row on more ranks, too, with the growth of `GROWTH`.

    >>> bound(FOUR_BITS, 3) == bound(FOUR_BITS, 4), bound(WEIGHTED_4, 8)
    (True, None)
    >>> bound(EIGHT_BITS, 32), bound(EIGHT_BITS, 128)
    (LossRow(mean=0.0003, upper=0.0009), LossRow(mean=0.00077, upper=0.0023))
    """
    counts = ROWS.get(spec, {})
    fitting = [count for count in counts if count >= ranks]
    if not fitting and (not counts or isinstance(spec, ErrorFeedback)):
        return None
    last = min(fitting, default=max(counts))
    grown = GROWTH ** math.ceil(math.log2(max(1.0, ranks / last)))
    rows = counts[last].values()
    return LossRow(*(round(grown * max(each), 5) for each in zip(*rows, strict=True)))


def allowed(spec: Spec, ranks: int, most: float) -> bool:
    """Return whether the rows of a spec show a loss of at most this share, and an interval that ends at most half as much above.

    >>> allowed(FOUR_BITS, 4, 0.01), allowed(WEIGHTED_3, 2, 0.01)
    (True, False)
    >>> allowed(EIGHT_BITS, 1024, 0.01), allowed(EIGHT_BITS, 1025, 0.01)
    (True, False)
    """
    row = bound(spec, ranks)
    return row is not None and row.mean <= most and row.upper <= 1.5 * most
