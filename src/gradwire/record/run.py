"""The format of a recorded run, `run.json`. Pure: no torch.

Times are microseconds; moments are seconds since the start of the recording. Sizes are bytes or elements.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import msgspec

from gradwire.core import (
    Document,
    Made,
    MemoryRecord,
    Plan,
    freeze,
    freeze_pairs,
    number,
    numbers,
    only_version,
    show,
    text,
    unique,
    whole,
    wholes,
)
from gradwire.errors import FormatError
from gradwire.sim import Timeline

FILE = "run.json"
"""Name of the file in the folder of a run."""

Points = tuple[tuple[int, float], ...]
"""Pairs of a step and a value, with ascending steps."""


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ratio of medians with its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float

    def __post_init__(self) -> None:
        numbers(self, "a ratio", "ratio", "low", "high")


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that was tried on the running job."""

    name: str
    step_us: float
    """The median step of the trial."""
    kept: bool
    """Whether this plan was chosen."""

    def __post_init__(self) -> None:
        text("name", self.name, "the name of a plan")
        number("step_us", self.step_us, "a time in microseconds")


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of the plan."""

    by: str
    """The policy, the file or the planner, in a few words."""
    words: tuple[str, ...] = ()
    """The reasons, line by line."""
    alternatives: tuple[Alternative, ...] = ()

    def __post_init__(self) -> None:
        text("by", self.by, "who decided")
        freeze(self, "words", "alternatives")


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training step of the rank that recorded. In the `local` schedule: the local steps from one exchange to the next."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("local_steps",)

    step: int
    """The handle's step number, which counts exchanges."""
    end_s: float
    """The end of the step's exchange."""
    step_us: float
    """Time from the start of a forward to the start of the next; for the last step, to the end of its exchange."""
    exposed_us: float
    """The wait for the exchange at the end of backward."""
    codec_us: float
    """CPU time of all encodes and decodes of the step, on all lanes."""
    loss: float | None
    """The loss that this rank logged; null if no loss was logged, or the loss was not finite."""
    local_steps: int | None = None
    """Number of local steps; null in other schedules, and in records of gradwire 0.3."""

    def __post_init__(self) -> None:
        whole("step", self.step, "a step's number")
        if self.local_steps is not None:
            whole("local_steps", self.local_steps, "the local steps of an exchange", low=1)
        number("end_s", self.end_s, "a moment in seconds")
        numbers(self, "a time in microseconds", "step_us", "exposed_us", "codec_us")


class BucketRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes of one bucket in a step. Records are in the order of the plan's buckets."""

    numel: int
    chunks: int
    gradient_bytes: int
    wire_bytes: int
    intra_bytes: int
    """The part of `wire_bytes` inside the node. `inter_bytes` leave the node."""
    inter_bytes: int
    exchange_us: float | None = None
    """Median time from the begin of the bucket's first task to the end of its last one; null if tasks were not timed."""
    predicted_us: float | None = None
    """Predicted time of the exchange, if the choice of the compressor predicted it for this bucket alone."""
    sent_energy: float | None = None
    """Squared norm of decoded values over that of the gradient, of one encode of the rank's gradient, in the last samples of
    blocks; null if there is no sample."""
    residual_norm: float | None = None
    """Norm of the residuals over that of the gradient."""
    error_norm: float | None = None
    """Norm of the decoded values less the gradient, over that of the gradient."""

    def __post_init__(self) -> None:
        times, measured = ("exchange_us", "predicted_us"), ("sent_energy", "residual_norm", "error_norm")
        counts = (field for field in self.__struct_fields__ if field not in times + measured)
        wholes(self, "a number of bytes, elements or chunks", *counts)
        numbers(self, "a time in microseconds", *times)
        numbers(self, "a ratio", *measured)


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor's bits and errors over the run."""

    name: str
    numel: int
    bits: Points
    """Bits per element of one encode, with the step from which they apply."""
    error: Points
    """Relative l2 error of one encode of this rank's gradient, without residuals; empty if it was not measured."""

    def __post_init__(self) -> None:
        text("name", self.name, "a parameter's name")
        whole("numel", self.numel, "the tensor's elements")
        for field in ("bits", "error"):
            freeze_pairs(self, field, "[step, value]")
            points = getattr(self, field)
            for index, (step, value) in enumerate(points):
                whole(f"{field}[{index}][0]", step, "a step's number")
                number(f"{field}[{index}][1]", value, "a value")
            for index, (before, after) in enumerate(pairwise(points)):
                if before[0] >= after[0]:
                    raise FormatError(f"{field}[{index + 1}] is {show(after)} behind {show(before)}: steps must ascend.")


