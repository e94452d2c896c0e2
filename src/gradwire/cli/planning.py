"""Commands that plan and predict. No GPU, no network, no torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.app import app
from gradwire.cli.sweeping import Inter, Nodes, Picture, bar, points_of, refuse_with_sweep, show_sweep
from gradwire.errors import FormatError

__all__ = ["compressors", "import_profile", "options", "plan", "report", "schedules", "simulate"]


@app.command()
def options(
    nodes: Annotated[int | None, typer.Option(help="Nodes of the cluster. With 1, only flat options apply.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks a node. With 1, only flat options apply.")] = None,
    devices: Annotated[str, typer.Option(help="Comma-separated: where encodes and decodes may run.")] = "gpu,cpu",
    max_encodes: Annotated[int | None, typer.Option(help="At most so many encodes, 0 to 4.")] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, and no others: the collectives of each exchange, such as allreduce or alltoall+allgather."
        ),
    ] = None,
    flat: Annotated[
        bool | None, typer.Option("--flat/--hierarchical", help="All ranks as one group, or nodes apart.")
    ] = None,
    compressed: Annotated[
        bool | None, typer.Option("--compressed/--uncompressed", help="With an encode, or without.")
    ] = None,
    restrict: Annotated[
        str | None,
        typer.Option(
            help="A restricted search of ByteComp: all-compressed, gpu, cpu, inter-allgather, inter-alltoall, "
            "alltoall+alltoall."
        ),
    ] = None,
    named: Annotated[bool, typer.Option("--named", help="Only what known systems do, with their names.")] = False,
    collectives: Annotated[
        bool,
        typer.Option("--collectives", help="Instead: what a policy's scheme may name, with the package it comes from."),
    ] = False,
    count: Annotated[bool, typer.Option("--count", help="Print how many, and nothing else.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON instead of a table.")] = False,
) -> None:
    """List the ways in which a bucket can be synchronised: ByteComp's tree of compression options, 4341 in all.

    A star marks what travels compressed. The tasks are what a plan's buckets have as their option.
    """
    from gradwire.bench.names import split_names
    from gradwire.planner.listing import as_json, as_table, choose, shape_note

    if collectives:
        from gradwire.planner.added import collective_rows

        _print_rows(collective_rows(), json)
        return
    chosen = choose(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        devices=split_names(devices),
        max_encodes=max_encodes,
        schemes=None if schemes is None else split_names(schemes),
        flat=flat,
        compressed=compressed,
        restrict=restrict,
        named=named,
    )
    if count:
        typer.echo(len(chosen))
    elif json:
        typer.echo(as_json(chosen), nl=False)
    else:
        typer.echo(as_table(chosen), nl=False)
        typer.echo(shape_note(nodes, ranks_per_node), err=True)
        typer.echo(f"Listed: {len(chosen)}.", err=True)


@app.command()
def compressors(
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON instead of a table.")] = False,
) -> None:
    """List the compressors, those of other packages too: a usual spec of each, its law, and how its payloads travel."""
    from gradwire.planner.added import compressor_rows

    _print_rows(compressor_rows(), json)


@app.command()
def schedules(
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON instead of a table.")] = False,
) -> None:
    """List the schedules, those of other packages too: when each exchanges gradients, and what it costs."""
    from gradwire.planner.added import schedule_rows

    _print_rows(schedule_rows(), json)


def _print_rows(rows: list[dict[str, Any]], json: bool) -> None:
    from gradwire.planner.added import rows_as_json, rows_as_text

    typer.echo(rows_as_json(rows) if json else rows_as_text(rows), nl=False)


@app.command()
def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profile: Annotated[Path, typer.Option(help="Profile file: the model's times, tensor by tensor.")],
    cluster: Annotated[Path, typer.Option(help="Cluster file: nodes, ranks and links.")],
    costs: Annotated[
        Path | None, typer.Option(help="Costs file: codec times. Not needed where nothing is encoded.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace that ui.perfetto.dev and chrome://tracing show.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where gradients are computed: gpu or cpu. Default: by the profile's device.")
    ] = None,
    codec_on: Annotated[
        str | None,
        typer.Option(help="Where codec tasks of that device run: compute or 'own thread'. Default: compute."),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            help="When last decodes run: 'at once', 'after backward', 'with encode' or none. Default: at once."
        ),
    ] = None,
    decode_calls: Annotated[
        str | None,
        typer.Option(help="A decode of several payloads: each by a call, or one call for all. Default: each."),
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(help="Lanes of a rank, 0 for strict launch order. Default: 2 on CPUs, 0 on GPUs.")
    ] = None,
    inter: Inter = None,
    nodes: Nodes = None,
    picture: Picture = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole timeline as JSON instead of a table.")] = False,
) -> None:
    """Predict the step of a plan on a cluster: who works when, and what nothing hides. No GPU, no network, no training.

    With --inter or --nodes: the plan as it is on many clusters, beside plain DDP, as scaling factors.
    """
    from gradwire.core import Cluster, Costs, Plan, Profile
    from gradwire.core.files import write_whole
    from gradwire.planner.sweep import sweep_plan
    from gradwire.sim.rules import changed_rules
    from gradwire.sim.table import as_table
    from gradwire.sim.timeline import simulate as simulate_plan
    from gradwire.sim.trace import as_trace

    times = Profile.load(profile)
    rules = changed_rules(
        times, device=device, codec_on=codec_on, decode=decode, decode_calls=decode_calls, lanes=lanes
    )
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())
    links = Cluster.load(cluster)
    points = points_of(links, inter, nodes, picture)
    if points:
        refuse_with_sweep(trace=trace)
        with bar("Simulating", 2 * len(points)) as seen:
            rows = sweep_plan(Plan.load(plan), times, points, codecs, rules, seen)
        show_sweep(rows, times, picture, json)
        return
    timeline = simulate_plan(Plan.load(plan), times, links, codecs, rules)
    if trace is not None:
        write_whole(trace, as_trace(timeline))
    typer.echo(timeline.to_json() if json else as_table(timeline), nl=False)


def _bytes_of(megabytes: float) -> int:
    if not 0 <= megabytes < 1e12:
        raise FormatError(f"--memory-mb is {megabytes}: it must be a number of megabytes, not below 0 and below 1e12.")
    return round(megabytes * 1e6)


@app.command()
def plan(
    profile: Annotated[Path, typer.Argument(help="Profile file: the model's times, tensor by tensor.")],
    cluster: Annotated[Path, typer.Option(help="Cluster file: nodes, ranks and links.")],
    costs: Annotated[Path | None, typer.Option(help="Costs file: codec times of every --spec.")] = None,
    spec: Annotated[
        list[str] | None,
        typer.Option(help="What may compress, such as QSGD(bits=4) or its JSON; several times for several."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="joint, fusion, bucket, bytecomp or ddp; in gradwire's repository also cupcake, even, layerwise and hipress."
        ),
    ] = "joint",
    devices: Annotated[
        str | None, typer.Option(help="Comma-separated: where codecs may run. Default: where all were measured.")
    ] = None,
    max_encodes: Annotated[int | None, typer.Option(help="At most so many encodes of one bucket, 0 to 4.")] = None,
    restrict: Annotated[
        str | None,
        typer.Option(
            help="A restricted search of ByteComp: gpu, cpu, inter-allgather, inter-alltoall, alltoall+alltoall; with --method "
            "bytecomp also all-compressed and myopic."
        ),
    ] = None,
    memory_mb: Annotated[float | None, typer.Option(help="Extra memory of the device at most.")] = None,
    exempt_vectors: Annotated[
        bool, typer.Option("--exempt-vectors/--all-tensors", help="Leave biases and norms uncompressed, or not.")
    ] = True,
    decode_calls: Annotated[
        str | None, typer.Option(help="A decode of several payloads: each by a call, or one for all. Default: each.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="plan.json to write.")] = None,
    inter: Inter = None,
    nodes: Nodes = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Of a sweep, comma-separated: methods as above, and bound, which no plan exceeds."),
    ] = None,
    picture: Picture = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of an explanation.")] = False,
) -> None:
    """Work out how each gradient should travel: buckets, compression, collectives and launch order. No GPU, no network.

    With --inter or --nodes: plans of several methods on many clusters, as scaling factors.
    """
    import json as codec

    from gradwire.bench.names import parse_spec, split_names
    from gradwire.core import Cluster, Costs, Profile
    from gradwire.planner.drafts import Limits, PlanningJob
    from gradwire.planner.methods import explanation, make
    from gradwire.planner.sweep import SWEPT, check_some_may, methods_here, sweep_methods
    from gradwire.sim.rules import changed_rules

    times = Profile.load(profile)
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())
    limits = Limits(
        devices=None if devices is None else tuple(split_names(devices)),
        max_encodes=max_encodes,
        memory_bytes=None if memory_mb is None else _bytes_of(memory_mb),
        exempt_vectors=exempt_vectors,
        restrict=restrict,
    )
    specs = [parse_spec(each) for each in spec or ()]
    rules, links = changed_rules(times, decode_calls=decode_calls), Cluster.load(cluster)
    points = points_of(links, inter, nodes, picture)
    if points:
        refuse_with_sweep(out=out, method=None if method == "joint" else method)
        chosen = methods_here() if methods is None else split_names(methods)
        if methods is None and (absent := [method for method in SWEPT if method not in chosen]):
            typer.echo(f"Left out, because only gradwire's repository has them: {', '.join(absent)}.", err=True)
        with bar("Planning", len(points) * len(chosen)) as seen:
            rows = sweep_methods(times, points, codecs, specs, limits, rules, chosen, seen)
        show_sweep(rows, times, picture, json)
        return
    if methods is not None:
        raise FormatError(
            f"--methods {methods} without a sweep: one plan has one method. Name it with --method, or add --inter or --nodes."
        )
    if method != "ddp":
        check_some_may(times, specs, limits)
    job = PlanningJob(times, links, codecs, specs, limits, rules)
    made = make(job, method)
    if out is not None:
        made.plan.save(out)
    if json:
        typer.echo(codec.dumps(made.plan.to_dict() | {"planning_ms": made.planning_ms}))
    else:
        typer.echo(explanation(job, made), nl=False)


@app.command()
def import_profile(
    source: Annotated[Path, typer.Argument(help="A profile or codec times as published with ByteComp.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="profile.json or costs.json to write.")],
    batch: Annotated[int, typer.Option(help="Samples per rank and step, which the source does not say.")] = 32,
    device: Annotated[str, typer.Option(help="What computed, which the source does not say.")] = "V100",
) -> None:
    """Turn ByteComp's published profiles and codec times into profile.json and costs.json."""
    from gradwire.costs.imported import import_file

    document = import_file(source, batch, device)
    document.save(out)
    typer.echo(f"{document.what} written to {out}.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder that handle.record, demo or bench wrote, or its run.json.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Page to write. Default: report.html in the run's folder.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard's event files into this folder. Needs tensorboard.")
    ] = None,
) -> None:
    """Write one HTML page about a recorded run: decisions, what they saved, one step, loss, bytes, errors, memory."""
    from gradwire.report.writing import write_report

    told = write_report(run, out)
    if tensorboard is not None:
        from gradwire.record.run import Run
        from gradwire.record.tensorboard import export

        export(Run.read(run), tensorboard)
        told += f"\nTensorBoard: {tensorboard}"
    typer.echo(told)
