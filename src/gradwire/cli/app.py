"""Defines the program, and the options that several commands have."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it, with the fields of its groups in the place of the groups.

    >>> from typing import NamedTuple
    >>> class Size(NamedTuple):
    ...     nodes: int = 2
    >>> def train(job: str, size: Size) -> None:
    ...     print(job, size)
    >>> grouped(train)(job="mlp", nodes=4)
    mlp Size(nodes=4)
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if hasattr(kind, "_fields"):
            groups[parameter.name] = kind
            parameters += _fields(kind)
        else:
            parameters.append(parameter.replace(annotation=kind))

    @wraps(command)
    def spread(**given: Any) -> None:
        made = {name: kind(*[given.pop(field) for field in kind._fields]) for name, kind in groups.items()}
        command(**given, **made)

    spread.__dict__["__signature__"] = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _fields(group: Any) -> list[inspect.Parameter]:
    """One parameter for each field, with its type and its default."""
    kinds, defaults = get_type_hints(group, include_extras=True), group._field_defaults
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, inspect.Parameter.empty), annotation=kinds[name]
        )
        for name in group._fields
    ]


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
    typer.Option(
        help="How payloads that came together are decoded: one (call), each (one by one), engine (as gradwire's, the default)."
    ),
]


class GivenOptions(NamedTuple):
    """A model of the user's own, for `gradwire.bench.names.GivenModel`."""

    model: Annotated[
        str | None, typer.Option(help="Any model, as MODULE:NAME of a class or function, such as torchvision.models:resnet18.")
    ] = None
    config: Annotated[str | None, typer.Option(help="With --model: keywords for NAME, or for its config, such as n_layer=4.")] = (
        None
    )
    shape: Annotated[
        str | None, typer.Option("--input", help="With --model: shape of a rank's batch, 8x3x64x64, or 8x128 for tokens.")
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
