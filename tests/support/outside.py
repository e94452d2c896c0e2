"""Packages outside gradwire, laid out as pip would do it, but without pip. Tests of entry points share them."""

import importlib
import sys
import tomllib
from pathlib import Path

import gradwire
from gradwire.core import entry_points

__all__ = ["EXAMPLES", "install", "lay_out", "use"]

EXAMPLES = Path(gradwire.__file__).parents[2] / "examples"


def install(example: str, folder: Path) -> None:
    """A package of examples/, found by its entry points once the folder is on the path."""
    project = tomllib.loads((EXAMPLES / example / "pyproject.toml").read_text())["project"]
    for module in (EXAMPLES / example).glob("*.py"):
        (folder / module.name).write_text(module.read_text())
    lay_out(folder, project["name"], project["entry-points"])


def lay_out(folder: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    """Write the metadata of an installed package, with its entry points by group."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {value}\n" for n, value in own.items()) for group, own in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()


def use(folder: str) -> None:
    """The packages of a folder are installed in this process from now on, also where another test had the names read before."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
        entry_points._groups.cache_clear()
