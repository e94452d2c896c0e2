"""The tutorials as notebooks are what their pages say, and run."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gradwire.testbed import permission_problem

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NAMES = ("language-model", "image-model")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    pytest.importorskip("nbformat")
    spec = importlib.util.spec_from_file_location("notebooks_of_docs", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_made_from_their_pages(maker: ModuleType, name: str) -> None:
    made = maker.notebook(FOLDER.parent / "tutorials" / f"{name}.md")
    assert (FOLDER / f"{name}.ipynb").read_text() == made, "run python docs/notebooks/make.py"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.network
@pytest.mark.skipif(permission_problem() is not None, reason="clusters cannot be emulated here")
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(FOLDER)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert printed.count("[0] step 20,") == 2
