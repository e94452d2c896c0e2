"""Commands that plan and predict, also for lists of rates and nodes. No GPU, no network, no torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gradwire.cli.app import ClusterFile, CostsFile, DecodeCalls, GivenOptions, Json, Specs, app, grouped
from gradwire.errors import FormatError

if TYPE_CHECKING:
    from gradwire.core import Cluster, Costs, Plan, Profile, Spec
    from gradwire.planner import Limits, SweepRow
    from gradwire.sim import Rules


class SweepOptions(NamedTuple):
    """The clusters of a sweep, and its picture."""

    inter: Annotated[str | None, typer.Option(help="Sweep over rates between nodes in Gb/s, such as 1,10,25,100.")] = None
    nodes: Annotated[str | None, typer.Option(help="Sweep over numbers of nodes, such as 1,2,4,...,512 (... doubles).")] = None
    slow_node: Annotated[
        str | None, typer.Option(help="Worst case and mean where one node's link is so many times slower, such as 1,2,5.")
    ] = None
    picture: Annotated[Path | None, typer.Option(help="With a sweep: PNG of the scaling factors. Needs matplotlib.")] = None


class RuleOptions(NamedTuple):
    """How the simulated engine runs a plan; None: as the profile's device does."""

    device: Annotated[str | None, typer.Option(help="Device of the model: gpu or cpu. Default: the profile's.")] = None
    codec_on: Annotated[str | None, typer.Option(help="Codec tasks: on compute (default) or 'own thread'.")] = None
    decode: Annotated[
        str | None, typer.Option(help="The last decodes: 'at once', 'after backward', 'with encode' or none. Default: at once.")
    ] = None
    decode_calls: DecodeCalls = None
    lanes: Annotated[
        int | None, typer.Option(help="Lanes; 0: launch order. Default on CPUs: 2, or 4 to 16 if far; on GPUs 0.")
    ] = None


class PlanFiles(NamedTuple):
    """The job that `gradwire plan` plans for."""

    cluster: Annotated[Path | None, typer.Option(help="Cluster file: nodes, ranks and links. Must be given.")] = None
    profile: Annotated[
        Path | None, typer.Argument(help="Profile file: the model's times, tensor by tensor. Not with --model.")
    ] = None
    costs: CostsFile = None
    spec: Specs = None


class LimitOptions(NamedTuple):
    """Options for the choices of the planner."""

    devices: Annotated[str | None, typer.Option(help="Comma-separated codec devices. Default: all measured.")] = None
    max_encodes: Annotated[
        int | None,
        typer.Option(help="The most encodes of one bucket; the tree's options have at most 4, rings and grids may have more."),
    ] = None
    restrict: Annotated[
        str | None,
        typer.Option(
            help="A restricted search of ByteComp: gpu, cpu, inter-allgather, inter-alltoall, alltoall+alltoall; with --method "
            "bytecomp also all-compressed and myopic."
        ),
    ] = None
    memory_mb: Annotated[float | None, typer.Option(help="The most extra memory of the device.")] = None
    exempt_vectors: Annotated[
        bool, typer.Option("--exempt-vectors/--all-tensors", help="Leave biases and norms uncompressed, or not.")
    ] = True
    schedule: Annotated[
        str, typer.Option(help="backward, or pipelined: gathers hide in the next forward, as in DeAR; needs forward times.")
    ] = "backward"

    def limits(self) -> "Limits":
        """The planner's limits. Raises FormatError for an impossible memory, PlanError for other impossible values."""
        from gradwire.bench.names import split_names
        from gradwire.planner import Limits

        if self.memory_mb is not None and not 0 <= self.memory_mb < 1e12:
            raise FormatError(f"--memory-mb is {self.memory_mb}: it must be a number of megabytes from 0 to below 1e12.")
        return Limits(
            devices=None if self.devices is None else tuple(split_names(self.devices)),
            max_encodes=self.max_encodes,
            memory_bytes=None if self.memory_mb is None else round(self.memory_mb * 1e6),
            exempt_vectors=self.exempt_vectors,
            restrict=self.restrict,
            schedule=self.schedule,
        )


class PlanInputs(NamedTuple):
    """The arguments of `PlanningJob`: what the planner and the simulator compute with."""

    profile: "Profile"
    cluster: "Cluster"
    costs: "Costs"
    specs: "Sequence[Spec]"
    limits: "Limits"
    rules: "Rules"


