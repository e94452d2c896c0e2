"""`gradwire plan` with the papers' own methods of planning (`benchmarks.papers.methods`), such as --method cupcake.

python -m benchmarks plan profile.json --cluster cluster.json --costs costs.json --spec qsgd4 --method cupcake
python -m benchmarks plan ... --inter 1,10,25 --methods ddp,fusion,cupcake
"""

import typer

from benchmarks.papers import methods
from gradwire.cli import app
from gradwire.planner.methods import METHODS


def run(arguments: list[str]) -> int:
    """Plan as `gradwire plan` does. The options are the same. Ends the program with the exit status."""
    METHODS.update(methods.METHODS)
    command = typer.main.get_command(app)
    return command.main(["plan", *arguments], prog_name="python -m benchmarks")
