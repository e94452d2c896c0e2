"""Commands that run jobs on this machine: demo, bench, profile, emulate, doctor."""

import os
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.app import GivenConfig, GivenInput, GivenName, Json, Specs, app
from gradwire.errors import FormatError, GradwireError


@app.command()
def demo(
    link: Annotated[str, typer.Option(help="Rate of the link between the nodes.")] = "100mbit",
    seconds: Annotated[float, typer.Option(help="Seconds of training, for each of the two methods.", min=1.0)] = 45.0,
    out: Annotated[Path, typer.Option(help="Folder for the page, the picture and the numbers.")] = Path("runs/demo"),
    json: Json = False,
) -> None:
    """Train a transformer on two nodes with a slow link between them: plain DDP beside gradwire's plan="auto". 2 minutes."""
    _check_extra("matplotlib", "sklearn")
    from rich.console import Console

    from gradwire.bench.demo import JOB, NODES, closing_lines, run_demo, summary_table
    from gradwire.bench.jobs import make_job
    from gradwire.bench.progress import RaceView
    from gradwire.bench.runner import emulation_problem
    from gradwire.testbed import parse_rate

    parse_rate(link)
    problem = emulation_problem()
    if problem is not None:
        typer.echo(
            f"No slow link can be emulated here: {problem}. So this demo shows bytes instead of seconds. Run as root or allow "
            "user namespaces for the whole demo.",
            err=True,
        )
    watch = RaceView(Console(stderr=True), NODES * make_job(JOB).batch_size)
    summary = run_demo(link, seconds, out, problem, watch)
    if json:
        typer.echo(summary.to_json(), nl=False)
        return
    Console().print(summary_table(summary))
    typer.echo("\n".join([*closing_lines(summary), f"Picture: {summary.picture}", f"Report: {out / 'report.html'}"]))


