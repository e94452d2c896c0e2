"""The matrix: jobs x links x methods, all methods of a cell group side by side in one run.

A cell group is one job over one link. Its ranks are one set of processes, in which the methods take turns
(`gradwire.bench.worker`); between groups the link's rate is changed.
"""

import collections
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gradwire.bench.events import StepEvent, parse_event
from gradwire.bench.loopback import Loopback
from gradwire.bench.names import UNLIMITED, check_job, check_method
from gradwire.bench.recorded import complete_runs
from gradwire.bench.results import Alone, BenchRun, Cell, WorkerOrder, WorkerRecord
from gradwire.bench.statistics import alone_from, cells_from
from gradwire.core.files import make_folder
from gradwire.core.made import Made
from gradwire.core.specs import Spec
from gradwire.errors import FormatError, TestbedError
from gradwire.testbed import EmulatedCluster, parse_rate, permission_problem, reexec_in_user_namespace_if_needed
from gradwire.testbed.cluster import MOST_NODES
from gradwire.testbed.output import LineCallback

__all__ = ["BenchRequest", "RunWatch", "emulation_problem", "run_bench", "run_profile"]

FEWEST_WARMUP_STEPS = 3
"""DDP lays its buckets out anew after its first step, and torch's PowerSGD hook begins with the third."""
ALONE_WARMUP_STEPS = 10
FAILURE_LINES = 40


