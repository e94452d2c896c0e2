"""Runs the matrix: jobs x links x methods, all methods of a cell group side by side in one run.

A cell group is one job over one link. One set of processes runs all methods of a cell group in turns
(`gradwire.bench.worker`). The runner changes the rate of the link between cell groups.
"""

import collections
import importlib.metadata
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.bench.loopback import Loopback
from gradwire.bench.names import UNLIMITED, GivenModel, check_device, check_job, check_method
from gradwire.bench.progress import View
from gradwire.bench.recorded import complete_runs, method_folder
from gradwire.bench.results import Alone, BenchRun, BetweenSites, Cell, WorkerOrder, WorkerRecord, parse_event
from gradwire.bench.statistics import alone_from, cells_from
from gradwire.core import Made, Spec, make_folder
from gradwire.errors import FormatError, TestbedError
from gradwire.testbed import (
    MOST_NODES,
    TIMED_OUT,
    EmulatedCluster,
    parse_rate,
    permission_problem,
    reexec_in_user_namespace_if_needed,
)

FEWEST_WARMUP_STEPS = 3
"""Fewest warm-up steps. DDP rebuilds its buckets after the first, and torch's PowerSGD hook compresses from the third on."""
ALONE_WARMUP_STEPS = 10
FAILURE_LINES = 40
Network = EmulatedCluster | Loopback


@dataclass(frozen=True)
class BenchRequest:
    """The measurements to make. Raises `FormatError`, `SpecError` or `TestbedError` with the first wrong value."""

    jobs: Sequence[str]
    links: Sequence[str]
    """Link rates such as "500mbit", or "unlimited"."""
    methods: Sequence[str]
    model: GivenModel | None = None
    """The model of the one job; None if all jobs are the bench's own."""
    device: str = "cpu"
    """See `WorkerOrder`."""
    nodes: int = 2
    ranks_per_node: int = 1
    intra: str | None = None
    """Rate inside a node, which all its ranks share for both directions, as behind a PCIe switch; None if unlimited."""
    sites: int = 1
    """Number of sites, which share out the nodes."""
    wan: str | None = None
    """The network between sites, such as "50ms rate 100mbit"."""
    steps: int = 30
    warmup_steps: int = 5
    turn_steps: int = 5
    deciding_steps: int = 0
    go_on_to: Mapping[str, int] = field(default_factory=dict)
    """See `WorkerOrder`. The same holds for `deciding_steps` and `race_s`."""
    race_s: float = 0.0
    alone_steps: int = 100
    """Number of steps of one rank alone, for the scaling factor; 0 to measure no scaling factor."""
    seed: int = 0
    record: Path | None = None
    """Folder for recorded runs of gradwire's methods: JOB-LINK/METHOD/run.json."""
    worker: str = "gradwire.bench.worker"
    """The module that each rank executes: its `main` builds the methods."""
    collective_timeout_s: float = 120.0
    group_timeout_s: float = 3600.0
    """The most that all methods of a job over a link may take together. The group fails if it takes longer."""

    def __post_init__(self) -> None:
        for job in self.jobs if self.model is None else ():
            check_job(job)
        check_device(self.device)
        if self.model is not None and self.device != "cpu":
            raise FormatError(f"the device is {self.device}, and a given model computes on the cpu. Leave out one of them.")
        for method in self.methods:
            self.check_method(method)
        for link in self.links:
            gbps_of(link)
        if self.intra is not None:
            parse_rate(self.intra)
        for what, names in (("job", self.jobs), ("link", self.links), ("method", self.methods)):
            if not names:
                raise FormatError(f"there is no {what} to measure: the list of {what}s is empty.")
        least = dict.fromkeys(("nodes", "ranks_per_node", "steps", "turn_steps"), 1)
        least |= {"alone_steps": 0, "seed": 0, "deciding_steps": 0, "warmup_steps": FEWEST_WARMUP_STEPS}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise FormatError(f"{name} is {getattr(self, name)}; it must be at least {low}.")
        if not 0 <= self.race_s < math.inf:
            raise FormatError(f"race_s is {self.race_s}; it must be a number of seconds, 0 for no race.")
        if self.nodes > MOST_NODES:
            raise FormatError(f"nodes is {self.nodes}; an emulated cluster has 1 to {MOST_NODES} nodes.")

    def check_method(self, name: str) -> None:
        """Raise `FormatError` or `SpecError` if the worker cannot build a method of this name."""
        check_method(name)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def gbps_of(link: str) -> float | None:
    """Return the rate of a link; None for an unlimited link. Raises `TestbedError` if the text is not a rate."""
    return None if link == UNLIMITED else parse_rate(link) / 1e9


