"""Compares local steps with per-step compression: held-out loss against seconds of training, on slow links.

    python -m benchmarks local [--links 10mbit 20mbit 100mbit] [--nodes 2] [--every 30] [--seconds 300] [--only WORD ...]
    python -m benchmarks local --equal ...    losses at equal samples (`benchmarks.local_equal`)
    python -m benchmarks local --step ...     how long a step takes, and its prediction (`benchmarks.local_step`)

All methods of a link train the bench's transformer for equal seconds, in turns, in one run (`race_s` of the bench). The goal is
the loss that plan="auto" has at its end. Of methods that gradwire expects something of, the table also has when they were said to
reach it, over when they did. A link's results go to benchmarks/results/local/LINK-NODES-EVERY.json after each turn.
A link whose run came to its end, with no method failing, is not measured again, unless --again. With --only the other methods
keep their results, marked as those of an earlier run. The tables of all links go into docs/local_steps.md. A method that fails is
named and takes no further part; the exit status is 1 then. Needs network namespaces, and torchft for its DiLoCo, which is left
out otherwise (`benchmarks/campaigns/rivals.py` says how to get it).
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import local_equal, local_step
from benchmarks.campaigns.rivals import RIVAL_PREFIX, TORCHFT, TORCHFT_MEAN, absent
from benchmarks.common import RESULTS, write, write_between
from benchmarks.markdown import table
from benchmarks.race import Race, is_whole, reached, steps_for_one
from gradwire.auto.local_losses import at_constant_rate, loss_above, steps_to_make_up
from gradwire.bench.names import GRADWIRE_PREFIX, parse_policy
from gradwire.bench.runner import emulation_problem, gbps_of
from gradwire.core.schedules import LocalSteps

JOB = "transformer"
FOLDER = RESULTS / "local"
PAGE = Path(__file__).parent.parent / "docs" / "local_steps.md"
BEGIN, END = "<!-- local: made by `python -m benchmarks local` -->", "<!-- end of local -->"
AUTO, WITH_LOCAL = "auto, accuracy safe", "auto, local steps allowed"
FOUR_BITS: dict[str, Any] = {"id": "qsgd", "bits": 4}
TWO_BITS: dict[str, Any] = {"id": "qsgd", "bits": 2}
DILOCO = {"lr": 0.7, "momentum": 0.9}


EVERY, DELAY = 30, 5
"""Default number of steps from one exchange to the next, and most steps during which a fragment is exchanged."""


def methods_of(every: int, delay: int = DELAY) -> dict[str, str]:
    """The bench's methods by their names in the tables: those with local steps exchange every so many steps."""

    def local(spec: Mapping[str, Any], **schedule: Any) -> str:
        steps = {"kind": "local", "every": every, "second_moment": "own"}
        return "gradwire:" + json.dumps({"default": spec, "schedule": steps | schedule})

    streamed = {"fragments": 4, "delay": min(delay, every // 4), "mixing": 0.5}
    feedback = {"id": "error_feedback", "inner": TWO_BITS}
    sparse = {"id": "error_feedback", "decay": 0.95, "inner": {"id": "topk", "ratio": 0.02, "values": TWO_BITS}}
    return {
        AUTO: "gradwire:auto",
        WITH_LOCAL: "gradwire:auto@local",
        "torchft's DiLoCo, float32": f"{RIVAL_PREFIX}{TORCHFT}@{every}",
        "torchft's DiLoCo, mean of weights": f"{RIVAL_PREFIX}{TORCHFT_MEAN}@{every}",
        "local, float32": local({"id": "identity"}, outer=DILOCO),
        "local, 4 bits": local(FOUR_BITS, outer=DILOCO),
        "local, 2 bits with feedback": local(feedback, outer=DILOCO),
        "local, 4 bits, mean of weights": local(FOUR_BITS),
        "local, 2 bits with feedback, mean of weights": local(feedback),
        "streaming, 4 bits": local(FOUR_BITS, **streamed, outer={"lr": 0.4}),
        "streaming, 4 bits, mean of weights": local(FOUR_BITS, **streamed),
        "SparseLoCo": local(sparse),
    }


METHODS = methods_of(EVERY)
AFTER = (125, 250, 500, 1000)
"""Numbers of auto's steps in the table of steps for one."""
STEPPED = {name: METHODS[name] for name in ("local, 4 bits, mean of weights", "streaming, 4 bits")} | {
    "streaming, 4 bits, delay=7": methods_of(EVERY, delay=7)["streaming, 4 bits"]
}
"""The methods with predicted and timed steps."""
COLUMNS = (
    "", "steps", "samples", "ms a step", "last loss", "seconds to auto's last loss", "times sooner", "said over took",
)  # fmt: skip


def run(arguments: list[str]) -> int:
    """Measure what is missing, print and write the tables; 1 where no link can be emulated, and where a method failed."""
    if "--equal" in arguments:
        return local_equal.run([each for each in arguments if each != "--equal"])
    if "--step" in arguments:
        return local_step.run([each for each in arguments if each != "--step"], STEPPED)
    parser = argparse.ArgumentParser(prog="python -m benchmarks local")
    parser.add_argument("--links", nargs="+", default=["10mbit", "20mbit", "100mbit"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--every", type=int, default=EVERY, help="steps from one exchange to the next")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, for each method")
    parser.add_argument("--only", nargs="+", default=[""], help="words: methods with one of them in their names, and auto")
    parser.add_argument("--again", action="store_true", help="measure links that have results, too")
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    methods = {
        name: method
        for name, method in methods_of(options.every).items()
        if name == AUTO or any(word in name for word in options.only)
    }
    left_out = {name: absent(method) for name, method in methods.items() if method.startswith(RIVAL_PREFIX) and absent(method)}
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    failed: list[str] = []
    for link in options.links:
        path = FOLDER / f"{link}-{options.nodes}-{options.every}.json"
        if options.again or not is_whole(path):
            racing = {name: method for name, method in methods.items() if name not in left_out}
            about = {"link": link, "nodes": options.nodes, "every": options.every, "seconds": options.seconds}
            about |= {"left_out": left_out} if left_out else {}
            race = Race(racing, about, JOB, link, nodes=options.nodes, race_s=options.seconds)
            kept = kept_methods(path, racing, options.seconds)
            race.run(lambda result, path=path, kept=kept: write(path, with_kept(result, kept), quiet=True))
            failed += [f"{link}: {name} failed: {why}" for name, why in race.failed.items()]
    results = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    results.sort(key=lambda each: (each["nodes"], gbps_of(each["link"]) or math.inf, -each["every"]))
    lines = [line for result in results for line in table_of(result)] + steps_table(results)
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def kept_methods(path: Path, racing: Collection[str], seconds: float) -> dict[str, Any]:
    """Return the results in a file of methods that do not race now, marked as those of an earlier run. None are kept that failed
    or trained for other seconds."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("seconds") != seconds:
        return {}
    others = known["methods"].keys() - {*racing, *known.get("failed", ())}
    return {name: found | {"earlier": True} for name, found in known["methods"].items() if name in others}


def with_kept(result: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a race, and behind them those of an earlier one."""
    return {**result, "methods": {**result["methods"], **kept}}


def steps_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of how many steps of each method learn what one of auto's learns, beside what gradwire expects."""
    rows = [
        (name, result["nodes"], result["every"], f"{expected:.2f}", *("-" if each is None else f"{each:.2f}" for each in found))
        for result in longest(results)
        for name, expected, found in steps_rows(result)
    ]
    head = ("", "ranks", "every", "expected", *(f"after {steps:,}" for steps in AFTER))
    about = "Steps for what one step of auto learns, by auto's steps until then:"
    return [about, "", *table(head, rows, left=1), ""] if rows else []


def longest(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the race with the most steps of auto for each number of ranks and of steps between exchanges: the same training runs
    over all links."""
    best: dict[tuple[int, int], Mapping[str, Any]] = {}
    for result in sorted(results, key=lambda each: each["methods"].get(AUTO, {"steps": 0})["steps"]):
        best[result["nodes"], result["every"]] = result
    return [best[key] for key in sorted(best)]


def steps_rows(result: Mapping[str, Any]) -> list[tuple[str, float, list[float | None]]]:
    """Return for each method with a row of losses the steps that gradwire expects for one of auto's, and those of the race."""
    methods, rows = result["methods"], []
    for name, found in methods.items():
        expected = expected_steps(name, result["every"], result["nodes"])
        if expected is not None and AUTO in methods:
            rows.append((name, expected, [steps_for_one(found, methods[AUTO], steps) for steps in AFTER]))
    return rows


def goal_of(result: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return auto's last loss, and after how many seconds auto has it. No loss is low enough if auto failed."""
    curve = result["methods"][AUTO]["held_out"] if AUTO in result["methods"].keys() - result.get("failed", {}).keys() else []
    goal = curve[-1][1] if curve else -math.inf
    return goal, reached(curve, goal)


def said_over_took(name: str, found: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """Return when a method was said to reach auto's last loss, over when it did. None if it did not, or nothing was said."""
    goal, whole = goal_of(result)
    took = reached(found["held_out"], goal)
    if took is None or whole is None:
        return None
    said = said_s(name, found, 1e3 * whole / result["methods"][AUTO]["step_ms"], result)
    return None if said is None else said / took


def said_s(name: str, found: Mapping[str, Any], steps: float, result: Mapping[str, Any]) -> float | None:
    """Return after how many seconds a method was expected to have learned what so many synchronous steps learn. None if nothing
    was expected of it.

    Auto's first decision says it, counted from when it was made. Of other local steps gradwire expects a number of steps; their
    time is the race's own.
    """
    if (decided := found.get("decided")) is not None:
        return float(decided["after_s"] + (steps - decided["step"]) * decided["learns_us"] / 1e6)
    more = expected_steps(name, result["every"], result["nodes"])
    return None if more is None else float(steps * more * found["step_ms"] / 1e3)


def expected_steps(name: str, every: int, ranks: int) -> float | None:
    """Return how many steps of a method are expected to learn what one synchronous step learns. None without a row of losses."""
    policy = methods_of(every).get(name, "").removeprefix(GRADWIRE_PREFIX)
    if not policy.startswith("{"):
        return None
    made = parse_policy(policy)
    assert isinstance(made.schedule, LocalSteps)
    above = loss_above(made.schedule, made.default, ranks)
    return None if above is None else at_constant_rate(steps_to_make_up(above), made.default)


def table_of(result: Mapping[str, Any]) -> list[str]:
    """A heading and a table."""
    methods, failed = result["methods"], result.get("failed", {})
    goal, whole = goal_of(result)
    rows = []
    for name, found in methods.items():
        seconds = reached(found["held_out"], goal)
        sooner = ("never", "-") if seconds is None or whole is None else (f"{seconds:.1f}", f"{whole / seconds:.2f}")
        said = said_over_took(name, found, result)
        sooner += ("-" if said is None else f"{said:.2f}",)
        name += " (failed: see the file)" if name in failed else " (in an earlier run)" if "earlier" in found else ""
        rows.append((name, str(found["steps"]), f"{found['samples']:,}", f"{found['step_ms']:.0f}",
                     f"{found['held_out'][-1][1]:.3f}", *sooner))  # fmt: skip
    head = f"{result['link']}, {result['nodes']} nodes, every {result['every']} steps, "
    head += f"{result['seconds']:g} s of training for each method:"
    head = head.replace(":", ", not to its end:") if "unfinished" in result else head
    return ["", head, "", *table(COLUMNS, rows, left=1), ""]
