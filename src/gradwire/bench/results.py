"""Defines the formats of the bench: the worker's line after each step, the record of the ranks, the results file.

The files are strict (`gradwire.core.strict.Document`). Times are microseconds, sizes are bytes, rates are gigabits per
second. Lists over steps include the warm-up steps; statistics exclude them.
"""

import contextlib
from typing import ClassVar

import msgspec

from gradwire.bench.names import GivenModel
from gradwire.core import Document, Made
from gradwire.record import Interval

PREFIX = "gradwire-bench "


class StepEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of one method on rank 0, or with `held_out` the evaluation after the step."""

    method: str
    step: int
    us: float
    loss: float
    held_out: float | None = None
    """Mean loss on held-out batches."""


def print_event(event: StepEvent) -> None:
    """Print the event as one line.

    >>> print_event(StepEvent("ddp", 3, 120000.0, 2.5))
    gradwire-bench {"method":"ddp","step":3,"us":120000.0,"loss":2.5}
    """
    print(PREFIX + msgspec.json.encode(event).decode(), flush=True)


def parse_event(line: str) -> StepEvent | None:
    """Return the event in a line; None for any other line."""
    if line.startswith(PREFIX):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line[len(PREFIX) :], type=StepEvent)
    return None


class WorkerOrder(Document, frozen=True, kw_only=True):
    """The work of the ranks of one cell group."""

    what: ClassVar[str] = "order to the bench's worker"

    job: str
    model: GivenModel | None = None
    """The model of the job; null if `job` is one of the bench's own."""
    device: str = "cpu"
    """The device of the job: one of `gradwire.bench.names.DEVICES`."""
    methods: tuple[str, ...]
    seed: int
    steps: int
    """Number of measured steps of each method, after `warmup_steps` that do not count."""
    warmup_steps: int
    turn_steps: int
    """Number of steps in one turn of a method."""
    collective_timeout_s: float
    runner: int
    """The process id of the runner. The ranks die with the runner."""
    result: str
    """The file for the `WorkerRecord`, which rank 0 writes."""
    record: str | None = None
    """The folder for recorded runs of gradwire's methods; null: none are recorded."""
    deciding_steps: int = 0
    """The most steps that a deciding method may take before its warm-up, and the most of a warm-up of codecs."""
    go_on_to: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of steps in all, by method. The method trains on after its measured steps and is evaluated regularly."""
    race_s: float = 0.0
    """Seconds of training in a race; 0 for no race. All methods except the floor train for so many seconds each, in
    turns of equal seconds, and are evaluated after each turn. `steps` and `warmup_steps` are then the floor's."""


