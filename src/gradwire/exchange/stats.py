"""Statistics of handles and exchanges."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradwire.core import MemoryRecord
from gradwire.exchange.layout import BucketBuffers
from gradwire.transport import Grid, Mark, Meter, Streams


@dataclass(frozen=True)
class BucketStats:
    """One bucket: what it holds and what it sends."""

    tensors: tuple[str, ...]
    numel: int
    chunks: int
    gradient_bytes: int
    """Bytes of the gradients themselves."""
    wire_bytes: int
    """Bytes this rank sends for the bucket in a step; in the delayed schedule the mean of usual steps and corrections."""
    intra_bytes: int
    """The part of `wire_bytes` that goes to ranks of the own node."""
    inter_bytes: int
    """The part of `wire_bytes` that leaves the node."""
    sent_energy: float | None = None
    """Squared norm of the decoded values over that of the gradient, of one encode of this rank's gradient, on a sample of blocks
    in the last steps. Usual is 0.8 to 1.5. None where nothing is encoded, before the first sample, and in `Exchange.stats`."""
    residual_norm: float | None = None
    """Norm of the residuals over that of the gradient, in the same sample."""
    error_norm: float | None = None
    """Norm of the decoded values less the gradient, over that of the gradient, in the same sample."""

    @staticmethod
    def of(buffers: BucketBuffers, grid: Grid, correcting: BucketBuffers | None = None, part: float = 0.0) -> "BucketStats":
        """Add up the schemes of its chunks, and those of its corrections, which are this part of all steps."""
        intra, inter = _sent(buffers, grid)
        if correcting is not None:
            pairs = zip((intra, inter), _sent(correcting, grid), strict=True)
            intra, inter = (round(usual + part * (corrected - usual)) for usual, corrected in pairs)
        tensors, numel = buffers.bucket.tensors, buffers.numel
        nbytes = numel * buffers.flat.element_size()
        return BucketStats(tensors, numel, len(buffers.chunks), nbytes, intra + inter, intra, inter)


def _sent(buffers: BucketBuffers, grid: Grid) -> tuple[int, int]:
    """Bytes of a step to ranks of the own node, and to others."""
    links = [grid.split(chunk.bytes_to) for chunk in buffers.chunks]
    return sum(inside for inside, _ in links), sum(outside for _, outside in links)


@dataclass(frozen=True, kw_only=True)
class ExchangeStats:
    """Statistics of an exchange, for this rank."""

    steps: int
    """Steps so far. Each `handle.join()` ends with one in which no rank has a batch, which counts too."""
    wire_bytes: int
    """Bytes of payload this rank sends in a step, as planned. Frames and acknowledgements come on top, and a few control
    messages of a bit a parameter and some 50 bytes each."""
    intra_bytes: int
    """The part of `wire_bytes` that goes to ranks of the own node. A sum on the wire counts as a ring in rank order."""
    inter_bytes: int
    """The part of `wire_bytes` that leaves the node."""
    gradient_bytes: int
    """Bytes of the tensors themselves."""
    codec_us: float
    """CPU time of encodes and decodes in a step, lanes added up: of the last step; of a handle the median of 100 steps."""
    memory: MemoryRecord
    """Memory that gradwire holds in addition to the tensors themselves."""
    buckets: tuple[BucketStats, ...]

    @staticmethod
    def of(
        exchange_steps: int, of_buckets: tuple[BucketStats, ...], buckets: Sequence[BucketBuffers], codec_us: float
    ) -> "ExchangeStats":
        """The sums over buckets."""
        return ExchangeStats(
            steps=exchange_steps,
            wire_bytes=sum(each.wire_bytes for each in of_buckets),
            intra_bytes=sum(each.intra_bytes for each in of_buckets),
            inter_bytes=sum(each.inter_bytes for each in of_buckets),
            gradient_bytes=sum(each.gradient_bytes for each in of_buckets),
            codec_us=codec_us,
            memory=memory_of(buckets),
            buckets=of_buckets,
        )

    def __str__(self) -> str:
        """One line; `repr` has every field."""
        return (
            f"{self.steps} steps in {len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)}; this rank sends "
            f"{self.wire_bytes / 1e6:.3f} MB a step for tensors of {self.gradient_bytes / 1e6:.3f} MB; encoding and "
            f"decoding take {self.codec_us / 1e3:.2f} ms"
        )


@dataclass(frozen=True, kw_only=True)
class Stats(ExchangeStats):
    """Statistics of a handle, for this rank. A recording's `run()` has the rest: steps, losses, bits and errors by tensor."""

    exposed_us: float
    """Median over the last 100 steps of the time that the end of backward waited for the exchange."""
    before_first_gradient: float
    """Part of backward that passes before its first gradient is there, 0 to 1: nothing can be sent in that time. Median of
    the first 20 steps; near 1 where the model is compiled as a whole."""
    decisions: tuple[Any, ...] = ()
    """Decisions that gradwire made by itself, with predictions and measurements, at most 100; the last one is in force."""
    decided: int = 0
    """Decisions so far."""

    def __str__(self) -> str:
        return f"{super().__str__()}; the end of backward waits {self.exposed_us / 1e3:.2f} ms"


