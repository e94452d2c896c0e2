"""The formats of the bench: what the worker hands back, and the one file that a run leaves.

Both are strict (`gradwire.core.strict.Document`). Times are microseconds, sizes are bytes, rates are gigabits per
second. Lists over steps begin with the warm-up steps, so that a loss curve is whole; every statistic leaves the
first `warmup_steps` out.
"""

from typing import ClassVar

import msgspec

from gradwire.core.made import Made
from gradwire.core.strict import Document
from gradwire.record.run import Interval

__all__ = [
    "Alone",
    "BenchRun",
    "Cell",
    "Decided",
    "Interval",
    "MethodRecord",
    "StepTimes",
    "WorkerOrder",
    "WorkerRecord",
]


class WorkerOrder(Document, frozen=True, kw_only=True):
    """What the ranks of one cell group are asked to do."""

    what: ClassVar[str] = "order to the bench's worker"

    job: str
    methods: tuple[str, ...]
    seed: int
    steps: int
    """Steps of each method that count."""
    warmup_steps: int
    """Steps of each method before those."""
    turn_steps: int
    """Steps a method takes before the next has its turn."""
    collective_timeout_s: float
    runner: int
    """The process id of who gave the order. When it dies, so do the ranks."""
    result: str
    """Where rank 0 writes the `WorkerRecord`."""
    record: str | None = None
    """Folder into which rank 0 records gradwire's methods; null for none."""
    deciding_steps: int = 0
    """Before its warm-up, a method that decides while it runs takes steps until it has decided, but no more than these."""
    go_on_to: dict[str, int] = msgspec.field(default_factory=dict)
    """By method: after the steps that count it goes on until it has made so many in all, and is evaluated now and then."""


class Decided(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision of a method that decides while it runs."""

    chosen: str
    """The plan in words."""
    plain: bool
    """Whether that is plain all-reduce."""
    step: int
    """When it was decided."""
    cost_us: float
    """How much longer the steps until then took than as many under the chosen plan."""


class MethodRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every rank saw of one method. Lists are by rank, then by step; a failed method may have short ones."""

    method: str
    failure: str | None
    wall_us: list[list[float]]
    cpu_us: list[list[float]]
    """CPU time of the whole process, all threads."""
    forward_us: list[list[float]] = []
    backward_us: list[list[float]] = []
    loss: list[list[float]]
    sent_bytes: list[list[int]]
    """What the rank's interface sent during the step, the traffic of all ranks that share the interface."""
    planned_bytes: list[int | None]
    codec_us: list[float | None]
    counted: tuple[int, int] | None = None
    """The first step that counts, and the first after those; null: all after the warm-up."""
    decided: list[Decided] = []
    held_out: list[tuple[int, float]] = []
    """Steps made, and rank 0's mean loss then on batches that nobody trains on."""


class WorkerRecord(Document, frozen=True, kw_only=True):
    """Everything the ranks of one cell group measured."""

    what: ClassVar[str] = "record of the bench's worker"

    version: int = 1
    job: str
    parameters: int
    world_size: int
    ranks_per_interface: int
    warmup_steps: int
    measured_gbps: float | None = None
    """Payload that a node's link carries. null: not measured."""
    methods: list[MethodRecord]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step times, of each step the mean over ranks."""

    median_us: float
    minimum_us: float
    p10_us: float
    p90_us: float
    mean_us: float
    stdev_us: float
    steps: int


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method on one job over one link. Where `failure` is set, the rest is null or empty."""

    job: str
    link: str
    gbps: float | None
    """null: unlimited."""
    method: str
    failure: str | None = None
    step: StepTimes | None = None
    wrong_on_purpose: bool = False
    """A part of each step was left out. Times and bytes are all that such a cell has."""
    forward_us: float | None = None
    """Median, with what the method did or waited for meanwhile."""
    backward_us: float | None = None
    """The same of backward. The rest of a step is the optimizer's."""
    counted_bytes: float | None = None
    """Per rank and step, from the interface's counter: Ethernet, IP and TCP headers and acknowledgements included."""
    planned_bytes: int | None = None
    """Per rank and step, what the method means to send. null where nobody can say."""
    counted_over_planned: float | None = None
    cpu_us: float | None = None
    codec_us: float | None = None
    """CPU time of the kernels of a step, measured alone in the same run. null where they cannot be run alone."""
    exposed_us: float | None = None
    """Median step minus the floor's median: communication that compute did not hide."""
    ideal_us: float | None = None
    """max(compute, wire); compute is the floor's median. null for several ranks a node, who share a link."""
    attainable_us: float | None = None
    """max(compute + codec, wire)."""
    scaling_factor: float | None = None
    """Throughput over n times that of one rank alone: T_n / (n T_1), from mean step times."""
    scaling_factor_stdev: float | None = None
    speedup_alone: float | None = None
    """S: throughput of all ranks over that of one rank alone, n times the scaling factor."""
    max_speedup: float | None = None
    """S^max: what S could be at most if the planned bytes, half in each phase, overlapped perfectly with backward and with
    forward (DeAR, eq. 6, with `measured_gbps`). The delayed schedule, which overlaps both with both, may be above."""
    measured_gbps: float | None = None
    """Payload that the link carried when it was measured alone. null: not measured, or shared by ranks of a node."""
    speedup: Interval | None = None
    """Against ddp in the same run; above 1 is faster."""
    step_us: list[float] = []
    """Each step, the mean over ranks, warm-up first."""
    loss: list[float] = []
    """Each step's mean over the ranks, warm-up first. The floor's ranks learn apart from each other."""
    counted: tuple[int, int] = (0, 0)
    """The first of those steps that counts, and the first after those; (0, 0): all after the run's warm-up."""
    decided: list[Decided] = []
    held_out: list[tuple[int, float]] = []
    """Steps made, and the mean loss then on batches that nobody trains on."""


class Alone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank alone on the machine, without a testbed: T_1."""

    job: str
    parameters: int
    failure: str | None = None
    step: StepTimes | None = None
    backward_us: float | None = None
    """The mean. The rest of a step is forward and the optimizer's step."""


class BenchRun(Document, frozen=True, kw_only=True):
    """A run of the matrix: `gradwire bench --json`."""

    what: ClassVar[str] = "bench results file"
    remedy: ClassVar[str] = "Make it with `gradwire bench --json FILE`."

    version: int = 1
    made: Made
    torch: str
    cores: int
    network: str
    """namespaces: an emulated cluster; loopback: plain processes, where only an unlimited link can be measured."""
    nodes: int
    ranks_per_node: int
    steps: int
    warmup_steps: int
    turn_steps: int
    seed: int
    notes: tuple[str, ...] = ()
    """What a reader must know before comparing."""
    alone: tuple[Alone, ...] = ()
    cells: tuple[Cell, ...] = ()

    def cell(self, job: str, link: str, method: str) -> Cell | None:
        """The cell of these names, if it was asked for."""
        found = [c for c in self.cells if (c.job, c.link, c.method) == (job, link, method)]
        return found[0] if found else None

    @property
    def failures(self) -> list[str]:
        """One line for each thing that failed."""
        lines = [f"{a.job}, one rank alone: {a.failure}" for a in self.alone if a.failure]
        return lines + [f"{c.job}, {c.link}, {c.method}: {c.failure}" for c in self.cells if c.failure]
