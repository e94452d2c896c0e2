"""Runs scripts to their ends: on two ranks each, all at once, in interpreters of their own. See interpreters.py, which
runs them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["End", "ends_of"]

End = dict[str, Any]
"""exit: the exit code; seconds: from an interrupt to the end; left: processes left behind; out, err: what was printed."""


def ends_of(script: str, arguments: list[str], folder: Path) -> dict[str, End]:
    """Return the end of "ARGUMENT.RANK" for every argument with which the script runs. The script is in the folder."""
    (folder / "train.py").write_text(script)
    runner = Path(__file__).with_name("interpreters.py")
    command = [sys.executable, str(runner), str(folder), str(folder / "train.py"), *arguments]
    subprocess.run(command, check=True, timeout=90)
    ends: dict[str, End] = json.loads((folder / "ends.json").read_text())
    for name, end in ends.items():
        end["out"], end["err"] = ((folder / f"{name}.{suffix}").read_text() for suffix in ("out", "err"))
    return ends
