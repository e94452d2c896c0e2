"""The errors of each tensor with each number of bits, from what ranks send and from the norms of the means that they get."""

import math
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch

from gradwire.compressors import Context, compressor_for
from gradwire.core import CODEC_TASKS, TensorInfo, innermost, printable
from gradwire.engine import Session
from gradwire.exchange import MEASURED, Slot
from gradwire.kernels import Segment, Segments, tensor_key
from gradwire.plan import AdaptiveBits, encodes_again

WIDTHS = tuple(range(2, 9))
"""Bits to choose from. The specs of these widths, `adaptive.ways(WIDTHS)`, are the ways to encode a tensor."""
_ARRIVED, _STEPS_SENT, _STEPS_ARRIVED = -3, -2, -1
"""The last columns of a row."""
_TOP = 0.01
"""The part of a gradient's values that count as its top values."""


class ErrorsSoFar(msgspec.Struct, forbid_unknown_fields=True):
    """How far a measurement is, as states keep it."""

    by: str
    left: int
    sent: Mapping[str, int]
    rows: Mapping[str, Sequence[float | None]]
    """Not finite: None."""


class Errors:
    """Measures each tensor as it is sent, or added up over several steps, until `remove`.

    rows: by name what `measured` returns, and three squared norms: of the sum over ranks that arrived and, added up over the
    steps, of what was sent and of what arrived. All are of the sum over ranks, not of the mean. `of_both_encodes` takes them.
    """

    def __init__(self, adaptive: AdaptiveBits, session: Session, wanted: set[str]) -> None:
        self.rows: dict[str, list[float]] = {}
        self.us = 0.0
        # lanes keep this, and what ends with a session keeps lanes
        self._adaptive, self._session = adaptive, weakref.proxy(session)
        self._left = adaptive.measured_steps
        """Steps to come."""
        self._options = {n: bucket.option for bucket in session.plan.buckets for n in bucket.tensors if n in wanted}
        self._again = [name for name in self._options if encodes_again(self._options[name])]
        """Tensors whose sums are encoded too."""
        self._sent: Counter[str] = Counter()
        """How often each tensor was sent, in steps that were void too."""
        self._now: list[str] = []
        """The tensors of the step at hand."""
        self._own: dict[str, torch.Tensor] = {}
        self._means: dict[str, torch.Tensor] = {}
        """Added up so far."""
        session.lanes.watch = self._sends

    def remove(self) -> None:
        self._session.lanes.watch = None

    def so_far(self, pending: bool) -> tuple[ErrorsSoFar, dict[str, torch.Tensor]]:
        """What `load` goes on with, between two of the steps. pending: the last one has landed, but its end was not told yet."""
        self._take_means()
        sums = {
            f"{MEASURED}{which}/{name}": values.clone()
            for which, of in enumerate((self._own, self._means))
            for name, values in of.items()
        }
        return ErrorsSoFar(repr(self._adaptive), self._left - pending, self._sent, self.rows), sums

    def load(self, saved: ErrorsSoFar, sums: Mapping[str, torch.Tensor]) -> None:
        """Go on where `so_far` was called, when `check` finds nothing wrong with it."""
        self._left, self._sent = saved.left, Counter(saved.sent)
        self.rows = {n: [math.nan if each is None else each for each in row] for n, row in saved.rows.items()}
        for key, values in sums.items():
            _, which, name = key.split("/", 2)
            (self._means if which == "1" else self._own)[name] = values.to(self._session.device, copy=True)

    @torch.no_grad()
    def _sends(self, slot: Slot, values: torch.Tensor) -> None:
        name = slot.name
        if name not in self._options:
            return
        began = time.perf_counter()
        self._sent[name] += 1
        self._now.append(name)
        last = self._sent[name] >= self._adaptive.accumulate
        factor = 1 if slot.apart else self._session.group.world_size
        row = self.rows.setdefault(name, [0.0] * columns(self._adaptive))
        row[_STEPS_SENT] += factor**2 * _square(values)
        own = _added(self._own, name, values.detach(), last)
        if last:
            row[:_ARRIVED] = [factor**2 * each for each in self._measured(name, own)]
        self.us += 1e6 * (time.perf_counter() - began)

    def step_ended(self) -> bool:
        """A step counted; returns whether it was the last one. Raises what waiting for its means does."""
        self._take_means()
        self._left -= 1
        return self.done

    @property
    def done(self) -> bool:
        """Whether no step is left to measure."""
        return not self._left

    @torch.no_grad()
    def _take_means(self) -> None:
        """Measure the norms of the means of the step at hand."""
        began = time.perf_counter()
        sent, self._now = set(self._now), []
        session, group = self._session, self._session.group
        if self._again and session.plan.schedule.gathers_in_forward:
            session.settle()
        for index, name in enumerate(self._again):
            if name not in sent or index % group.world_size != group.rank:  # another rank has the same mean
                continue
            slot = session.reducer.running.slots[name]
            values = slot.view if not slot.apart else session.parameters[name].grad
            if values is None or values.is_sparse:
                continue
            last = self._sent[name] >= self._adaptive.accumulate
            self.rows[name][_STEPS_ARRIVED] += group.world_size**2 * _square(values)
            mean = _added(self._means, name, values.detach(), last)
            if last:
                self.rows[name][_ARRIVED] = group.world_size**2 * _square(mean)
        self.us += 1e6 * (time.perf_counter() - began)

    def _measured(self, name: str, values: torch.Tensor) -> list[float]:
        step, rank = self._session.reducer.step, self._session.group.rank
        return measured(self._adaptive, name, values.reshape(-1), step, rank)


