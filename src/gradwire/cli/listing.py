"""Defines commands that list the parts of plans: options, compressors, schedules."""

from typing import Annotated, Any, NamedTuple

import typer

from gradwire.cli.app import Json, app, grouped


class OptionFilter(NamedTuple):
    """The options that `gradwire options` lists."""

    nodes: Annotated[int | None, typer.Option(help="Nodes of the cluster. One node has only flat options.")] = None
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks per node. One rank has only flat options.")] = None
    devices: Annotated[str, typer.Option(help="Comma-separated devices of encodes and decodes.")] = "gpu,cpu"
    max_encodes: Annotated[int | None, typer.Option(help="The most encodes of an option, 0 to 4.")] = None
    schemes: Annotated[str | None, typer.Option(help="Comma-separated: allreduce, alltoall+allgather, ...")] = None
    flat: Annotated[bool | None, typer.Option("--flat/--hierarchical", help="One group, or nodes apart.")] = None
    compressed: Annotated[bool | None, typer.Option("--compressed/--uncompressed", help="With encodes or not.")] = None
    restrict: Annotated[
        str | None,
        typer.Option(
            help="A restricted search of ByteComp: all-compressed, gpu, cpu, inter-allgather, inter-alltoall, alltoall+alltoall."
        ),
    ] = None
    named: Annotated[bool, typer.Option("--named", help="Only options of known systems, with their names.")] = False


@app.command()
@grouped
def options(
    *,
    wanted: OptionFilter,
    collectives: Annotated[bool, typer.Option("--collectives", help="List a policy's schemes instead.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Print only the number of options.")] = False,
    json: Json = False,
) -> None:
    """List the options, the ways to synchronise a bucket: ByteComp's tree of compression options, 4341 in all.

    A star marks a compressed transfer. The tasks are the `option` of a bucket in a plan.
    """
    from gradwire.bench.names import split_names
    from gradwire.planner import choose_options, options_json, options_table, shape_note

    if collectives:
        from gradwire.planner import collective_rows

        _print_rows(collective_rows(), json)
        return
    named = wanted._asdict() | {"devices": split_names(wanted.devices)}
    if wanted.schemes is not None:
        named["schemes"] = split_names(wanted.schemes)
    chosen = choose_options(**named)
    if count:
        typer.echo(len(chosen))
    elif json:
        typer.echo(options_json(chosen), nl=False)
    else:
        typer.echo(options_table(chosen), nl=False)
        typer.echo(shape_note(wanted.nodes, wanted.ranks_per_node), err=True)
        typer.echo(f"Listed: {len(chosen)}.", err=True)


@app.command()
def compressors(json: Json = False) -> None:
    """List the compressors of gradwire and of other packages: a usual spec, the law, and the schemes of each."""
    from gradwire.planner import compressor_rows

    _print_rows(compressor_rows(), json)


@app.command()
def schedules(json: Json = False) -> None:
    """List the schedules of gradwire and of other packages: when each exchanges gradients, and its costs."""
    from gradwire.planner import schedule_rows

    _print_rows(schedule_rows(), json)


def _print_rows(rows: list[dict[str, Any]], json: bool) -> None:
    from gradwire.planner import rows_as_json, rows_as_text

    typer.echo(rows_as_json(rows) if json else rows_as_text(rows), nl=False)
