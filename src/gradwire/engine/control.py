"""The control exchange: at the end of a step ranks report what became of their backwards.

Reports are merged with few messages from each rank (`gradwire.transport.merging`). Where ranks differ, or left the step, the
whole reports of all ranks are then gathered, along the same rounds. All ranks know from the merged reports whether they do.
"""

import hashlib
import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from gradwire.errors import DisagreementError
from gradwire.exchange import Abandoned
from gradwire.transport import COMPLETE, Group, Lanes, Link, MergedValues, gather_over_ranks, merge_over_ranks

_HEADER = struct.Struct("<qqQq??Q?dq")
_ALIKE = struct.Struct("<qqQ??Q??q")
NOT_WEIGHED = -1.0
"""The samples of a rank whose script gives no weights."""
_PIECE = 2**20
_OWN_STEPS = 10
"""After so many steps of a script's own gradients weights are compared for the first time."""


class BackwardState(IntEnum):
    """The end of a rank's backward."""

    DONE = 0
    LEFT = 1
    """It was left in the middle; what was missing was sent as zeros."""
    OUT = 2
    """The rank has no batch any more and took part with zeros."""
    CHANGED = 3
    """Its parameters were replaced or converted; it took part with zeros, and synchronises others when all ranks do."""
    NO_VOICE = 4
    """It has no batch, and the plan takes votes, in which its zeros counted."""


class RankReport(NamedTuple):
    """The report of one rank at the end of a step."""

    step: int
    state: BackwardState
    plan: int
    """The first 8 bytes of the plan's digest."""
    came: int
    """Gradients that came in this backward."""
    joining: bool
    """Whether the rank is inside `handle.join()`."""
    scaled: bool
    """Whether it knows of a scale of the loss."""
    weights: int
    """A checksum of the weights, in the steps that compare them; 0 in others."""
    stepped: bool
    """Whether its script stepped the optimizer after the last backward, where the schedule knows."""
    samples: float
    """The rank's weight in the mean, or NOT_WEIGHED."""
    incomplete: int
    """COMPLETE if all operations of the step before have completed on the rank's device without an error; otherwise the first
    bucket with one that has not."""
    used: int
    """Bit i: parameter i got a gradient since the last synchronised step."""


class RankReports:
    """The reports of all ranks at the end of a step."""

    def __init__(self, each: Sequence[RankReport], merged: MergedValues, alike: bool) -> None:
        """`each`: by rank of the group. `merged`: the parameters that are used on any rank, and the sum of samples. `alike`:
        whether ranks differ in nothing but their gradients and samples."""
        self.each, self._merged, self.alike = each, merged, alike

    @cached_property
    def used(self) -> set[int]:
        """The parameters that got a gradient on any rank."""
        bits = f"{int.from_bytes(self._merged.bits, 'little'):b}"
        return {index for index, bit in enumerate(reversed(bits)) if bit == "1"}

    @property
    def mean_samples(self) -> float:
        """The sum of the weights of ranks that gave one, over the number of all ranks."""
        return self._merged.sums[0] / len(self.each)

    @property
    def watched(self) -> MergedValues | None:
        """The values that all ranks gave to be merged with their reports (`ControlExchange.ride`), if they did."""
        return MergedValues(b"", self._merged.most, self._merged.sums[1:]) if self._merged.most else None

    def ranks_in(self, state: BackwardState) -> list[int]:
        """The ranks of the group whose backward ended so."""
        if self.alike:
            return list(range(len(self.each))) if self.each[0].state is state else []
        return [rank for rank, report in enumerate(self.each) if report.state is state]

    @property
    def weighed_by_some(self) -> bool:
        """Whether some ranks with a batch gave it a weight, and others gave none."""
        if self.alike:
            return False
        return len({report.samples == NOT_WEIGHED for report in self.each if report.state is BackwardState.DONE}) > 1


