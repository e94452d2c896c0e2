"""The command line: thin over functions. Nothing heavy is imported before a command needs it."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradwire.errors import GradwireError

__all__ = ["app", "main"]

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


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each method; fewer make it shorter.")] = 120,
    out: Annotated[Path, typer.Option(help="Folder for summary.json, demo.png and bench.json.")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Train a transformer on two nodes at 500 Mb/s: plain DDP and gradwire in turns, about two minutes."""
    from rich.console import Console

    from gradwire.bench.demo import run_demo, summary_table
    from gradwire.bench.progress import ProgressView
    from gradwire.bench.runner import emulation_problem

    summary = run_demo(steps, out, emulation_problem(), ProgressView(Console(stderr=True)))
    if json:
        typer.echo(summary.to_json(), nl=False)
        return
    console = Console()
    console.print(summary_table(summary))
    ddp, ours = summary.methods["ddp"], summary.methods["gradwire"]
    interval = f"{summary.speedup_low:.2f} to {summary.speedup_high:.2f}"
    typer.echo(
        f"gradwire: {summary.speedup:.2f} times as fast as plain DDP ({summary.speed}; 95 % interval {interval}), "
        f"{summary.bytes_ratio:.1f} times fewer bytes, loss {ours.final_loss:.3f} against {ddp.final_loss:.3f}."
    )
    if summary.problem is not None:
        typer.echo(
            f"The speed at {summary.link} is computed from bytes and rate, because no link can be emulated here: "
            f"{summary.problem}. Run as root, or where user namespaces are allowed, to measure it."
        )
    typer.echo(f"Picture: {summary.picture}")


@app.command()
def bench(
    what: Annotated[
        str,
        typer.Option(help="methods: those of --methods; ceiling: fake compression, to see where more stops paying."),
    ] = "methods",
    jobs: Annotated[str, typer.Option(help="Comma-separated: transformer, mlp, resnet.")] = "transformer,mlp,resnet",
    links: Annotated[
        str, typer.Option(help="Comma-separated rates between nodes, such as 500mbit, or unlimited.")
    ] = "100mbit,500mbit,1000mbit,unlimited",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: floor, ddp, ddp-2mb, ddp-fp16, ddp-powersgd, gradwire:POLICY with identity, fp16, "
            "qsgd4, qsgd4-ef, a spec such as ErrorFeedback(TopK(0.01)) or a plan file as POLICY."
        ),
    ] = "floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4",
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks in each node.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of each method that count.")] = 30,
    warmup: Annotated[int, typer.Option(help="Steps of each method before those.")] = 5,
    turn: Annotated[int, typer.Option(help="Steps a method takes before the next has its turn.")] = 5,
    alone_steps: Annotated[
        int, typer.Option(help="Steps of one rank alone, for the scaling factor; 0 leaves it out.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the models and batches.")] = 0,
    json: Annotated[Path | None, typer.Option(help="File for the results, written after every group of cells.")] = None,
) -> None:
    """Measure jobs x links x methods, all methods of a job side by side in one run."""
    from rich.console import Console

    from gradwire.bench.ceiling import ceiling_methods, ceiling_tables
    from gradwire.bench.names import split_names
    from gradwire.bench.progress import ProgressView
    from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench
    from gradwire.bench.table import FULL_WIDTH, tables
    from gradwire.core.checks import word

    word("what", what, ("methods", "ceiling"))

    request = BenchRequest(
        jobs=split_names(jobs),
        links=split_names(links),
        methods=ceiling_methods() if what == "ceiling" else split_names(methods),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        steps=steps,
        warmup_steps=warmup,
        turn_steps=turn,
        alone_steps=alone_steps,
        seed=seed,
    )
    run = run_bench(request, emulation_problem(), ProgressView(Console(stderr=True)), json)
    console = Console() if sys.stdout.isatty() else Console(width=FULL_WIDTH)
    if what == "ceiling":
        for table, words in ceiling_tables(run):
            console.print(table)
            console.print(words)
    else:
        for table in tables(run, console.width):
            console.print(table)
    for note in run.notes:
        typer.echo(f"Note: {note}")
    for failure in run.failures:
        typer.echo(f"FAILED: {failure}", err=True)
    if run.failures:
        raise typer.Exit(1)


@app.command()
def emulate(
    command: Annotated[list[str], typer.Argument(help="After `--`: a script and its arguments, or -m MODULE.")],
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks in each node.")] = 1,
    inter: Annotated[str | None, typer.Option(help="Rate between nodes, such as 500mbit. Default: no limit.")] = None,
    intra: Annotated[str | None, typer.Option(help="Rate inside a node, such as 10gbit. Default: no limit.")] = None,
) -> None:
    """Run any torchrun script on an emulated cluster: gradwire emulate --inter 500mbit -- train.py --epochs 1"""
    from gradwire import testbed

    testbed.reexec_in_user_namespace_if_needed([sys.executable, *sys.orig_argv[1:]])
    raise typer.Exit(testbed.emulate(nodes, ranks_per_node, inter, intra, command))


