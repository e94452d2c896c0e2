"""The blocks of the documentation that can run do run, and print what the pages say."""

from pathlib import Path

import pytest
from doc_blocks import blocks, run_page, unlike_output
from interpreters import Interpreters

from gradwire.testbed import permission_problem

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if any(block.mark for block in blocks(page))]
IN_CI = ("README", "two-processes")
"""Pages of those that start ranks from a shell which CI runs too. It runs all others that do not."""


def case(page: Path) -> object:
    starts = any(block.mark == "run" and (block.language == "sh" or block.about) for block in blocks(page))
    marks = [pytest.mark.slow] * starts + [pytest.mark.thorough] * (starts and page.stem not in IN_CI)
    return pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.network
@pytest.mark.parametrize("page", [case(page) for page in RUN])
def test_what_a_page_shows_runs(interpreters: Interpreters, page: Path, tmp_path: Path) -> None:
    assert run_page(interpreters, page, tmp_path, emulates=permission_problem() is None) == []


def test_the_runner_sees_what_it_is_for(interpreters: Interpreters, tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    page.write_text(
        "<!-- file: a.txt -->\n```\ntwo 2\n```\n\n<!-- run -->\n```sh\ncat a.txt\n```\n\n<!-- output -->\n```\ntwo 3\n```\n"
        "<!-- run -->\n```python\nprint('three')\n```\n\n<!-- output -->\n```\nfour\n```\n\n```sh\nfalse\n```\n"
        "<!-- run: 2 ranks -->\n```python\ntrain(1)\nassert dist.get_rank() == 0\n```\n"
    )
    wrong = run_page(interpreters, page, folder, emulates=False)
    assert wrong[0].startswith("'four' was not printed, but: three")
    assert any("AssertionError" in text for text in wrong[1:])  # the other rank may have been killed for it


def test_ranks_and_commands_of_a_page_start_with_torch_loaded(interpreters: Interpreters, tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    page.write_text(
        "<!-- file: say.py -->\n```python\nimport os, sys\nprint('torch' in sys.modules, os.environ['RANK'], sys.argv[1:])\n```\n"
        "<!-- run -->\n```sh\ntorchrun --standalone --nproc-per-node 2 say.py --with 'two words'\n```\n"
        "<!-- output -->\n```\nTrue 0 ['--with', 'two words']\nTrue 1 ['--with', 'two words']\n```\n"
        "<!-- run -->\n```sh\ngradwire nothing\n```\n"
    )
    (told,) = run_page(interpreters, page, folder, emulates=False)
    assert "ended with 2" in told and "nothing" in told


def test_numbers_may_be_others() -> None:
    assert unlike_output("loss 1.20, 3 ms\n", "gradwire: ...\nloss 0.9, 44 ms\n") == []
    assert unlike_output("loss 1.20, 3 ms\n", "loss 0.9\n") == ["loss 1.20, 3 ms"]
