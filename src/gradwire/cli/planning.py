"""Commands that plan and predict, also for lists of rates and nodes. No GPU, no network, no torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.app import ClusterFile, CostsFile, DecodeCalls, GivenConfig, GivenInput, GivenName, Json, Specs, app
from gradwire.errors import FormatError

if TYPE_CHECKING:
    from gradwire.core import Cluster, Profile
    from gradwire.planner import SweepRow

Inter = Annotated[str | None, typer.Option(help="Sweep over rates between nodes in Gb/s, such as 1,10,25,100.")]
Nodes = Annotated[str | None, typer.Option(help="Sweep over numbers of nodes, such as 1,2,4,...,512 (... doubles).")]
SlowNode = Annotated[
    str | None,
    typer.Option(help="Worst case and mean where one node's link is so many times slower, such as 1,2,5."),
]
Picture = Annotated[Path | None, typer.Option(help="With a sweep: PNG of the scaling factors. Needs matplotlib.")]


@app.command()
def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profile: Annotated[Path, typer.Option(help="Profile file: the model's times, tensor by tensor.")],
    cluster: ClusterFile,
    costs: CostsFile = None,
    trace: Annotated[Path | None, typer.Option(help="Trace for ui.perfetto.dev and chrome://tracing.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the model: gpu or cpu. Default: the profile's.")] = None,
    codec_on: Annotated[str | None, typer.Option(help="Codec tasks: on compute (default) or 'own thread'.")] = None,
    decode: Annotated[
        str | None,
        typer.Option(help="The last decodes: 'at once', 'after backward', 'with encode' or none. Default: at once."),
    ] = None,
    decode_calls: DecodeCalls = None,
    lanes: Annotated[int | None, typer.Option(help="Lanes; 0: launch order. Default: 2 on CPUs, 0 on GPUs.")] = None,
    inter: Inter = None,
    nodes: Nodes = None,
    slow_node: SlowNode = None,
    picture: Picture = None,
    json: Json = False,
) -> None:
    """Predict the step of a plan on a cluster: the timeline and the exposed time. Needs no GPU, no network and no training.

    With --inter or --nodes: the scaling factors of the plan and of plain DDP on many clusters. With --slow-node: their steps
    where one node's link is slower.
    """
    from gradwire.core import Cluster, Costs, Plan, Profile, write_whole
    from gradwire.planner import PlanningJob, against, make, read_slower, sweep_plan
    from gradwire.sim import as_table, as_trace, changed_rules
    from gradwire.sim import simulate as simulate_plan

    times = Profile.load(profile)
    rules = changed_rules(
        times, device=device, codec_on=codec_on, decode=decode, decode_calls=decode_calls, lanes=lanes
    )
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())
    links = Cluster.load(cluster)
    if points := points_of(links, inter, nodes, picture):
        refuse_with_sweep(trace=trace, slow_node=slow_node)
        with bar("Simulating", 2 * len(points)) as seen:
            rows = sweep_plan(Plan.load(plan), times, points, codecs, rules, seen)
        show_sweep(rows, times, picture, json)
        return
    if slow_node is not None:
        if trace is not None:
            raise FormatError(f"--trace {trace} needs one cluster, and --slow-node has several. Leave out one of them.")
        plain = make(PlanningJob(times, links, Costs(codecs=()), rules=rules), "ddp").plan
        plans, factors = {"plain DDP": plain, "the plan": Plan.load(plan)}, read_slower(slow_node)
        with bar("Simulating", len(factors)) as seen:
            answer = against(plans, times, links, codecs, factors, rules, seen)
        typer.echo(answer.as_json() if json else answer.as_table(), nl=False)
        return
    timeline = simulate_plan(Plan.load(plan), times, links, codecs, rules)
    if trace is not None:
        write_whole(trace, as_trace(timeline))
    typer.echo(timeline.to_json() if json else as_table(timeline), nl=False)


def points_of(cluster: "Cluster", inter: str | None, nodes: str | None, picture: Path | None) -> "list[Cluster]":
    """The clusters of a sweep, or none. Raises FormatError for unreadable lists, and for --picture without a sweep."""
    from gradwire.planner import clusters, read_nodes, read_rates
    from gradwire.report.pictures import check_picture

    if inter is None and nodes is None:
        if picture is not None:
            raise FormatError(
                f"--picture {picture} without a sweep: one cluster gives one point. Add --inter, such as 1,10,25,100, or "
                "--nodes, such as 1,2,4,...,64."
            )
        return []
    rates = None if inter is None else read_rates(inter)
    counts = None if nodes is None else read_nodes(nodes)
    if picture is not None:
        check_picture(picture, min(len(rates or (0,)), len(counts or (0,))))
    return clusters(cluster, rates, counts)


def refuse_with_sweep(**options: object) -> None:
    """Raises FormatError if an option is given that needs a single cluster."""
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise FormatError(
                f"{option} {value} needs one cluster, not a sweep. Leave out {option}, or --inter and --nodes."
            )


@contextmanager
def bar(what: str, steps: int) -> "Iterator[Callable[[int], None]]":
    """A progress bar on stderr, or one line if stderr is no terminal. Gives a function of the number of finished steps."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what}: {steps} steps", highlight=False)
        yield lambda done: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda done: progress.update(task, completed=done)


