"""What a soak found, as JSON and in words."""

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from statistics import median
from typing import Any

import torch

from soak.endurance import Endurance
from soak.settings import HOOK, INTEGRATIONS, NOT_POSSIBLE, SCHEDULES, SPECS
from soak.stage import ALLOWANCE_S, TIMEOUT_S
from soak.trials import KINDS, LEFT_OUT, Trial

ALL = (*SCHEDULES, HOOK, *INTEGRATIONS)


def summarise(
    trials: Sequence[Trial],
    runs: Sequence[Endurance],
    left: list[str],
    skipped: list[str],
    seconds: float,
    options: Any,
) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "command": f"make soak (python -m soak --faults {options.faults} --steps {options.steps} --seed {options.seed} "
        f"--jobs {options.jobs})",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, torch {torch.__version__}",
        "group_timeout_s": TIMEOUT_S,
        "allowance_s": ALLOWANCE_S,
        "specs": {name: repr(spec) for name, spec in SPECS.items()},
        "faults": len(trials),
        "passed_faults": sum(trial.passed for trial in trials),
        "kinds": {kind: of_kind(found) for kind in KINDS if (found := [t for t in trials if t.kind == kind])},
        "pairs": counted(trials, KINDS, ALL, lambda trial: (trial.kind, trial.schedule)),
        "settings": counted(
            trials, sorted({t.setting for t in trials}), ALL, lambda trial: (trial.setting, trial.schedule)
        ),
        "left_out": {f"{kind}, {schedule}": why for (kind, schedule), why in LEFT_OUT.items()},
        "settings_left_out": {name: {"schedules": list(which), "why": why} for name, (which, why) in NOT_POSSIBLE.items()},
        "compared": sum(trial.compared for trial in trials),
        "not_comparable": Counter(trial.not_comparable for trial in trials if trial.not_comparable),
        "started_again": sum(trial.started_again for trial in trials),
        "endurance": [asdict(each) | {"passed": each.passed} for each in runs],
        "left_over": left,
        "not_possible_here": skipped,
        # what was printed in full is kept by its last line: tracebacks name the folders of a machine
        "failures": [asdict(t) | {"detail": t.detail.strip().splitlines()[-1]} for t in trials if not t.passed],
        "seconds": round(seconds),
        "passed": not left and all(t.passed for t in trials) and all(r.passed for r in runs),
    }  # fmt: skip


def of_kind(trials: Sequence[Trial]) -> dict[str, Any]:
    latencies = [trial.latency_s for trial in trials if trial.latency_s is not None]
    found: dict[str, Any] = {"trials": len(trials), "passed": sum(trial.passed for trial in trials)}
    if latencies:
        found["error_after_s"] = {"median": round(median(latencies), 3), "max": round(max(latencies), 3)}
    if any(trial.detail for trial in trials if trial.passed):
        found["ended"] = Counter(trial.detail for trial in trials if trial.passed)
    return found


def counted(
    trials: Sequence[Trial],
    rows: Iterable[str],
    columns: Sequence[str],
    place: Callable[[Trial], tuple[str, str]],
) -> dict[str, dict[str, list[int]]]:
    """By row and column: how many trials, and how many passed."""
    table: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        for column in columns:
            if found := [trial.passed for trial in trials if place(trial) == (row, column)]:
                table[row][column] = [len(found), sum(found)]
    return dict(table)


def told(summary: dict[str, Any]) -> str:
    columns = ALL
    lines = [f"{'':<18}" + "".join(f"{column:>13}" for column in columns)]
    for kind, row in summary["pairs"].items():
        cells = [f"{row[c][1]} of {row[c][0]}" if c in row else "-" for c in columns]
        lines.append(f"{kind:<18}" + "".join(f"{cell:>13}" for cell in cells))
    for kind, found in summary["kinds"].items():
        if late := found.get("error_after_s"):
            lines.append(f"{kind:<18}errors after {late['median']} s (median), {late['max']} s (last)")
        if "ended" in found:
            lines.append(f"{kind:<18}{dict(found['ended'])}")
    lines.append(f"resumed bit for bit: {summary['compared']}; not comparable: {dict(summary['not_comparable'])}")
    lines.append(f"started again, since ranks did not come to their first step in time: {summary['started_again']}")
    for each in summary["endurance"]:
        lines.append(
            f"{each['steps']} steps of auto on {each['ranks']} ranks: drift compared {each['drift_checks']} times, memory "
            f"{each['memory_growth_bytes'] / 1e6:+.2f} MB, {each['decisions']} decisions, {max(0, each['threads_left'])} threads "
            f"and {max(0, each['files_left'])} files left, {each['seconds']:.0f} s"
        )
    lines.append(f"left over: {', '.join(summary['left_over']) or 'nothing'}")
    if summary["not_possible_here"]:
        lines.append(f"not possible here: {', '.join(summary['not_possible_here'])}")
    lines.append(f"{summary['passed_faults']} of {summary['faults']} faults passed")
    lines.append(f"{'passed' if summary['passed'] else 'FAILED'} in {summary['seconds']} s")
    return "\n".join(lines)
