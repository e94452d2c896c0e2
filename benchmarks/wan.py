"""The league of methods between two sites of two nodes each: held-out loss against seconds of training.

    python -m benchmarks wan [--jobs transformer] [--delays 10 50 100] [--rates 100 20] [--losses 0 0.1] [--seconds 45]

The emulated network between the sites has a round trip in ms, a rate of each site in Mb/s, and a part of lost packets in percent.
All methods of a cell train for equal seconds, in turns. A cell's results go to benchmarks/results/wan/CELL.json after each turn.
Methods that have results are not measured again, unless --again; `--only WORD ..` names those that are wanted. The tables go to
docs/sites_measured.md. Needs network namespaces, torchft and Hivemind; what is not installed is left out and named.
"""

import argparse
import json
import sys
from collections.abc import Collection, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.campaigns.rivals import HIVEMIND, ISLANDS_PREFIX, RIVAL_PREFIX, TORCHFT, absent
from benchmarks.common import RESULTS, write
from benchmarks.local import methods_of
from benchmarks.markdown import table
from benchmarks.race import Race, reached
from gradwire.bench.names import UNLIMITED
from gradwire.bench.runner import emulation_problem
from gradwire.core.files import write_whole
from gradwire.report.pictures import COLOURS, MARKERS, STYLES, Panel, canvas, looks_of

FOLDER = RESULTS / "wan"
DOCS = Path(__file__).parents[1] / "docs"
NODES, SITES, EVERY = 4, 2, 30
_LOCAL = methods_of(EVERY)
RIVALS = {
    "DDP": "ddp",
    "DDP, fp16 hook": "ddp-fp16",
    "DDP, PowerSGD hook": "ddp-powersgd",
    "torchft's DiLoCo, float32": f"{RIVAL_PREFIX}{TORCHFT}@{EVERY}",
    "Hivemind, mean of weights, float16": f"{RIVAL_PREFIX}{HIVEMIND}@{EVERY}",
    "SparseLoCo, as a plan": _LOCAL["SparseLoCo"],
}
"""The methods of others. SparseLoCo is a plan of gradwire after its paper."""
OURS = {
    "auto": "gradwire:auto",
    "local steps, 4 bits": _LOCAL["local, 4 bits, mean of weights"],
    "local steps, 4 bits, delayed": _LOCAL["streaming, 4 bits, mean of weights"],
    "islands, 4 bits": f"{ISLANDS_PREFIX}{EVERY}",
}
METHODS = RIVALS | OURS
NOT_DRAWN = "DDP, fp16 hook"
"""Nine curves can be told apart."""
HEAD = ("", "steps", "ms a step", "held-out loss", "times sooner at the loss of the best other method")
PAGE = """# Between two sites: methods beside each other

Two sites have two machines each. The network between them is slow, far away, or loses packets. Every method trains the same job
for equal seconds. What counts is the held-out loss that it reaches.

{summary}

The best other method is the one with the lowest loss at its end. "Times sooner" says when a method of gradwire had that loss.

![Held-out loss against seconds of training](pictures/wan.png)

The picture leaves out DDP with the fp16 hook.

- **Emulated**, and measured by `python -m benchmarks wan`: 4 nodes share 2 processors. So computation is slower than on 4
  machines, and a method that sends less gains less than it would there.
- A delay is a round trip. A rate is that of one site, in each direction.
- Local steps, islands, DiLoCo and Hivemind exchange every {every} steps. torchft's quantised all-reduce needs a GPU, and was
  not measured.
- Methods of one run take turns. Those that were measured later are named.
- The goal is 1.5 times sooner in every cell. Hivemind's mean of weights is the method of gradwire's local steps, in float16.
  Between two exchanges lie 30 steps of computation, which take most of the time here. So fewer bytes shorten little, and three
  cells at 100 Mb/s are below the goal. A cell has four exchanges, so its times are coarse.
- auto exchanges in every step. It has the loss of the best method with local steps in few cells.
- How to train between sites: [Train between two sites](how-to/sites.md).

{tables}
"""


