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
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"made": made} | result, indent=1) + "\n")
    print(f"written to {path}")
