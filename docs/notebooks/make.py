"""Writes the tutorials on real data as notebooks: `python docs/notebooks/make.py`, from the pages of docs/tutorials.

Blocks that are marked to run become cells of code, everything else cells of text.
"""

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent
PAGES = [HERE.parent / "tutorials" / f"{name}.md" for name in ("language-model", "image-model")]
_BLOCK = re.compile(r"^<!-- run[^>]*-->\n+```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook(page: Path) -> str:
    """The notebook of a page, as JSON."""
    text = page.read_text(encoding="utf-8")
    cells = [new_code_cell("%cd -q ../..", metadata={"tags": ["folder of the repository"]})]
    at = 0
    for block in _BLOCK.finditer(text):
        language, code = block.groups()
        cells += [
            new_markdown_cell(_of_notebooks(text[at : block.start()])),
            new_code_cell(("%%bash\n" if language == "sh" else "") + code),
        ]
        at = block.end()
    cells.append(new_markdown_cell(_of_notebooks(text[at:])))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
        cell["source"] = cell["source"].strip()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.writes(new_notebook(cells=cells, metadata={"kernelspec": kernel})) + "\n"


def _of_notebooks(text: str) -> str:
    """Text of a page for the folder of notebooks, without comments."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"\]\((?=[\w-]+\.(?:md|png))", "](../tutorials/", text)


def main() -> None:
    for page in PAGES:
        (HERE / f"{page.stem}.ipynb").write_text(notebook(page), encoding="utf-8")


if __name__ == "__main__":
    main()