def check(
    saved: ErrorsSoFar, sums: Mapping[str, torch.Tensor], adaptive: AdaptiveBits, tensors: Sequence[TensorInfo]
) -> None:
    """Raises ValueError for a saved measurement that does not fit the model or these adaptive bits."""
    numels = {info.name: info.numel for info in tensors}
    wrong = sorted(name for name in saved.sent if name not in numels)
    wrong += sorted(name for name, row in saved.rows.items() if len(row) != columns(adaptive) or name not in saved.sent)
    wrong += sorted(key for key, values in sums.items() if numels.get(key.split("/", 2)[2]) != values.numel())
    if wrong or not 0 <= saved.left <= adaptive.measured_steps:
        what = printable(wrong[0]) if wrong else f"{saved.left} steps to come"
        raise ValueError(
            f"the state's measurement of errors has {what}, which does not fit the model and {adaptive!r}. Pass what "
            "handle.state_dict() returned."
        )


def _added(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor, last: bool) -> torch.Tensor:
    """The values of a step, added to those of the steps before."""
    if name in sums:
        values = sums.pop(name).add_(values)
    elif not last:
        values = values.to(torch.float32, copy=True)
    if not last:
        sums[name] = values
    return values


def _square(values: torch.Tensor) -> float:
    """The squared norm."""
    return float(values.detach().float().square().sum())


def columns(adaptive: AdaptiveBits) -> int:
    """The numbers of a row."""
    return len(adaptive.ways(WIDTHS)) + 2 - _ARRIVED


def of_both_encodes(
    row: Sequence[float], option: tuple[str, ...], ranks: int, present: int, unbiased: bool = True
) -> list[float]:
    """A row of `Errors`, summed over ranks, with the errors of all encodes of the option; as long as one of `measured`.

    An encode of the sum loses as much as one of a gradient, in relation to the norm. Only its owner has the sum as it is before
    that encode. What arrives was encoded in the present way, and would lose nothing in the same way again. So its norm counts,
    without the noise of the encodes that it came through. present: the index of that way. unbiased: whether errors are noise.
    """
    *errors, square, top = row[:_ARRIVED]
    arrived, steps_sent, steps_arrived = row[_ARRIVED:]
    # an owner adds its own part of a shard as it is
    encoded = 1 - 1 / ranks if _first_link(option) == "alltoall" else 1.0
    first = [encoded * error for error in errors]
    if not encodes_again(option) or not square:
        return [*first, square, top]
    relative = [error / square for error in errors]
    noise = relative[present] if unbiased else 0.0
    exact = arrived - encoded * noise * steps_sent - noise / (1 + noise) * steps_arrived
    exact = min(max(exact, 0.0), ranks * square)  # no sum is longer
    return [*(own + each * (exact + own) for own, each in zip(first, relative, strict=True)), square, top]


def _first_link(option: Sequence[str]) -> str:
    return next(task.partition(":")[0] for task in option if task.partition(":")[0] not in CODEC_TASKS)


def measured(adaptive: AdaptiveBits, name: str, gradient: torch.Tensor, step: int, rank: int) -> list[float]:
    """For a flat gradient of one rank: the squared error of each of the ways, the squared norm, and that of its top."""
    device, numel, found = gradient.device, gradient.numel(), []
    context = Context(torch.tensor([0, step, 0, rank], device=device))
    decoded = torch.empty(numel, dtype=torch.float32, device=device)
    for spec in map(innermost, adaptive.ways(WIDTHS)):
        compressor = compressor_for(spec)
        segments = Segments((Segment(0, numel, tensor_key(name), 0, spec.element_bits),), device)
        payload = torch.empty(compressor.payload_bytes(segments, gradient.dtype), dtype=torch.uint8, device=device)
        compressor.encode(gradient, [], segments, context, payload)
        compressor.decode(payload, segments, torch.float32, False, decoded, context)
        found.append(float((decoded - gradient).square().sum()))
    magnitudes = gradient.float().square()
    top = magnitudes.topk(max(1, round(_TOP * numel)), sorted=False).values if numel else magnitudes
    return [*found, float(magnitudes.sum()), float(top.sum())]
