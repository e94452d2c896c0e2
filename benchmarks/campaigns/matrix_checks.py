"""Checks the matrix: the measured values against the wanted ones. Pure: no torch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.campaigns.matrix_cells import AGGRESSIVE, POWERSGD, SAFE, MatrixCell
from benchmarks.campaigns.matrix_first import FIRST_STEP, JUDGED_STEPS, MOST_BEHIND, MOST_OVER_BEST, missed

__all__ = ["Check", "checks", "verdict_lines"]

FEWEST_PAIRS = 7
REACHED, MEDIAN, PLAIN = 0.98, 0.95, 0.99
SPEEDUPS = {0.1: 6.3, 0.5: 2.9, 1.0: 2.0}
"""Wanted speedups of the transformer on two nodes over DDP, by Gb/s."""
OF_ATTAINABLE = 1.15
SLOW_GBPS = (0.1, 0.5)


class Check(NamedTuple):
    """One thing that is wanted."""

    wanted: str
    measured: str
    holds: bool | None
    """Whether the check holds; None if nothing was measured that could decide it."""


def checks(cells: Sequence[MatrixCell]) -> list[Check]:
    """All of them, over the cells that there are."""
    return [*_never_slower(cells), *_transformer(cells), _first(cells), _sooner(cells), *_controls(cells)]


def verdict_lines(cells: Sequence[MatrixCell]) -> Iterator[str]:
    """One line for each check."""
    for check in checks(cells):
        word = {True: "yes", False: "NO ", None: "n/a"}[check.holds]
        yield f"{word}  {check.wanted}: {check.measured}"


def _never_slower(cells: Sequence[MatrixCell]) -> Iterator[Check]:
    """Check auto against the better DDP in every cell."""
    pairs = [(float(cell.pairs), cell.name) for cell in cells]
    yield _least(f"at least {FEWEST_PAIRS} pairs of blocks in every cell", pairs, FEWEST_PAIRS, "{:.0f}")
    against = [cell.speedup(SAFE, cell.better_ddp) for cell in cells]
    highs = [(interval.high, cell.name) for interval, cell in zip(against, cells, strict=True)]
    wanted = f'the 95 % interval of auto "safe" over the better DDP reaches {REACHED} in every cell'
    yield _least(wanted, highs, REACHED, "{:.3f}")
    medians = [(interval.ratio, cell.name) for interval, cell in zip(against, cells, strict=True)]
    yield _least(f"the median is at least {MEDIAN} in every cell", medians, MEDIAN, "{:.3f}")
    plain = [ratio for (ratio, _), cell in zip(medians, cells, strict=True) if cell.chose_plain(SAFE)]
    mean = float(np.exp(np.mean(np.log(plain)))) if plain else None
    yield Check(
        f"the geometric mean over cells where auto chose plain all-reduce is at least {PLAIN}",
        "it chose plain all-reduce nowhere" if mean is None else f"{mean:.3f} over {len(plain)} cells",
        None if mean is None else mean >= PLAIN,
    )


def _transformer(cells: Sequence[MatrixCell]) -> Iterator[Check]:
    """Check the speed of auto on slow networks."""
    found = {cell.gbps: cell for cell in cells if (cell.job, cell.run.nodes) == ("transformer", 2)}
    for gbps, least in SPEEDUPS.items():
        cell = found.get(gbps)
        wanted = f'transformer, 2 nodes, {1000 * gbps:.0f} Mb/s: auto "safe" at least {least} times as fast as DDP'
        if cell is None:
            yield Check(wanted, "not measured", None)
            continue
        speedup = cell.speedup(SAFE)
        times = f"{speedup.ratio:.2f} ({speedup.low:.2f} to {speedup.high:.2f})"
        yield Check(wanted, times, speedup.ratio >= least)
        part = cell.of_attainable(SAFE)
        wanted = f"there within {OF_ATTAINABLE} of attainable"
        yield Check(wanted, "unknown" if part is None else f"{part:.3f}", None if part is None else part <= OF_ATTAINABLE)


def _first(cells: Sequence[MatrixCell]) -> Check:
    """Auto from its first step."""
    wanted = (
        f"auto decides in time, is at most {MOST_BEHIND} behind the better DDP from step {FIRST_STEP} to {JUDGED_STEPS}, and its "
        f"choice takes at most {MOST_OVER_BEST} times as long as the best"
    )
    if not cells:
        return Check(wanted, "not measured", None)
    problems = list(missed({cell.name: cell.first_steps for cell in cells}))
    return Check(wanted, "; ".join(problems) or f"in all {len(cells)} cells", not problems)


def _sooner(cells: Sequence[MatrixCell]) -> Check:
    """Check auto's most lossy class against torch's PowerSGD hook."""
    slow = [cell for cell in cells if cell.gbps in SLOW_GBPS]
    wanted = "auto \"aggressive\" reaches DDP's loss sooner than torch's PowerSGD hook in every cell at 100 and 500 Mb/s"
    if not slow:
        return Check(wanted, "not measured", None)
    later = []
    for cell in slow:
        ours, theirs = cell.reached(AGGRESSIVE), cell.reached(POWERSGD)
        if ours.step is None or ours.seconds >= theirs.seconds:
            later.append(f"{cell.name} ({_when(ours.step, ours.seconds)} against {_when(theirs.step, theirs.seconds)})")
    told = f"in {len(slow) - len(later)} of {len(slow)} cells"
    return Check(wanted, told + ("; not in " + "; ".join(later) if later else ""), not later)


def _controls(cells: Sequence[MatrixCell]) -> Iterator[Check]:
    """Report the controls, which show how far the bench can be trusted. They have no wanted value."""
    if cells:
        ratios = [cell.speedup("ddp-again").ratio for cell in cells]
        yield Check("control: DDP over DDP again, the same method twice", f"{min(ratios):.3f} to {max(ratios):.3f}", None)
        apart = max(cell.apart for cell in cells)
        yield Check(
            "control: losses of what should learn as DDP does, apart from DDP's without a limit by at most",
            f"{apart:.2%} of the first step's loss",
            None,
        )


def _least(wanted: str, found: Sequence[tuple[float, str]], least: float, shown: str) -> Check:
    """Check that all values are large enough. found: values with their cells' names. The check reports the lowest value
    and the number of values that are too low."""
    if not found:
        return Check(wanted, "not measured", None)
    lowest, name = min(found)
    enough = sum(value >= least for value, _ in found)
    told = f"in {enough} of {len(found)} cells; lowest {shown.format(lowest)} ({name})"
    return Check(wanted, told, enough == len(found))


def _when(step: int | None, seconds: float) -> str:
    return f"{seconds:.0f} s" if step is not None else f"not in {seconds:.0f} s"
