"""The program and what all its commands share."""

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Data-parallel PyTorch training that stays fast when the network is not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from gradwire import __version__

        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What all commands share."""
