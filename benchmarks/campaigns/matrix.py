"""DDP, torch's hooks and plan="auto" in its three classes, over jobs, links and numbers of nodes: `python -m benchmarks matrix`.

First, for each job and number of nodes, DDP alone without a limit on the link: what it learns, which no link changes, and what a
step takes. From that follow how many steps a turn has in each cell, and how long all of it will take, which is said. Then
each cell is one run of the bench: deciding, nine rounds of turns, and for some methods more steps until DDP's final loss.

Each of these is a file in the request's folder, in the bench's own format. What is there is not measured again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.campaigns.matrix_cells import AGGRESSIVE, CANDIDATES, EXACT, METHODS, POWERSGD, RIVALS, SAFE, WINDOW, MatrixCell
from benchmarks.campaigns.matrix_first import JUDGED_STEPS
from gradwire.bench.names import MOST_DECIDING_STEPS, UNLIMITED, check_job
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import BenchRun
from gradwire.bench.runner import BenchRequest, gbps_of, run_bench
from gradwire.bench.statistics import wire_us
from gradwire.core.checks import whole
from gradwire.core.files import make_folder
from gradwire.errors import FormatError, TestbedError

__all__ = ["JOBS", "LINKS", "NODES", "MatrixRequest", "expected_seconds", "measured_cells", "run_matrix"]

JOBS = ("mlp", "resnet", "transformer")
LINKS = ("100mbit", "500mbit", "1000mbit", UNLIMITED)
NODES = (2, 4)

ROUNDS = 9
WARMUP_STEPS = 3
MOST_TURN_STEPS = 4
TURN_S = 1.5
"""A turn of plain DDP takes about so long, and has at least one step and at most `MOST_TURN_STEPS`."""
LEARNERS = (SAFE, AGGRESSIVE, POWERSGD)
"""Methods that learn otherwise than DDP. They train until they have DDP's loss."""
LEARNERS_STEPS = 1.2
"""Most steps of these methods, as a multiple of DDP's steps."""
SLOW_GBPS = 0.5
"""They go on over links of this rate or less, where time to a loss is the question. Over faster links DDP goes on, in turns with
auto, to `RIVAL_STEPS`: there auto's time since its first step is close to DDP's."""
RIVAL_STEPS = 120

SHARE_OF_WIRE = {"floor": 0.0, "ddp-fp16": 0.5, POWERSGD: 0.03, SAFE: 0.1, AGGRESSIVE: 0.05}
SHARE_OF_WIRE |= dict.fromkeys(CANDIDATES[1:], 0.1)
"""Rough share of plain DDP's wire time that a method needs, if it is not all; used only to estimate the length of the run."""
PLAIN_STEPS_TO_DECIDE = 6
START_S = 20.0


@dataclass(frozen=True)
class MatrixRequest:
    """The measurements to make. Raises FormatError or TestbedError with the first wrong value."""

    folder: Path
    jobs: Sequence[str] = JOBS
    links: Sequence[str] = LINKS
    nodes: Sequence[int] = NODES
    loss_steps: int = 150
    """The time to a loss is that to DDP's loss after so many steps."""
    seed: int = 0
    again: bool = False
    """Measure what has results already, too."""

    def __post_init__(self) -> None:
        for job in self.jobs:
            check_job(job)
        for link in self.links:
            gbps_of(link)
        for nodes in self.nodes:
            whole("nodes", nodes, "emulated nodes", low=2)
        whole("loss_steps", self.loss_steps, "steps of DDP, whose final loss is the goal", low=2 * WINDOW)
        for what, names in (("job", self.jobs), ("link", self.links), ("number of nodes", self.nodes)):
            if not names:
                raise FormatError(f"there is no {what} to measure: the list is empty.")


class _Key(NamedTuple):
    nodes: int
    job: str
    link: str

    @property
    def title(self) -> str:
        return f"{self.job}, {self.nodes} nodes, {self.link}"


def run_matrix(
    request: MatrixRequest, problem: str | None, watch: ProgressView, say: Callable[[str], None]
) -> tuple[list[MatrixCell], list[str]]:
    """Measure what is missing. Returns the cells of those asked for that have results, and what failed: a cell with a
    method that failed is not kept, and the next run tries it again. `problem` is `emulation_problem()`.

    Raises TestbedError where no link can be emulated.
    """
    if problem is not None:
        raise TestbedError(f"the matrix cannot be measured here: {problem}. Run as root or allow user namespaces.")
    make_folder(request.folder)
    failures = []
    for nodes, job in dict.fromkeys((key.nodes, key.job) for key in _keys(request)):
        if request.again or _learning(request, nodes, job) is None:
            say(f"{job}, {nodes} nodes: DDP's {request.loss_steps} steps without a limit, for its loss and the estimate")
            asked = _learning_request(request, nodes, job)
            failures += _measure(asked, _learning_path(request, nodes, job), watch)
    missing = [key for key in _keys(request) if _learning(request, key.nodes, key.job) is not None]
    missing = [key for key in missing if request.again or _cell(request, key) is None]
    seconds = {key: _expected(request, key) for key in missing}
    if missing:
        say(f"{len(missing)} cells to measure, about {sum(seconds.values()) / 60:.0f} minutes:")
        for key in missing:
            say(f"  {key.title}: {seconds[key] / 60:.1f} minutes, {_turn_steps(request, key)} steps a turn")
    for key in missing:
        failures += _measure(_cell_request(request, key), _path(request, key), watch)
    return measured_cells(request), failures


