"""Adds the bench's times of all methods to the recorded run of each gradwire method."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from msgspec.structs import replace

from gradwire.bench.results import Cell
from gradwire.bench.statistics import median_ratio, step_times
from gradwire.core import Made
from gradwire.record import Rival, Run

NAMES = {"ddp": "plain DDP", "ddp-2mb": "DDP, 2 MB buckets", "ddp-fp16": "DDP, fp16 hook", "ddp-powersgd": "DDP, PowerSGD hook"}
FEWEST_STEPS = 4
"""Fewest steps of two methods that are compared."""
_LONGEST_NAME = 100


def method_folder(group: Path, method: str) -> Path:
    """Return the folder of a method's recorded run, inside the folder of its cell group. Where the name would be long, or may be
    that of another method too, it ends with a hash.

    >>> method_folder(Path("runs"), "gradwire:ErrorFeedback(TopK(0.01))").name
    'gradwire-ErrorFeedback-TopK-0.01'
    >>> method_folder(Path("runs"), "gradwire:plans/a.json").name
    'gradwire-plans-a.json-daa70122'
    """
    name = re.sub(r"[^A-Za-z0-9._=]+", "-", method).strip("-.")
    if len(name) > _LONGEST_NAME or not re.fullmatch(r"[A-Za-z0-9._=:(), @-]*", method):
        name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(method.encode()).hexdigest()[:8]}"
    return group / name


def complete_runs(group: Path, cells: Sequence[Cell], warmup_steps: int, turn_steps: int, made: Made) -> None:
    """Complete the recorded runs of a cell group. made: the bench's host, date and command, which the ranks do not know."""
    good = {cell.method: cell for cell in cells if cell.failure is None}
    for name, own in good.items():
        folder = method_folder(group, name)
        if name.startswith("gradwire") and (folder / "run.json").exists():
            run = replace(Run.read(folder), made=made)
            with_rivals(run, own, good, warmup_steps, turn_steps).save(folder / "run.json")


def with_rivals(run: Run, own: Cell, all_methods: Mapping[str, Cell], warmup_steps: int, turn_steps: int) -> Run:
    """Return the run with the bench's times and losses (means over ranks), and with torch's methods as rivals, DDP first."""
    ends = list(accumulate(us / 1e6 for us in own.step_us))
    steps = tuple(
        replace(each, step_us=sum(own.step_us[begin:end]), end_s=ends[end - 1], loss=own.loss[end - 1])
        for each, at, local in zip(run.steps, run.optimizer_steps, run.local_steps, strict=True)
        for begin, end in [(round(at - local) + 1, round(at) + 1)]
        if end <= len(ends)
    )
    first = _first_counted(own, warmup_steps)
    counted = own.step_us[first:]
    times_of = {name: each.step_us[_first_counted(each, warmup_steps) :] for name, each in all_methods.items()}
    rivals = tuple(
        _rival(name, all_methods[method], times_of[method], counted, turn_steps)
        for method, name in NAMES.items()
        if len(counted) >= FEWEST_STEPS and times_of.get(method)
    )
    return replace(run, steps=steps, rivals=rivals, warmup_steps=first)


def _first_counted(cell: Cell, warmup_steps: int) -> int:
    return warmup_steps if cell.counted == (0, 0) else cell.counted[0]


def _rival(name: str, theirs: Cell, times: Sequence[float], counted: Sequence[float], turn_steps: int) -> Rival:
    # A/A: the method's odd turns over its even turns
    odd, even = ([us for at, us in enumerate(times) if at // turn_steps % 2 == half] for half in (1, 0))
    return Rival(
        name=name,
        step_us=step_times(times).median_us,
        sent_bytes=theirs.planned_bytes,
        speedup=median_ratio(times, counted),
        again=median_ratio(odd, even) if min(len(odd), len(even)) >= FEWEST_STEPS else None,
        end_s=tuple(accumulate(us / 1e6 for us in theirs.step_us)),
        loss=tuple(theirs.loss),
    )
