"""Tests that take long, of which `make test` and `make test-ci` run a fifth, by the commit: tests/costly.txt has them.

To measure them anew, run the tests of `make test-ci` for each of GRADWIRE_TURN=0 to 4, alone on a machine, with
`--junitxml=REPORT`, and after each `python tests/support/turns.py REPORT`. Tests that a report does not have stay as they are.
"""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["COSTLY", "TURNS", "costly_of", "of_commit", "of_test", "turns"]

TURNS = 5
COSTLY = Path(__file__).parents[1] / "costly.txt"
_ALWAYS = "test_every_page_is_read_without_a_warning_and_the_site_has_all_names"
_TOGETHER = ("tests/scripts/test_bench_demo.py", "tests/scripts/test_bench_worker.py", "tests/scripts/test_build.py")
"""Files that wait as a whole: their first test runs or compiles what all of them look at."""
_LEAST_S = 3.0


def turns(costly: str) -> dict[str, int]:
    """The turn, from 0 on, in which each test of the text runs: all turns take about equally long."""
    seconds = _seconds(costly)
    sums = [0.0] * TURNS
    found = {}
    for name in sorted(seconds, key=lambda each: (-seconds[each], each)):
        found[name] = sums.index(min(sums))
        sums[found[name]] += seconds[name]
    return found


def of_test(nodeid: str, costly: dict[str, int]) -> int | None:
    """The turn of this test. None if it runs in each."""
    name = nodeid.partition("[")[0]
    return costly.get(name, costly.get(name.partition("::")[0]))


def of_commit() -> int:
    """The turn of the commit that is checked out; 0 without one, or without git."""
    if shutil.which("git") is None:
        return 0
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=COSTLY.parent, capture_output=True, text=True, check=False)
    return int(asked.stdout[:8] or "0", 16) % TURNS


def costly_of(report: str, known: str = "") -> str:
    """The text of tests/costly.txt from a report of pytest in JUnit's form. known: the text until now."""
    found: Counter[str] = Counter()
    for case in ElementTree.fromstring(report).iter("testcase"):
        file, _, of_class = case.attrib["classname"].replace(".", "/").partition("/Test")
        name = "::".join([f"{file}.py", *([f"Test{of_class}"] if of_class else []), case.attrib["name"].partition("[")[0]])
        found[f"{file}.py" if f"{file}.py" in _TOGETHER else name] += float(case.attrib["time"])
    seconds = Counter[str](_seconds(known) | found)  # type: ignore[arg-type]  # seconds are no whole numbers
    lines = [f"{number:.0f} {name}" for name, number in seconds.most_common() if number >= _LEAST_S and _ALWAYS not in name]
    return "\n".join(lines) + "\n"


def _seconds(costly: str) -> dict[str, float]:
    return {name: float(number) for number, name in map(str.split, costly.splitlines())}


if __name__ == "__main__":
    given, now = (path.read_text(encoding="utf-8") for path in (Path(sys.argv[1]), COSTLY))
    COSTLY.write_text(costly_of(given, now), encoding="utf-8")
