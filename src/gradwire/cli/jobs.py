"""Commands that run something on this machine: demo, bench, profile, emulate, doctor."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.app import app
from gradwire.errors import FormatError, GradwireError

__all__ = ["bench", "demo", "doctor", "emulate", "profile"]


@app.command()
def demo(
    steps: Annotated[
        int,
        typer.Option(help="Training steps of each method; fewer make it shorter, and below 60 auto does not decide."),
    ] = 70,
    out: Annotated[Path, typer.Option(help="Folder for the page, the picture and the numbers.")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Train a transformer on two nodes at 500 Mb/s: plain DDP and gradwire, which decides by itself; about 90 seconds."""
    _check_extra("matplotlib", "sklearn")
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
    typer.echo(f"Picture: {summary.picture}\nReport: {out / 'report.html'}")


@app.command()
def bench(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Option(
            help="methods: those of --methods; ceiling: fake compression, to see where more stops paying; phases: what of the "
            "reduce and of the gather phase a step waits for; options: one bucket by each scheme, flat and hierarchical, beside "
            "the model's prediction."
        ),
    ] = "methods",
    jobs: Annotated[str, typer.Option(help="Comma-separated: transformer, mlp, resnet.")] = "transformer,mlp,resnet",
    links: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated rates between nodes, such as 500mbit, or unlimited. Default: "
            "100mbit,500mbit,1000mbit,unlimited; of options 200mbit."
        ),
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Auto in its three classes beside DDP and torch's hooks, on 2 and 4 nodes, to the step and to DDP's loss. Takes "
            "long, and says first how long. --jobs, --links, --nodes and --seed restrict it; its step counts are its own.",
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="With --matrix: folder for a file a cell. Cells that are there are not measured again.")
    ] = Path("benchmarks/results/matrix"),
    again: Annotated[bool, typer.Option("--again", help="With --matrix: measure those, too.")] = False,
    loss_steps: Annotated[
        int, typer.Option(help="With --matrix: the loss to reach is DDP's after so many steps.")
    ] = 150,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: floor, ddp, ddp-again, ddp-2mb, ddp-fp16, ddp-powersgd, gradwire:POLICY with identity, fp16, "
            "qsgd4, qsgd4-ef, a spec such as ErrorFeedback(TopK(0.01)) or a plan file as POLICY."
        ),
    ] = "floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4",
    nodes: Annotated[int | None, typer.Option(help="Emulated nodes. Default: 2; of the matrix 2, then 4.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks in each node. Default: 1; of options 2.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each method that count.")] = 30,
    warmup: Annotated[int, typer.Option(help="Steps of each method before those.")] = 5,
    turn: Annotated[int, typer.Option(help="Steps a method takes before the next has its turn.")] = 5,
    alone_steps: Annotated[
        int, typer.Option(help="Steps of one rank alone, for the scaling factor; 0 leaves it out.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the models and batches.")] = 0,
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Profile first, and put the simulator's steps beside the measured ones."),
    ] = False,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="With --predict: what the planner may use; several times for several. Default: QSGD and Top-k."
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Folder for a record of each gradwire method's run, for gradwire report.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the results, written after every group of cells.")] = None,
) -> None:
    """Measure jobs x links x methods, all methods of a job side by side in one run.

    --matrix, --predict, and --what with anything but methods, need gradwire's repository: a wheel does not have them.
    """
    from rich.console import Console

    _check_extra("sklearn")
    from gradwire.bench.names import split_names
    from gradwire.bench.progress import ProgressView
    from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench
    from gradwire.bench.table import FULL_WIDTH, tables
    from gradwire.core.checks import word
    from gradwire.core.repository import from_repository

    word("what", what, ("methods", "ceiling", "phases", "options"))
    if json is not None and not json.parent.is_dir():
        raise FormatError(f"--json {json}: there is no folder {json.parent}. Make it; nothing was measured yet.")
    kind = "matrix" if matrix else "predict" if predict else what
    _refuse_others(context, kind)
    campaigns: Any = (
        None if kind == "methods" else from_repository("campaigns.commands", f"`gradwire bench {_flag(kind)}`")
    )
    if matrix:
        campaigns.bench_matrix(split_names(jobs), links, nodes, loss_steps, seed, out, again)
        return
    if what == "options":
        grid = 2 if nodes is None else nodes, 2 if ranks_per_node is None else ranks_per_node
        campaigns.bench_options(split_names(links or "200mbit"), *grid, json)
        return
    chosen = campaigns.METHODS[what]() if what != "methods" else split_names(methods)
    request = BenchRequest(
        jobs=split_names(jobs),
        links=split_names(links or f"100mbit,500mbit,1000mbit{'' if predict else ',unlimited'}"),
        methods=campaigns.predictable(chosen) if predict else chosen,
        nodes=2 if nodes is None else nodes,
        ranks_per_node=1 if ranks_per_node is None else ranks_per_node,
        steps=steps,
        warmup_steps=warmup,
        turn_steps=turn,
        alone_steps=alone_steps,
        seed=seed,
        record=record,
    )
    if predict:
        campaigns.bench_predictions(request, spec or ["QSGD(bits=4)", "ErrorFeedback(TopK(0.01))"], json)
        return
    run = run_bench(request, emulation_problem(), ProgressView(Console(stderr=True)), json)
    console = Console() if sys.stdout.isatty() else Console(width=FULL_WIDTH)
    if campaigns is not None:
        for table, words in campaigns.TABLES[what](run):
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