class DeviceTimes(NamedTuple):
    """The times of one step on a device, from timed marks. To read them may wait until the device has done the step."""

    streams: Streams
    began: Mark
    """The mark in the caller's stream where it began to wait for the step's exchanges: the end of backward."""
    ended: Mark
    """The mark in the caller's stream behind all exchanges."""
    tasks: Sequence[tuple[Mark, Mark]]
    """Begin and end of each task of all lanes."""

    @property
    def exposed_s(self) -> float:
        """The time that the device waited for exchanges at the end of backward."""
        return self.streams.elapsed_s(self.began, self.ended)

    @property
    def busy_s(self) -> float:
        """The time in which some task was under way."""
        since = [[self.streams.elapsed_s(self.tasks[0][0], mark) for mark in task] for task in self.tasks]
        busy_s, until = 0.0, -math.inf
        for began, ended in sorted(since):
            busy_s += max(0.0, ended - max(began, until))
            until = max(until, ended)
        return busy_s


class StepReport(NamedTuple):
    """The measurements of one step, in seconds."""

    meters: list[Meter]
    exposed_s: float
    device: DeviceTimes | None = None
    """The times on the device, if lanes only queued their work and an observer wanted times."""

    @property
    def codec_s(self) -> float:
        return sum(meter.codec_seconds for meter in self.meters)

    @property
    def link_s(self) -> float:
        """Time that lanes spent on tasks but for their codec work: with links, and waiting for the other ranks."""
        return sum(max(0.0, meter.task_seconds - meter.codec_seconds) for meter in self.meters)


def memory_of(buckets: Iterable[BucketBuffers]) -> MemoryRecord:
    """Bytes of the buckets' gradients, of what their compressors remember, and of all other values that their schemes hold."""
    buckets = list(buckets)
    chunks = [chunk for each in buckets for chunk in each.chunks]
    flat = _sizes(each.flat for each in buckets)
    remembered = [tensor for chunk in chunks for memory in chunk.memory for tensor in memory.held]
    remembered += [each.energies.energy for each in buckets if each.energies is not None]
    slots = [slot for each in buckets for slot in each.slots]
    remembered += [kept for slot in slots for kept in (slot.owed, slot.energy) if kept is not None]
    held = _sizes([*remembered, *(tensor for chunk in chunks for tensor in chunk.shared.values())])
    others = _sizes(tensor for tensor in _tensors_in(chunks, set()) if tensor.dtype is not torch.int64)
    return MemoryRecord(
        gradient_bytes=sum(flat.values()),
        residual_bytes=sum(held.values()),
        payload_bytes=sum(size for place, size in others.items() if place not in flat and place not in held),
    )


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each piece of memory that the tensors lie in, by where it begins."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that can be reached through containers and gradwire's own objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each, seen)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each, seen)
    elif type(value).__module__.startswith("gradwire.") and hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value), seen)
