"""Access to `benchmarks`, which is in gradwire's repository and in no wheel."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from gradwire.errors import GradwireError

ROOT = Path(__file__).resolve().parents[3]
"""The repository's root, if gradwire is installed in editable form or run from a checkout."""


def from_repository(module: str, wanted: str) -> ModuleType:
    """A module of `benchmarks`, such as "papers.methods". wanted: the feature that the user asked for, for messages.

    The repository is found around this file or on Python's path. Raises GradwireError if there is no repository.
    """
    if (ROOT / "benchmarks" / "campaigns").is_dir() and str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # before another package of this name in the current folder
    try:
        return import_module(f"benchmarks.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "benchmarks":
            raise
    raise GradwireError(
        f"{wanted} is not installed: a wheel of gradwire leaves out benchmarks/{module.replace('.', '/')}.py, which is in "
        "gradwire's repository. Clone the repository, and run `python -m gradwire` in its root."
    )
