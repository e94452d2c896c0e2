"""Bits by tensor on a live job: rank 0 assigns bits by errors that are measured on the gradients themselves.

In one step of each period every rank encodes and decodes all that it is about to send with every number of bits: its own
gradients, or whatever the schedule sends. Where the sum of all ranks is encoded too, ranks do the same with the means, each with
a part of the tensors. Squared errors are added over ranks and encodes. The new plan keeps the buckets, so residuals stay in
place; new buckets are made only if tensors get blocks of different sizes.
"""

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from gradwire.auto.decision import say, unlike
from gradwire.auto.live import Live
from gradwire.compressors import Context, compressor_for
from gradwire.core.collectives import CODEC_TASKS
from gradwire.core.latest import Latest
from gradwire.core.plan import Plan
from gradwire.core.specs import ElementRun, innermost
from gradwire.core.tensors import TensorInfo
from gradwire.engine.session import Session
from gradwire.errors import PlanError
from gradwire.exchange.layout import Slot
from gradwire.kernels import Segment, Segments, tensor_key
from gradwire.planner.adaptive import AdaptiveBits
from gradwire.planner.bits import Assignment, Sensitivity, error_budget, exact, kmeans, linear
from gradwire.planner.policy import Policy
from gradwire.planner.schemes import encodes_again
from gradwire.record.run import Decision

WIDTHS = tuple(range(2, 9))
"""Bits to choose from. The specs of these widths, `adaptive.ways(WIDTHS)`, are the ways to encode a tensor."""
UNIFORM = WIDTHS.index(4)
"""The index of 4 bits among the ways, whose error sets the error budget."""
_FIRST = 10
"""The first step that is measured: gradients of the first steps are not typical."""
_TOP = 0.01
"""The part of a gradient's values that count as its top values."""
_RULES = {"exact": exact, "kmeans": kmeans, "linear": linear}


@dataclass(frozen=True)
class Assigned:
    """Bits by tensor from a step on."""

    step: int
    rule: str
    bits: Mapping[str, int]
    blocks: Mapping[str, int]
    """Elements that share one scale."""
    nbytes: int
    """Payload bytes of these tensors, encoded once."""
    uniform_nbytes: int
    """Payload bytes with 4 bits for all tensors."""
    error: float
    """The error over that of 4 bits for all tensors: square roots of squared errors summed over ranks."""
    proven: bool
    """Whether fewer bytes would break the budget."""
    measured_us: float
    """Time of measuring, on rank 0."""
    chosen_us: float
    """Time of choosing, on rank 0."""

    def __str__(self) -> str:
        counts = {width: list(self.bits.values()).count(width) for width in WIDTHS}
        widths = ", ".join(f"{count} of {width}" for width, count in counts.items() if count)
        if len(sizes := sorted(set(self.blocks.values()))) > 1:
            widths += f", in blocks of {', '.join(map(str, sizes))}"
        size = self.nbytes / max(1, self.uniform_nbytes)
        return (
            f"bits by tensor from step {self.step}: {widths}; {size:.2f} of the bytes of 4 bits for all at {self.error:.2f} "
            f"times their error. Measured in {self.measured_us / 1e3:.1f} ms, chosen in {self.chosen_us / 1e3:.1f} ms."
        )