def run(arguments: list[str]) -> int:
    """Measure what is missing, print and write the page; 1 where nothing can be emulated, and where a method failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks wan")
    parser.add_argument("--jobs", nargs="+", default=["transformer"])
    parser.add_argument("--delays", nargs="+", type=int, default=[10, 50, 100], help="round trips, in ms")
    parser.add_argument("--rates", nargs="+", type=int, default=[100, 20], help="of a site, in Mb/s")
    parser.add_argument("--losses", nargs="+", type=float, default=[0.0, 0.1], help="of packets, in percent")
    parser.add_argument("--seconds", type=float, default=45.0, help="of training, for each method")
    parser.add_argument("--only", nargs="+", default=[""], help="words: methods with one of them in their names")
    parser.add_argument("--again", action="store_true", help="measure cells that have results, too")
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    left_out = {name: absent(method) for name, method in METHODS.items() if method.startswith(RIVAL_PREFIX) and absent(method)}
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    methods = {name: method for name, method in METHODS.items() if name not in left_out}
    failed: list[str] = []
    for job, loss, rate, delay in product(options.jobs, options.losses, options.rates, options.delays):
        about = {"job": job, "delay_ms": delay, "mbps": rate, "loss_percent": loss, "seconds": options.seconds}
        about |= {"left_out": left_out} if left_out else {}
        path = FOLDER / f"{job}-{delay}ms-{rate}mbit-{loss:g}.json"
        before = measured_before(path, options.seconds)
        wanted = {name: method for name, method in methods.items() if any(word in name for word in options.only)}
        missing = {name: method for name, method in wanted.items() if options.again or name not in before}
        if not missing:
            continue
        wan = f"{delay}ms rate {rate}mbit" + (f" loss {loss:g}%" if loss else "")
        race = Race(missing, about, job, UNLIMITED, nodes=NODES, sites=SITES, wan=wan, race_s=options.seconds)
        race.run(partial(_keep, path, before, missing))
        failed += [f"{path.stem}: {name} failed: {why}" for name, why in race.failed.items()]
    results = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    results.sort(key=lambda each: (each["job"] != "transformer", -each["mbps"], each["loss_percent"], each["delay_ms"]))
    summary, tables = summary_of(results), [line for result in results for line in table_of(result)]
    print("\n".join([*summary, *tables]))
    drawn = [each for each in results if each["job"] == results[0]["job"] and not each["loss_percent"]]
    if drawn:
        draw(DOCS / "pictures" / "wan.png", drawn)
    write_whole(DOCS / "sites_measured.md", PAGE.format(every=EVERY, summary="\n".join(summary), tables="\n".join(tables)))
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _keep(path: Path, before: Mapping[str, Any], measured: Collection[str], result: dict[str, Any]) -> None:
    write(path, merged(before, result, measured), quiet=True)


def measured_before(path: Path, seconds: float) -> dict[str, Any]:
    """The results of the methods that came to their end in this cell, by name; none if they trained for other seconds."""
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("seconds") != seconds:
        return {}
    left = {*before.get("failed", ()), *before.get("unfinished", ())}
    return {name: found for name, found in before["methods"].items() if name not in left}


def merged(before: Mapping[str, Any], result: dict[str, Any], measured: Collection[str]) -> dict[str, Any]:
    """The results of a cell, with those of methods that were measured before, in the order of the table."""
    later = {name: found | ({"later": True} if before else {}) for name, found in result["methods"].items()}
    found = {**before, **later}
    result = result | {"methods": {name: found[name] for name in sorted(found, key=[*METHODS].index)}}
    return result | ({"unfinished": sorted(measured)} if "unfinished" in result else {})


def best_of(result: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
    """The method with the lowest loss at its end; None where all failed."""
    whole = [name for name in names if name in result["methods"] and name not in result.get("failed", {})]
    return min(whole, key=lambda name: result["methods"][name]["held_out"][-1][1], default=None)


def sooner(result: Mapping[str, Any], name: str) -> float | None:
    """How many times sooner a method had the last loss of the best other one. None: it never had it, or all others failed."""
    if (best := best_of(result, RIVALS)) is None:
        return None
    seconds, goal = result["methods"][best]["held_out"][-1]
    found = reached(result["methods"][name]["held_out"], goal)
    return seconds / found if found else None


def where(result: Mapping[str, Any]) -> str:
    """A cell in words."""
    return f"{result['job']}, {result['delay_ms']} ms, {result['mbps']} Mb/s, {result['loss_percent']:g} % lost"


def summary_of(results: list[dict[str, Any]]) -> list[str]:
    """The table of all cells: the best other method, and gradwire's best."""
    rows = []
    for result in results:
        best, ours = best_of(result, RIVALS), {name: sooner(result, name) for name in OURS if name in result["methods"]}
        first = max(ours, key=lambda name: ours[name] or 0.0, default="")
        loss = f"{result['methods'][best]['held_out'][-1][1]:.3f}" if best is not None else "-"
        rows.append((where(result), best or "-", loss, first, in_words(ours.get(first)), in_words(ours.get("auto"))))
    head = ("cell", "best other method", "its last loss", "gradwire's first there", "times sooner", "auto, times sooner")
    return table(head, rows, left=2)


def in_words(times: float | None) -> str:
    """
    >>> in_words(1.499), in_words(None)
    ('1.50', 'never')
    """
    return f"{times:.2f}" if times else "never"


def table_of(result: Mapping[str, Any]) -> list[str]:
    """A heading and the table of one cell."""
    rows = []
    for name, found in result["methods"].items():
        times, last = in_words(sooner(result, name)), found["held_out"][-1][1]
        name += " (failed)" if name in result.get("failed", {}) else ""
        rows.append((name, found["steps"], f"{found['step_ms']:.0f}", f"{last:.3f}", times))
    said = f"{result['seconds']:g} s of training for each method{', not to its end' if 'unfinished' in result else ''}."
    later = [name for name, found in result["methods"].items() if "later" in found]
    said += f" Measured later, in a run of their own: {', '.join(later)}." if later else ""
    return ["", f"## {where(result)}", "", said, "", *table(HEAD, rows, left=1)]


def draw(path: Path, results: list[dict[str, Any]]) -> None:
    """A panel for each cell: the held-out loss of each method against seconds."""
    methods = [{name: found for name, found in result["methods"].items() if name != NOT_DRAWN} for result in results]
    courses = [{name: found["held_out"] for name, found in each.items()} for each in methods]
    panels = []
    for result, of in zip(results, courses, strict=True):
        losses = {name: [loss for _, loss in course] for name, course in of.items()}
        panels.append(Panel(f"{result['delay_ms']} ms, {result['mbps']} Mb/s", [], losses))
    looks = looks_of(panels)
    title = f"{results[0]['job']}, two sites: held-out loss against seconds of training"
    with canvas(path, title, panels, "seconds", "held-out loss") as grid:
        for axes, panel, of in zip(grid, panels, courses, strict=True):
            for name, values in panel.curves.items():
                look = looks[name] % len(COLOURS)
                style = {"color": COLOURS[look], "marker": MARKERS[look], "markersize": 4, "markevery": 0.2, "linewidth": 1.6}
                axes.plot([second for second, _ in of[name]], values, STYLES[look], label=name, **style)
