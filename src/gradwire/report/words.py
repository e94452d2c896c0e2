"""Describes a run in sentences and numbers."""

import statistics
from collections.abc import Sequence

from gradwire.record import Run
from gradwire.report.html import milliseconds, short, size

FINAL_STEPS = 10


def step_us(run: Run) -> float:
    """Return the median step without the warm-up, in microseconds."""
    return statistics.median(_lengths(run)) if run.steps else 0.0


def spread(run: Run) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of the steps, in microseconds."""
    lengths = sorted(_lengths(run))
    return lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]


def _lengths(run: Run) -> list[float]:
    first = run.steps[0].step + run.warmup_steps
    counted = [step for step in run.steps if step.step >= first]
    return [step.step_us for step in counted or run.steps]


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean of the last FINAL_STEPS losses."""
    return statistics.fmean(losses[-FINAL_STEPS:])


def summary(run: Run) -> str:
    """Return the first line of the page and of the command."""
    if not run.steps:
        return "No step was recorded: the loop ended before its first step."
    sends = f"sends {size(run.wire_bytes)} per step and rank, for gradients of {size(run.gradient_bytes)}"
    if not run.rivals:
        low, high = spread(run)
        return (
            f"A step takes {milliseconds(step_us(run))} (median; most are between {milliseconds(low)} and "
            f"{milliseconds(high)}) and {sends}."
        )
    rival = run.rivals[0]
    speed = rival.speedup
    interval = f"95 % interval {speed.low:.2f} to {speed.high:.2f}"
    if speed.low > 1:
        speed_text = f"{speed.ratio:.2f} times as fast as {rival.name} ({interval})"
    elif speed.high < 1:
        speed_text = f"slower than {rival.name}, at {speed.ratio:.2f} times its speed ({interval})"
    else:
        speed_text = f"not measurably faster or slower than {rival.name} ({speed.ratio:.2f} times, {interval})"
    bytes_text = f"; {share(run.wire_bytes, rival.sent_bytes)} than {rival.name}" if rival.sent_bytes else ""
    return (
        f"gradwire is {speed_text}: {milliseconds(step_us(run))} a step instead of {milliseconds(rival.step_us)}. "
        f"It {sends}{bytes_text}."
    )


def share(nbytes: float, others: float) -> str:
    """Compare a number of bytes with another one, in words.

    >>> share(10, 80), share(10, 5), share(10, 10)
    ('8 times fewer bytes', '2 times more bytes', 'no fewer bytes')
    """
    if not nbytes or not others or abs(nbytes - others) < 0.005 * others:
        return "no fewer bytes"
    fewer, more = f"{short(others / nbytes)} times fewer bytes", f"{short(nbytes / others)} times more bytes"
    return fewer if nbytes < others else more


def decided(run: Run) -> list[str]:
    """Describe the plan: a line for each spec and scheme, the most bytes first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, bucket in enumerate(run.plan.buckets):
        specs = sorted({repr(spec) for spec in bucket.specs if spec.encodes})
        way = " then ".join(dict.fromkeys(bucket.link_tasks))
        groups.setdefault((" and ".join(specs) or "uncompressed", way), []).append(index)
    rows = []
    for (spec, way), indices in groups.items():
        tensors = _count(sum(len(run.plan.buckets[index].tensors) for index in indices), "tensor")
        nbytes = sum(run.buckets[index].gradient_bytes for index in indices)
        rows.append((nbytes, f"{tensors} of {size(nbytes)} in {_count(len(indices), 'bucket')}: {spec}, by {way}."))
    return [line for _, line in sorted(rows, key=lambda row: -row[0])]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
