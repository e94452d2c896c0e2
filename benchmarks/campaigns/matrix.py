"""`gradwire bench --matrix`: DDP, torch's hooks and plan="auto" in its three classes, over jobs, links and numbers of nodes.

First, for each job and number of nodes, DDP alone without a limit on the link: what it learns, which no link changes, and what a
step takes. From that follow how many steps a turn has in each cell, and how long all of it will take, which is said. Then
each cell is one run of the bench: deciding, nine rounds of turns, and for some methods more steps until DDP's final loss.

Each of these is a file in the request's folder, in the bench's own format. What is there is not measured again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.campaigns.matrix_cells import AGGRESSIVE, EXACT, METHODS, POWERSGD, SAFE, WINDOW, MatrixCell
from gradwire.bench.names import UNLIMITED, check_job
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
DECIDING_STEPS = 80
LEARNERS = (SAFE, AGGRESSIVE, POWERSGD)
"""What learns otherwise than DDP: it goes on until its loss is DDP's."""
LEARNERS_STEPS = 1.2
"""For so many times DDP's steps."""
SLOW_GBPS = 0.5
"""They go on over links of this rate or less, where time to a loss is the question."""

SHARE_OF_WIRE = {"floor": 0.0, "ddp-fp16": 0.5, POWERSGD: 0.03, SAFE: 0.1, AGGRESSIVE: 0.05}
"""How much of plain DDP's wire time a method needs, roughly, where it is not all of it: for the estimate of time alone."""
STEPS_TO_DECIDE, PLAIN_STEPS_TO_DECIDE = 50, 6
START_S = 20.0


@dataclass(frozen=True)
class MatrixRequest:
    """What to measure. Raises FormatError or TestbedError naming the first thing that is wrong."""

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
            say(
                f"{job}, {nodes} nodes: DDP's {request.loss_steps} steps without a limit, for its loss and the estimate"
            )
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
    """Those of the cells asked for that have results."""
    cells = []
    for key in _keys(request):
        run, learning = _cell(request, key), _learning(request, key.nodes, key.job)
        if run is not None and learning is not None:
            cells.append(MatrixCell(run, learning))
    return cells


def expected_seconds(learning: BenchRun, gbps: float | None, turn_steps: int, goal: int) -> float:
    """How long a cell will take, from steps without a limit. `goal`: to how many steps `LEARNERS` go on; 0 if they do not."""
    step_s = {name: _step_us(learning, gbps, name) / 1e6 for name in METHODS}
    own_steps = WARMUP_STEPS + ROUNDS * turn_steps
    seconds = START_S + own_steps * sum(step_s.values())
    for name in (EXACT, SAFE, AGGRESSIVE):
        plain = PLAIN_STEPS_TO_DECIDE * step_s["ddp"]
        seconds += plain + (STEPS_TO_DECIDE - PLAIN_STEPS_TO_DECIDE) * step_s[name]
    for name in LEARNERS:
        before = own_steps + (0 if name == POWERSGD else STEPS_TO_DECIDE)
        seconds += max(0, goal - before) * step_s[name]
    return seconds


def _step_us(learning: BenchRun, gbps: float | None, method: str) -> float:
    """What a step of the method will take, roughly: compute and what it sends one after the other."""
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
        deciding_steps=DECIDING_STEPS,
        go_on_to=dict.fromkeys(LEARNERS, _goal(request, key)),
        alone_steps=0,
        seed=request.seed,
    )


def _turn_steps(request: MatrixRequest, key: _Key) -> int:
    step_us = _step_us(_known(request, key), gbps_of(key.link), "ddp")
    return min(MOST_TURN_STEPS, max(1, round(TURN_S * 1e6 / step_us)))


def _goal(request: MatrixRequest, key: _Key) -> int:
    gbps = gbps_of(key.link)
    return round(LEARNERS_STEPS * request.loss_steps) if gbps is not None and gbps <= SLOW_GBPS else 0


def _expected(request: MatrixRequest, key: _Key) -> float:
    return expected_seconds(_known(request, key), gbps_of(key.link), _turn_steps(request, key), _goal(request, key))


def _path(request: MatrixRequest, key: _Key) -> Path:
    return request.folder / f"{key.nodes}-{key.job}-{key.link}.json"


def _learning_path(request: MatrixRequest, nodes: int, job: str) -> Path:
    return request.folder / f"{nodes}-{job}-learning.json"


def _cell(request: MatrixRequest, key: _Key) -> BenchRun | None:
    """What was measured before of this cell, with this seed, if learners went on for as many steps as asked for."""
    run, goal = _kept(_path(request, key), request.seed), _goal(request, key)
    enough = run is not None and all(len(cell.loss) >= goal for cell in run.cells if cell.method in LEARNERS)
    return run if enough else None


def _learning(request: MatrixRequest, nodes: int, job: str) -> BenchRun | None:
    """What was measured before, if it has as many steps as asked for."""
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