@dataclass(frozen=True)
class BenchRequest:
    """What to measure. Raises `FormatError`, `SpecError` or `TestbedError` naming the first thing that is wrong."""

    jobs: Sequence[str]
    links: Sequence[str]
    """Rates such as "500mbit", or "unlimited"."""
    methods: Sequence[str]
    nodes: int = 2
    ranks_per_node: int = 1
    steps: int = 30
    warmup_steps: int = 5
    turn_steps: int = 5
    deciding_steps: int = 0
    """Before its warm-up, a method that decides while it runs takes steps until it has decided, but no more than these."""
    go_on_to: Mapping[str, int] = field(default_factory=dict)
    """By method: after the steps that count it goes on until it has made so many in all, and is evaluated now and then."""
    alone_steps: int = 100
    """Steps of one rank alone, for the scaling factor; 0 leaves it out."""
    seed: int = 0
    record: Path | None = None
    """Folder for recorded runs of gradwire's methods: JOB-LINK/METHOD/run.json."""
    collective_timeout_s: float = 120.0
    group_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for job in self.jobs:
            check_job(job)
        for method in self.methods:
            check_method(method)
        for link in self.links:
            gbps_of(link)
        for what, names in (("job", self.jobs), ("link", self.links), ("method", self.methods)):
            if not names:
                raise FormatError(f"there is no {what} to measure: the list of {what}s is empty.")
        least = {
            "nodes": 1,
            "ranks_per_node": 1,
            "steps": 1,
            "turn_steps": 1,
            "alone_steps": 0,
            "seed": 0,
            "deciding_steps": 0,
        }
        for name, low in (least | {"warmup_steps": FEWEST_WARMUP_STEPS}).items():
            if getattr(self, name) < low:
                raise FormatError(f"{name} is {getattr(self, name)}; it must be at least {low}.")
        if self.nodes > MOST_NODES:
            raise FormatError(f"nodes is {self.nodes}; an emulated cluster has 1 to {MOST_NODES} nodes.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node


class RunWatch(Protocol):
    """Who looks on: a progress bar, or nobody."""

    def group(self, title: str, methods: Sequence[str], steps: int) -> AbstractContextManager[object]:
        """A cell group is running while the context lasts."""

    def step(self, event: StepEvent) -> None:
        """Rank 0 has made a step."""


class Network(Protocol):
    """What `EmulatedCluster` and `Loopback` have in common."""

    def set_inter(self, rate: str | None) -> None:
        """Change the rate of every node's link."""

    def run(self, argv: list[str], *, env: dict[str, str] | None, on_line: LineCallback, timeout: float | None) -> int:
        """Execute `argv` once per rank."""


def gbps_of(link: str) -> float | None:
    """The rate of a link; None for an unlimited one. Raises `TestbedError` for text that is no rate."""
    return None if link == UNLIMITED else parse_rate(link) / 1e9


def emulation_problem() -> str | None:
    """Why no link can be emulated here, or None if one can; then this process is where it can, by starting anew if
    it must."""
    problem = permission_problem()
    if problem is None:
        reexec_in_user_namespace_if_needed([sys.executable, *sys.orig_argv[1:]])
    return problem


def run_bench(request: BenchRequest, problem: str | None, watch: RunWatch, save_to: Path | None = None) -> BenchRun:
    """Measure everything asked for. `problem` is `emulation_problem()`: where it is set, plain loopback is used.

    With `save_to` the file is written after every group, so that an interrupted run leaves what it has measured.
    A method that fails is a cell with its failure; nothing is raised for it.
    """
    links, notes = _measurable(request, problem)
    if request.record is not None:
        make_folder(request.record)
    runner = _Runner(request, problem, notes, watch, save_to)
    for job in request.jobs if request.alone_steps else ():
        runner.measure_alone(job)
    with runner.open_network() as network:
        for link in links:
            network.set_inter(None if link == UNLIMITED else link)
            for job in request.jobs:
                runner.measure_group(network, job, link)
    return runner.result()


def run_profile(
    request: BenchRequest, job: str, link: str, specs: Sequence[Spec], steps: int, folder: Path, watch: RunWatch
) -> tuple[str, ...]:
    """Run `gradwire profile` on the request's emulated cluster; its files are written to `folder`. Returns what it warned of.

    Raises TestbedError if it fails, with what its ranks said.
    """
    said: collections.deque[str] = collections.deque(maxlen=FAILURE_LINES)
    argv = [sys.executable, "-u", "-m", "gradwire", "profile", "--job", job, "--out", str(folder)]
    argv += ["--steps", str(steps)]
    for spec in specs:
        argv += ["--spec", repr(spec)]
    with EmulatedCluster(request.nodes, request.ranks_per_node, None if link == UNLIMITED else link) as network:
        with watch.group(f"{job}, {link}, profiling", ["profile"], 2 * steps):
            code = network.run(
                argv,
                env={"OMP_NUM_THREADS": "1"},
                on_line=lambda rank, stream, line: said.append(f"[{rank}] {line}"),
                timeout=request.group_timeout_s,
            )
    if code:
        raise TestbedError(f"the profiling of {job} over {link} ended with exit code {code}:\n" + "\n".join(said))
    return tuple(line.partition("UserWarning: ")[2] for line in said if "UserWarning: " in line)


def _measurable(request: BenchRequest, problem: str | None) -> tuple[list[str], list[str]]:
    """The links that can be measured here, and what a reader must know."""
    notes = []
    if "floor" not in request.methods:
        notes.append("Without the method floor there is no compute time: exposed, ideal and attainable are left out.")
    if request.ranks_per_node > 1 and any(link != UNLIMITED for link in request.links):
        notes.append("Ranks of a node share its link: ideal and attainable are given for one rank a node only.")
    cores = os.cpu_count() or 1
    if request.world_size > cores:
        notes.append(
            f"{request.world_size} ranks share {cores} cores: compute is slower than on machines of their own."
        )
    if problem is None:
        return list(request.links), notes
    links = [link for link in request.links if link == UNLIMITED]
    skipped = [link for link in request.links if link != UNLIMITED]
    if not links:
        raise TestbedError(
            f"the links {', '.join(skipped)} cannot be measured here: {problem}. Run as root or allow user "
            f"namespaces, or ask for --links {UNLIMITED}, which plain loopback can measure."
        )
    notes.append(
        "Plain loopback: all ranks are one node, only an unlimited link can be measured, and what other programs send "
        "over loopback meanwhile is counted too."
    )
    if skipped:
        notes.append(f"Not measured: {', '.join(skipped)}, because {problem}.")
    return links, notes


class _Runner:
    """One run in progress."""

    def __init__(
        self, request: BenchRequest, problem: str | None, notes: list[str], watch: RunWatch, save_to: Path | None
    ) -> None:
        self.request = request
        self.problem = problem
        self.notes = notes
        self.watch = watch
        self.save_to = save_to
        self.alone: list[Alone] = []
        self.cells: list[Cell] = []
        self.made = Made.now()

    def open_network(self) -> EmulatedCluster | Loopback:
        """The emulated cluster, or plain loopback where none can be made."""
        if self.problem is not None:
            return Loopback(self.request.world_size)
        return EmulatedCluster(self.request.nodes, self.request.ranks_per_node)

    def measure_alone(self, job: str) -> None:
        """T_1 of the scaling factor: one rank, no testbed, the other cores idle."""
        outcome = self._run(
            Loopback(1).run, f"{job}, one rank alone", job, ["floor"], self.request.alone_steps, ALONE_WARMUP_STEPS
        )
        if isinstance(outcome, WorkerRecord):
            self.alone.append(alone_from(outcome))
        else:
            self.alone.append(Alone(job=job, parameters=0, failure=outcome))
        self._save()

    def measure_group(self, network: Network, job: str, link: str) -> None:
        """All methods on one job over one link."""
        request = self.request
        record = None if request.record is None else request.record / f"{job}-{link}"
        outcome = self._run(
            network.run, f"{job}, {link}", job, request.methods, request.steps, request.warmup_steps, record
        )
        gbps = gbps_of(link)
        if isinstance(outcome, WorkerRecord):
            alone = next((alone for alone in self.alone if alone.job == job), None)
            cells = cells_from(outcome, link, gbps, request.ranks_per_node, alone)
            self.cells += cells
            if record is not None:
                complete_runs(record, cells, request.warmup_steps, request.turn_steps, self.made)
        else:
            self.cells += [
                Cell(job=job, link=link, gbps=gbps, method=method, failure=outcome) for method in request.methods
            ]
        self._save()

    def result(self) -> BenchRun:
        """Everything measured so far."""
        request = self.request
        return BenchRun(
            made=self.made,
            torch=importlib.metadata.version("torch"),
            cores=os.cpu_count() or 1,
            network="namespaces" if self.problem is None else "loopback",
            nodes=request.nodes,
            ranks_per_node=request.ranks_per_node,
            steps=request.steps,
            warmup_steps=request.warmup_steps,
            turn_steps=request.turn_steps,
            seed=request.seed,
            notes=tuple(self.notes),
            alone=tuple(self.alone),
            cells=tuple(self.cells),
        )

    def _save(self) -> None:
        if self.save_to is not None:
            self.result().save(self.save_to)

    def _run(
        self,
        run: Callable[..., int],
        title: str,
        job: str,
        methods: Sequence[str],
        steps: int,
        warmup_steps: int,
        record: Path | None = None,
    ) -> WorkerRecord | str:
        """What the ranks recorded, or why they recorded nothing."""
        said: collections.deque[str] = collections.deque(maxlen=FAILURE_LINES)
        last = "nothing"

        def on_line(rank: int, stream: str, line: str) -> None:
            nonlocal last
            event = parse_event(line) if stream == "stdout" else None
            if event is not None:
                last = f"step {event.step} of {event.method}"
                self.watch.step(event)
            elif line.strip():
                said.append(f"[{rank}] {line}")

        with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
            result = Path(folder, "record.json")
            order = WorkerOrder(
                job=job,
                methods=tuple(methods),
                seed=self.request.seed,
                steps=steps,
                warmup_steps=warmup_steps,
                turn_steps=self.request.turn_steps,
                deciding_steps=self.request.deciding_steps,
                go_on_to={name: goal for name, goal in self.request.go_on_to.items() if name in methods},
                collective_timeout_s=self.request.collective_timeout_s,
                runner=os.getpid(),
                result=str(result),
                record=None if record is None else str(record.resolve()),
            )
            order.save(Path(folder, "order.json"))
            argv = [sys.executable, "-u", "-m", "gradwire.bench.worker", str(Path(folder, "order.json"))]
            with self.watch.group(title, methods, steps + warmup_steps):
                code = run(
                    argv,
                    env={"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                    on_line=on_line,
                    timeout=self.request.group_timeout_s,
                )
            if code == 0 and result.exists():
                return WorkerRecord.load(result)
        words = "\n".join(["", *said])
        return f"the ranks ended with exit code {code}; what rank 0 finished last was {last}. Their last words:{words}"
