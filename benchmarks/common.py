"""Functions that the benchmarks share: the place of results, and the facts written with them."""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.bench.runner import Network
from gradwire.core.files import write_whole
from gradwire.core.provenance import processor_name

RESULTS = Path(__file__).parent / "results"
WIDTH = 260
"""Of tables that are not printed on a terminal."""


def print_wide(tables: Iterable[Table]) -> None:
    """Print tables; not on a terminal with all their columns."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for table in tables:
        console.print(table)


def collected(
    nodes: Network,
    module: str,
    arguments: Sequence[object],
    about: str,
    timeout: float | None = None,
    hears: Callable[[str], bool] = lambda line: False,
) -> dict[str, Any]:
    """Return the JSON objects that the ranks of `python -m MODULE ARGUMENTS` print, merged. Each rank has one thread.

    hears: a function that gets every line of standard output first; a line for which it returns True is dropped. Other lines
    go to standard error, except warnings. Raises SystemExit if a rank fails, no object comes, or `timeout` seconds pass.
    """
    found: dict[str, Any] = {}

    def on_line(rank: int, stream: str, line: str) -> None:
        if stream == "stdout" and hears(line):
            return
        if stream == "stdout" and line.startswith("{"):
            found.update(json.loads(line))
        elif line.strip() and "Warning" not in line:
            print(f"{about}: {line}", file=sys.stderr, flush=True)

    command = [sys.executable, "-u", "-m", module, *map(str, arguments)]
    code = nodes.run(command, env={"OMP_NUM_THREADS": "1"}, on_line=on_line, timeout=timeout)
    if code or not found:
        raise SystemExit(f"{about}: the ranks ended with exit code {code}{'' if found else ' and found nothing'}.")
    return found


def mean_inside_turns(step_us: Sequence[float], period: int) -> float:
    """The mean step of turns of `period + 2` steps, without the first and the last step of each.

    >>> mean_inside_turns([0.0, 2.0, 2.0, 90.0, 0.0, 4.0, 4.0, 90.0], 2)
    3.0
    """
    turn = period + 2
    return statistics.fmean(us for begin in range(0, len(step_us), turn) for us in step_us[begin + 1 : begin + 1 + period])


def write(path: Path, result: dict[str, Any], quiet: bool = False) -> None:
    """Write a result with date, machine and the command that made it. `quiet`: without a word."""
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor_name(),
        "command": " ".join(
            ["python -m benchmarks", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]
        ),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"made": made} | result, indent=1) + "\n")
    if not quiet:
        print(f"written to {path}")


def between(text: str, begin: str, end: str, block: str) -> str:
    """The text with this block between its two marks. Raises ValueError where a mark is missing.

    >>> between("a (old) b", "(", ")", "new")
    'a (new) b'
    """
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"there is no mark {end if opened else begin!r} in the text. Write both marks where the block belongs.")
    return before + begin + block + end + after


def write_between(page: Path, begin: str, end: str, lines: list[str]) -> None:
    """Put lines between two marks of a page."""
    write_whole(page, between(page.read_text(), begin, end, "\n".join(["\n", *lines, "\n"])))
    print(f"written to {page}")