class Rival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another method for the same model, measured side by side in the same run."""

    name: str
    step_us: float
    """Median time of a step."""
    sent_bytes: int | None
    """Planned bytes per rank and step; null if unknown."""
    speedup: Interval
    """Median step of the rival over the median step of this run. Above 1, this run is faster."""
    again: Interval | None = None
    """The rival against itself, measured twice side by side (A/A): the noise of a ratio."""
    end_s: tuple[float, ...] = ()
    """The end of each step, without the turns of other methods."""
    loss: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        text("name", self.name, "the name of a method")
        number("step_us", self.step_us, "a time in microseconds")
        if self.sent_bytes is not None:
            whole("sent_bytes", self.sent_bytes, "a number of bytes")
        freeze(self, "end_s", "loss")
        if len(self.end_s) != len(self.loss):
            raise FormatError(f"loss (and end_s) has {len(self.loss)} (and {len(self.end_s)}) values: each step has one of both.")


class Run(Document, frozen=True, kw_only=True):
    """A recorded training run."""

    what: ClassVar[str] = "record of a run"
    remedy: ClassVar[str] = "Record it again: with handle.record(FOLDER) around the training loop."
    private: ClassVar[bool] = True

    version: int = 1
    made: Made
    model: str
    device: str
    """"cpu", or torch's name of the accelerator."""
    world_size: int
    nodes: int
    decision: Decision
    plan: Plan
    """The plan in use at the end."""
    steps: tuple[StepRecord, ...]
    """Long runs keep only every 2nd, 4th, ... step."""
    warmup_steps: int = 1
    """Number of first steps that statistics exclude."""
    buckets: tuple[BucketRecord, ...]
    tensors: tuple[TensorRecord, ...]
    memory: MemoryRecord
    timeline: Timeline | None = None
    """The measured step of median length among the last steps. In the `local` schedule: all local steps of one exchange."""
    rivals: tuple[Rival, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        only_version(self.version)
        text("model", self.model, "the model's name")
        text("device", self.device, "what computed")
        whole("world_size", self.world_size, "the number of ranks", low=1)
        whole("nodes", self.nodes, "the number of nodes", low=1)
        whole("warmup_steps", self.warmup_steps, "a number of steps")
        freeze(self, "steps", "buckets", "tensors", "rivals", "notes")
        unique("tensors", [tensor.name for tensor in self.tensors], ".name")
        if len(self.buckets) != len(self.plan.buckets):
            raise FormatError(
                f"buckets has {len(self.buckets)} entries, and plan.buckets has {len(self.plan.buckets)}: each bucket of the "
                "plan has one entry. Record the run again."
            )

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> "Run":
        """Read the record in a run's folder, or in a file. Raises FormatError with the name of the file."""
        path = Path(folder)
        return Run.load(path / FILE if path.is_dir() else path)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that one rank sends in a step. In the `local` schedule: in a round of `round_steps` steps."""
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    @property
    def round_steps(self) -> int:
        """Rank 0's local steps in which all buckets are exchanged once; 1 in other schedules."""
        schedule = self.plan.schedule
        return schedule.begins_after(schedule.exchanges - 1, rank=0) if schedule.sends_weights else 1

    @property
    def counts_local_steps(self) -> bool:
        """Whether the record has the number of local steps of each exchange. Records of gradwire 0.3 have not."""
        return self.round_steps == 1 or any(step.local_steps for step in self.steps)

    @property
    def local_steps(self) -> tuple[float, ...]:
        """The number of optimizer steps in each of `steps`: 1 but in the `local` schedule."""
        otherwise = 1.0 if self.counts_local_steps else self.round_steps / self.plan.schedule.exchanges
        return tuple(step.local_steps or otherwise for step in self.steps)

    @property
    def optimizer_steps(self) -> tuple[float, ...]:
        """The number, from 0, of the last optimizer step in each of `steps`. Equals `step` but in the `local` schedule."""
        at, before, result = -1.0, -1, []
        for step, local_steps in zip(self.steps, self.local_steps, strict=True):
            at, before = at + local_steps * (step.step - before), step.step
            result.append(at)
        return tuple(result)
