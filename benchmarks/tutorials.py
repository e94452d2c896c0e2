"""The two tutorials on real data: each script with DDP and with gradwire over an emulated link, until both are equally good.

    python -m benchmarks tutorials [--link 100mbit] [--again]

A run is written to benchmarks/results/tutorials/NAME-METHOD.json when it ends; only runs without a file are made, unless --again.
Then draws the picture of each page, and writes its table. Needs network namespaces.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, write, write_between
from benchmarks.markdown import table
from gradwire.bench.runner import emulation_problem
from gradwire.testbed import EmulatedCluster

ROOT = Path(__file__).parents[1]
FOLDER, PAGES = RESULTS / "tutorials", ROOT / "docs" / "tutorials"
METHODS = {"DDP": ["ddp"], "gradwire": list[str]()}


class Tutorial(NamedTuple):
    """A page, its script, and the words for what is measured on held-out data."""

    name: str
    page: str
    options: list[str]
    held_out: str


TUTORIALS = (
    Tutorial("language_model", "language-model", ["--target", "1.9"], "held-out loss"),
    Tutorial("image_model", "image-model", [], "held-out images recognised"),
)


def run(arguments: list[str]) -> int:
    """Make the runs that are missing, then the pictures and tables. Returns 1 if nothing can be measured here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tutorials")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--again", action="store_true", help="make runs that have results, too")
    options = parser.parse_args(arguments)
    for tutorial in TUTORIALS:
        for method, words in METHODS.items():
            path = FOLDER / f"{tutorial.name}-{method.lower()}.json"
            if options.again or not path.exists():
                if problem := emulation_problem():
                    print(f"{tutorial.name}: not measured, {problem}")
                    return 1
                write(path, {"link": options.link, "curve": curve(tutorial, words, options.link)})
        curves = {method: json.loads((FOLDER / f"{tutorial.name}-{method.lower()}.json").read_text()) for method in METHODS}
        draw(tutorial, {method: found["curve"] for method, found in curves.items()})
        lines = rows_of({method: found["curve"] for method, found in curves.items()}, tutorial.held_out)
        begin = f"<!-- {tutorial.name}: made by `python -m benchmarks tutorials` -->"
        write_between(PAGES / f"{tutorial.page}.md", begin, f"<!-- end of {tutorial.name} -->", lines)
        print("\n".join(lines))
    return 0


def curve(tutorial: Tutorial, words: list[str], link: str) -> list[dict[str, Any]]:
    """Run the script on two emulated nodes. Returns what it wrote every 20 steps."""
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(2, inter=link) as cluster:
        log = Path(folder) / "curve.json"
        script = str(ROOT / "examples" / f"{tutorial.name}.py")
        cluster.run([sys.executable, script, *words, *tutorial.options, "--log", str(log)], timeout=1800.0)
        found: list[dict[str, Any]] = json.loads(log.read_text())
        return found


def rows_of(curves: dict[str, list[dict[str, Any]]], held_out: str) -> list[str]:
    """Return a table: for each method its steps, its seconds, a step, and what it reached."""
    ends = {method: points[-1] for method, points in curves.items()}
    rows = [
        (
            method,
            f"{end['held_out']:.2f}" if "loss" in held_out else f"{end['held_out']:.1%}",
            str(end["step"]),
            f"{end['seconds']:.0f}",
            f"{1e3 * end['seconds'] / end['step']:.0f}",
            f"{ends['DDP']['seconds'] / end['seconds']:.1f}",
        )
        for method, end in ends.items()
    ]
    return table(("method", held_out, "steps", "seconds", "ms a step", "times as soon as DDP"), rows, left=1)


def draw(tutorial: Tutorial, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Write the picture of a page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.4))
    for method, points in curves.items():
        axes.plot(
            [each["seconds"] for each in points], [each["held_out"] for each in points], marker="o", markersize=3, label=method
        )
    axes.set(xlabel="seconds", ylabel=tutorial.held_out, xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PAGES / f"{tutorial.page}.png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)