def show_sweep(rows: "Sequence[SweepRow]", profile: "Profile", picture: Path | None, json: bool) -> None:
    """Print the table or the JSON, and draw the picture."""
    from gradwire.planner import sweep_json, sweep_table
    from gradwire.report.pictures import draw_sweep

    typer.echo((sweep_json if json else sweep_table)(rows, profile), nl=False)
    if picture is not None:
        draw_sweep(rows, profile.model, picture)
        typer.echo(f"Picture: {picture}", err=True)


A_CLUSTER = (
    '{"version": 1, "nodes": 16, "ranks_per_node": 1, "intra": {"alpha_us": 10, "gbps": 100}, '
    '"inter": {"alpha_us": 30, "gbps": 10}}'
)
"""What a cluster file looks like: 16 nodes with 10 Gb/s between them."""


@app.command()
def plan(
    cluster: Annotated[Path | None, typer.Option(help="Cluster file: nodes, ranks and links. Must be given.")] = None,
    profile: Annotated[
        Path | None, typer.Argument(help="Profile file: the model's times, tensor by tensor. Not with --model.")
    ] = None,
    model: GivenName = None,
    config: GivenConfig = None,
    shape: GivenInput = None,
    costs: CostsFile = None,
    spec: Specs = None,
    method: Annotated[
        str,
        typer.Option(
            help="joint, fusion, bucket, even, layerwise, grace, hipress, hitopkcomm, byteps-compress, bytecomp or ddp; in "
            "gradwire's repository also cupcake."
        ),
    ] = "joint",
    devices: Annotated[str | None, typer.Option(help="Comma-separated codec devices. Default: all measured.")] = None,
    max_encodes: Annotated[int | None, typer.Option(help="The most encodes of one bucket, 0 to 4.")] = None,
    restrict: Annotated[
        str | None,
        typer.Option(
            help="A restricted search of ByteComp: gpu, cpu, inter-allgather, inter-alltoall, alltoall+alltoall; with --method "
            "bytecomp also all-compressed and myopic."
        ),
    ] = None,
    memory_mb: Annotated[float | None, typer.Option(help="The most extra memory of the device.")] = None,
    exempt_vectors: Annotated[
        bool, typer.Option("--exempt-vectors/--all-tensors", help="Leave biases and norms uncompressed, or not.")
    ] = True,
    decode_calls: DecodeCalls = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="plan.json to write.")] = None,
    inter: Inter = None,
    nodes: Nodes = None,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated methods of a sweep; also bound, which no plan exceeds.")
    ] = None,
    slow_node: SlowNode = None,
    picture: Picture = None,
    json: Json = False,
) -> None:
    """Plan the exchange of each gradient: buckets, compression, collectives and launch order. Needs no GPU and no network.

    --model measures a model here, on the processor, instead of reading a profile; without --costs the codecs too.
    --spec names the compressors that the plan may use. With --inter or --nodes: the scaling factors of several methods on
    many clusters. With --slow-node: a plan for each factor, and what each takes with all of them; -o writes the one with the
    least mean.
    """
    import json as codec

    from gradwire.bench.names import GivenModel, parse_spec, split_names
    from gradwire.core import Cluster, Costs, Profile
    from gradwire.planner import (
        SWEPT,
        Limits,
        PlanningJob,
        against,
        check_some_may,
        explanation,
        make,
        plans_against,
        read_slower,
        sweep_methods,
    )
    from gradwire.sim import changed_rules

    if (given := GivenModel.of(model, config, shape)) is not None and profile is not None:
        raise FormatError(f"{profile} and --model {model} are given, and one job is planned. Leave out one of them.")
    if given is None and profile is None:
        raise FormatError("there is no job to plan. Name a profile file, or a model by --model and --input.")
    if cluster is None:
        raise FormatError(
            f"there is no cluster to plan for. Pass --cluster cluster.json, a file such as this: {A_CLUSTER}"
        )
    if memory_mb is not None and not 0 <= memory_mb < 1e12:
        raise FormatError(f"--memory-mb is {memory_mb}: it must be a number of megabytes from 0 to below 1e12.")
    limits = Limits(
        devices=None if devices is None else tuple(split_names(devices)),
        max_encodes=max_encodes,
        memory_bytes=None if memory_mb is None else round(memory_mb * 1e6),
        exempt_vectors=exempt_vectors,
        restrict=restrict,
    )
    specs = [parse_spec(each) for each in spec or ()]
    links = Cluster.load(cluster)
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())
    if given is not None:
        from gradwire.bench.models import measure_model

        times, codecs = measure_model(given, specs, None if costs is None else codecs)
    elif profile is not None:
        times = Profile.load(profile)
    rules = changed_rules(times, decode_calls=decode_calls)
    if points := points_of(links, inter, nodes, picture):
        refuse_with_sweep(out=out, method=None if method == "joint" else method, slow_node=slow_node)
        chosen = list(SWEPT) if methods is None else split_names(methods)
        with bar("Planning", len(points) * len(chosen)) as seen:
            rows = sweep_methods(times, points, codecs, specs, limits, rules, chosen, seen)
        show_sweep(rows, times, picture, json)
        return
    if methods is not None:
        raise FormatError(
            f"--methods {methods} needs a sweep, because one plan has one method. Use --method, or add --inter or --nodes."
        )
    if method != "ddp":
        check_some_may(times, specs, limits)
    if slow_node is not None:
        factors = read_slower(slow_node)
        with bar("Planning", len(factors)) as seen:
            plans = plans_against(times, links, codecs, factors, specs, limits, rules, method, seen)
        answer = against(plans, times, links, codecs, factors, rules)
        if out is not None:
            plans[answer.best.name].save(out)
        typer.echo(answer.as_json() if json else answer.as_table(), nl=False)
        return
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
    source: Annotated[
        Path, typer.Argument(help="A profile or codec times as published with ByteComp, or codec times as .csv.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="profile.json or costs.json to write.")],
    batch: Annotated[int, typer.Option(help="Samples per rank and step. The source does not tell.")] = 32,
    device: Annotated[str, typer.Option(help="The device of the measurement. The source does not tell.")] = "V100",
) -> None:
    """Turn ByteComp's published profiles and codec times, or codec times in CSV, into profile.json and costs.json.

    The columns of the CSV are spec,device,bytes,encode_us,decode_us: docs/profiler.md has an example.
    """
    from gradwire.costs import import_file

    document = import_file(source, batch, device)
    document.save(out)
    typer.echo(f"{document.what} written to {out}.")


@app.command()
def import_cluster(
    sources: Annotated[
        list[Path], typer.Argument(help="Output of nccl-tests: a run on one host, a run on several hosts, or both.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="cluster.json to write.")],
    collective: Annotated[
        str | None, typer.Option(help="What ran, where the output does not say: all_reduce, all_gather, ...")
    ] = None,
) -> None:
    """Turn the output of nccl-tests (all_reduce_perf and others) into cluster.json."""
    from gradwire.costs import cluster_from

    cluster, problems = cluster_from(sources, collective)
    cluster.save(out)
    for problem in problems:
        typer.echo(f"Note: {problem}", err=True)
    links = f"intra {cluster.intra.gbps:.3g} Gb/s, inter {cluster.inter.gbps:.3g} Gb/s"
    typer.echo(f"{cluster.what} of {cluster.nodes} x {cluster.ranks_per_node} ranks ({links}) written to {out}.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder that handle.record, demo or bench wrote, or its run.json.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Page. Default: report.html in the folder.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard files. Needs tensorboard.")] = None,
) -> None:
    """Write one HTML page about a recorded run: decisions, savings, one step, loss, bytes, errors, memory."""
    from gradwire.report.page import write_report

    told = write_report(run, out)
    if tensorboard is not None:
        from gradwire.record import Run
        from gradwire.record.tensorboard import export

        export(Run.read(run), tensorboard)
        told += f"\nTensorBoard: {tensorboard}"
    typer.echo(told)