@app.command()
@grouped
def simulate(
    *,
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    profile: Annotated[Path, typer.Option(help="Profile file: the model's times, tensor by tensor.")],
    cluster: ClusterFile,
    costs: CostsFile = None,
    trace: Annotated[Path | None, typer.Option(help="Trace for ui.perfetto.dev and chrome://tracing.")] = None,
    rules: RuleOptions,
    sweep: SweepOptions,
    json: Json = False,
) -> None:
    """Predict the step of a plan on a cluster: the timeline and the exposed time. Needs no GPU, no network and no training.

    With --inter or --nodes: the scaling factors of the plan and of plain DDP on many clusters. With --slow-node: their steps
    where one node's link is slower.
    """
    from gradwire.core import Cluster, Costs, Plan, Profile, check_writable, write_whole
    from gradwire.planner import Limits
    from gradwire.sim import as_table, as_trace, changed_rules
    from gradwire.sim import simulate as simulate_plan

    if trace is not None:
        check_writable(trace)
    times = Profile.load(profile)
    links = Cluster.load(cluster)
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())

    def rules_on(there: Cluster) -> "Rules":
        return changed_rules(times, there, **rules._asdict())

    inputs = PlanInputs(times, links, codecs, (), Limits(), rules_on(links))
    if points := points_of(inputs.cluster, sweep):
        refuse_with_sweep(trace=trace, slow_node=sweep.slow_node)
        from gradwire.planner import sweep_plan

        checked = Plan.load(plan)
        with bar("Simulating", 2 * len(points)) as seen:
            rows = sweep_plan(checked, times, points, codecs, rules_on, seen)
        show_sweep(rows, times, sweep.picture, json)
    elif sweep.slow_node is not None:
        if trace is not None:
            raise FormatError(f"--trace {trace} needs one cluster, and --slow-node has several. Leave out one of them.")
        simulate_slow_node(Plan.load(plan), inputs, sweep.slow_node, json)
    else:
        timeline = simulate_plan(Plan.load(plan), times, inputs.cluster, codecs, inputs.rules)
        if trace is not None:
            write_whole(trace, as_trace(timeline))
        typer.echo(timeline.to_json() if json else as_table(timeline), nl=False)


def simulate_slow_node(plan: "Plan", inputs: "PlanInputs", slower: str, json: bool) -> None:
    """Simulate a plan and plain DDP where one node's link is slower by each of these factors."""
    from gradwire.core import Costs
    from gradwire.planner import PLAIN_DDP, PlanningJob, make_plan, read_slower, steps_with_slow_node

    factors = read_slower(slower)
    job = PlanningJob(inputs.profile, inputs.cluster, Costs(codecs=()), rules=inputs.rules)
    plans = {PLAIN_DDP: make_plan(job, "ddp").plan, "the plan": plan}
    with bar("Simulating", len(factors)) as seen:
        answer = steps_with_slow_node(plans, inputs.profile, inputs.cluster, inputs.costs, factors, inputs.rules, seen)
    typer.echo(answer.as_json() if json else answer.as_table(), nl=False)


def points_of(cluster: "Cluster", sweep: SweepOptions) -> "list[Cluster]":
    """The clusters of a sweep, or none. Raises FormatError for unreadable lists, and for --picture without a sweep."""
    from gradwire.core import check_writable
    from gradwire.planner import clusters, read_nodes, read_rates
    from gradwire.report.pictures import check_picture

    inter, nodes, picture = sweep.inter, sweep.nodes, sweep.picture
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
        check_writable(picture)
    return clusters(cluster, rates, counts)


def refuse_with_sweep(**options: object) -> None:
    """Raises FormatError if an option is given that needs a single cluster."""
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise FormatError(f"{option} {value} needs one cluster, not a sweep. Leave out {option}, or --inter and --nodes.")


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
"""An example of a cluster file: 16 nodes with 10 Gb/s between them."""


