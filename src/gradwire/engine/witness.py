"""Measures what encodes do to gradients while a model trains, on a few blocks of one bucket every few steps.

The blocks are copied when their gradients are sent, with their residuals, and are encoded and decoded once more at the end of the
step. Three numbers of each bucket follow, of one encode of this rank's gradient:

- Sent energy: the squared norm of the decoded values over that of the gradient. Near 1 where the error of the codec is orthogonal
  to what is sent. Above, an optimizer such as Adam takes smaller steps.
- Residual norm: the norm of the residual over that of the gradient.
- Error norm: the norm of the decoded values less the gradient, over that of the gradient.

Nothing is sent, and no state of the run changes. The time is limited to a share of the steps' time. On a device the work is only
queued, and the numbers count in the step in which they have arrived: backward does not wait for them.
"""

import math
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from gradwire.compressors import Context, compressor_for
from gradwire.core import Plan, TensorInfo
from gradwire.engine.reducer import Observer
from gradwire.exchange import BucketBuffers, BucketStats, Exchange, Slot
from gradwire.kernels import Segment, Segments, tensor_key
from gradwire.kernels.reference.weights import values_of
from gradwire.transport import Group, Lanes, LanesObserver, Mark, Streams

LEAST_ENERGY, MOST_ENERGY = 0.8, 1.5
"""The usual sent energy, in the unit of weights, of a codec whose error is orthogonal to what is sent. Where gradients shrink,
older and larger residuals take it to 1.35."""
MOST_RESIDUAL = 1.0
"""The largest usual norm of residuals, over that of gradients. Residuals that grow without end pass it."""
SHARE = 0.005
"""The most time that measuring takes, as a share of the time of the steps."""
_FIRST, _EVERY, _LATER = 24, 5, 20
"""The first samples of a plan, the fewest steps from one of them to the next, and from one sample to the next later: most faults
of codecs are there from the begin, and where ranks share processors a sample takes 3 ms."""
_RUNS, _RUN = 16, 1024
"""Runs of elements in a sample, and about how many elements a run has."""
_KEPT = 8
"""The last samples of a bucket that count."""
_LEAST = 6
"""The fewest samples that are judged."""
_GOLDEN = 0.6180339887


class TrainedJob(Protocol):
    """A model in training between two steps: that of a handle (`Session`), of a hook of DistributedDataParallel, or of FSDP2."""

    @property
    def group(self) -> Group: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def tensors(self) -> list[TensorInfo]:
        """The tensors that are exchanged, in registration order. A change of the model makes another list."""
        ...

    @property
    def plan(self) -> Plan: ...
    @property
    def step(self) -> int:
        """The number of steps that counted so far."""
        ...


class WitnessedJob(TrainedJob, Protocol):
    """The job of a handle or of DDP's hook, whose exchanges use one set of lanes."""

    @property
    def lanes(self) -> Lanes: ...
    @property
    def last_exchange(self) -> Exchange:
        """The exchange that ran the last step."""
        ...

    @property
    def searching(self) -> bool:
        """Whether plans are being tried."""
        ...


class Quality(NamedTuple):
    """Sums of squares of a sample, over those of its gradients."""

    sent_energy: float
    residual_norm: float
    error_norm: float
    weighted_energy: float
    """The sent energy in the unit of the elements' weights, in which the error of a codec is orthogonal to what is sent."""


@dataclass(eq=False)
class _SampledRun:
    """A few blocks of one tensor."""

    slot: Slot
    first: int
    end: int
    """Elements from the tensor's start."""
    state: Sequence[torch.Tensor]
    """The state of the encode of these elements, where it is kept."""
    values: torch.Tensor | None = None
    """The gradient, divided by the number of ranks."""
    before: list[torch.Tensor] = field(default_factory=list)
    """The state before the encode."""


class _Sample(NamedTuple):
    """The blocks of one bucket that are encoded once more."""

    made_for: int
    """The step whose specs the exchange runs. The exchange itself would live as long as its lanes have this observer."""
    buffers: BucketBuffers
    runs: list[_SampledRun]


class _Squares(NamedTuple):
    """The mean squares of a sample, on their way to the host."""

    bucket: int
    numel: int
    """Elements of the bucket's compressed tensors."""
    on_host: torch.Tensor
    streams: Streams
    there: Mark
    """The mark behind the copy to the host."""


