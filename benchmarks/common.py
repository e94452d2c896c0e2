"""What the benchmarks share: where results go and what is written with them."""

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradwire.core.files import write_whole

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    """The processor, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result with date, machine and the command that made it."""
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "command": " ".join(
            ["python -m benchmarks", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]
        ),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"made": made} | result, indent=1) + "\n")
    print(f"written to {path}")


def write_between(page: Path, begin: str, end: str, lines: list[str]) -> None:
    """Put lines between two marks of a page."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    write_whole(page, "\n".join([before + begin, "", *lines, "", end + after]))
    print(f"written to {page}")
