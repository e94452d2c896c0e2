"""The documentation is built without a warning, and the site has what it promises."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from interpreters import Interpreters

import gradwire

ROOT = Path(__file__).parents[2]
NEEDED = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
MISSING = [name for name in NEEDED if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: `make docs` installs what it needs")
def test_every_page_is_read_without_a_warning_and_the_site_has_all_names(interpreters: Interpreters, tmp_path: Path) -> None:
    """Every page is read, and its links are resolved. Two are written: `make docs` writes all, which takes as long again."""
    common = ["-q", "-d", str(tmp_path / "trees")]
    every_page = [*common, "-W", "--keep-going", "-b", "dummy", "docs", str(tmp_path / "nothing")]
    two_pages = [*common, "-b", "html", "docs", str(tmp_path / "site"), "docs/reference/api.md", "docs/reference/cli.md"]
    program = f"import sys\nfrom sphinx.cmd.build import main\nsys.exit(main({every_page}) or main({two_pages}))"
    done = interpreters.run([sys.executable, "-c", program], cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    api = (site / "reference" / "api.html").read_text()
    assert [name for name in gradwire.__all__ if name != "__version__" and f'id="gradwire.{name}"' not in api] == []
    commands = (site / "reference" / "cli.html").read_text()
    assert len(re.findall(r'id="gradwire-[a-z-]+"', commands)) >= 10
    for option in ("--accuracy", "--ranks-per-node"):
        assert (option in commands) == (option == "--ranks-per-node")
