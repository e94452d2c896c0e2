"""The control exchange: at the end of a step every rank tells every other what became of its backward."""

import struct
import weakref
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from gradwire.engine.drift import DriftWatch
from gradwire.errors import DisagreementError
from gradwire.exchange import Abandoned
from gradwire.transport import DamagedError, Lanes, Link

_HEADER = struct.Struct("<qqQq?Q?")
_CHECK = struct.Struct("<I")


class BackwardState(IntEnum):
    """What became of a rank's backward."""

    DONE = 0
    LEFT = 1
    """It was left in the middle; what was missing was sent as zeros."""
    OUT = 2
    """The rank has no batch any more and took part with zeros."""
    CHANGED = 3
    """Its parameters were replaced or converted; it took part with zeros, and synchronises others when all ranks do."""


class RankReport(NamedTuple):
    """What one rank says at the end of a step."""

    step: int
    state: BackwardState
    plan: int
    """The first 8 bytes of the plan's digest."""
    came: int
    """Gradients that came in this backward."""
    joining: bool
    """Whether the rank is inside `handle.join()`."""
    weights: int
    """A checksum of the weights, in the steps that compare them; 0 in others."""
    stepped: bool
    """Whether its script stepped the optimizer after the last backward, where the schedule knows."""
    used: int
    """Bit i: parameter i got a gradient since the last synchronised step."""


class ControlExchange:
    """What the ranks of one model tell each other, and what follows from it."""

    def __init__(self, lanes: Lanes, drift_check_steps: int) -> None:
        self._lanes, self._drift = lanes, DriftWatch(drift_check_steps)
        self.plan = 0
        """The first 8 bytes of the digest of the plan that runs."""
        self.joining = False
        """Whether the rank is inside `handle.join()`."""
        self.stepped = True
        """Whether this rank's script did step the optimizer after the last backward, where the schedule knows."""

    def watch(self, names: Sequence[str], weights: "Sequence[weakref.ref[torch.nn.Parameter]]") -> None:
        """Tell of these parameters from now on."""
        self._names, self._weights = names, weights

    def report(self, step: int, state: BackwardState, came: int, used: Collection[int], weights: int = 0) -> RankReport:
        """What this rank says. `used`: the indices of parameters."""
        bits = "".join("1" if index in used else "0" for index in reversed(range(len(self._names))))
        return RankReport(step, state, self.plan, came, self.joining, weights, self.stepped, int(bits, 2))

    def tell(
        self, step: int, state: BackwardState, came: int, used: Collection[int], after: "Future[Any] | None" = None
    ) -> "Future[list[RankReport]]":
        """Tell all ranks how this rank's backward went, when `after` is done, and hear the same of them."""
        weights = self._drift.digest(self._weights) if self._drift.due(step) else 0
        own = self.report(step, state, came, used, weights)
        self.stepped = True  # a step that was left out is told once
        doing = self._lanes.flight.doing("control exchange")

        def exchange(link: Link) -> list[RankReport]:
            reports = exchange_reports(own, len(self._names), link, after)
            doing.done()
            return reports

        return self._lanes.control.submit(exchange)

    def why_void(self, reports: Sequence[RankReport], leaving_is_void: bool = True) -> str | None:
        """Why the step must not count, in the same words on all ranks; None if it counts."""
        if not leaving_is_void:
            reports = [
                each._replace(state=BackwardState.DONE) if each.state is BackwardState.LEFT else each
                for each in reports
            ]
        return why_void(reports, self._lanes.group.global_ranks, len(self._names))

    def check_drift(self, reports: Sequence[RankReport], step: int) -> None:
        """Raises DisagreementError if ranks told different checksums of their weights. Collective then."""
        if len({report.weights for report in reports if report.state is BackwardState.DONE}) < 2:
            return
        lanes = self._lanes
        with lanes.told("checksums of all weights", step):
            packed = lanes.control.submit(partial(exchange_bytes, self._drift.packed())).result()
        trained = {
            rank: raw
            for rank, raw, report in zip(lanes.group.global_ranks, packed, reports, strict=True)
            if report.state is BackwardState.DONE
        }
        words = self._drift.difference(trained, self._names, step)
        raise lanes.fail(DisagreementError(words).about(trained, step))


def used_anywhere(reports: Sequence[RankReport]) -> set[int]:
    """The parameters that got a gradient on any rank."""
    bits = f"{reduce(or_, (report.used for report in reports)):b}"
    return {index for index, bit in enumerate(reversed(bits)) if bit == "1"}