class Witness(Observer, LanesObserver):
    """Measures the encodes of one job."""

    def __init__(self, job: WitnessedJob, share: float = SHARE) -> None:
        # lanes keep a reference to this object and outlive the job
        self._job: WitnessedJob = weakref.proxy(job)
        self.share = share
        """The most time that measuring takes, as a share of the time of the steps."""
        self._plan: Plan | None = None
        """The plan of the samples."""
        self._squares: dict[int, deque[list[float]]] = {}
        """For each bucket mean squares of gradient, decoded values, error and residual in each of the last samples, and the
        first two in the unit of the elements' weights."""
        self._numels: dict[int, int] = {}
        self._turn = 0
        self._sample: _Sample | None = None
        self._coming: _Squares | None = None
        self._runs: dict[Slot, list[_SampledRun]] = {}
        self._next_step, self._spent_s, self._taken = _EVERY, 0.0, 0
        self._since = 0, time.perf_counter()
        """A step, and the moment of its end."""
        self.problem = ""
        """The fault of the codecs of this run, in a few words; '' if there is none."""

    # ---- in steps

    @torch.no_grad()
    def sends(self, slot: Slot, values: torch.Tensor) -> None:
        began = time.perf_counter()
        for run in self._runs.get(slot, ()):
            flat = values.detach().as_strided((values.numel(),), (1,), values.storage_offset())
            run.values = flat[run.first : run.end].clone()
            if slot.apart:
                run.values.mul_(1.0 / self._job.group.world_size)
            run.before = [each.clone() for each in run.state]
        self._spent_s += time.perf_counter() - began

    def finished(self, exposed_s: float) -> None:
        job, step = self._job, self._job.step
        if self._coming is not None:
            self._take()
        if self._sample is None and step < self._next_step:
            return
        began = time.perf_counter()
        if self._sample is not None:
            self._coming = self._measure(self._sample, step - 1) or self._coming
            self._take()
            job.lanes.observe(self, on=False)
            self._sample, self._runs = None, {}
            self._put_off(step, self._spent_s + time.perf_counter() - began)
        elif job.group.world_size > 1 and not job.searching:
            self._ask(job.last_exchange)
            self._spent_s = time.perf_counter() - began

    def _put_off(self, step: int, spent_s: float) -> None:
        """Choose the step of the next sample, so that the time spent is a small share of the time of the steps."""
        now, (before, then) = time.perf_counter(), self._since
        step_s = (now - then) / max(1, step - before)
        self._taken += 1
        fewest = _EVERY if self._taken < _FIRST else _LATER
        self._next_step = step + max(fewest, math.ceil(spent_s / (self.share * step_s))) - 1
        self._since = step, now

    def _ask(self, exchange: Exchange) -> None:
        """Choose the blocks of the next sample: each time another bucket, and other blocks of a bucket."""
        if exchange.plan is not self._plan:
            self._squares.clear()
            self._coming, self._taken = None, 0
        self._plan = exchange.plan
        buckets = [each for each in exchange.encoded if each.bucket.main_spec.granularity]
        runs = []
        if buckets:
            buffers = buckets[self._turn % len(buckets)]
            self._turn += 1
            runs = list(_runs_of(buffers, self._turn * _GOLDEN % 1))
        if not runs:
            self._next_step += _EVERY
            return
        for run in runs:
            self._runs.setdefault(run.slot, []).append(run)
        self._sample = _Sample(exchange.made_for, buffers, runs)
        self._job.lanes.observe(self)

    def _take(self) -> None:
        """Count the squares that were measured last, if they have arrived."""
        coming = self._coming
        if coming is None or not coming.streams.is_done(coming.there):
            return
        squares, self._coming = [float(each) for each in coming.on_host], None
        if all(map(math.isfinite, squares)):
            self._squares.setdefault(coming.bucket, deque(maxlen=_KEPT)).append(squares)
            self._numels[coming.bucket] = coming.numel
        self.problem = self._judged()

    @torch.no_grad()
    def _measure(self, sample: _Sample, step: int) -> _Squares | None:
        """Encode and decode the copied blocks. None where another exchange ran the step."""
        given = [(run, run.values) for run in sample.runs if run.values is not None]
        if not given:
            return None  # another exchange ran the step
        buffers, ranks, made_for = sample.buffers, self._job.group, sample.made_for
        codec = compressor_for(buffers.bucket.main_spec.at_step(made_for)).summing(1, ranks.world_size)
        values = torch.cat([each for _, each in given])
        state = [torch.cat(each) for each in zip(*(run.before for run, _ in given), strict=True)]
        residual = state[codec.state.index("residual")].clone() if "residual" in codec.state else torch.zeros_like(values)
        segments = _segments_of([run for run, _ in given], buffers, made_for)
        key = torch.zeros(4, dtype=torch.int64, device=values.device)
        key[1].fill_(step)
        key[3].fill_(ranks.rank)
        context = Context(key)
        payload = torch.zeros(codec.payload_bytes(segments, values.dtype), dtype=torch.uint8, device=values.device)
        sent = torch.zeros(values.numel(), dtype=torch.float32, device=values.device)
        codec.encode(values, state, segments, context, payload)
        codec.decode(payload, segments, values.dtype, False, sent, context)
        units = 1.0 if segments.weights is None else values_of(segments.weights)
        measured = values, sent, sent - values, residual, values / units, sent / units
        squares = torch.stack([each.double().square().mean() for each in measured])
        on_host = torch.empty(squares.shape, dtype=squares.dtype, device="cpu", pin_memory=squares.is_cuda)
        on_host.copy_(squares, non_blocking=True)
        streams, numel = self._job.lanes.data[0].link.streams, sum(slot.view.numel() for slot in buffers.compressed)
        return _Squares(buffers.index, numel, on_host, streams, streams.mark())

    # ---- between steps

    def of_buckets(self, stats: Sequence[BucketStats]) -> tuple[BucketStats, ...]:
        """Statistics of buckets, with what was measured of each."""
        found = {index: _quality([_means(squares)]) for index, squares in self._squares.items()}
        return tuple(
            each
            if (quality := found.get(index)) is None
            else replace(each, sent_energy=quality[0], residual_norm=quality[1], error_norm=quality[2])
            for index, each in enumerate(stats)
        )

    def _judged(self) -> str:
        means = {index: _means(squares) for index, squares in self._squares.items()}
        quality = _quality([[self._numels[index] * each for each in row] for index, row in means.items()])
        if quality is None or sum(map(len, self._squares.values())) < _LEAST:
            return ""
        if not LEAST_ENERGY <= quality.weighted_energy <= MOST_ENERGY:
            return (
                f"the encoded gradients have {quality.weighted_energy:.2f} times the energy of the gradients, where "
                f"{LEAST_ENERGY} to {MOST_ENERGY} is usual"
            )
        if quality.residual_norm > MOST_RESIDUAL:
            return (
                f"what was not sent yet has {quality.residual_norm:.2f} times the norm of the gradients, where at most "
                f"{MOST_RESIDUAL} is usual"
            )
        return ""