def emulation_problem() -> str | None:
    """Return why this machine cannot emulate links, or None if it can. Restarts the process in a user namespace if needed."""
    problem = permission_problem()
    if problem is None:
        reexec_in_user_namespace_if_needed([sys.executable, *sys.orig_argv[1:]])
    return problem


def run_bench(request: BenchRequest, problem: str | None, watch: View, save_to: Path | None = None) -> BenchRun:
    """Measure all cells of the request. `problem` is `emulation_problem()`; unless None, the ranks use plain loopback.

    `save_to` is written after every cell group, for interrupted runs. A method's failure is in its cell; no error is raised.
    """
    links, notes = _measurable(request, problem)
    if request.record is not None:
        make_folder(request.record)
    runner = _Runner(request, problem, notes, watch, save_to)
    for job in request.jobs if request.alone_steps else ():
        runner.measure_alone(job)
    with _cluster(request) if problem is None else Loopback(request.world_size) as network:
        for link in links:
            network.set_inter(None if link == UNLIMITED else link)
            for job in request.jobs:
                runner.measure_group(network, job, link)
    return runner.result()


def run_profile(
    request: BenchRequest, job: str, link: str, specs: Sequence[Spec], steps: int, folder: Path, watch: View
) -> tuple[str, ...]:
    """Run `gradwire profile` on the request's emulated cluster and write its files to `folder`. Returns its warnings.

    Raises TestbedError with the output of the ranks if the profiling fails.
    """
    said: collections.deque[str] = collections.deque(maxlen=FAILURE_LINES)
    warned: dict[str, None] = {}  # in order; ranks may warn alike

    def on_line(rank: int, stream: str, line: str) -> None:
        said.append(f"[{rank}] {line}")
        if "UserWarning: " in line:
            warned[line.partition("UserWarning: ")[2]] = None

    argv = [sys.executable, "-u", "-m", "gradwire", "profile", "--job", job]
    argv += ["--out", str(folder), "--steps", str(steps), "--device", request.device]
    argv += [word for spec in specs for word in ("--spec", repr(spec))]
    with _cluster(request) as network:
        network.set_inter(None if link == UNLIMITED else link)
        with watch.group(f"{job}, {link}, profiling", ["profile"], 2 * steps):
            code = network.run(
                argv,
                env={"OMP_NUM_THREADS": "1"},
                on_line=on_line,
                timeout=request.group_timeout_s,
            )
    if code:
        raise TestbedError(f"profiling {job} over {link}: {_ended(code, request.group_timeout_s)}:\n" + "\n".join(said))
    return tuple(warned)


def _ended(code: int, limit_s: float) -> str:
    """Say how the ranks of a group without a result ended."""
    if code == TIMED_OUT:
        return f"the ranks took longer than {limit_s:g} s, the limit of a job over a link. Take fewer steps or methods"
    return f"the ranks ended with exit code {code}"


def _cluster(request: BenchRequest) -> EmulatedCluster:
    return EmulatedCluster(request.nodes, request.ranks_per_node, None, request.intra, request.sites, request.wan)


def _measurable(request: BenchRequest, problem: str | None) -> tuple[list[str], list[str]]:
    """Return the links that can be measured on this machine, and notes for the reader of the results."""
    notes = []
    limited = [link for link in request.links if link != UNLIMITED]
    if request.nodes == 1 and limited:
        raise FormatError(
            f"links has {', '.join(limited)}, and nodes is 1: one node has no link to others, so every rate would give the same "
            f"times. Take 2 nodes or more, or --links {UNLIMITED}."
        )
    if "floor" not in request.methods:
        notes.append("Without the method floor there is no compute time: exposed, ideal and attainable are left out.")
    if request.ranks_per_node > 1 and limited:
        notes.append("The ranks of a node share its link: ideal and attainable need one rank per node.")
    if request.device == "sleeping":
        notes.append("Jobs computed nothing: their computation is a timed sleep, and losses mean nothing.")
    cores = os.cpu_count() or 1
    if request.world_size > cores and request.device == "cpu":
        notes.append(f"{request.world_size} ranks share {cores} cores: compute is slower than on separate machines.")
    if problem is None:
        return list(request.links), notes
    if request.intra is not None:
        raise TestbedError(
            f"the rate {request.intra} inside a node cannot be emulated here: {problem}. Run as root, allow user namespaces, or "
            "leave out --intra."
        )
    if len(limited) == len(request.links):
        raise TestbedError(
            f"links {', '.join(limited)} cannot be measured here: {problem}. Run as root, allow user namespaces, or pass "
            f"--links {UNLIMITED}, which uses plain loopback."
        )
    notes.append(
        "Plain loopback: all ranks are one node, the link is unlimited, and the counted bytes include the traffic of other "
        "programs."
    )
    if limited:
        notes.append(f"Not measured: {', '.join(limited)}, because {problem}.")
    return [UNLIMITED], notes


