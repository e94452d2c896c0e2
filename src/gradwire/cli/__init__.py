"""Implements the command line. A command imports heavy modules only when it runs."""

import sys

import typer

from gradwire.cli import jobs, listing, planning
from gradwire.cli.app import app
from gradwire.errors import FormatError, GradwireError
from gradwire.renames import old_words

__all__ = ["app", "jobs", "listing", "main", "planning"]


def main() -> None:
    """Run the `gradwire` program. A GradwireError is printed as one message; the exit code is then 2."""
    try:
        if old := old_words(sys.argv[1:]):
            raise FormatError(old)
        app(prog_name="gradwire")
    except GradwireError as error:
        typer.echo(f"gradwire: {error}", err=True)
        sys.exit(2)
