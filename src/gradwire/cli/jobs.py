"""Commands that run on this machine: demo, bench, profile, emulate, doctor, lighthouse."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer

from gradwire.cli.app import GivenOptions, Json, Specs, app, grouped
from gradwire.errors import FormatError, GradwireError

_JOBS = "transformer,mlp,resnet"
"""The jobs that `gradwire bench` measures where none is named."""


@app.command()
def demo(
    link: Annotated[str, typer.Option(help="Rate of the link between the nodes.")] = "100mbit",
    seconds: Annotated[float, typer.Option(help="Seconds of training, for each of the two methods.", min=1.0)] = 25.0,
    out: Annotated[Path, typer.Option(help="Folder for the page, the picture and the numbers.")] = Path("runs/demo"),
    json: Json = False,
) -> None:
    """Train a transformer on two nodes with a slow link between them: plain DDP next to gradwire's plan="auto". 2 minutes."""
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


class BenchSize(NamedTuple):
    """How much `gradwire bench` measures of each method."""

    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 2
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of each node.")] = 1
    steps: Annotated[int, typer.Option(help="Measured steps of each method.")] = 30
    warmup: Annotated[int, typer.Option(help="Steps of each method before the measured steps.")] = 5
    device: Annotated[
        str, typer.Option(help="cpu, or sleeping: computation is a timed sleep, so that many nodes fit on few cores.")
    ] = "cpu"


class BenchFiles(NamedTuple):
    """Options for the output of `gradwire bench`."""

    record: Annotated[Path | None, typer.Option(help="Folder for records of runs, for gradwire report.")] = None
    json: Annotated[Path | None, typer.Option(help="File for the results, written after every group of cells.")] = None


@app.command()
@grouped
def bench(
    *,
    jobs: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated: transformer, mlp, resnet, embeddings, bert. Default: {_JOBS}. Not with --model."),
    ] = None,
    given: GivenOptions,
    links: Annotated[
        str, typer.Option(help="Comma-separated rates between nodes, such as 500mbit or unlimited.")
    ] = "100mbit,500mbit,1000mbit,unlimited",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: floor, ddp, ddp-again, ddp-2mb, ddp-fp16, ddp-powersgd, gradwire:POLICY. POLICY is identity, "
            "fp16, qsgd4, qsgd4-ef, a spec such as ErrorFeedback(TopK(0.01)), or a policy or plan file."
        ),
    ] = "floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4",
    size: BenchSize,
    files: BenchFiles,
) -> None:
    """Measure jobs x links x methods, all methods of a job side by side in one run.

    In gradwire's repository `python -m benchmarks methods` has more options and methods.
    """
    _check_extra("sklearn")
    from rich.console import Console

    from gradwire.bench.names import MOST_DECIDING_STEPS, GivenModel, split_names
    from gradwire.bench.progress import ProgressView
    from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench
    from gradwire.bench.table import print_run
    from gradwire.core import check_writable

    if files.json is not None:
        check_writable(files.json)
    model = GivenModel.of(*given)
    if model is not None and jobs is not None:
        raise FormatError(f"--jobs {jobs} has no effect with --model, which is the one job. Leave out one of them.")
    request = BenchRequest(
        jobs=split_names(_JOBS if jobs is None else jobs) if model is None else [model.model],
        model=model,
        links=split_names(links),
        methods=split_names(methods),
        device=size.device,
        nodes=size.nodes,
        ranks_per_node=size.ranks_per_node,
        steps=size.steps,
        warmup_steps=size.warmup,
        deciding_steps=MOST_DECIDING_STEPS,
        record=files.record,
    )
    problem = emulation_problem()
    if model is not None:
        from gradwire.bench.models import ModelJob

        ModelJob(model)  # raises its errors once, before ranks start
    raise typer.Exit(print_run(run_bench(request, problem, ProgressView(Console(stderr=True)), files.json)))