@app.command()
def options(
    nodes: Annotated[int | None, typer.Option(help="Nodes of the cluster. With 1, only flat options apply.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks a node. With 1, only flat options apply.")] = None,
    devices: Annotated[str, typer.Option(help="Comma-separated: where encodes and decodes may run.")] = "gpu,cpu",
    max_encodes: Annotated[int | None, typer.Option(help="At most so many encodes, 0 to 4.")] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, and no others: allreduce, allgather, reducescatter+allgather, reduce+broadcast, "
            "alltoall+allgather, gather+broadcast."
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
    count: Annotated[bool, typer.Option("--count", help="Print how many, and nothing else.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON instead of a table.")] = False,
) -> None:
    """List the ways in which a bucket can be synchronised: ByteComp's tree of compression options, 4341 in all.

    A star marks what travels compressed. The tasks are what a plan's buckets have as their option.
    """
    from gradwire.bench.names import split_names
    from gradwire.planner.listing import as_json, as_table, choose, shape_note

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
    json: Annotated[bool, typer.Option("--json", help="Print the whole timeline as JSON instead of a table.")] = False,
) -> None:
    """Predict the step of a plan on a cluster: who works when, and what nothing hides. No GPU, no network, no training."""
    from gradwire.core import Cluster, Costs, Plan, Profile
    from gradwire.core.files import write_whole
    from gradwire.sim.rules import changed_rules
    from gradwire.sim.table import as_table
    from gradwire.sim.timeline import simulate as simulate_plan
    from gradwire.sim.trace import as_trace

    times = Profile.load(profile)
    rules = changed_rules(
        times, device=device, codec_on=codec_on, decode=decode, decode_calls=decode_calls, lanes=lanes
    )
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())
    timeline = simulate_plan(Plan.load(plan), times, Cluster.load(cluster), codecs, rules)
    if trace is not None:
        write_whole(trace, as_trace(timeline))
    typer.echo(timeline.to_json() if json else as_table(timeline), nl=False)


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
        typer.Option(help="joint, fusion, cupcake, bucket, even, layerwise, hipress, bytecomp or ddp."),
    ] = "joint",
    devices: Annotated[
        str | None, typer.Option(help="Comma-separated: where codecs may run. Default: where all were measured.")
    ] = None,
    max_encodes: Annotated[int | None, typer.Option(help="At most so many encodes of one bucket, 0 to 4.")] = None,
    memory_mb: Annotated[float | None, typer.Option(help="Extra memory of the device at most.")] = None,
    exempt_vectors: Annotated[
        bool, typer.Option("--exempt-vectors/--all-tensors", help="Leave biases and norms uncompressed, or not.")
    ] = True,
    decode_calls: Annotated[
        str | None, typer.Option(help="A decode of several payloads: each by a call, or one for all. Default: each.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="plan.json to write.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of an explanation.")] = False,
) -> None:
    """Work out how each gradient should travel: buckets, compression, collectives and launch order. No GPU, no network."""
    import json as codec

    from gradwire.bench.names import parse_spec, split_names
    from gradwire.core import Cluster, Costs, Profile
    from gradwire.planner.drafts import Job, Limits
    from gradwire.planner.methods import explanation, make
    from gradwire.sim.rules import changed_rules

    times = Profile.load(profile)
    codecs = Costs.load(costs) if costs is not None else Costs(codecs=())
    limits = Limits(
        devices=None if devices is None else tuple(split_names(devices)),
        max_encodes=max_encodes,
        memory_bytes=None if memory_mb is None else round(memory_mb * 1e6),
        exempt_vectors=exempt_vectors,
    )
    specs = [parse_spec(each) for each in spec or ()]
    job = Job(times, Cluster.load(cluster), codecs, specs, limits, changed_rules(times, decode_calls=decode_calls))
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
def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds that ranks wait for each other.", min=1.0)] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Tell what this machine can do and, on every rank of a job, how fast its links are. Exit code 1 if there are problems.

    Started under torchrun or `gradwire emulate` with several ranks it measures the links between them:
    torchrun ... -m gradwire doctor
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what its sockets try again and again is told in words here
    from rich.console import Console

    from gradwire.doctor import Report, examine, summary, tables
    from gradwire.doctor.progress import Spinner

    with Spinner(Console(stderr=True)) as spinner:

        def show(report: Report) -> None:
            spinner.stop()
            if json:
                typer.echo(report.to_json(), nl=False)
                return
            console = Console()
            for table in tables(report):
                console.print(table)
            typer.echo(summary(report))

        code = examine(timeout, show, spinner.say)
    raise typer.Exit(code)


def main() -> None:
    """The `gradwire` program. An error that gradwire raises on purpose is one message and exit code 2."""
    try:
        app(prog_name="gradwire")
    except GradwireError as error:
        typer.echo(f"gradwire: {error}", err=True)
        sys.exit(2)