class ControlExchange:
    """Exchanges reports between the ranks of one model, and decides what follows from them."""

    def __init__(self, lanes: Lanes, drift_check_steps: int) -> None:
        self._lanes, self._drift = lanes, DriftWatch(drift_check_steps)
        self.plan = 0
        """The first 8 bytes of the digest of the plan that runs."""
        self.joining = False
        """Whether the rank is inside `handle.join()`."""
        self.scaled, self._some_scaled = False, False
        """Whether this rank knows of a scale of the loss; whether in the last step all ranks were joining, and one knew it."""
        self.samples = NOT_WEIGHED
        """This rank's weight in the mean of the step that runs."""
        self.stepped = True
        """Whether this rank's script did step the optimizer after the last backward, where the schedule knows."""
        self._rides: MergedValues | None = None
        self._watched: MergedValues | None = None

    def ride(self, values: MergedValues) -> Callable[[], MergedValues | None]:
        """Merge values without bits over all ranks, together with the next report. All ranks do so between the same steps.
        Returns a function that gives the result at the end of that step, and None before."""
        self._rides, self._watched = values, None
        return lambda: self._watched

    def join(self, joining: bool) -> None:
        """The rank enters or leaves `handle.join()`."""
        self.joining, self._some_scaled = joining, False

    @property
    def tells_scale(self) -> bool:
        """Whether ranks tell each other the scale of the loss before a step, since some may be without a batch."""
        return self.joining and self._some_scaled

    def watch(self, names: Sequence[str], weights: "Sequence[weakref.ref[torch.nn.Parameter]]") -> None:
        """Tell of these parameters from now on."""
        self._names, self._weights = names, weights

    def report(self, step: int, state: BackwardState, came: int, used: Collection[int], weights: int = 0) -> RankReport:
        """The report of this rank. `used`: the indices of parameters."""
        bits = "".join("1" if index in used else "0" for index in reversed(range(len(self._names))))
        plan, joining, stepped, samples = self.plan, self.joining, self.stepped, self.samples
        return RankReport(step, state, plan, came, joining, self.scaled, weights, stepped, samples, COMPLETE, int(bits, 2))

    def tell(
        self, step: int, state: BackwardState, came: int, used: Collection[int], after: "Future[Any] | None" = None
    ) -> "Future[RankReports]":
        lanes = self._lanes
        # weights of a step whose sums never arrived are not compared: its failure is reported instead
        compares = self._drift.due(step) and lanes.first_incomplete() == COMPLETE
        own = self.report(step, state, came, used, self._drift.digest(self._weights) if compares else 0)
        self.stepped = True  # a step that was left out is reported once
        rides, self._rides = self._rides, None
        doing = lanes.flight.doing("control exchange")

        def exchange(link: Link) -> RankReports:
            told = own._replace(incomplete=lanes.first_incomplete())
            reports = exchange_reports(told, len(self._names), link, lanes.first_tag, after, rides)
            doing.done()
            return reports

        return lanes.control.submit(exchange)

    def check_complete(self, reports: RankReports) -> None:
        """Raises CommunicationError, on all ranks, if operations of the step before failed on a rank's device."""
        ranks = zip(self._lanes.group.global_ranks, reports.each, strict=True)
        if incomplete := {rank: report.incomplete for rank, report in ranks if report.incomplete != COMPLETE}:
            raise self._lanes.incomplete(incomplete, reports.each[0].step - 1)

    def why_void(self, reports: RankReports, leaving_is_void: bool = True) -> str | None:
        """Why the step must not count, in the same words on all ranks; None if it counts."""
        each = reports.each
        if reports.alike and each[0].state is BackwardState.DONE:
            return None
        if not leaving_is_void:
            each = [one._replace(state=BackwardState.DONE) if one.state is BackwardState.LEFT else one for one in each]
        return why_void(each, reports.weighed_by_some, self._lanes.group.global_ranks, len(self._names))

    def close_step(self, reports: RankReports, step: int) -> None:
        """End a step that counts, on all ranks alike. Raises DisagreementError if ranks reported different checksums of their
        weights. Collective then."""
        self._watched = reports.watched
        told = reports.each[:1] if reports.alike else reports.each
        self._some_scaled = any(each.scaled for each in told) and all(each.joining for each in told)
        if reports.alike or len({reports.each[rank].weights for rank in reports.ranks_in(BackwardState.DONE)}) < 2:
            return
        lanes = self._lanes
        with lanes.told("checksums of all weights", step):
            packed = lanes.control.submit(partial(gather_over_ranks, own=self._drift.packed(), tag=lanes.first_tag)).result()
        trained = {lanes.group.global_ranks[rank]: packed[rank] for rank in reports.ranks_in(BackwardState.DONE)}
        words = self._drift.difference(trained, self._names, step)
        raise lanes.fail(DisagreementError(words).about(trained, step))