@app.command()
@grouped
def plan(
    *,
    files: PlanFiles,
    given: GivenOptions,
    method: Annotated[
        str,
        typer.Option(
            help="joint, fusion, bucket, even, layerwise, grace, hipress, hitopkcomm, byteps-compress, bytecomp or ddp; "
            "`python -m benchmarks plan` in gradwire's repository also takes cupcake."
        ),
    ] = "joint",
    limits: LimitOptions,
    decode_calls: DecodeCalls = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="plan.json to write.")] = None,
    sweep: SweepOptions,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated methods of a sweep; also bound, which no plan exceeds.")
    ] = None,
    json: Json = False,
) -> None:
    """Plan the exchange of each gradient: buckets, compression, collectives and launch order. Needs no GPU and no network.

    --model measures a model here, on the processor, instead of reading a profile; without --costs the codecs too.
    --spec names the compressors that the plan may use. With --inter or --nodes: the scaling factors of several methods on
    many clusters. With --slow-node: a plan for each factor, and what each takes with all of them; -o writes the one with the
    least mean.
    """
    from gradwire.bench.names import split_names
    from gradwire.core import check_writable, show
    from gradwire.planner import SWEPT, check_some_may, sweep_methods
    from gradwire.sim import changed_rules

    if out is not None:
        check_writable(out)
    inputs = plan_inputs(files, given, limits, decode_calls)
    if points := points_of(inputs.cluster, sweep):
        refuse_with_sweep(out=out, method=None if method == "joint" else method, slow_node=sweep.slow_node)
        rules_on = partial(changed_rules, inputs.profile, decode_calls=decode_calls)
        chosen = list(SWEPT) if methods is None else split_names(methods)
        if not chosen:
            raise FormatError(f"--methods is {show(methods)}: it names no method. Write one or more, such as ddp,joint,bound.")
        with bar("Planning", len(points) * len(chosen)) as seen:
            rows = sweep_methods(inputs.profile, points, inputs.costs, inputs.specs, inputs.limits, rules_on, chosen, seen)
        show_sweep(rows, inputs.profile, sweep.picture, json)
        return
    if methods is not None:
        raise FormatError(
            f"--methods {methods} needs a sweep, because one plan has one method. Use --method, or add --inter or --nodes."
        )
    if method != "ddp":
        check_some_may(inputs.profile, inputs.specs, inputs.limits)
    if sweep.slow_node is not None:
        plan_slow_node(inputs, method, sweep.slow_node, out, json)
    else:
        plan_once(inputs, method, out, json)


def plan_inputs(files: PlanFiles, given: GivenOptions, limits: LimitOptions, decode_calls: str | None) -> PlanInputs:
    """Read the files, or measure the given model. Raises FormatError if there is no job, or two jobs, or no cluster."""
    from gradwire.bench.names import GivenModel, parse_spec
    from gradwire.core import Cluster, Costs, Profile
    from gradwire.sim import changed_rules

    model = GivenModel.of(*given)
    if model is not None and files.profile is not None:
        raise FormatError(f"{files.profile} and --model {model.model} are given, and one job is planned. Leave out one of them.")
    if model is None and files.profile is None:
        raise FormatError("there is no job to plan. Name a profile file, or a model by --model and --input.")
    if files.cluster is None:
        raise FormatError(f"there is no cluster to plan for. Pass --cluster cluster.json, a file such as this: {A_CLUSTER}")
    allowed, specs = limits.limits(), [parse_spec(each) for each in files.spec or ()]
    links = Cluster.load(files.cluster)
    codecs = Costs.load(files.costs) if files.costs is not None else Costs(codecs=())
    if model is not None:
        from gradwire.bench.models import measure_model

        times, codecs = measure_model(model, specs, None if files.costs is None else codecs)
    else:
        assert files.profile is not None
        times = Profile.load(files.profile)
    return PlanInputs(times, links, codecs, specs, allowed, changed_rules(times, links, decode_calls=decode_calls))


def plan_slow_node(inputs: PlanInputs, method: str, slower: str, out: Path | None, json: bool) -> None:
    """Plan for each factor by which one node's link is slower. Show what each plan takes, and write the best one."""
    from gradwire.planner import plans_for_slow_node, read_slower, steps_with_slow_node

    profile, cluster, costs, specs, limits, rules = inputs
    factors = read_slower(slower)
    with bar("Planning", len(factors)) as seen:
        plans = plans_for_slow_node(profile, cluster, costs, factors, specs, limits, rules, method, seen)
    answer = steps_with_slow_node(plans, profile, cluster, costs, factors, rules)
    if out is not None:
        plans[answer.best_plan.name].save(out)
    typer.echo(answer.as_json() if json else answer.as_table(), nl=False)


def plan_once(inputs: PlanInputs, method: str, out: Path | None, json: bool) -> None:
    """Make one plan, write it, and show it or what it decides."""
    import json as codec

    from gradwire.planner import PlanningJob, explain_plan, make_plan

    job = PlanningJob(*inputs)
    made = make_plan(job, method)
    if out is not None:
        made.plan.save(out)
    if json:
        typer.echo(codec.dumps(made.plan.to_dict() | {"planning_ms": made.planning_ms}))
    else:
        typer.echo(explain_plan(job, made), nl=False)


@app.command()
def import_profile(
    source: Annotated[Path, typer.Argument(help="A profile or codec times as published with ByteComp, or codec times as .csv.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="profile.json or costs.json to write.")],
    batch: Annotated[
        int | None, typer.Option(help="Samples per rank and step of a profile. The source does not tell. Default: 32.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="The device of a profile. The source does not tell. Default: V100.")] = None,
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

    if tensorboard is None:
        typer.echo(write_report(run, out))
        return
    from gradwire.record import Run
    from gradwire.record.tensorboard import export, folder_for

    with folder_for(tensorboard):
        typer.echo(write_report(run, out))
        export(Run.read(run), tensorboard)
    typer.echo(f"TensorBoard: {tensorboard}")
