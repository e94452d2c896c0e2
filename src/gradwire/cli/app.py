"""Defines the program, and the options that several commands have."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

app = typer.Typer(
    help="Data-parallel PyTorch training that stays fast when the network is not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Specs = Annotated[list[str] | None, typer.Option(help="A compressor, such as QSGD(bits=4); may be repeated.")]
ClusterFile = Annotated[Path, typer.Option(help="Cluster file: nodes, ranks and links.")]
CostsFile = Annotated[Path | None, typer.Option(help="Costs file: codec times. Needed only with compression.")]
DecodeCalls = Annotated[
    str | None,
    typer.Option(help="How payloads that came together are decoded: one (call), each (one by one). Default: each."),
]


class GivenOptions(NamedTuple):
    """A model of the user's own, for `gradwire.bench.names.GivenModel`."""

    model: Annotated[
        str | None,
        typer.Option(help="Any model, as MODULE:NAME of a class or function, such as torchvision.models:resnet18."),
    ] = None
    config: Annotated[
        str | None, typer.Option(help="With --model: keywords for NAME, or for its config, such as n_layer=4.")
    ] = None
    shape: Annotated[
        str | None,
        typer.Option("--input", help="With --model: shape of a rank's batch, 8x3x64x64, or 8x128 for tokens."),
    ] = None


def _print_version(wanted: bool) -> None:
    if wanted:
        from gradwire import __version__

        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the program itself."""
