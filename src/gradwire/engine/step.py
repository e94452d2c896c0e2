"""The steps of one handle: from gradient-ready events to what its schedule makes of averaged gradients.

The states of a step:
1. idle. The first gradient-ready event of a synchronised backward begins a step: the lanes start and a callback is
   queued for the end of this backward.
2. running. After each event and the script's own hooks the gradient is copied, divided by the world size, into its slot,
   which becomes the parameter's grad. A bucket's last one hands the bucket to the lanes.
3. closing (the callback). Gradients that never came are filled in (zeros, or what earlier backwards without
   synchronisation left); one small exchange tells how each rank's backward went and which parameters it used; what else
   is awaited is the schedule's. Parameters no rank used keep the grad they had, as under DDP. Then idle.
4. failed. A backward that was left in the middle (an exception that the script caught) is ended in order: what is
   missing travels as zeros and the control exchange says so, so that all ranks raise in the same step and `reset` makes
   all idle again. After a collective failed it is for good.

A rank without batches takes part in steps with zeros and without a backward (`run_out`).
Reentrant checkpointing runs backwards inside the backward, each with its own end. When the graph shows it beforehand,
gradients are only collected and everything is sent when the outermost backward ends: right, without overlap.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial, reduce
from operator import or_

import torch
from torch.autograd import Variable

from gradwire.collectives import Group, Lane, LinkError
from gradwire.engine import reentrant
from gradwire.engine.control import Report, State, exchange_reports, why_void
from gradwire.engine.drift import DriftWatch
from gradwire.engine.executor import Executor
from gradwire.engine.failure import RollCall
from gradwire.engine.hooks import GradientHooks
from gradwire.engine.layout import Slot
from gradwire.engine.states import Saveable
from gradwire.engine.stats import StepReport
from gradwire.engine.traits import Traits
from gradwire.engine.usable import Usable
from gradwire.errors import DisagreementError, GradwireError, StepStateError

__all__ = ["Steps"]


class Steps(Usable, Saveable, Traits):
    """What all schedules have in common. Each is a class of its own, made by `gradwire.engine.schedules`."""

    def __init__(self, group: Group, control: Lane, roll_call: RollCall, drift_check_steps: int) -> None:
        super().__init__(group, roll_call)
        self.control = control
        self.synchronise, self.joining, self.deferred = True, False, False
        self.drift = DriftWatch(drift_check_steps)
        self.active: list[int] = []
        """Ranks of the group that had a batch in the last step."""
        self.ready_order: list[int] = []
        """Indices in the order in which the gradients of the last step came."""
        self.on_finished: Callable[[float], None] = lambda exposed_s: None
        """Called at the end of each backward that counted, with the seconds that it waited there."""
        self.on_measured: Callable[[StepReport], None] = lambda report: None
        """Called when the lanes are done with a step."""
        self._used, self._running = 0, False
        self._seen = False
        """Whether a backward was finished: what its graph is like is known then."""
        self._outer_task = -1
        self._release: weakref.finalize[..., Steps] | None = None
        self._hooks = GradientHooks(self, Steps.gradient_coming, Steps.gradient_ready)

    def watch(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Synchronise the gradients of these, by name and in registration order. `attach` must follow."""
        self._hooks.remove()
        self.names = list(parameters)
        self._parameters = [weakref.ref(parameter) for parameter in parameters.values()]
        self._used, self._seen = 0, False
        before = type(self).before_gradient if self.acts_before_gradients else None
        acts = (Steps.gradient_coming, Steps.gradient_ready)
        self._hooks = GradientHooks(self, *acts, parameters.values(), before)

    def attach(self, executor: Executor, random: torch.Tensor) -> None:
        """Use these buckets from the next step on. `random` keys their random streams: column 1 is the step."""
        self.executor, self.random = executor, random
        self._plan_word = int(executor.plan.digest()[:16], 16)
        by_name = {slot.name: slot for buffers in executor.buckets for slot in buffers.slots}
        self.slots: list[Slot] = [by_name[name] for name in self.names]
        self._bucket_sizes = [len(buffers.slots) for buffers in executor.buckets]
        if self._release is not None:
            self._release.detach()
        # a step that was left in the middle keeps lanes waiting for gradients: when nobody can bring them, they go
        self._release = weakref.finalize(self, executor.give_up)

    def detach(self) -> None:
        """Remove the hooks and let the lanes go."""
        self._hooks.remove()
        if self._release is not None:
            self._release()

    def expect_graph(self, outputs: list[torch.Tensor]) -> None:
        """Called after a forward whose backward will synchronise: learn of the outermost backward before it begins."""
        if not self._seen and not self.deferred:
            self.deferred = reentrant.in_graph(outputs)
        if self.deferred:
            for output in outputs:
                output.register_hook(self._outermost)

    def _outermost(self, gradient: torch.Tensor) -> None:
        if self.synchronise and not self._running:
            self._begin()

    # ---- running

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is about to be accumulated into parameter.grad."""

    def gradient_coming(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient was accumulated into parameter.grad, and hooks of the script may follow."""
        self._used |= 1 << index
        if not self.synchronise:
            return
        self._check_usable()
        if not self._running:
            if reentrant.inside():
                raise StepStateError(
                    f"the first gradient of the step, {self.names[index]!r}, came from a backward inside the backward "
                    "(reentrant checkpointing), and gradwire cannot see where the outer one ends. Nothing was sent. Call "
                    "the model itself rather than its parts, or use checkpoint(..., use_reentrant=False)."
                )
            self._begin()
        elif torch._C._current_graph_task_id() != self._outer_task and not self.deferred:
            self._refuse_second_backward(index)
        if (failed := self.executor.failure()) is not None:
            raise self._lane_failed(failed)
        self._came[index] = None

    def gradient_ready(self, index: int, parameter: torch.nn.Parameter) -> None:
        """parameter.grad is as it is to be sent."""
        if not self.synchronise or self.deferred:
            return
        if index in self._filled:
            raise self._leave(
                f"the gradient of {self.names[index]!r} became ready twice in step {self.step}: it is used inside a "
                "reentrant checkpoint and outside of it. Use checkpoint(..., use_reentrant=False)."
            )
        self._fill(index, parameter)

    def _begin(self) -> None:
        self._check_usable()
        if torch._C._current_graph_task_id() == -1:
            raise StepStateError(
                "this backward runs as compiled autograd, whose end gradwire cannot see. Switch it off."
            )
        self._running = True
        self._outer_task = torch._C._current_graph_task_id()
        self.on_begin()
        self._begin_step()
        Variable._execution_engine.queue_callback(self._close)

    def _begin_step(self) -> None:
        self._came: dict[int, None] = {}
        self._filled: dict[int, None] = {}
        self._left = list(self._bucket_sizes)
        self.random[:, :, 1] = self.step
        self.first_gradient_s = time.perf_counter()
        self.executor.start()

    def may_send(self) -> bool:
        """Whether a forward that begins now may send: not one that recomputes activations inside a backward.

        Raises if the last backward failed or was left.
        """
        self._check_usable()
        inside = torch._C._current_graph_task_id() != -1
        if self._running and not inside:
            raise self._was_left("a new forward begins")
        return not inside

    def _refuse_second_backward(self, index: int) -> None:
        if reentrant.inside():
            return  # inside the backward we know; each parameter's gradient is still counted once
        raise self._was_left(f"gradient {self.names[index]!r} belongs to a new backward")

    def _was_left(self, what_now: str) -> GradwireError:
        return self._leave(
            f"{what_now}, but step {self.step} of the last backward is not finished: {len(self._filled)} of "
            f"{len(self.names)} gradients came, then it was left (an exception in it?). All ranks raise and none may use "
            "this step's gradients: call handle.reset() on all of them and go on with the next batch, or restart."
        )

    @torch.no_grad()
    def _leave(self, words: str) -> GradwireError:
        """End the step in order, with zeros for what is missing, and tell all ranks. Returns the error to raise here."""
        for index, slot in enumerate(self.slots):
            if index not in self._filled:
                slot.take_over(None)
                slot.view.zero_()
                self._count(slot)
        with contextlib.suppress(Exception):  # where ranks are gone too, this rank's own words matter more
            self.executor.finish(self._tell(State.LEFT))
            self._can_reset = True
        self._give_back()
        return self._fail(StepStateError(words))

    def _give_back(self) -> None:
        """No rank uses what was summed: residuals take it back."""
        for slot in self.slots:
            self.executor.buckets[slot.bucket].take_back(slot)

    def _fill(self, index: int, parameter: torch.nn.Parameter) -> None:
        slot, grad = self.slots[index], parameter.grad
        if grad is None:
            raise self._leave(
                f"the gradient of {slot.name!r} was gone when it was to be sent: a hook used it and set it to None (an "
                "optimizer in backward?). gradwire averages after all hooks; step the optimizer after backward."
            )
        self._filled[index] = None
        slot.take_over(grad)
        self._scale_into(slot, grad)
        parameter.grad = slot.hand_out()
        self._count(slot)

    def _scale_into(self, slot: Slot, grad: torch.Tensor) -> None:
        """The slot takes this rank's share of the mean; its memory may be the gradient's."""
        if grad.is_sparse:
            self._filled.pop(self.names.index(slot.name), None)
            raise self._leave(
                f"the gradient of {slot.name!r} is sparse; gradwire sends dense gradients. Use Embedding(..., sparse=False)."
            )
        torch.mul(grad.detach(), 1.0 / self.group.world_size, out=slot.view)

    def _count(self, slot: Slot) -> None:
        slot.add_owed()
        self._left[slot.bucket] -= 1
        if not self._left[slot.bucket]:
            self.executor.ready(slot.bucket)

    # ---- closing

    def _tell(self, state: State) -> "Future[list[Report]]":
        """Tell all ranks how this rank's backward went, and hear the same of them."""
        came = len(self._filled)
        weights = self.drift.digest(self._parameters) if self.drift.due(self.step) else 0
        own = Report(self.step, state, self._plan_word, came, self.joining, weights, self.stepped, self._used)
        return self.control.submit(partial(exchange_reports, own, len(self.names)))

    @torch.no_grad()
    def _close(self) -> None:
        self._end(State.DONE)

    @torch.no_grad()
    def run_out(self) -> None:
        """One step of a rank without a batch: zeros for all gradients, no backward."""
        self._check_usable()
        self._begin_step()
        self._end(State.OUT)

    def _end(self, state: State) -> None:
        kept: dict[int, torch.Tensor | None] = {}
        if self.deferred:
            self.ready_order = list(range(len(self.names)))
        else:
            self._fill_late()
            self.ready_order = list(self._filled)
        for index, reference in enumerate(self._parameters):
            if index not in self._filled:
                kept[index] = self._fill_missing(index, None if state is State.OUT else reference())
        start = time.perf_counter()
        reports = self._exchange(state)
        exposed = time.perf_counter() - start
        self._check_drift(reports)
        used = reduce(or_, (report.used for report in reports))
        for index, slot in enumerate(self.slots):
            slot.owed = None if used >> index & 1 else slot.owed
        for index, own in kept.items():
            self._settle(index, own, used_anywhere=bool(used >> index & 1))
        self.active = [rank for rank, report in enumerate(reports) if report.state is State.DONE]
        self._used = 0
        self._running, self._seen = False, self._seen or state is State.DONE
        self.step += 1
        self._closed(exposed)
        self.on_finished(exposed)

    def _closed(self, exposed_s: float) -> None:
        """The step counts: what the schedule does at the end of backward."""

    def _check_drift(self, reports: Sequence[Report]) -> None:
        """Raises if ranks told different checksums of their weights. Collective then."""
        if not self.drift.found(reports):
            return
        try:
            words = self.drift.difference(self.control, reports, self.group.global_ranks, self.names, self.step)
        except LinkError as error:
            raise self.broken("checksums of all weights", error) from error
        raise self._fail(DisagreementError(words))

    def _exchange(self, state: State) -> list[Report]:
        """Tell what became of this rank's backward, and `_hear`."""
        return self._hear(self._tell(state))

    def _hear(self, told: "Future[list[Report]]") -> list[Report]:
        """Wait for what all ranks tell of the step, and for what else the schedule does. Raises on all of them when the step
        is void; nothing is under way then."""
        with self._failures_told():
            self._wait(told)
        reports = told.result()
        if problem := self._why_void(reports):
            with self._failures_told():
                self.executor.finish()
            self._can_reset = len({report.plan for report in reports}) == 1
            self._give_back()
            raise self._fail(StepStateError(problem))
        return reports

    def _why_void(self, reports: Sequence[Report]) -> str | None:
        return why_void(reports, self.group.global_ranks, len(self.names))

    def _wait(self, told: "Future[list[Report]]") -> None:
        """For what all ranks tell, and for as much of the lanes' work as must be over at the end of backward."""
        raise NotImplementedError

    @torch.no_grad()
    def announce_change(self) -> None:
        """Tell all ranks that this one's parameters changed. Returns when all said the same; raises on all when some ran
        a step instead, which is void."""
        self._check_usable()
        for index, slot in enumerate(self.slots):
            parameter = self._parameters[index]()
            if parameter is not None and parameter.grad is not None and parameter.grad is slot.handed:
                parameter.grad = parameter.grad.clone()  # what was accumulated, before the slot is zeroed
            slot.take_over(None)
        self._begin_step()
        for buffers in self.executor.buckets:
            buffers.flat.zero_()
        for slot in self.slots:
            self._count(slot)
        self._exchange(State.CHANGED)
        with self._failures_told():
            self.executor.finish()
        self._give_back()

    def converted(self) -> str | None:
        """The first parameter whose gradient does not fit its slot any more (`model.to(dtype)`)."""
        for name, slot, reference in zip(self.names, self.slots, self._parameters, strict=True):
            if (parameter := reference()) is not None and not slot.fits(parameter):
                return repr(name)
        return None

    def reset(self) -> None:
        """Begin anew after a void step. Collective."""
        if self.failure is None and self._running:
            self._was_left("reset() was called")
        if self.failure is None:
            return
        if not self._can_reset:
            raise type(self.failure)(f"reset() cannot mend this: {self.failure}")
        self._can_reset = False
        own = Report(self.step, State.DONE, self._plan_word, 0, self.joining, 0, self.stepped, 0)
        try:
            reports = self.control.submit(partial(exchange_reports, own, len(self.names))).result()
        except LinkError as error:
            raise self.broken("all ranks to call reset()", error) from error
        self.step = 1 + max(report.step for report in reports)
        self.failure, self._running, self._used = None, False, 0
        for reference in self._parameters:
            if (parameter := reference()) is not None:
                parameter.grad = None

    def _fill_late(self) -> None:
        """Gradients that came without becoming ready: the parameter's memory was replaced, and its node with it."""
        late = [index for index in self._came if index not in self._filled]
        for index in late:
            if (parameter := self._parameters[index]()) is not None:
                self._fill(index, parameter)
        if late:
            self._hooks.renew()

    def _fill_missing(self, index: int, parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
        """Fill the slot of a gradient that did not come in this backward; returns what the grad was."""
        slot = self.slots[index]
        grad = parameter.grad if parameter is not None else None
        own = grad.clone() if grad is not None and grad is slot.handed else grad
        slot.take_over(grad)
        if own is None:
            slot.view.zero_()
        else:
            self._scale_into(slot, own)
        self._count(slot)
        return own

    def _settle(self, index: int, own: torch.Tensor | None, used_anywhere: bool) -> None:
        parameter, slot = self._parameters[index](), self.slots[index]
        if not used_anywhere:
            self.executor.buckets[slot.bucket].take_back(slot)
        if parameter is None:
            return
        if used_anywhere:
            parameter.grad = slot.hand_out()
        elif own is not None and parameter.grad is slot.handed:
            slot.view.copy_(own)