class Decided(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision of a deciding method, such as gradwire:auto."""

    chosen: str
    """The plan in words."""
    plain: bool
    """Whether the plan is plain all-reduce."""
    step: int
    cost_us: float
    """Time of all steps before the decision, minus the time of as many steps under the chosen plan."""
    predicted_us: float | None = None
    """Predicted time of a step of the chosen plan."""
    measured_us: float | None = None
    """Time of a step of the chosen plan in the trial; null: the plan did not run."""
    learns_us: float | None = None
    """Expected time for what a step of plain all-reduce learns, at a constant learning rate."""


class MethodRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one method. Lists are by rank, then by step; the lists of a failed method may be short."""

    method: str
    failure: str | None
    wall_us: list[list[float]]
    cpu_us: list[list[float]]
    """CPU time of the whole process, all threads."""
    forward_us: list[list[float]] = []
    backward_us: list[list[float]] = []
    loss: list[list[float]]
    sent_bytes: list[list[int]]
    """Bytes that the rank's interface sent during the step, for all ranks that share the interface."""
    planned_bytes: list[int | None]
    crossing_bytes: list[int | None] = []
    phases: int | None = None
    codec_us: list[float | None]
    counted: tuple[int, int] | None = None
    """The range of measured steps; null: all steps after the warm-up."""
    decided: list[Decided] = []
    held_out: list[tuple[int, float]] = []
    """Pairs of a number of steps and rank 0's mean loss on held-out batches after these steps."""
    wrong_on_purpose: bool = False
    """Whether the method leaves out a part of each step."""


class WorkerRecord(Document, frozen=True, kw_only=True):
    """All measurements of one cell group."""

    what: ClassVar[str] = "record of the bench's worker"

    version: int = 1
    job: str
    parameters: int
    world_size: int
    ranks_per_interface: int
    warmup_steps: int
    measured_gbps: float | None = None
    """The payload rate of a node's link; null: not measured."""
    methods: list[MethodRecord]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of step times. The time of a step is the mean over ranks."""

    median_us: float
    minimum_us: float
    p10_us: float
    p90_us: float
    mean_us: float
    stdev_us: float
    steps: int


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method on one job over one link. If `failure` is set, the other measurements are null or empty."""

    job: str
    link: str
    gbps: float | None
    """Rate of the link; null if unlimited."""
    method: str
    failure: str | None = None
    step: StepTimes | None = None
    wrong_on_purpose: bool = False
    """The method leaves out a part of each step, so only times and bytes are kept."""
    forward_us: float | None = None
    """Median time of forward, including the method's work and waits. `backward_us` is the same of backward."""
    backward_us: float | None = None
    counted_bytes: float | None = None
    """Bytes per rank and step at the interface's counter, including headers and acknowledgements."""
    planned_bytes: int | None = None
    """Planned bytes per rank and step; null if unknown."""
    crossing_bytes: int | None = None
    """Planned bytes of a step that go to other nodes, to other sites where there are any, of all ranks together; null if
    unknown."""
    phases: int | None = None
    """How often, one after another, the exchange of a bucket waits for other nodes or sites; null if unknown."""
    counted_over_planned: float | None = None
    """null also where several ranks share a node: the counter lacks what they send each other."""
    cpu_us: float | None = None
    codec_us: float | None = None
    """CPU time of the kernels of a step, measured alone in the same run; null: the kernels cannot run alone."""
    exposed_us: float | None = None
    """Median step minus the floor's median: communication that compute did not hide."""
    ideal_us: float | None = None
    """max(compute, wire); compute is the floor's median. null if several ranks of a node share a link."""
    attainable_us: float | None = None
    """max(compute + codec, wire)."""
    scaling_factor: float | None = None
    """Throughput of n ranks over n times the throughput of one rank alone: T_n / (n T_1), from mean step times."""
    scaling_factor_stdev: float | None = None
    speedup_alone: float | None = None
    """S: n times the scaling factor."""
    max_speedup: float | None = None
    """S^max: the largest S if the planned bytes, half in each phase, overlap perfectly with backward and forward (DeAR, eq. 6,
    with `measured_gbps`). The delayed schedule overlaps both phases with both, so S may be larger there."""
    measured_gbps: float | None = None
    """The payload rate of the idle link; null: not measured, or several ranks of a node share the link."""
    speedup: Interval | None = None
    """The speedup over ddp in the same run; above 1 is faster."""
    step_us: list[float] = []
    """Time of each step, the mean over ranks, warm-up first."""
    loss: list[float] = []
    """Loss of each step, the mean over ranks, warm-up first. The ranks of the floor train independently."""
    counted: tuple[int, int] = (0, 0)
    """The range of measured steps; (0, 0): all steps after the run's warm-up."""
    decided: list[Decided] = []
    held_out: list[tuple[int, float]] = []
    """Pairs of a number of steps and rank 0's mean loss on held-out batches after these steps."""


class Alone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one rank alone on the machine, without a testbed: T_1."""

    job: str
    parameters: int = 0
    failure: str | None = None
    step: StepTimes | None = None
    backward_us: float | None = None
    """Mean time of backward. The rest of a step is forward and the optimizer's step."""


class BetweenSites(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work of the relay between emulated sites, over all cells."""

    frames: int
    """Ethernet frames, of one or more segments."""
    late_frames: int
    """Frames that were sent more than 0.5 ms late: the processors were busy."""
    latest_ms: float
    """The longest time by which a frame was late."""
    full_queue_segments: int
    """Segments for which a link's queue had no room, as in a router."""
    dropped_frames: int | None = None
    """Frames that the kernel dropped because the relay came too late to read them."""
    wire_bytes: int | None = None
    """Bytes that sites sent to each other, with the headers of all segments."""
    cpu_s: float | None = None
    """Processor seconds of the relay."""


class BenchRun(Document, frozen=True, kw_only=True):
    """A run of the matrix: `gradwire bench --json`."""

    what: ClassVar[str] = "bench results file"
    remedy: ClassVar[str] = "Make it with `gradwire bench --json FILE`."
    omit_at_default: ClassVar[tuple[str, ...]] = ("device", "intra", "sites", "wan")

    version: int = 1
    made: Made
    torch: str
    cores: int
    network: str
    """"namespaces" for an emulated cluster; "loopback" for plain processes over an unlimited link."""
    nodes: int
    ranks_per_node: int
    intra: str | None = None
    """The emulated rate inside a node; null: no limit."""
    sites: int = 1
    wan: str | None = None
    """The emulated network between sites; null: one site."""
    device: str = "cpu"
    """The device of the jobs: one of `gradwire.bench.names.DEVICES`."""
    steps: int
    warmup_steps: int
    turn_steps: int
    seed: int
    notes: tuple[str, ...] = ()
    between_sites: BetweenSites | None = None
    """null: one site."""
    alone: tuple[Alone, ...] = ()
    cells: tuple[Cell, ...] = ()

    def cell(self, job: str, link: str, method: str) -> Cell | None:
        return next((c for c in self.cells if (c.job, c.link, c.method) == (job, link, method)), None)

    @property
    def failures(self) -> list[str]:
        """One line for each failed method."""
        lines = [f"{a.job}, one rank alone: {a.failure}" for a in self.alone if a.failure]
        return lines + [f"{c.job}, {c.link}, {c.method}: {c.failure}" for c in self.cells if c.failure]