class Errors:
    """Measures each tensor as it is sent, or added up over several steps, until `remove`: rows of `measured` by name."""

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

    @torch.no_grad()
    def _sends(self, slot: Slot, values: torch.Tensor) -> None:
        name = slot.name
        if name not in self._options:
            return
        began = time.perf_counter()
        self._sent[name] += 1
        self._now.append(name)
        last = self._sent[name] >= self._adaptive.accumulate
        own = _added(self._own, name, values.detach(), last)
        if last:
            ranks = self._session.group.world_size
            factor = 1 if slot.apart else ranks
            # an owner adds its own part of a shard as it is
            encoded = 1 - 1 / ranks if _first_link(self._options[name]) == "alltoall" else 1.0
            *errors, square, top = (factor**2 * each for each in self._measured(name, own))
            self.rows[name] = [*(encoded * each for each in errors), square, top]
        self.us += 1e6 * (time.perf_counter() - began)

    @torch.no_grad()
    def step_ended(self) -> bool:
        """A step counted; returns whether it was the last one. Raises what waiting for its means does."""
        began = time.perf_counter()
        self._left -= 1
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
            mean = _added(self._means, name, values.detach(), last)
            if last:
                row, errors = self.rows[name], self._measured(name, mean)[:-2]
                pairs = zip(row, errors, strict=False)
                self.rows[name] = [*(own + group.world_size**2 * each for own, each in pairs), *row[-2:]]
        self.us += 1e6 * (time.perf_counter() - began)
        return not self._left

    def _measured(self, name: str, values: torch.Tensor) -> list[float]:
        step, rank = self._session.reducer.step, self._session.group.rank
        return measured(self._adaptive, name, values.reshape(-1), step, rank)


def _added(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor, last: bool) -> torch.Tensor:
    """The values of a step, added to those of the steps before."""
    if name in sums:
        values = sums.pop(name).add_(values)
    elif not last:
        values = values.to(torch.float32, copy=True)
    if not last:
        sums[name] = values
    return values


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


def sensitivities(
    adaptive: AdaptiveBits, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]
) -> list[Sensitivity]:
    """The input of the rules. Rows are sums of `measured` over ranks, one for each tensor."""
    tensors, ways = [], adaptive.ways(WIDTHS)
    for info, row in zip(infos, rows, strict=True):
        sizes = [spec.payload_bytes([ElementRun(info.numel, spec.element_bits)], 4) for spec in ways]
        errors, (square, top) = tuple(row[: len(ways)]), row[len(ways) :]
        tensors.append(Sensitivity(info.name, tuple(sizes), errors, info.numel, math.sqrt(square), math.sqrt(top)))
    return tensors


def assign(adaptive: AdaptiveBits, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]) -> Assignment:
    """The index of each tensor's way, from rows as in `sensitivities`. Raises PlanError if an error is not finite."""
    tensors = sensitivities(adaptive, infos, rows)
    return _RULES[adaptive.rule](tensors, error_budget(tensors, UNIFORM, adaptive.alpha))


def with_bits(plan: Plan, adaptive: AdaptiveBits, bits: Mapping[str, int]) -> Plan:
    """The plan with these bits; other tensors keep their specs."""
    buckets = []
    for bucket in plan.buckets:
        specs = {
            name: adaptive.spec(bits[name], adaptive.block) if name in bits else bucket.spec_of(name)
            for name in bucket.tensors
        }
        alike = len(set(specs.values())) == 1
        buckets.append(msgspec.structs.replace(bucket, spec=specs[bucket.tensors[0]] if alike else specs))
    return msgspec.structs.replace(plan, buckets=tuple(buckets), prediction=None)


