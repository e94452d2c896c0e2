"""Defines the plans that are predicted, and the file and table of predicted and measured steps. No torch."""

import statistics
from collections.abc import Iterator
from typing import ClassVar

import msgspec
from rich.table import Table

from gradwire.bench.table import NOTHING, milliseconds
from gradwire.core.plan import Bucket, Plan
from gradwire.core.profile import Profile, TensorProfile
from gradwire.core.provenance import Made
from gradwire.core.specs import Identity
from gradwire.core.strict import Document
from gradwire.core.tensors import fingerprint

__all__ = ["LinkFit", "PredictRun", "Predicted", "ddp_plan", "prediction_table", "summary"]

DDP_FIRST_BYTES, DDP_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's defaults: what its first bucket holds, and the others."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method on one job over one link. Where `failure` is set there is no measured time."""

    job: str
    link: str
    method: str
    predicted_us: float
    measured_us: float | None = None
    """The median step."""
    p10_us: float | None = None
    p90_us: float | None = None
    computation_us: float
    """Predicted time of optimizer, forward and backward, as profiled."""
    wire_us: float
    """Predicted busy time of the link between nodes."""
    codec_us: float
    """Predicted time of all encodes and decodes."""
    failure: str | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.measured_us is None else (self.predicted_us - self.measured_us) / self.measured_us


class LinkFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fit of a link for a cell group's predictions, from the profiling before the group."""

    job: str
    link: str
    inter_alpha_us: float
    inter_gbps: float
    allreduce_alpha_us: float
    allreduce_gbps: float
    said: tuple[str, ...] = ()
    """Warnings of the profiling."""


class PredictRun(Document, frozen=True, kw_only=True):
    """A run of `python -m benchmarks predict`."""

    what: ClassVar[str] = "file of predictions"
    remedy: ClassVar[str] = "Make it with `python -m benchmarks predict --json FILE`."

    version: int = 1
    made: Made
    torch: str
    cores: int
    nodes: int
    ranks_per_node: int
    profile_steps: int
    steps: int
    median_error: float | None = None
    """Median over cells of |error|; None where nothing was measured."""
    worst_error: float | None = None
    fits: tuple[LinkFit, ...] = ()
    cells: tuple[Predicted, ...] = ()

    def with_errors(self) -> "PredictRun":
        """Return the run with its errors summed up."""
        errors = [abs(cell.error) for cell in self.cells if cell.error is not None]
        if not errors:
            return self
        return msgspec.structs.replace(self, median_error=statistics.median(errors), worst_error=max(errors))


def ddp_plan(profile: Profile) -> Plan:
    """Return the plan of DistributedDataParallel after its first step: all-reduce of tensors in gradient-ready order. A
    bucket closes with the tensor that brings it to 25 MiB, the first bucket at 1 MiB. Tensors must be of one dtype."""
    buckets: list[list[TensorProfile]] = [[]]
    filled = 0
    for tensor in profile.tensors:
        if filled >= (DDP_FIRST_BYTES if len(buckets) == 1 else DDP_BYTES):
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.nbytes
    return Plan(
        fingerprint=fingerprint(profile.tensor_infos("cpu")),
        schedule="backward",  # type: ignore[arg-type]
        buckets=tuple(
            Bucket(
                tensors=tuple(tensor.name for tensor in bucket),
                spec=Identity(),
                reduce_dtype=bucket[0].dtype,
                option=("allreduce:inter",),
                numel=sum(tensor.numel for tensor in bucket),
            )
            for bucket in buckets
        ),
        launch=tuple((index, "allreduce") for index in range(len(buckets))),
    )


def prediction_table(run: PredictRun) -> Table:
    """A line for each cell."""
    title = f"predicted and measured steps, {run.nodes} nodes x {run.ranks_per_node} ranks, {run.steps} steps"
    table = Table(title=title, title_justify="left")
    for column in ("job", "link", "method", "predicted ms", "measured ms", "p10-p90", "error"):
        table.add_column(column, justify="left" if column in ("job", "link", "method") else "right")
    previous = None
    for cell in run.cells:
        if previous not in (None, (cell.job, cell.link)):
            table.add_section()
        table.add_row(cell.job, cell.link, cell.method, *_numbers(cell))
        previous = (cell.job, cell.link)
    return table


def _numbers(cell: Predicted) -> Iterator[str]:
    yield milliseconds(cell.predicted_us)
    yield milliseconds(cell.measured_us) if cell.failure is None else "FAILED"
    spread = cell.p10_us is not None
    yield f"{milliseconds(cell.p10_us)}-{milliseconds(cell.p90_us)}" if spread else NOTHING
    yield NOTHING if cell.error is None else f"{100 * cell.error:+.1f} %"


def summary(run: PredictRun) -> str:
    """The errors in a sentence."""
    if run.median_error is None or run.worst_error is None:
        return "Nothing was measured."
    known = sum(cell.error is not None for cell in run.cells)
    return f"Error over {known} cells: median {100 * run.median_error:.1f} %, worst {100 * run.worst_error:.1f} %."
