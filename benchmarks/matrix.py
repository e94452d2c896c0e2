"""Writes docs/matrix.md and the table of README.md from what `gradwire bench --matrix` has measured. Measures nothing.

    python -m benchmarks matrix [--loss-steps 150]

The README's table stands between two comments, `benchmarks.campaigns.matrix_tables.README_MARKS`; without them it is printed.
"""

import argparse
from pathlib import Path

from benchmarks.campaigns.matrix import MatrixRequest, measured_cells
from benchmarks.campaigns.matrix_checks import verdict_lines
from benchmarks.campaigns.matrix_tables import in_readme, matrix_page, readme_block
from benchmarks.common import RESULTS
from gradwire.core.files import write_whole

ROOT = Path(__file__).parent.parent
PAGE, README = ROOT / "docs" / "matrix.md", ROOT / "README.md"


def run(arguments: list[str]) -> int:
    """Returns 1 if there is nothing to write from."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks matrix")
    parser.add_argument("--loss-steps", type=int, default=150, help="as it was measured with")
    loss_steps = parser.parse_args(arguments).loss_steps
    cells = measured_cells(MatrixRequest(RESULTS / "matrix", loss_steps=loss_steps))
    if not cells:
        print(f"nothing is measured yet: gradwire bench --matrix --loss-steps {loss_steps}")
        return 1
    write_whole(PAGE, matrix_page(cells))
    print(f"written to {PAGE}")
    text = in_readme(README.read_text(), readme_block(cells))
    if text is None:
        print(readme_block(cells))
    else:
        write_whole(README, text)
        print(f"written to {README}")
    print("\n".join(verdict_lines(cells)))
    return 0