def exchange_reports(
    own: RankReport, parameters: int, link: Link, tag: int, after: "Future[Any] | None" = None, rides: MergedValues | None = None
) -> RankReports:
    """The reports of all ranks, sent when `after` is done. `parameters`: the number of bits of `used`. `rides`: values to merge
    too. Raises what `gather_over_ranks` raises, and Abandoned where the result of `after` is None."""

    def begin() -> None:
        if after is not None and after.result() is None:
            raise Abandoned

    weighed = own.samples != NOT_WEIGHED
    flags = own.joining, own.scaled
    alike = _ALIKE.pack(own.step, own.state, own.plan, *flags, own.weights, own.stepped, weighed, own.incomplete)
    # ranks are alike where no bit is 1 on some of them and 0 on others
    bits = alike + bytes(255 - byte for byte in alike) + own.used.to_bytes(-(-parameters // 8), "little")
    most, sums = (rides.most, rides.sums) if rides is not None else ((), ())
    merged = merge_over_ranks(link, MergedValues(bits, most, (own.samples if weighed else 0.0, *sums)), tag, begin)
    ones, zeros = merged.bits[: len(alike)], merged.bits[len(alike) : 2 * len(alike)]
    are_alike = not any(one & zero for one, zero in zip(ones, zeros, strict=True))
    merged = merged._replace(bits=merged.bits[2 * len(alike) :])
    if are_alike and own.state is not BackwardState.LEFT:
        return RankReports([own] * link.world_size, merged, True)
    packed = _HEADER.pack(*own[:-1])
    each = []
    for raw in gather_over_ranks(link, packed, tag):
        report = RankReport(*(*_HEADER.unpack(raw), 0))
        each.append(report._replace(state=BackwardState(report.state)))
    return RankReports(each, merged, False)


def why_void(reports: Sequence[RankReport], weighed_by_some: bool, ranks: Sequence[int], parameters: int) -> str | None:
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
    idle = [rank for rank, report in zip(ranks, reports, strict=True) if report.state is BackwardState.NO_VOICE]
    if idle:
        return (
            f"step {step} is void on all ranks: rank {idle[0]} has no batch (handle.weight(0), or its loop ended in join()), and "
            "the plan has SignSGD or Signum, votes in which its zeros count as 1. Give each rank a batch in every step, or use a "
            "spec with magnitudes, such as gw.EFSignSGD(); handle.reset() on all ranks goes on."
        )
    trained = [(rank, r.samples) for rank, r in zip(ranks, reports, strict=True) if r.state is BackwardState.DONE]
    weighed = [(rank, samples) for rank, samples in trained if samples != NOT_WEIGHED]
    if weighed_by_some:
        rank, samples = weighed[0]
        other = next(rank for rank, samples in trained if samples == NOT_WEIGHED)
        return (
            f"step {step} is void on all ranks: rank {rank} gave its batch the weight {samples:g} (handle.weight), and rank "
            f"{other} gave none. Call handle.weight(n) before each backward on all ranks or on none, with 0 for a rank without a "
            "batch; handle.reset() on all ranks goes on."
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


# ---- do all ranks still have the same weights? Checksums that are cheap enough to compare every now and then


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A 64-bit number for each tensor: its words, each times an odd number that depends on its place, added up.

    Equal bits give equal numbers. Another value of any single word gives another number, and so does an exchange of two
    words unless by chance. Works on the tensor's device, in pieces of 1M words.
    """
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, {})[place] = _checksum(tensor.detach())
    # the host waits once for each device, not for each tensor
    found = {place: total for sums in by_device.values() for place, total in zip(sums, _read(sums.values()), strict=True)}
    return [found[place] % 2**64 for place in sorted(found)]


class DriftWatch:
    """Compares weights every so many steps; 0 is never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sums: list[int] = []

    def due(self, step: int) -> bool:
        """Whether weights are compared in this step."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def digest(self, weights: "Sequence[weakref.ref[torch.nn.Parameter]]") -> int:
        """One 64-bit number for all of them."""
        self._sums = checksums(weight for reference in weights if (weight := reference()) is not None)
        return int.from_bytes(hashlib.blake2b(self.packed(), digest_size=8).digest(), "little")

    def difference(self, packed: Mapping[int, bytes], names: Sequence[str], step: int) -> str:
        """The difference, in words. `packed`: what `packed()` gave on each rank that trained, by global rank."""
        words = self._words()
        sums = {rank: words.unpack(raw) for rank, raw in packed.items()}
        first, *others = sums
        index, other = next(
            (index, other) for index in range(len(names)) for other in others if sums[other][index] != sums[first][index]
        )
        return (
            f"the weights of rank {first} and rank {other} are not the same any more, found in step {step}; the first "
            f"tensor that differs is {names[index]!r}. Ranks train different models since the last check, at most "
            f"{self._every} steps ago. Look for code that changes weights on one rank only (loading, clamping, averaging, "
            "random layers without a common seed), or for faulty memory; restart from a checkpoint."
        )

    def packed(self) -> bytes:
        """The checksums of the last digest."""
        return self._words().pack(*self._sums)

    def _words(self) -> struct.Struct:
        return struct.Struct(f"<{len(self._sums)}Q")


class OwnSteps:
    """Compares weights between optimizer steps that no synchronised backward came before: those of gradients that a script
    computed itself, as by `torch.autograd.grad`.

    Such steps are not the same in number on all ranks, so no rank waits for another: each writes its checksums to the rendezvous
    store, and looks there for those of the ranks before and after it, when it makes such a step. Where weights differ, two ranks
    that follow each other differ. A rank has one key, which is overwritten and never deleted: `get` would wait for a key
    that went after `check`. Words are sealed with the group's key, and others are ignored: whoever reaches the store could make
    every rank warn.
    """

    def __init__(self, every: int, group: Group, name: str) -> None:
        self._every, self._group, self._name = every, group, name
        self._steps, self._written = 0, ""
        self._told = every == 0
        self._store: Any = None

    def synchronised(self) -> None:
        """A synchronised backward has ended."""
        self._steps = 0

    def step(self, weights: "Sequence[weakref.ref[torch.nn.Parameter]]", names: Sequence[str], after: int) -> str | None:
        """An optimizer is about to step. `after`: the synchronised steps so far. Returns, once, what to warn the script of."""
        self._steps += 1
        if self._told or self._group.world_size == 1:
            return None
        try:
            if self._steps == min(_OWN_STEPS, self._every) or self._steps % self._every == 0:
                self._write(weights, f"{after}/{self._steps}")
            if not self._written:
                return None
            own, ranks = self._group.rank, self._group.world_size
            return next(filter(None, (self._differs_from(rank, names) for rank in {(own - 1) % ranks, (own + 1) % ranks})), None)
        except (RuntimeError, struct.error):
            # the host of the store is gone, perhaps within an answer: whoever waits for a rank next says so, and this only looks
            self._told = True
            return None

    def _write(self, weights: "Sequence[weakref.ref[torch.nn.Parameter]]", at: str) -> None:
        if self._store is None:
            self._store = self._group.store(f"{self._name}/own-steps")
        self._sums = checksums(weight for reference in weights if (weight := reference()) is not None)
        packed = struct.pack(f"<{len(self._sums)}Q", *self._sums).hex()
        place = str(self._group.rank)
        self._store.set(place, self._group.met.key.seal(self._sealed(place), f"{at} {packed}"))
        self._written = at

    def _sealed(self, place: str) -> str:
        """The place for which words are sealed: not that of another handle."""
        return f"{self._name}/own-steps/{place}"

    def _differs_from(self, rank: int, names: Sequence[str]) -> str | None:
        if not self._store.check([str(rank)]):
            return None
        words = self._group.met.key.unseal(self._sealed(str(rank)), self._store.get(str(rank)))
        at, _, packed = (words or "").partition(" ")
        if at != self._written:
            return None
        sums = struct.unpack(f"<{len(self._sums)}Q", bytes.fromhex(packed))
        index = next((i for i, (own, other) in enumerate(zip(self._sums, sums, strict=True)) if own != other), None)
        if index is None:
            return None
        self._told = True
        return (
            f"the weights of this rank and rank {self._group.global_ranks[rank]} are not the same, after {self._steps} optimizer "
            f"steps without a synchronised backward; the first tensor that differs is {names[index]!r}. gradwire averages what "
            "backward() accumulates. Gradients that a script computes itself (torch.autograd.grad, p.grad = ...) are each rank's "
            "own: call loss.backward(), or average them with gw.Exchange before the step."
        )


def _read(sums: Iterable[torch.Tensor]) -> list[int]:
    numbers: list[int] = torch.stack(list(sums)).tolist()
    return numbers


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.contiguous().reshape(-1).view(torch.uint8)
    if words.numel() % 4 == 0 and words.storage_offset() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), device=tensor.device)
        total += (piece * (2 * place + 1)).sum()
    return total
