"""Driver of `gw.AdaptiveBits`: chooses the bits of each tensor while the job trains, from errors that `bit_errors` measures.

In one step of each period every rank encodes and decodes everything that it is about to send, with every number of bits: its
own gradients, or the tensors that the schedule sends instead. If an option encodes the sum of all ranks too, the error of that
encode follows from the norm of the mean. Squared errors are added over ranks and encodes. Rank 0 then chooses the bits. The
new plan keeps the buckets, so residuals stay in place. Buckets change only if tensors get blocks of different sizes.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from gradwire.auto.bit_errors import WIDTHS, BitErrors, SavedBitErrors, check, columns, of_both_encodes
from gradwire.auto.decision import PlanDriver, say, unlike
from gradwire.auto.job_times import JobTimes, JobTiming
from gradwire.auto.live import Live
from gradwire.core import ElementRun, Plan, Spec, TensorInfo, innermost
from gradwire.engine import EndsLater, Session
from gradwire.errors import FormatError, PlanError
from gradwire.exchange import Saved
from gradwire.plan import AdaptiveBits, Policy
from gradwire.planner.bits import Assignment, Sensitivity, error_budget, exact, kmeans, linear, shortest, step_times, with_specs

UNIFORM = WIDTHS.index(4)
"""Index of 4 bits among the ways. The error of 4 bits for all tensors sets the error budget."""
_FIRST = 10
"""The first step that is measured: gradients of the first steps are not typical."""


@dataclass(frozen=True)
class Assigned:
    """The bits of each tensor from `step` on, and how they were chosen."""

    step: int
    rule: str
    bits: Mapping[str, int]
    blocks: Mapping[str, int]
    """Elements that share one scale, by tensor."""
    nbytes: int
    """Payload bytes of one encode of these tensors."""
    uniform_nbytes: int
    """Payload bytes of one encode with 4 bits for all tensors."""
    error: float
    """Error relative to 4 bits for all tensors. Both errors are square roots of squared errors summed over ranks."""
    proven: bool
    """Whether the solver proved that fewer bytes would exceed the error budget."""
    measured_us: float
    """Time of measuring the errors on rank 0, in microseconds."""
    chosen_us: float
    """Time of choosing the bits on rank 0, in microseconds."""
    predicted_us: float | None = None
    """Predicted time of a step; None if the bits were chosen by bytes."""
    uniform_us: float | None = None
    """Predicted time of a step with 4 bits for all tensors; None if the bits were chosen by bytes."""

    def __str__(self) -> str:
        counts = {width: list(self.bits.values()).count(width) for width in WIDTHS}
        widths = ", ".join(f"{count} of {width}" for width, count in counts.items() if count)
        if len(sizes := sorted(set(self.blocks.values()))) > 1:
            widths += f", in blocks of {', '.join(map(str, sizes))}"
        size = self.nbytes / max(1, self.uniform_nbytes)
        step = ""
        if self.predicted_us is not None and self.uniform_us is not None:
            step = f"; predicted {self.predicted_us / 1e3:.1f} ms a step, {self.uniform_us / 1e3:.1f} with 4 bits"
        return (
            f"bits by tensor from step {self.step}: {widths}; {size:.2f} of the bytes of 4 bits for all at {self.error:.2f} "
            f"times their error{step}. Measured in {self.measured_us / 1e3:.1f} ms, chosen in {self.chosen_us / 1e3:.1f} ms."
        )


def sensitivities(adaptive: AdaptiveBits, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]) -> list[Sensitivity]:
    """Return the input of the rules. rows: for each tensor the result of `measured`, summed over ranks."""
    tensors, ways = [], adaptive.ways(WIDTHS)
    for info, row in zip(infos, rows, strict=True):
        sizes = [spec.payload_bytes([ElementRun(info.numel, spec.element_bits)], 4) for spec in ways]
        errors, (square, top) = tuple(row[: len(ways)]), row[len(ways) :]
        tensors.append(Sensitivity(info.name, tuple(sizes), errors, info.numel, math.sqrt(square), math.sqrt(top)))
    return tensors


def assign(adaptive: AdaptiveBits, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]) -> Assignment:
    """Choose a way for each tensor. rows: as in `sensitivities`. Raises PlanError if an error is not finite."""
    tensors = sensitivities(adaptive, infos, rows)
    budget, ladder = error_budget(tensors, UNIFORM, adaptive.alpha), adaptive.ladder(WIDTHS)
    if adaptive.rule == "kmeans":
        return kmeans(tensors, budget, ladder=ladder)
    # the rule "time" comes here until the times of the job are known
    return linear(tensors, budget, ladder) if adaptive.rule == "linear" else exact(tensors, budget)


def with_bits(plan: Plan, adaptive: AdaptiveBits, bits: Mapping[str, int]) -> Plan:
    """Return the plan with these bits by tensor. Other tensors keep their specs."""
    specs = {name: adaptive.spec(width, adaptive.block) for name, width in bits.items()}
    buckets = tuple(with_specs(bucket, specs) for bucket in plan.buckets)
    return msgspec.structs.replace(plan, buckets=buckets, prediction=None)


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """The field `measuring` of a saved state."""

    errors: SavedBitErrors | None = None
    times: dict[str, Any] | None = None


class _Chosen(NamedTuple):
    """The assignment that rank 0 sends to the other ranks, with its predicted times."""

    assignment: Assignment
    predicted_us: float | None = None
    uniform_us: float | None = None


def _read(saved: Saved) -> tuple[_Kept, JobTimes | None]:
    """Decode the measurements in a saved state. Raises ValueError if they are damaged."""
    if not saved.measuring:
        return _Kept(), None
    try:
        kept = msgspec.json.decode(saved.measuring, type=_Kept)
        return kept, None if kept.times is None else JobTimes.from_dict(kept.times)
    except (msgspec.MsgspecError, FormatError) as error:
        raise ValueError(
            f"the field measuring of the state is no measurement: {error} Pass what handle.state_dict() returned."
        ) from error


class AdaptiveBitsDriver(PlanDriver):
    """Driver of one handle with `gw.AdaptiveBits`."""

    def __init__(self, adaptive: AdaptiveBits) -> None:
        super().__init__(adaptive)
        self.adaptive = adaptive
        self.later_specs = adaptive.ways(WIDTHS)
        self._errors: BitErrors | None = None
        self._timing = JobTiming(self.later_specs) if adaptive.rule == "time" else None

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """Return the policy until the first measurement."""
        return self.adaptive.policy

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Return why a saved plan cannot come from the policy with other bits; '' if it can."""
        return unlike(plan, own, self.adaptive.ways(WIDTHS))

    def state(self, session: Session) -> dict[str, torch.Tensor]:
        """Return the measurement that is under way, and the times of the job."""
        pending = isinstance(session.schedule, EndsLater) and session.schedule.untold
        errors, sums = measuring.so_far(pending) if (measuring := self._under_way()) is not None else (None, {})
        times = self._timing.times if self._timing is not None else None
        if errors is None and times is None:
            return {}
        text = msgspec.json.encode(_Kept(errors, times.to_dict() if times is not None else None))
        return {"measuring": torch.frombuffer(bytearray(text), dtype=torch.uint8), **sums}

    def check(self, session: Session, saved: Saved) -> None:
        """Check the measurements of a saved state. Raises ValueError if `state` cannot have returned them."""
        kept, _ = _read(saved)
        if kept.errors is not None and kept.errors.by == repr(self.adaptive):
            check(kept.errors, saved.measured, self.adaptive, session.tensors)

    def resumed(self, session: Session, saved: Saved) -> None:
        """Go on from a saved state: measure errors in the steps in which the saved run would have, and complete a measurement."""
        self._stop()
        kept, times = _read(saved)
        if self._timing is not None:
            self._timing.take(Live(session), times)
        if kept.errors is not None and kept.errors.by == repr(self.adaptive):
            self._errors = self._errors_of(session)
            self._errors.load(kept.errors, saved.measured)
            if self._errors.done:
                self._choose(Live(session), self._errors)
        elif 0 < (since := self._since_first(session)) < self.adaptive.measured_steps and session.group.rank == 0:
            step, steps = session.reducer.step, self.adaptive.measured_steps
            say(
                f"the bits of all tensors stay unchanged until step {step - since + self.adaptive.period + steps}: the state was "
                f"saved at step {step}, while errors of {steps} steps were measured, and has nothing of them that counts here. "
                "It was saved by other ranks, with other adaptive bits, by an older gradwire, or without the state of a rank."
            )
        self._measure_if_due(session)

    def detached(self) -> None:
        """Stop measuring."""
        self._stop()
        if self._timing is not None:
            self._timing.stop()

    def finished(self, session: Session) -> None:
        """End a step: complete a measurement, or begin one that is due."""
        live = Live(session)
        measuring = self._under_way()
        if self._timing is not None and measuring is None:
            self._timing.finished(live)
        elif self._timing is not None:
            self._timing.pause()  # measuring errors makes a step longer
        if measuring is not None and measuring.step_ended():
            self._choose(live, measuring)
        self._measure_if_due(session)

    def _since_first(self, session: Session) -> int:
        """Return the number of steps since the first measured step of this period; 0 just before it."""
        first = min(_FIRST, self.adaptive.period - self.adaptive.measured_steps)
        return session.reducer.step % self.adaptive.period - first

    def _measure_if_due(self, session: Session) -> None:
        if not self._since_first(session) and self._errors is None:
            self._errors = self._errors_of(session)

    def _errors_of(self, session: Session) -> BitErrors:
        return BitErrors(self.adaptive, session, self._adapting(Live(session)))

    def _adapting(self, live: Live) -> set[str]:
        """Return the names of the tensors with bits to choose: those that match no rule of the policy."""
        ways = set(self.adaptive.ways(WIDTHS))
        ruled = {info.name for info in live.infos if self.adaptive.rules_match(info)}
        found = {name for bucket in live.plan.buckets for name in bucket.tensors if bucket.spec_of(name) in ways}
        return found - ruled

    def _under_way(self) -> BitErrors | None:
        """The measurement of errors. A change of the model ends it, until the next period."""
        if self._errors is not None and self._errors.outdated:
            self._stop()
        return self._errors

    def _stop(self) -> None:
        if self._errors is not None:
            self._errors.remove()
            self._errors = None

    def _assigned(self, live: Live, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]) -> str:
        try:
            return msgspec.json.encode(self._chosen(live, infos, rows)).decode()
        except PlanError as error:  # gradients were not finite
            say(f"the bits of all tensors stay unchanged: {error}")
            return ""

    def _chosen(self, live: Live, infos: Sequence[TensorInfo], rows: Sequence[Sequence[float]]) -> _Chosen:
        times = self._timing.times_for(live) if self._timing is not None else None
        if times is None:
            return _Chosen(assign(self.adaptive, infos, rows))
        tensors = sensitivities(self.adaptive, infos, rows)
        step_us = step_times(live.plan, times.simulator(), [info.name for info in infos], self.adaptive.ways(WIDTHS))
        place = {name: index for index, bucket in enumerate(live.plan.buckets) for name in bucket.tensors}
        budget, buckets = error_budget(tensors, UNIFORM, self.adaptive.alpha), [place[info.name] for info in infos]
        found = shortest(tensors, budget, buckets, step_us)
        return _Chosen(found, step_us(found.choices), step_us([UNIFORM] * len(infos)))

    def _choose(self, live: Live, errors: BitErrors) -> None:
        """Choose bits by the errors of all ranks, change the plan, and log the decision."""
        self._stop()
        adapting = self._adapting(live)
        began = time.perf_counter()
        infos, rows = self._errors_of_all_ranks(live, errors, adapting)
        if not infos:
            return
        told = live.made_by_first(partial(self._assigned, live, infos, rows), "the bits of all tensors stay unchanged")
        if not told:
            return
        chosen, ways = msgspec.json.decode(told, type=_Chosen), self.adaptive.ways(WIDTHS)
        specs = {info.name: ways[choice] for info, choice in zip(infos, chosen.assignment.choices, strict=True)}
        self._change(live, adapting, specs)
        found, uniform = chosen.assignment, math.fsum(row[UNIFORM] for row in rows)
        assigned = Assigned(
            step=live.step,
            rule=self.adaptive.rule,
            bits={name: spec.element_bits for name, spec in specs.items()},
            blocks={name: getattr(innermost(spec), "block", 0) for name, spec in specs.items()},
            nbytes=found.nbytes,
            uniform_nbytes=sum(ways[UNIFORM].payload_bytes([ElementRun(info.numel, 4)], 4) for info in infos),
            error=math.sqrt(found.error / uniform) if uniform else 1.0,
            proven=found.proven,
            measured_us=errors.us,
            chosen_us=1e6 * (time.perf_counter() - began),
            predicted_us=chosen.predicted_us,
            uniform_us=chosen.uniform_us,
        )
        if live.group.rank == 0:
            if self.decisions:  # the first one is for the user, later ones for debugging
                logging.getLogger("gradwire").debug(str(assigned))
            else:
                say(str(assigned))
        self.decide(assigned)

    def _errors_of_all_ranks(
        self, live: Live, errors: BitErrors, adapting: set[str]
    ) -> tuple[list[TensorInfo], list[list[float]]]:
        """The tensors with a gradient in this step, with the row of each, summed over ranks. Other tensors keep their bits."""
        infos, ways = [info for info in live.infos if info.name in adapting], self.adaptive.ways(WIDTHS)
        zeros = [0.0] * columns(self.adaptive)
        flat = [value for info in infos for value in errors.rows.get(info.name, zeros)]
        if not flat:
            return [], []
        summed = live.merged((), flat).sums
        rows = [summed[at : at + len(zeros)] for at in range(0, len(summed), len(zeros))]
        bucket_of = {name: bucket for bucket in live.plan.buckets for name in bucket.tensors}
        kept, both = [], []
        for info, row in zip(infos, rows, strict=True):
            if row[len(ways)] != 0.0:
                bucket = bucket_of[info.name]
                present = ways.index(bucket.spec_of(info.name))
                kept.append(info)
                both.append(of_both_encodes(row, bucket.option, live.group.world_size, present, not self.adaptive.feedback))
        return kept, both

    def _change(self, live: Live, adapting: set[str], specs: Mapping[str, Spec]) -> None:
        """Change to the plan with these specs. It has other buckets only if tensors get blocks of different sizes."""
        if len({spec.family for spec in (*specs.values(), self.adaptive.ways(WIDTHS)[0])}) > 1:
            present = {name: bucket.spec_of(name) for bucket in live.plan.buckets for name in bucket.tensors}
            stay = {name: present[name] for name in adapting}
            live.change_to(live.plan_of(self.adaptive.policy_of({**stay, **specs})))
        else:
            bits = {name: spec.element_bits for name, spec in specs.items()}
            live.change_to(with_bits(live.plan, self.adaptive, bits))
