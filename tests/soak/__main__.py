"""`make soak`: 200 kills and 200 other faults, and 10,000 steps; the summary goes to benchmarks/results/soak.json."""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradwire.core.files import write_whole
from soak import links
from soak.endurance import Endurance, endure
from soak.training import PLANS
from soak.trials import ALLOWANCE_S, KINDS, TIMEOUT_S, Trial, run

SHARES = {
    "stopped": 40, "paused": 30, "restarted": 30, "odd one": 25, "raised": 20, "uneven": 15, "corrupted": 20,
    "disk full": 8, "link lost": 5, "link flaps": 4, "torchrun restarts": 3,
}  # fmt: skip
"""How many of 200 trials are of each kind."""
LONG_RUNS = (("qsgd2-ef", 2), ("qsgd4-large", 3))
"""Plan and ranks."""
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "soak.json"


def main(arguments: list[str]) -> int:
    """Run all that is asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m soak")
    parser.add_argument("--kills", type=int, default=200, help="ranks killed by SIGKILL")
    parser.add_argument("--trials", type=int, default=200, help="faults of all other kinds")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the long runs; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count on")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the summary goes")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of every connection that a dead rank breaks
    began = time.monotonic()
    kinds = ["killed"] * options.kills + chosen(options.trials)
    skipped = [] if links.possible() else ["link lost", "link flaps", "torchrun restarts"]
    with ThreadPoolExecutor(options.jobs) as pool:
        work = [pool.submit(run, k, options.seed + i) for i, k in enumerate(kinds) if k not in skipped]
        trials: list[Trial] = []
        for done in work:
            trials.append(trial := done.result())
            if not trial.passed:
                print(f"FAILED {trial.kind}, seed {trial.seed}: {trial.detail}", flush=True)
            if len(trials) % 50 == 0:
                print(f"{len(trials)} of {len(work)} trials after {time.monotonic() - began:.0f} s", flush=True)
    runs: list[Endurance] = []
    for longer in [None, *LONG_RUNS] if options.steps else [None]:
        if longer is not None:
            runs.append(endure(*longer, options.steps))
        left = [str(process) for process in multiprocessing.active_children()] + [
            str(n) for n in links.namespaces_left()
        ]
        summary = summarise(trials, runs, left, skipped, time.monotonic() - began, options)
        write_whole(options.json, json.dumps(summary, indent=1) + "\n")
    print(told(summary))
    return 0 if summary["passed"] else 1


def chosen(trials: int) -> list[str]:
    """The kinds of that many trials: each once, then by shares."""
    rest = [((number + 0.5) / share, kind) for kind, share in SHARES.items() for number in range(1, trials)]
    return [*SHARES, *(kind for _, kind in sorted(rest))][:trials]


def summarise(
    trials: list[Trial], runs: list[Endurance], left: list[str], skipped: list[str], seconds: float, options: Any
) -> dict[str, Any]:
    by_kind: dict[str, Any] = {}
    for kind in KINDS:
        of_kind = [trial for trial in trials if trial.kind == kind]
        if not of_kind:
            continue
        latencies = [trial.latency_s for trial in of_kind if trial.latency_s is not None]
        by_kind[kind] = {
            "trials": len(of_kind),
            "passed": sum(trial.passed for trial in of_kind),
            **(
                {"error_after_s": {"median": round(median(latencies), 3), "max": round(max(latencies), 3)}}
                if latencies
                else {}
            ),
            **({"ended": Counter(trial.detail for trial in of_kind if trial.passed)} if kind == "corrupted" else {}),
        }
    return {
        "date": date.today().isoformat(),
        "command": f"make soak (python -m soak --kills {options.kills} --trials {options.trials} --steps {options.steps} "
        f"--seed {options.seed})",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, torch {torch.__version__}",
        "group_timeout_s": TIMEOUT_S,
        "allowance_s": ALLOWANCE_S,
        "plans": {name: repr(plan) for name, plan in PLANS.items()},
        "faults": by_kind,
        "endurance": [asdict(each) | {"passed": each.passed} for each in runs],
        "left_over": left,
        "not_possible_here": skipped,
        # what was printed in full is kept by its last line: tracebacks name the folders of a machine
        "failures": [asdict(t) | {"detail": t.detail.strip().splitlines()[-1]} for t in trials if not t.passed],
        "seconds": round(seconds),
        "passed": not left and all(t.passed for t in trials) and all(r.passed for r in runs),
    }


def told(summary: dict[str, Any]) -> str:
    lines = []
    for kind, found in summary["faults"].items():
        late = found.get("error_after_s")
        extra = f"; errors after {late['median']} s (median), {late['max']} s (last)" if late else ""
        extra += f"; {dict(found['ended'])}" if "ended" in found else ""
        lines.append(f"{kind:<18}{found['passed']:>4} of {found['trials']}{extra}")
    for each in summary["endurance"]:
        lines.append(
            f"{each['steps']} steps of {each['plan']} on {each['ranks']} ranks: weights equal {each['compared']} of "
            f"{each['compared']} times, memory {100 * each['memory_growth']:+.2f} %, {max(0, each['threads_left'])} threads "
            f"and {max(0, each['files_left'])} files left"
        )
    lines.append(f"left over: {', '.join(summary['left_over']) or 'nothing'}")
    if summary["not_possible_here"]:
        lines.append(f"not possible here: {', '.join(summary['not_possible_here'])}")
    lines.append(f"{'passed' if summary['passed'] else 'FAILED'} in {summary['seconds']} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