def _runs_of(buffers: BucketBuffers, phase: float) -> Iterator[_SampledRun]:
    """Runs of blocks, spread evenly over the elements whose gradients this rank encodes. phase: 0 to 1, moves all of them."""
    spans = list(_spans_of(buffers))
    total, granularity = sum(high - low for _, low, high, _ in spans), buffers.bucket.main_spec.granularity
    length = max(granularity, _RUN // granularity * granularity)
    target, passed, ended = phase * total / _RUNS, 0, 0
    for slot, low, high, state in spans:
        ended = low
        while target < passed + high - low:
            first = max(ended, low + int(target - passed) // granularity * granularity)
            ended = min(high, first + length)
            if first < ended:
                yield _SampledRun(slot, first, ended, [each[first - low : ended - low] for each in state])
            target += total / _RUNS
        passed += high - low


def _spans_of(buffers: BucketBuffers) -> Iterator[tuple[Slot, int, int, list[torch.Tensor]]]:
    """The elements whose gradients this rank encodes: the tensor, the first and the end in it, and the state of the encode."""
    for begin, chunk in zip(buffers.bounds, buffers.chunks, strict=False):
        for memory in chunk.of_gradient:
            for slot in () if memory.narrow else buffers.compressed:
                start, end = begin + memory.start, begin + memory.end
                low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
                if low < high:
                    state = [each[low - start : high - start] for each in memory.state]
                    yield slot, low - slot.offset, high - slot.offset, state


def _segments_of(runs: Sequence[_SampledRun], buffers: BucketBuffers, step: int) -> Segments:
    """The segments of the runs' elements, one run after another."""
    rows, at = [], 0
    for run in runs:
        name, numel = run.slot.name, run.end - run.first
        rows.append(Segment(at, numel, tensor_key(name), run.first, buffers.bucket.bits_of(name, step)))
        at += numel
    weights = None
    if buffers.energies is not None:
        of_all = buffers.energies.weights
        weights = torch.cat([of_all[run.slot.offset + run.first : run.slot.offset + run.end] for run in runs])
    names = tuple(run.slot.name for run in runs)
    return Segments(tuple(rows), runs[0].slot.device, names, ((),) * len(runs), weights)


def _means(rows: Collection[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _quality(rows: Sequence[Sequence[float]]) -> Quality | None:
    """The ratios of added squares; None without any, and where all gradients are zero."""
    gradient, sent, error, residual, given, coded = map(sum, zip(*rows, strict=True)) if rows else (0.0,) * 6
    if not gradient or not given:
        return None
    return Quality(sent / gradient, math.sqrt(residual / gradient), math.sqrt(error / gradient), coded / given)
