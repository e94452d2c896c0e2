"""Compares mean steps of the delayed schedule with equation 7 of CD-SGD (docs/papers/cd-sgd.md), with its parts
measured apart.

    python -m benchmarks delayed [--links 100mbit 500mbit 1000mbit] [--turns 2] [--again]

The transformer. Takes 4 to 8 minutes a link. Needs network namespaces. All parts are measured in the same run, in turns with the
schedules: compute (a step that sends nothing), the exchange of a usual step and of a correction (while nothing else runs), and
the CPU time of both. All are means, parts as steps, so that what a busy host adds is in both; over whole periods: of a turn's 22
steps the first, which waits for nothing, and the last, which waits twice, are left out.
Where corrections are staggered, the exchange of each step is the mean of a period's. Writes benchmarks/results/delayed.json after
each link, and a table into docs/schedules_measured.md. A link that has results is not measured again, unless --again.

1 if a mean step is more than 10 % off the equation, or k=None at 500 Mb/s more than 10 % above what is attainable, or k=5 with
8-bit corrections there not faster than the backward schedule, or staggered corrections anywhere slower than unstaggered ones by
more than 2 %.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.campaigns.parts import WRONG_PREFIX
from benchmarks.common import RESULTS, mean_inside_turns, write, write_between
from benchmarks.papers.closed_forms import cd_sgd_mean_us, cd_sgd_staggered_us

JOB = "transformer"
PATH = RESULTS / "delayed.json"
PAGE = Path(__file__).parent.parent / "docs" / "schedules_measured.md"
BEGIN, END = "<!-- delayed: made by `python -m benchmarks delayed` -->", "<!-- end of delayed -->"
PERIOD = 20
"""Steps of a turn that count: whole periods of each k."""
TURN = PERIOD + 2
WARMUP_STEPS = 4
CORRECTED = (2, 5, 20)
WITHIN = 1.10
NOISE = 1.02
"""Two steps that are equally long may come out so far apart."""
PROMISED = "500mbit"
"""The link for which k=None, and k=5 with 8-bit corrections, are promised something."""
BACKWARD = "gradwire:qsgd4"
NEVER, EIGHT_BITS = "qsgd4@delayednone", "+qsgd8"
COMPUTE = f"{WRONG_PREFIX}compute-only:{NEVER}"
USUAL = f"{WRONG_PREFIX}exchange-only:{NEVER}"
CORRECTIONS = {words: f"{WRONG_PREFIX}exchange-only:qsgd4@delayed1{words}" for words in ("", EIGHT_BITS)}
UNSTAGGERED = "-unstaggered"
SCHEDULES: dict[str, tuple[int | None, str, bool]] = {
    **{
        f"gradwire:qsgd4@delayed{k}{'' if staggered else UNSTAGGERED}{words}": (k, words, staggered)
        for words in CORRECTIONS
        for staggered in (True, False)
        for k in CORRECTED
    },
    f"gradwire:{NEVER}": (None, "", True),
}
"""Methods, each with its k, the spec of its corrections, and whether they are staggered."""


def run(arguments: list[str]) -> int:
    """Measure, write the results and the table, and say what is not as promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks delayed")
    parser.add_argument("--links", nargs="+", default=["100mbit", "500mbit", "1000mbit"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure links that have results, too")
    options = parser.parse_args(arguments)
    found = json.loads(PATH.read_text())["links"] if PATH.exists() else {}
    for link in options.links:
        if link in found and not options.again:
            continue
        if (bench := _measured(link, options.turns)) is None:
            return 1
        found[link] = of_link(bench, link)
        write(PATH, {"job": JOB, "links": found})
    lines = table(found)
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    wrong = verdict(found)
    print("\n".join(wrong))
    return 1 if wrong else 0


def _measured(link: str, turns: int) -> dict[str, Any] | None:
    """Return the bench's measurements over a link; None if they failed."""
    methods = ["floor", COMPUTE, USUAL, *CORRECTIONS.values(), BACKWARD, *SCHEDULES]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "benchmarks", "methods", "--jobs", JOB, "--links", link]
        command += ["--methods", ",".join(methods), "--alone-steps", "0", "--warmup", str(WARMUP_STEPS)]
        command += ["--turn", str(TURN), "--steps", str(TURN * turns), "--json", str(result)]
        failed = subprocess.run(command).returncode
        return None if failed or not result.exists() else json.loads(result.read_text())


def of_link(bench: dict[str, Any], link: str) -> dict[str, Any]:
    """The parts of equation 7 on a link, and by method the measured mean step and the equation's, in microseconds."""
    cells = {cell["method"]: cell for cell in bench["cells"] if cell["link"] == link}
    parts = {
        "floor_us": cells["floor"]["step"]["median_us"],
        "compute_us": mean_us(cells[COMPUTE], bench["warmup_steps"]),
        "usual_exchange_us": mean_us(cells[USUAL], bench["warmup_steps"]),
        "usual_cpu_us": cells[USUAL]["cpu_us"],
        "usual_codec_us": cells[USUAL]["codec_us"],
    }
    for words, method in CORRECTIONS.items():
        parts[f"correction{words}_us"] = mean_us(cells[method], bench["warmup_steps"])
        parts[f"correction{words}_cpu_us"] = cells[method]["cpu_us"]
    steps = {
        method: {"mean_us": mean_us(cells[method], bench["warmup_steps"]), "equation_us": equation_us(parts, *schedule)}
        for method, schedule in SCHEDULES.items()
    }
    return {
        **{name: bench[name] for name in ("torch", "cores", "network", "nodes", "steps", "turn_steps")},
        "parts": parts,
        "steps": steps,
        "backward_us": mean_us(cells[BACKWARD], bench["warmup_steps"]),
        "attainable_us": cells[f"gradwire:{NEVER}"]["attainable_us"],
    }


def mean_us(cell: dict[str, Any], warmup_steps: int) -> float:
    """The mean of the steps inside each turn, whole periods of each k."""
    return mean_inside_turns(cell["step_us"][warmup_steps:], PERIOD)


def equation_us(parts: dict[str, float], k: int | None, corrections: str, staggered: bool) -> float:
    """Equation 7 as above. What an exchange takes of the compute cores, codec and packets, is added to compute,
    in corrections too."""
    on_compute = min(parts["usual_cpu_us"], parts["usual_exchange_us"])
    compute_us, compressed_us = parts["compute_us"], parts["usual_exchange_us"] - on_compute
    exchange_us, cpu_us = (parts[f"correction{corrections}{part}_us"] for part in ("", "_cpu"))
    if k is not None and staggered:
        return cd_sgd_staggered_us(k, compute_us + cpu_us / k, exchange_us, on_compute, compressed_us, on_compute)
    correction_us = max(exchange_us, compute_us + cpu_us)
    return cd_sgd_mean_us(k, compute_us, correction_us, on_compute, compressed_us, on_compute)


def table(found: dict[str, Any]) -> list[str]:
    """Return Markdown: the measured parts, and each schedule's step next to the equation's."""

    def part(name: str) -> list[str]:
        return [f"{of['parts'][name] / 1e3:.1f}" for of in found.values()]

    names = {
        "compute without the schedule": "floor_us",
        "compute (τ)": "compute_us",
        "4-bit exchange alone (δ + ψ)": "usual_exchange_us",
        "CPU time of it (δ_c)": "usual_cpu_us",
        "codec in it": "usual_codec_us",
        "correction alone (φ)": "correction_us",
        "8-bit correction alone": f"correction{EIGHT_BITS}_us",
    }
    rows = [[words, *part(name)] for words, name in names.items()]
    rows.append(["`backward` schedule, 4 bits", *(f"{of['backward_us'] / 1e3:.1f}" for of in found.values())])
    for method, (k, corrections, staggered) in SCHEDULES.items():
        values = []
        for of in found.values():
            mean, equation = (of["steps"][method][name] / 1e3 for name in ("mean_us", "equation_us"))
            values.append(f"{mean:.1f} / {equation:.1f} = {mean / equation:.2f}")
        words = ", 8-bit corrections" * bool(corrections) + ", staggered" * (k is not None and staggered)
        rows.append([f"k={k}{words}: measured / equation 7", *values])
    return markdown.table(["milliseconds", *found], rows)


def verdict(found: dict[str, Any]) -> list[str]:
    """One line for everything that is not as promised."""
    wrong = []
    for link, of in found.items():
        for method, step in of["steps"].items():
            ratio = step["mean_us"] / step["equation_us"]
            if not 1 / WITHIN <= ratio <= WITHIN:
                wrong.append(f"{link}, {method}: the mean step is {ratio:.2f} times that of equation 7")
            k, words, staggered = SCHEDULES[method]
            at_once = of["steps"].get(f"gradwire:qsgd4@delayed{k}{UNSTAGGERED}{words}")
            if staggered and at_once is not None and step["mean_us"] > NOISE * at_once["mean_us"]:
                slower = step["mean_us"] / at_once["mean_us"]
                wrong.append(f"{link}, {method}: the mean step is {slower:.2f} times that of unstaggered corrections")
    if PROMISED in found:
        of = found[PROMISED]
        never = of["steps"][f"gradwire:{NEVER}"]["mean_us"] / of["attainable_us"]
        if never > WITHIN:
            wrong.append(f"{PROMISED}: k=None takes {never:.2f} times what is attainable")
        five = of["steps"][f"gradwire:qsgd4@delayed5{EIGHT_BITS}"]["mean_us"] / of["backward_us"]
        if five >= 1:
            wrong.append(f"{PROMISED}: k=5 with 8-bit corrections takes {five:.2f} times the backward schedule's step")
    return wrong