def measured_cells(request: MatrixRequest) -> list[MatrixCell]:
    """Return the requested cells that have results."""
    cells = []
    for key in _keys(request):
        run, learning = _cell(request, key), _learning(request, key.nodes, key.job)
        if run is not None and learning is not None:
            cells.append(MatrixCell(run, learning))
    return cells


def expected_seconds(learning: BenchRun, gbps: float | None, turn_steps: int, goals: Mapping[str, int] | None = None) -> float:
    """The expected time of a cell, from steps without a limit. goals: by method, the number of steps in all."""
    seconds = START_S
    for name in METHODS:
        step_s = _step_us(learning, gbps, name) / 1e6
        deciding = MOST_DECIDING_STEPS if name in (EXACT, SAFE, AGGRESSIVE) else 0
        steps = max(deciding + WARMUP_STEPS + ROUNDS * turn_steps, (goals or {}).get(name, 0))
        seconds += steps * step_s
        if deciding:
            seconds += PLAIN_STEPS_TO_DECIDE * (_step_us(learning, gbps, "ddp") / 1e6 - step_s)
    return seconds


def _step_us(learning: BenchRun, gbps: float | None, method: str) -> float:
    """Estimate a step of the method roughly: compute and sends one after the other."""
    steps = {cell.method: cell.step.median_us for cell in learning.cells if cell.step is not None}
    if method == "floor":
        return steps["floor"]
    planned = next(cell.planned_bytes or 0 for cell in learning.cells if cell.method == "ddp")
    return max(steps["ddp"], steps["floor"] + SHARE_OF_WIRE.get(method, 1.0) * wire_us(planned, gbps))


def _keys(request: MatrixRequest) -> Iterator[_Key]:
    for nodes in request.nodes:
        for job in request.jobs:
            for link in request.links:
                yield _Key(nodes, job, link)


def _measure(asked: BenchRequest, path: Path, watch: ProgressView) -> list[str]:
    """Run it and keep the result if it is whole. Returns what failed."""
    run = run_bench(asked, None, watch)
    if not run.failures:
        run.save(path)
    return [f"{asked.nodes} nodes, {failure}" for failure in run.failures]


def _learning_request(request: MatrixRequest, nodes: int, job: str) -> BenchRequest:
    return BenchRequest(
        jobs=[job],
        links=[UNLIMITED],
        methods=["floor", "ddp"],
        nodes=nodes,
        steps=2 * MOST_TURN_STEPS,
        warmup_steps=WARMUP_STEPS,
        turn_steps=MOST_TURN_STEPS,
        go_on_to={"ddp": request.loss_steps},
        alone_steps=0,
        seed=request.seed,
    )


def _cell_request(request: MatrixRequest, key: _Key) -> BenchRequest:
    turn_steps = _turn_steps(request, key)
    return BenchRequest(
        jobs=[key.job],
        links=[key.link],
        methods=METHODS,
        nodes=key.nodes,
        steps=ROUNDS * turn_steps,
        warmup_steps=WARMUP_STEPS,
        turn_steps=turn_steps,
        deciding_steps=MOST_DECIDING_STEPS,
        go_on_to=_goals(request, key),
        alone_steps=0,
        seed=request.seed,
    )


def _turn_steps(request: MatrixRequest, key: _Key) -> int:
    step_us = _step_us(_known(request, key), gbps_of(key.link), "ddp")
    return min(MOST_TURN_STEPS, max(1, round(TURN_S * 1e6 / step_us)))


def _goals(request: MatrixRequest, key: _Key) -> dict[str, int]:
    """Return the number of steps in all, by method."""
    gbps = gbps_of(key.link)
    if gbps is None or gbps > SLOW_GBPS:
        return {SAFE: JUDGED_STEPS, **dict.fromkeys(RIVALS, RIVAL_STEPS)}
    learned = round(LEARNERS_STEPS * request.loss_steps)
    return dict.fromkeys(LEARNERS, learned) | {SAFE: max(JUDGED_STEPS, learned)}


def _expected(request: MatrixRequest, key: _Key) -> float:
    return expected_seconds(_known(request, key), gbps_of(key.link), _turn_steps(request, key), _goals(request, key))


def _path(request: MatrixRequest, key: _Key) -> Path:
    return request.folder / f"{key.nodes}-{key.job}-{key.link}.json"


def _learning_path(request: MatrixRequest, nodes: int, job: str) -> Path:
    return request.folder / f"{nodes}-{job}-learning.json"


def _cell(request: MatrixRequest, key: _Key) -> BenchRun | None:
    """Return an earlier result of this cell with this seed, if it has all methods and enough steps."""
    run, goals = _kept(_path(request, key), request.seed), _goals(request, key)
    whole_run = run is not None and {cell.method for cell in run.cells} == set(METHODS)
    enough = run is not None and all(len(cell.loss) >= goals.get(cell.method, 0) for cell in run.cells)
    return run if whole_run and enough else None


def _learning(request: MatrixRequest, nodes: int, job: str) -> BenchRun | None:
    """Return an earlier result if it has enough steps."""
    run = _kept(_learning_path(request, nodes, job), request.seed)
    whole_run = run is not None and len(run.cells[-1].loss) == request.loss_steps
    return run if whole_run else None


def _known(request: MatrixRequest, key: _Key) -> BenchRun:
    run = _learning(request, key.nodes, key.job)
    assert run is not None
    return run


def _kept(path: Path, seed: int) -> BenchRun | None:
    run = BenchRun.load(path) if path.exists() else None
    return run if run is not None and run.seed == seed else None