class _Runner:
    """One run in progress."""

    def __init__(self, request: BenchRequest, problem: str | None, notes: list[str], watch: View, save_to: Path | None) -> None:
        self.request, self.problem, self.notes = request, problem, notes
        self.watch, self.save_to = watch, save_to
        self.between_sites: BetweenSites | None = None
        self.alone: list[Alone] = []
        self.cells: list[Cell] = []
        self.made = Made.now()

    def measure_alone(self, job: str) -> None:
        """Measure T_1 of the scaling factor: one rank, no testbed, the other cores idle."""
        title = f"{job}, one rank alone"
        found = self._run(Loopback(1), title, job, ["floor"], self.request.alone_steps, ALONE_WARMUP_STEPS)
        self.alone.append(alone_from(found) if isinstance(found, WorkerRecord) else Alone(job=job, failure=found))
        self._save()

    def measure_group(self, network: Network, job: str, link: str) -> None:
        request, title, gbps = self.request, f"{job}, {link}", gbps_of(link)
        record = None if request.record is None else method_folder(request.record, f"{job}-{link}")
        found = self._run(network, title, job, request.methods, request.steps, request.warmup_steps, record)
        if isinstance(found, str):
            cells = [Cell(job=job, link=link, gbps=gbps, method=method, failure=found) for method in request.methods]
        else:
            alone = next((alone for alone in self.alone if alone.job == job), None)
            cells = cells_from(found, link, gbps, request.ranks_per_node, alone)
            if record is not None:
                complete_runs(record, cells, request.warmup_steps, request.turn_steps, self.made)
        self.cells += cells
        if isinstance(network, EmulatedCluster) and network.sites > 1:
            self._look_between_sites(network, title)
        self._save()

    def _look_between_sites(self, network: EmulatedCluster, title: str) -> None:
        """Keep what the relay did so far, and note where the network was not as ordered."""
        try:
            counts = network.wan_counts()
        except TestbedError as error:  # the relay ended
            self.notes.append(f"{title}: {error}")
            return
        self.between_sites = BetweenSites(
            frames=counts.frames,
            late_frames=counts.late_frames,
            latest_ms=round(1e3 * counts.latest_s, 3),
            full_queue_segments=counts.full_queue_segments,
            dropped_frames=counts.dropped_frames,
            wire_bytes=counts.wire_bytes,
            cpu_s=round(counts.cpu_s, 3),
        )
        if (problem := counts.problem()) is not None:
            self.notes.append(f"{title}: {problem}")

    def result(self) -> BenchRun:
        """Return everything measured so far."""
        asked = ["nodes", "ranks_per_node", "device", "steps", "warmup_steps", "turn_steps", "seed"]
        if self.problem is None:
            asked += ["intra", "sites", "wan"]
        return BenchRun(
            made=self.made,
            torch=importlib.metadata.version("torch"),
            cores=os.cpu_count() or 1,
            network="namespaces" if self.problem is None else "loopback",
            **{name: getattr(self.request, name) for name in asked},
            notes=tuple(self.notes),
            between_sites=self.between_sites,
            alone=tuple(self.alone),
            cells=tuple(self.cells),
        )

    def _save(self) -> None:
        if self.save_to is not None:
            self.result().save(self.save_to)

    def _run(
        self,
        network: Network,
        title: str,
        job: str,
        methods: Sequence[str],
        steps: int,
        warmup_steps: int,
        record: Path | None = None,
    ) -> WorkerRecord | str:
        """Return the record of the ranks, or the reason why there is none."""
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
                model=self.request.model,
                device=self.request.device,
                methods=tuple(methods),
                seed=self.request.seed,
                steps=steps,
                warmup_steps=warmup_steps,
                turn_steps=self.request.turn_steps,
                deciding_steps=self.request.deciding_steps,
                go_on_to={name: goal for name, goal in self.request.go_on_to.items() if name in methods},
                collective_timeout_s=self.request.collective_timeout_s,
                race_s=self.request.race_s,
                runner=os.getpid(),
                result=str(result),
                record=None if record is None else str(record.resolve()),
            )
            order.save(Path(folder, "order.json"))
            argv = [sys.executable, "-u", "-m", self.request.worker, str(Path(folder, "order.json"))]
            with self.watch.group(title, methods, steps + warmup_steps):
                code = network.run(
                    argv,
                    env={"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                    on_line=on_line,
                    timeout=self.request.group_timeout_s + self.request.race_s * len(methods),
                )
            if code == 0 and result.exists():
                return WorkerRecord.load(result)
        words = "\n".join(["", *said])
        return f"{_ended(code, self.request.group_timeout_s)}. Rank 0 finished {last} last. Their last output:{words}"