@app.command()
def bench(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Option(
            help="methods: the methods of --methods; ceiling: fake compression, the gain that more compression could bring; "
            "phases: the exposed time of the reduce and the gather phase; options: one bucket by each scheme, flat and "
            "hierarchical, beside the predicted time."
        ),
    ] = "methods",
    jobs: Annotated[
        str, typer.Option(help="Comma-separated: transformer, mlp, resnet, embeddings.")
    ] = "transformer,mlp,resnet",
    model: GivenName = None,
    config: GivenConfig = None,
    shape: GivenInput = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated rates between nodes, such as 500mbit or unlimited. Default: "
            "100mbit,500mbit,1000mbit,unlimited; for --papers 100mbit,200mbit,500mbit; for options 200mbit."
        ),
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Measure auto's three accuracy classes beside DDP and torch's hooks, on 2 and 4 nodes: step times and times to "
            "DDP's loss. Prints an estimate of its duration. Takes --jobs, --links, --nodes and --seed.",
        ),
    ] = False,
    papers: Annotated[
        bool,
        typer.Option(
            "--papers",
            help="Measure the papers' systems beside gradwire's joint plan and their predictions, on 4 nodes and on 2 nodes of 2 "
            "ranks. The systems without a compressor of their own choose from --spec.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --matrix or --papers: folder for the cells' results. Existing cells are kept. Default: "
            "benchmarks/results/matrix or benchmarks/results/papers."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --matrix or --papers: measure existing cells again.")
    ] = False,
    loss_steps: Annotated[int, typer.Option(help="With --matrix: the target is DDP's loss after so many steps.")] = 150,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: floor, ddp, ddp-again, ddp-2mb, ddp-fp16, ddp-powersgd, gradwire:POLICY. POLICY is identity, "
            "fp16, qsgd4, qsgd4-ef, a spec such as ErrorFeedback(TopK(0.01)), or a policy or plan file."
        ),
    ] = "floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4",
    nodes: Annotated[int | None, typer.Option(help="Emulated nodes. Default: 2; for --matrix 2 and 4.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of each node. Default: 1; for options 2.")] = None,
    intra: Annotated[
        str | None, typer.Option(help="Rate inside each node, which all its ranks share, as behind a PCIe switch.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Measured steps of each method.")] = 30,
    warmup: Annotated[int, typer.Option(help="Steps of each method before the measured steps.")] = 5,
    turn: Annotated[int, typer.Option(help="Steps that a method takes in one turn.")] = 5,
    alone_steps: Annotated[int, typer.Option(help="Steps of one rank alone, for the scaling factor; 0: none.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the models and batches.")] = 0,
    predict: Annotated[bool, typer.Option("--predict", help="Show predicted steps beside the measured steps.")] = False,
    spec: Specs = None,
    record: Annotated[Path | None, typer.Option(help="Folder for records of runs, for gradwire report.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the results, written after every group of cells.")] = None,
) -> None:
    """Measure jobs x links x methods, all methods of a job side by side in one run.

    --matrix, --papers, --predict and --what ceiling, phases or options need gradwire's repository. A wheel does not contain
    them. --spec (with --predict or --papers) names what the planner may use; the default is QSGD and Top-k, and for --papers
    2 bits too.
    """
    from rich.console import Console

    _check_extra("sklearn")
    from gradwire.bench.names import GivenModel, split_names
    from gradwire.bench.progress import ProgressView
    from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench
    from gradwire.bench.table import FULL_WIDTH, tables
    from gradwire.core import from_repository, word

    word("what", what, ("methods", "ceiling", "phases", "options"))
    if json is not None and not json.parent.is_dir():
        raise FormatError(
            f"--json {json}: the folder {json.parent} does not exist. Create the folder; nothing was measured."
        )
    flags = {"matrix": matrix, "papers": papers, "predict": predict, "model": model is not None and what == "methods"}
    kind = next((name for name, given in flags.items() if given), what)
    _refuse_others(context, kind)
    given = GivenModel.of(model, config, shape)
    campaigns: Any = (
        None
        if kind in ("methods", "model")
        else from_repository("campaigns.commands", f"`gradwire bench {_flag(kind)}`")
    )
    if matrix:
        campaigns.bench_matrix(split_names(jobs), links, nodes, loss_steps, seed, out or _RESULTS / "matrix", again)
        return
    if papers:
        shape_given = nodes is not None or ranks_per_node is not None
        campaigns.bench_papers(
            split_names(jobs),
            links,
            [(nodes or 2, ranks_per_node or 1)] if shape_given else None,
            {"steps": steps, "warmup_steps": warmup, "turn_steps": turn, "seed": seed, "again": again, "intra": intra},
            spec,
            out or _RESULTS / "papers",
        )
        return
    if what == "options":
        grid = 2 if nodes is None else nodes, 2 if ranks_per_node is None else ranks_per_node
        campaigns.bench_options(split_names(links or "200mbit"), *grid, json)
        return
    chosen = campaigns.METHODS[what]() if what != "methods" else split_names(methods)
    request = BenchRequest(
        jobs=split_names(jobs) if given is None else [given.model],
        model=given,
        links=split_names(links or f"100mbit,500mbit,1000mbit{'' if predict else ',unlimited'}"),
        methods=campaigns.predictable(chosen) if predict else chosen,
        nodes=2 if nodes is None else nodes,
        ranks_per_node=1 if ranks_per_node is None else ranks_per_node,
        intra=intra,
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
    problem = emulation_problem()
    if given is not None:
        from gradwire.bench.models import ModelJob

        ModelJob(given)  # an error is told here once, before ranks start
    run = run_bench(request, problem, ProgressView(Console(stderr=True)), json)
    console = Console() if sys.stdout.isatty() else Console(width=FULL_WIDTH)
    for shown in tables(run, console.width) if campaigns is None else chain(*campaigns.TABLES[what](run)):
        console.print(shown)
    for note in run.notes:
        typer.echo(f"Note: {note}")
    for failure in run.failures:
        typer.echo(f"FAILED: {failure}", err=True)
    if run.failures:
        raise typer.Exit(1)


_RESULTS = Path("benchmarks/results")
_SIZE = {"jobs", "links", "nodes", "ranks_per_node", "intra", "steps", "warmup", "turn"}
_COMMON = _SIZE | {"alone_steps", "seed", "record", "json"}
_USED = {
    "matrix": {"matrix", "jobs", "links", "nodes", "seed", "loss_steps", "out", "again"},
    "papers": {*_SIZE, "papers", "seed", "spec", "out", "again"},
    "options": {"what", "links", "nodes", "ranks_per_node", "json"},
    "ceiling": {*_COMMON, "what"},
    "phases": {*_COMMON, "what"},
    "predict": {*_COMMON - {"record"}, "methods", "predict", "spec"},
    "methods": {*_COMMON, "what", "methods"},
    "model": {*_COMMON - {"jobs"}, "what", "methods", "model", "config", "shape"},
}
"""The options of `bench` that each kind of measurement uses."""


def _check_extra(*names: str) -> None:
    """Raises GradwireError if a module of the extra `bench` is missing."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise GradwireError(
            f"this command needs {' and '.join(missing)}, of the extra bench. Run: pip install '.[bench]' in a checkout of "
            "gradwire, or: pip install 'gradwire-...whl[bench]'"
        )


def _refuse_others(context: typer.Context, kind: str) -> None:
    """Raises FormatError for a given option that this kind of measurement does not use."""
    for name in sorted(context.params.keys() - _USED[kind]):
        source, option = context.get_parameter_source(name), _option(name)
        if source is not None and source.name == "COMMANDLINE":
            used = ", ".join(sorted(map(_option, _USED[kind])))
            raise FormatError(f"{option} has no effect with {_flag(kind)}, which uses {used}. Leave out {option}.")


def _option(name: str) -> str:
    return "--input" if name == "shape" else f"--{name.replace('_', '-')}"


def _flag(kind: str) -> str:
    return f"--{kind}" if kind in ("matrix", "papers", "predict", "model") else f"--what {kind}"


@app.command()
def profile(
    job: Annotated[
        str, typer.Option(help="transformer, mlp, resnet or embeddings. For your own model, call handle.profile(...).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for profile.json, cluster.json and costs.json.")] = Path("profile"),
    spec: Specs = None,
    steps: Annotated[int, typer.Option(help="Steps with exchanges. As many steps without exchanges follow.")] = 20,
) -> None:
    """Measure a job, the links between its ranks, and the codecs of --spec, for `gradwire plan` and `gradwire simulate`.

    Start it with torchrun or emulate: gradwire emulate --inter 500mbit -- -m gradwire profile --job mlp
    """
    _check_extra("sklearn")
    from gradwire.bench.jobs import profile_job
    from gradwire.bench.names import parse_spec
    from gradwire.profiler import described

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
    flight: Annotated[
        bool, typer.Option("--flight", help="Read flight records, which ranks whose step failed wrote.")
    ] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="The flight records, of all ranks.")] = None,
    json: Json = False,
) -> None:
    """Examine this machine, and with several ranks the links between them. The exit code is 1 if there are problems.

    With --flight FILES... say which rank was behind when a step failed, and in what.

    To measure the links, start the ranks with torchrun or `gradwire emulate`: torchrun ... -m gradwire doctor
    """
    if flight or files:
        from gradwire.doctor import behind
        from gradwire.transport import FlightRecord

        if not (flight and files):
            raise FormatError("the doctor reads files only as `gradwire doctor --flight FILES...`, of all ranks.")
        typer.echo("\n".join(behind([FlightRecord.load(path) for path in files])))
        raise typer.Exit(0)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the doctor reports errors of torch's sockets itself
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