def exchange_reports(
    own: RankReport, parameters: int, link: Link, after: "Future[Any] | None" = None
) -> list[RankReport]:
    """Everybody's report, by rank of the group. `parameters` is how many bits `used` has. See `exchange_bytes`."""
    packed = _HEADER.pack(*own[:-1]) + own.used.to_bytes(-(-parameters // 8), "little")
    reports = []
    for raw in exchange_bytes(packed, link, after):
        step, state, plan, came, joining, weights, stepped = _HEADER.unpack_from(raw)
        used = int.from_bytes(raw[_HEADER.size :], "little")
        reports.append(RankReport(step, BackwardState(state), plan, came, joining, weights, stepped, used))
    return reports


def exchange_bytes(own: bytes, link: Link, after: "Future[Any] | None" = None) -> list[bytes]:
    """Everybody's bytes, as many from each, by rank of the group, sent when `after` is done. Raises LinkError, DamagedError
    for bytes that changed on the way, and Abandoned where the result of `after` is None."""
    sent = torch.frombuffer(bytearray(own + _CHECK.pack(zlib.crc32(own))), dtype=torch.uint8)
    rows = [sent if rank == link.rank else torch.empty_like(sent) for rank in range(link.world_size)]
    # one hop and point to point, so that a transfer that fails tells with whom
    exchange = link.expect(0, rows, checked=False)
    if after is not None and after.result() is None:
        raise Abandoned
    exchange.send([sent] * link.world_size)
    for rank in range(link.world_size):
        exchange.wait(rank)
    link.finish_later(exchange)
    return [_checked(bytes(row.tolist()), rank) for rank, row in enumerate(rows)]


def _checked(raw: bytes, rank: int) -> bytes:
    told, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
    if zlib.crc32(told) != _CHECK.unpack(check)[0]:
        raise DamagedError(rank, ValueError("the checksum of what ranks tell each other does not fit"))
    return told


def why_void(reports: Sequence[RankReport], ranks: Sequence[int], parameters: int) -> str | None:
    """Why the step must not count, in the same words on all ranks; None if it counts. `ranks` are the global ones."""
    step = reports[0].step
    if len({report.step for report in reports}) > 1:
        steps = [report.step for report in reports]
        each = ", ".join(f"rank {rank} at {step}" for rank, step in zip(ranks, steps, strict=True))
        return (
            f"ranks are at different steps, {min(steps)} to {max(steps)} ({each}): some ran more backward passes than "
            "others, and gradients of different batches were added. Give every rank the same number of batches, or "
            "use handle.join()."
        )
    if len({report.plan for report in reports}) > 1:
        each = ", ".join(f"rank {rank} {report.plan:016x}" for rank, report in zip(ranks, reports, strict=True))
        return f"ranks run different plans in step {step} ({each}): what they sent was decoded wrongly. Restart."
    left = [(rank, r.came) for rank, r in zip(ranks, reports, strict=True) if r.state is BackwardState.LEFT]
    if left:
        who = "; ".join(f"rank {rank} left it after {came} of {parameters} gradients" for rank, came in left)
        return (
            f"step {step} is void on all ranks: {who} (an exception in backward that its script caught? see its own log). "
            "None may use this step's gradients: call handle.reset() on all ranks and go on with the next batch, or restart."
        )
    changed = [rank for rank, report in zip(ranks, reports, strict=True) if report.state is BackwardState.CHANGED]
    if changed and len(changed) < len(ranks):
        others = [rank for rank in ranks if rank not in changed]
        return (
            f"step {step} is void on all ranks: trainable parameters of rank {changed[0]}'s model were added, thawed, "
            f"converted or replaced, and those of rank {others[0]}'s were not. Change the model on all ranks before the same "
            "step; after an exception that was caught here, handle.reset() on all ranks goes on."
        )
    skipped = [rank for rank, report in zip(ranks, reports, strict=True) if not report.stepped]
    if skipped and len(skipped) < len(ranks):
        others = [rank for rank in ranks if rank not in skipped]
        return (
            f"step {step} is void on all ranks: rank {skipped[0]} left out optimizer.step() before it, and rank {others[0]} did "
            "not. With shard_optimizer each rank steps a shard of the weights, so those of the ranks that left it out miss an "
            "update. Step on all ranks or on none, and restart from a checkpoint; handle.reset() goes on with the weights as "
            "they are, which are the same on all ranks."
        )
    out = [rank for rank, report in zip(ranks, reports, strict=True) if report.state is BackwardState.OUT]
    outside = [rank for rank, report in zip(ranks, reports, strict=True) if not report.joining]
    if out and outside:
        return (
            f"rank {out[0]} has no batch for step {step} and waits in handle.join(), but rank {outside[0]} is not inside "
            "it. Enter join() on all ranks around the same loop."
        )
    return None
