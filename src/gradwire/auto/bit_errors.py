"""Measures the error of each tensor with each number of bits, for the driver in `adaptive_bits`.

The errors of the first encode come from the tensors that a rank sends. Those of a second one follow from norms of means.
"""

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
from gradwire.transport import LanesObserver

WIDTHS = tuple(range(2, 9))
"""Numbers of bits to choose from. `adaptive.ways(WIDTHS)` are the specs of these widths: the ways to encode a tensor."""
_ARRIVED, _STEPS_SENT, _STEPS_ARRIVED = -3, -2, -1
"""Indices of the last columns of a row."""
_TOP = 0.01
"""Share of a gradient's values that count as its top values."""


class SavedBitErrors(msgspec.Struct, forbid_unknown_fields=True):
    """A measurement under way, as states save it."""

    by: str
    left: int
    sent: Mapping[str, int]
    rows: Mapping[str, Sequence[float | None]]
    """The rows of `BitErrors`, with None for numbers that are not finite."""


class BitErrors(LanesObserver):
    """Measures each tensor when it is sent, or the sum of several steps, until `remove`.

    rows: by name the result of `measured`, and three squared norms: of the sum over ranks that this rank received, and,
    added up over the steps, of the tensors that were sent and of the sums that were received. All numbers are of the
    sum over ranks, not of the mean. `of_both_encodes` reads the rows.
    """

    def __init__(self, adaptive: AdaptiveBits, session: Session, wanted: set[str]) -> None:
        self.rows: dict[str, list[float]] = {}
        self.us = 0.0
        # lanes keep a reference to this object and outlive the session
        self._adaptive, self._session = adaptive, weakref.proxy(session)
        self._tensors = session.tensors
        self._left = adaptive.measured_steps
        """Number of steps that are still to be measured."""
        self._options = {n: bucket.option for bucket in session.plan.buckets for n in bucket.tensors if n in wanted}
        self._again = [name for name in self._options if encodes_again(self._options[name])]
        """Tensors with a second encode, of the sum over ranks."""
        self._sent: Counter[str] = Counter()
        """Number of times that each tensor was sent, void steps included."""
        self._now: list[str] = []
        """Tensors that were sent in the current step."""
        self._own: dict[str, torch.Tensor] = {}
        self._means: dict[str, torch.Tensor] = {}
        """Means added up so far, by name."""
        session.lanes.observe(self)

    @property
    def outdated(self) -> bool:
        """Whether the model changed since the measurement began: names may stand for other tensors, or for none."""
        return self._session.tensors is not self._tensors

    def remove(self) -> None:
        self._session.lanes.observe(self, on=False)

    def so_far(self, pending: bool) -> tuple[SavedBitErrors, dict[str, torch.Tensor]]:
        """Return the measurement for `load` to go on with. Call it between two steps.

        pending: the last exchange has ended, but `step_ended` was not called for its step yet.
        """
        self._take_means()
        sums = {
            f"{MEASURED}{which}/{name}": values.clone()
            for which, of in enumerate((self._own, self._means))
            for name, values in of.items()
        }
        return SavedBitErrors(repr(self._adaptive), self._left - pending, self._sent, self.rows), sums

    def load(self, saved: SavedBitErrors, sums: Mapping[str, torch.Tensor]) -> None:
        """Go on with a measurement that `so_far` returned and that `check` accepted."""
        self._left, self._sent = saved.left, Counter(saved.sent)
        self.rows = {n: [math.nan if each is None else each for each in row] for n, row in saved.rows.items()}
        for key, values in sums.items():
            _, which, name = key.split("/", 2)
            (self._means if which == "1" else self._own)[name] = values.to(self._session.device, copy=True)

    @torch.no_grad()
    def sends(self, slot: Slot, values: torch.Tensor) -> None:
        name = slot.name
        if name not in self._options or self.outdated:
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
        """Count a step. Returns whether it was the last one. Raises the exchange's error if waiting for means fails."""
        self._take_means()
        self._left -= 1
        return self.done

    @property
    def done(self) -> bool:
        """Whether all steps are measured."""
        return not self._left

    @torch.no_grad()
    def _take_means(self) -> None:
        """Measure the norms of the means that arrived in the current step."""
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


def check(saved: SavedBitErrors, sums: Mapping[str, torch.Tensor], adaptive: AdaptiveBits, tensors: Sequence[TensorInfo]) -> None:
    """Check a saved measurement. Raises ValueError if it does not fit the model or these adaptive bits."""
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
    """Return the sum of this step's values and those of the steps before."""
    if name in sums:
        values = sums.pop(name).add_(values)
    elif not last:
        values = values.to(torch.float32, copy=True)
    if not last:
        sums[name] = values
    return values


def _square(values: torch.Tensor) -> float:
    return float(values.detach().float().square().sum())


def columns(adaptive: AdaptiveBits) -> int:
    """Return the length of a row."""
    return len(adaptive.ways(WIDTHS)) + 2 - _ARRIVED


def of_both_encodes(
    row: Sequence[float], option: tuple[str, ...], ranks: int, present: int, unbiased: bool = True
) -> list[float]:
    """Return the errors of all encodes of an option together, in the form that `measured` returns.

    row: a row of `BitErrors`, summed over ranks. present: the index of the way that the tensor has now. unbiased:
    whether the errors of an encode are independent noise.

    An encode of the sum loses as much as an encode of a gradient, relative to the norm. Only the owner of a shard has the sum
    before that encode. Other ranks receive the sum in the present encoding, which would lose nothing if it were encoded in the
    same way again. So the error is estimated from the norm of the received sum, without the noise of the encodes before.
    """
    *errors, square, top = row[:_ARRIVED]
    arrived, steps_sent, steps_arrived = row[_ARRIVED:]
    # an owner adds its own part of a shard without an encode
    encoded = 1 - 1 / ranks if _first_link(option) == "alltoall" else 1.0
    first = [encoded * error for error in errors]
    if not encodes_again(option) or not square:
        return [*first, square, top]
    relative = [error / square for error in errors]
    noise = relative[present] if unbiased else 0.0
    exact = arrived - encoded * noise * steps_sent - noise / (1 + noise) * steps_arrived
    exact = min(max(exact, 0.0), ranks * square)  # the norm of a sum is at most the sum of the norms
    return [*(own + each * (exact + own) for own, each in zip(first, relative, strict=True)), square, top]


def _first_link(option: Sequence[str]) -> str:
    return next(task.partition(":")[0] for task in option if task.partition(":")[0] not in CODEC_TASKS)


def measured(adaptive: AdaptiveBits, name: str, gradient: torch.Tensor, step: int, rank: int) -> list[float]:
    """Return the squared error of each way, the squared norm, and that of the top values of a rank's flat gradient."""
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
