"""What the benchmarks of nodes whose computation is a timed sleep share: the request, what they keep of a method, and how their
tables show it."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.names import MOST_DECIDING_STEPS
from gradwire.bench.results import Cell, Decided
from gradwire.bench.runner import FEWEST_WARMUP_STEPS, BenchRequest

__all__ = [
    "add_options", "failures", "found_by", "is_there", "is_whole", "milliseconds", "predicted_ms", "ratio", "request_of",
    "results_in", "status_of",
]  # fmt: skip


def add_options(parser: argparse.ArgumentParser, steps: int, about: str = "measured steps of each method") -> None:
    """Add --steps and --again."""
    parser.add_argument("--steps", type=int, default=steps, help=about)
    parser.add_argument("--again", action="store_true", help="measure what has results, too")


def request_of(
    job: str, link: str, methods: Sequence[str], nodes: int, steps: int, turn_steps: int, sites: int = 1, wan: str | None = None
) -> BenchRequest:
    """The request for a group of methods, whose computation is a timed sleep."""
    return BenchRequest(
        jobs=[job],
        links=[link],
        methods=methods,
        device="sleeping",
        nodes=nodes,
        sites=sites,
        wan=wan,
        steps=steps,
        warmup_steps=FEWEST_WARMUP_STEPS,
        turn_steps=turn_steps,
        deciding_steps=MOST_DECIDING_STEPS,
        alone_steps=0,
    )


def is_there(path: Path, names: Iterable[str]) -> bool:
    """Whether the file has a result with a time of every method of these names."""
    return path.exists() and is_whole(json.loads(path.read_text()), names)


def results_in(folder: Path) -> list[dict[str, Any]]:
    """The results of all files of a folder."""
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def status_of(failed: Sequence[str]) -> int:
    """Print what failed. Returns the exit status."""
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def found_by(cell: Cell | None) -> dict[str, Any]:
    """What is kept of a method: times in ms, bytes, what a deciding one decided, and why a failed one failed."""
    if cell is None or cell.step is None:
        why = None if cell is None else cell.failure
        return {"step_ms": None, "decided": [], "failure": why or "nothing was measured"}
    return {
        "step_ms": _ms(cell.step.median_us),
        "p10_ms": _ms(cell.step.p10_us),
        "p90_ms": _ms(cell.step.p90_us),
        "forward_ms": _ms(cell.forward_us),
        "cpu_ms": _ms(cell.cpu_us),
        "codec_ms": _ms(cell.codec_us),
        "planned_mb": None if cell.planned_bytes is None else round(cell.planned_bytes / 1e6, 3),
        "crossing_mb": None if cell.crossing_bytes is None else round(cell.crossing_bytes / 1e6, 3),
        "phases": cell.phases,
        "decided": [_decided(each) for each in cell.decided],
        "failure": cell.failure,
    }


def _decided(one: Decided) -> dict[str, Any]:
    times = {"predicted_ms": _ms(one.predicted_us), "measured_ms": _ms(one.measured_us)}
    return {"step": one.step, "chosen": one.chosen, "cost_s": round(one.cost_us / 1e6, 2)} | times


def predicted_ms(found: Mapping[str, Any]) -> float | None:
    """The step that the last decision of a method predicted; None where it decided nothing, and in results that lack it.

    >>> predicted_ms({"decided": [{"predicted_ms": 9.0}, {"predicted_ms": 8.0}]}), predicted_ms({"decided": [{}]})
    (8.0, None)
    """
    return found["decided"][-1].get("predicted_ms") if found["decided"] else None


def is_whole(result: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether every method of these names has a time."""
    return all(result["methods"].get(name, {}).get("step_ms") is not None for name in names)


def failures(place: str, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each method that failed."""
    return [f"{place}: {name} failed: {each['failure']}" for name, each in found.items() if each["failure"]]


def milliseconds(value: float | None) -> str:
    """A time in ms as a table shows it.

    >>> milliseconds(1234.5), milliseconds(None)
    ('1,234', 'failed')
    """
    return "failed" if value is None else f"{value:,.0f}"


def ratio(of: float | None, to: float | None) -> str:
    """A ratio as a table shows it.

    >>> ratio(3, 2), ratio(None, 2)
    ('1.50', '-')
    """
    return "-" if not of or not to else f"{of / to:.2f}"


def _ms(us: float | None) -> float | None:
    return None if us is None else round(us / 1e3, 1)