def _check_extra(*names: str) -> None:
    """Raises GradwireError if a module of the extra `bench` is missing."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise GradwireError(
            f"this command needs {' and '.join(missing)}, of the extra bench. Run: pip install '.[bench]' in a checkout of "
            "gradwire, or: pip install 'gradwire-...whl[bench]'"
        )


@app.command()
def profile(
    job: Annotated[
        str, typer.Option(help="transformer, mlp, resnet or embeddings. For your own model, call handle.profile(...).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for profile.json, cluster.json and costs.json.")] = Path("profile"),
    spec: Specs = None,
    steps: Annotated[int, typer.Option(help="Steps with exchanges. As many steps without exchanges follow.")] = 20,
    device: Annotated[str, typer.Option(help="cpu, or sleeping: computation is a timed sleep.")] = "cpu",
) -> None:
    """Measure a job, the links between its ranks, and the codecs of --spec, for `gradwire plan` and `gradwire simulate`.

    Start it with torchrun or emulate: gradwire emulate --inter 500mbit -- -m gradwire profile --job mlp
    """
    _check_extra("sklearn")
    from gradwire.bench.jobs import make_job, profile_job
    from gradwire.bench.names import check_device, parse_spec
    from gradwire.bench.sleeping_jobs import SleepingJob
    from gradwire.core import check_writable, make_folder
    from gradwire.profiler import described

    specs = [parse_spec(each) for each in spec or ("QSGD(bits=4)",)]
    made = make_job(job)
    if os.environ.get("RANK") == "0":
        check_writable(make_folder(out) / "profile.json")
    found = profile_job(SleepingJob(made) if check_device(device) == "sleeping" else made, out, steps, specs, specs[0])
    if os.environ.get("RANK") == "0":
        typer.echo(described(found) + f"Written to {out}.")


@app.command()
def emulate(
    command: Annotated[list[str], typer.Argument(help="After `--`: a script and its arguments, or -m MODULE.")],
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks in each node.")] = 1,
    inter: Annotated[str | None, typer.Option(help="Rate between nodes, such as 500mbit. Default: no limit.")] = None,
    intra: Annotated[str | None, typer.Option(help="Rate inside a node, such as 10gbit. Default: no limit.")] = None,
    sites: Annotated[int, typer.Option(help="Sites with a network of their own between them; nodes are shared out.")] = 1,
    wan: Annotated[
        str | None,
        typer.Option(help='Between sites: "50ms 2ms loss 0.1% up 20mbit down 100mbit port 443". First the round trip.'),
    ] = None,
) -> None:
    """Run any torchrun script on an emulated cluster: gradwire emulate --inter 500mbit -- train.py --epochs 1"""
    from gradwire import testbed

    if nodes == 1 and inter is not None:
        raise FormatError(
            f"--inter {inter} is the rate between nodes, and --nodes is 1: no message would cross it. Take 2 nodes or more, or "
            "leave out --inter."
        )
    testbed.reexec_in_user_namespace_if_needed([sys.executable, *sys.orig_argv[1:]])
    raise typer.Exit(testbed.emulate(nodes, ranks_per_node, inter, intra, command, sites, wan))


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds that ranks wait for each other.", min=1.0, max=86400.0)] = 60.0,
    flight: Annotated[bool, typer.Option("--flight", help="Read flight records, which ranks whose step failed wrote.")] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="The flight records, of all ranks.")] = None,
    json: Json = False,
) -> None:
    """Examine this machine, and with several ranks the links between them. The exit code is 1 if there are problems.

    With --flight FILES... say which rank was behind when a step failed, and in what.

    To measure the links, start the ranks with torchrun or `gradwire emulate`: torchrun ... -m gradwire doctor
    """
    if flight or files:
        from gradwire.doctor.flight import behind
        from gradwire.transport import FlightRecord

        if not (flight and files):
            raise FormatError("the doctor reads files only as `gradwire doctor --flight FILES...`, of all ranks.")
        if json:
            raise FormatError("--json has no effect with --flight, whose answer is text. Leave out --json.")
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


@app.command()
def lighthouse(
    bind: Annotated[str, typer.Option(help="Address and port to listen at. Members must reach it.")] = "0.0.0.0:29510",
    min_replicas: Annotated[int, typer.Option(help="The least members of a step, where scripts ask for fewer.", min=1)] = 1,
    silence: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which a member is gone.", min=0.3, max=86400.0)
    ] = 1.0,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for a living member that is behind.", min=0.1, max=86400.0)
    ] = 600.0,
) -> None:
    """Name the members of every step of an elastic job, for `gw.elastic`: torchft's lighthouse. Runs until it is interrupted."""
    if find_spec("torchft") is None:
        raise GradwireError("this command needs the package torchft, which is not installed. Run: pip install 'torchft>=0.2'")
    from threading import Event

    os.environ.setdefault("RUST_LOG", "error")  # torchft's log has several lines for each step
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=bind,
            min_replicas=min_replicas,
            join_timeout_ms=round(1e3 * patience),
            quorum_tick_ms=20,
            heartbeat_timeout_ms=round(1e3 * silence),
        )
    except Exception as error:  # torchft has a RuntimeError for all
        raise GradwireError(
            f"the lighthouse cannot listen at {bind!r}: {error}. Pass --bind with an address of this machine and a free port, "
            "such as 0.0.0.0:29510 or [::]:29510."
        ) from error
    host, port = bind.rpartition(":")[0], urlsplit(server.address()).port
    everywhere = host in ("", "0.0.0.0", "[::]")  # members reach it by this machine's name
    typer.echo(f"the lighthouse listens at {server.address() if everywhere else f'http://{host}:{port}'}")
    try:
        Event().wait()
    except KeyboardInterrupt:
        server.shutdown()