_COMMON = {
    *("jobs", "links", "nodes", "ranks_per_node", "steps", "warmup", "turn"),
    *("alone_steps", "seed", "record", "json"),
}
_USED = {
    "matrix": {"matrix", "jobs", "links", "nodes", "seed", "loss_steps", "out", "again"},
    "options": {"what", "links", "nodes", "ranks_per_node", "json"},
    "ceiling": {*_COMMON, "what"},
    "phases": {*_COMMON, "what"},
    "predict": {*_COMMON - {"record"}, "methods", "predict", "spec"},
    "methods": {*_COMMON, "what", "methods"},
}
"""Options of `bench` that each kind of measurement looks at."""


def _check_extra(*names: str) -> None:
    """Before anything is measured: these modules, which the extra `bench` installs. Raises GradwireError."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise GradwireError(
            f"{' and '.join(missing)} cannot be imported, which this command needs. Run: pip install 'gradwire[bench]'"
        )


def _refuse_others(context: typer.Context, kind: str) -> None:
    """Raises FormatError for an option that was given and would not be looked at."""
    given = [name for name in context.params if _is_given(context, name)]
    for name in given:
        if name not in _USED[kind]:
            used = ", ".join(f"--{each.replace('_', '-')}" for each in sorted(_USED[kind]))
            raise FormatError(
                f"--{name.replace('_', '-')} has no effect with {_flag(kind)}, which looks at {used}. Leave it out."
            )


def _flag(kind: str) -> str:
    return f"--{kind}" if kind in ("matrix", "predict") else f"--what {kind}"


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command()
def profile(
    job: Annotated[str, typer.Option(help="transformer, mlp or resnet. For a model of your own: handle.profile(...).")],
    out: Annotated[Path, typer.Option(help="Folder for profile.json, cluster.json and costs.json.")] = Path("profile"),
    spec: Annotated[
        list[str] | None, typer.Option(help="Compressors to time, such as QSGD(bits=4); several times for several.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps with exchanges; as many are made without.")] = 20,
) -> None:
    """Measure a job, the links between its ranks and codecs: what `gradwire plan` and `simulate` read.

    Started under torchrun or emulate: gradwire emulate --inter 500mbit -- -m gradwire profile --job mlp
    """
    _check_extra("sklearn")
    from gradwire.bench.names import parse_spec
    from gradwire.bench.profiling import profile_job
    from gradwire.profiler.words import described

    specs = [parse_spec(each) for each in spec or ("QSGD(bits=4)",)]
    found = profile_job(job, out, steps, specs, specs[0])
    if os.environ.get("RANK") == "0":
        typer.echo(described(found) + f"Written to {out}.")


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
def doctor(
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait for each other.", min=1.0, max=86400.0)
    ] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Tell what this machine can do and, on every rank of a job, how fast its links are. Exit code 1 if there are problems.

    Started under torchrun or `gradwire emulate` with several ranks it measures the links between them:
    torchrun ... -m gradwire doctor
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what fails in its sockets is said here, once
    from rich.console import Console

    from gradwire.doctor import Report, examine, summary, tables

    with Console(stderr=True).status("") as status:

        def show(report: Report) -> None:
            status.stop()
            if json:
                typer.echo(report.to_json(), nl=False)
                return
            console = Console()
            for table in tables(report):
                console.print(table)
            typer.echo(summary(report))

        code = examine(timeout, show, status.update)
    raise typer.Exit(code)
