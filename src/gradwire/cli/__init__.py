"""The command line: thin over functions. Nothing heavy is imported before a command needs it."""

import sys

import typer

from gradwire.cli import jobs, planning
from gradwire.cli.app import app
from gradwire.errors import GradwireError

__all__ = ["app", "jobs", "main", "planning"]


def main() -> None:
    """The `gradwire` program. An error that gradwire raises on purpose is one message and exit code 2."""
    try:
        app(prog_name="gradwire")
    except GradwireError as error:
        typer.echo(f"gradwire: {error}", err=True)
        sys.exit(2)