class Bits:
    """The driver of one handle."""

    searching = False

    def __init__(self, adaptive: AdaptiveBits) -> None:
        self.adaptive = adaptive
        self.later_specs = adaptive.ways(WIDTHS)
        self.decisions = Latest[Assigned]()
        self._errors: Errors | None = None

    def __repr__(self) -> str:
        return repr(self.adaptive)

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """The policy until the first measurement."""
        return self.adaptive.policy

    def recorded(self) -> Decision:
        """The last assignment, if there is one."""
        return Decision(by=repr(self), words=tuple(str(each) for each in self.decisions[-1:]))

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Why a saved plan cannot come from the policy with other bits; '' if it can."""
        return unlike(plan, own, self.adaptive.ways(WIDTHS))

    def resumed(self, session: Session, same_ranks: bool, searching: bool) -> None:
        """Keep nothing but the plan. Gradients are measured in the next step where the run that saved would have done so."""
        self._stop()
        self._measure_if_due(session)

    def detached(self) -> None:
        """Stop measuring gradients."""
        self._stop()

    def finished(self, session: Session) -> None:
        """A step ended."""
        live = Live(session)
        if self._errors is not None and self._errors.step_ended():
            self._choose(live, self._errors)
        self._measure_if_due(session)

    def _measure_if_due(self, session: Session) -> None:
        live = Live(session)
        first = min(_FIRST, self.adaptive.period - self.adaptive.measured_steps)
        if live.step % self.adaptive.period == first and self._errors is None:  # of the next step
            self._errors = Errors(self.adaptive, session, self._adapting(live))

    def _adapting(self, live: Live) -> set[str]:
        """The tensors whose bits are chosen: those that match no rule of the policy."""
        ways = set(self.adaptive.ways(WIDTHS))
        ruled = {info.name for info in live.infos if self.adaptive.rules_match(info)}
        found = {name for bucket in live.plan.buckets for name in bucket.tensors if bucket.spec_of(name) in ways}
        return found - ruled

    def _stop(self) -> None:
        if self._errors is not None:
            self._errors.remove()
            self._errors = None

    def _assigned(self, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]) -> str:
        try:
            return msgspec.json.encode(assign(self.adaptive, infos, rows)).decode()
        except PlanError as error:  # gradients were not finite
            say(f"the bits of all tensors stay unchanged: {error}")
            return ""

    def _choose(self, live: Live, errors: Errors) -> None:
        self._stop()
        adapting = self._adapting(live)
        infos = [info for info in live.infos if info.name in adapting]
        ways = self.adaptive.ways(WIDTHS)
        zeros = [0.0] * (len(ways) + 2)
        flat = [value for info in infos for value in errors.rows.get(info.name, zeros)]
        if not flat:
            return
        began = time.perf_counter()
        summed = [math.fsum(column) for column in zip(*live.exchange(flat)(), strict=True)]
        rows = [summed[at : at + len(zeros)] for at in range(0, len(summed), len(zeros))]
        # tensors without gradient in this step keep their bits
        told_of = [(info, row) for info, row in zip(infos, rows, strict=True) if row[len(ways)] != 0.0]
        if not told_of:
            return
        infos, rows = [info for info, _ in told_of], [row for _, row in told_of]
        told = live.made_by_first(partial(self._assigned, infos, rows), "the bits of all tensors stay unchanged")
        if not told:
            return
        found = msgspec.json.decode(told, type=Assignment)
        specs = {info.name: ways[choice] for info, choice in zip(infos, found.choices, strict=True)}
        bits = {name: spec.element_bits for name, spec in specs.items()}
        if len({spec.family for spec in specs.values()} | {ways[0].family}) > 1:
            present = {name: bucket.spec_of(name) for bucket in live.plan.buckets for name in bucket.tensors}
            stay = {name: present[name] for name in adapting}
            live.change_to(live.plan_of(self.adaptive.policy_of(stay | specs)))
        else:
            live.change_to(with_bits(live.plan, self.adaptive, bits))
        uniform = math.fsum(row[UNIFORM] for row in rows)
        assigned = Assigned(
            step=live.step,
            rule=self.adaptive.rule,
            bits=bits,
            blocks={name: getattr(innermost(spec), "block", 0) for name, spec in specs.items()},
            nbytes=found.nbytes,
            uniform_nbytes=sum(ways[UNIFORM].payload_bytes([ElementRun(i.numel, 4)], 4) for i in infos),
            error=math.sqrt(found.error / uniform) if uniform else 1.0,
            proven=found.proven,
            measured_us=errors.us,
            chosen_us=1e6 * (time.perf_counter() - began),
        )
        if live.group.rank == 0:
            if self.decisions:
                logging.getLogger("gradwire").debug(str(assigned))
            else:
                say(str(assigned))
        self.decisions.append(assigned)
