"""The handle: what `parallelize` returns, and what keeps a model synchronised."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from gradwire.collectives import Meter, SilentLink
from gradwire.core.plan import Plan
from gradwire.core.specs import Spec
from gradwire.engine.leaving import reset
from gradwire.engine.registry import REGISTRY
from gradwire.engine.saving import load_state, state_of
from gradwire.engine.schedules.base import ClipsGradients, CopiesWeights, Corrects, ShardsOptimizer
from gradwire.engine.session import Session
from gradwire.errors import PayloadError, PlanError, StepStateError
from gradwire.exchange.stats import BucketStats, ExchangeStats, Stats
from gradwire.profiler import Profiling
from gradwire.record.recording import Recording
from gradwire.record.run import Decision
from gradwire.sim.timeline import Timeline

_WHOLE = (
    "this handle's schedule leaves optimizers whole, on every rank. Call {}() of the optimizer itself; only "
    "gw.Pipelined(shard_optimizer=True) cuts its state into shards."
)


class Handle:
    """Keeps the gradients of one model synchronised. Made by `gradwire.parallelize`.

    It lives as long as the model, whether or not it is kept, until `detach()`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        """What the handle works on: the reducer, the exchange and the lanes of the model. For those who extend gradwire."""
        self._recording: Recording | None = None

    @property
    def plan(self) -> Plan:
        """The plan that is executed. One made from a policy is made again after the first step, when the order in which
        gradients become ready is known."""
        return self.session.plan

    @property
    def decision(self) -> Any:
        """With plan="auto", `gw.AdaptiveBits` or `gw.Tuned`: what was decided last, with what was predicted and measured. None
        before that, and for a plan of the user's own. Its str() says it in a line."""
        decisions = self.decisions
        return decisions[-1] if decisions else None

    @property
    def decisions(self) -> tuple[Any, ...]:
        """The last 100 decisions. `handle.stats().decided` is how many there were."""
        return tuple(self.session.driver.decisions) if self.session.driver is not None else ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate into `grad`; the first one outside synchronises the sum, as under DDP."""
        reducer = self.session.reducer
        before, reducer.synchronise = reducer.synchronise, False
        try:
            yield
        finally:
            reducer.synchronise = before

    def stats(self) -> Stats:
        """What happened so far on this rank. Needs no other rank."""
        session = self.session
        buckets, reports, grid = session.exchange.buckets, list(session.reports), session.group.grid
        schedule = session.schedule
        correcting, part = schedule.correcting() if isinstance(schedule, Corrects) else ((), 0.0)
        of_buckets = tuple(
            BucketStats.of(usual, grid, other, part) for usual, other in zip_longest(buckets, correcting)
        )
        codec_us = 1e6 * statistics.median([r.codec_s for r in reports]) if reports else 0.0
        of_exchange = ExchangeStats.of(session.reducer.step, of_buckets, buckets, codec_us)
        weights = schedule.weight_bytes() if isinstance(schedule, CopiesWeights) else 0
        memory = msgspec.structs.replace(of_exchange.memory, weight_bytes=weights)
        return Stats(
            **{field.name: getattr(of_exchange, field.name) for field in fields(of_exchange)} | {"memory": memory},
            exposed_us=1e6 * statistics.median([r.exposed_s for r in reports]) if reports else 0.0,
            before_first_gradient=session.first_gradient.median,
            decisions=self.decisions,
            decided=session.driver.decisions.total if session.driver is not None else 0,
        )

    def time_codec(self, repeats: int = 5) -> float:
        """CPU seconds that one step's encodes and decodes take when nothing else runs: the median of `repeats`.

        Sends nothing. Call it between steps; gradients and residuals are as before afterwards.
        """
        self.session.settle()
        exchange = self.session.exchange
        link: Any = SilentLink(exchange.group)
        changed = [*exchange.memory.held(), *exchange.flats]
        copies = [tensor.clone() for tensor in changed]
        seconds = []
        for slot in exchange.slots.values():
            if slot.apart:
                exchange.lent.lend(slot, slot.empty().zero_())
        try:
            for _ in range(repeats):
                meter = Meter()
                for task in sorted((t for tasks in exchange.executor.tasks for t in tasks), key=lambda t: t.phase):
                    scheme = exchange.buckets[task.bucket].chunks[task.chunk]
                    scheme.post(link, 0, (task.phase,))
                    scheme.run(task.phase, link, meter, None)
                seconds.append(meter.codec_seconds)
        except PayloadError as error:
            raise StepStateError(
                f"the codecs cannot be timed before the present plan has run a step: {error}. Call this after one."
            ) from error
        finally:
            exchange.lent.give_back()
            for tensor, copy in zip(changed, copies, strict=True):
                tensor.copy_(copy)
        return statistics.median(seconds)

    def profile(
        self, folder: str | os.PathLike[str], steps: int = 20, specs: Sequence[Spec] = ()
    ) -> AbstractContextManager[Profiling]:
        """Measure the model, the links and the codecs inside an ordinary training loop. See `gradwire.profiler.Profiling`."""
        if self.session.driver is not None and self.session.driver.searching:
            raise PlanError(
                "plans are still being tried on this job, so steps are not alike. Profile when handle.decision is there, which "
                "takes at most 15 steps, or with a plan of your own."
            )
        return Profiling(self.session, folder, steps, specs)

    def record(
        self, folder: str | os.PathLike[str], error_steps: int = 20, decision: Decision | None = None
    ) -> Recording:
        """Record an ordinary training loop for `gradwire report`. See `gradwire.record.recording.Recording`.

        `decision` is how the plan came about, where somebody knows more than that it was given.
        """
        driver, policy = self.session.driver, self.session.policy
        given = "a plan that was given" if policy is None else f"a policy with {policy.default!r} as default"
        decided = decision or (driver.recorded if driver is not None else Decision(by=given))
        self._recording = Recording(self.session, self.stats, folder, error_steps, decided)
        return self._recording

    def timeline(self) -> Timeline:
        """One step as the last recording measured it, of the simulator's form. Raises StepStateError where there is none."""
        if self._recording is None:
            raise StepStateError("nothing was recorded: train a few steps inside handle.record(FOLDER) first.")
        return self._recording.timeline()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's step, plan and residuals, keys `rank{r}/...`, safe for torch.distributed.checkpoint.

        Of the plan it holds what a policy makes it from again, and its digest. The tensors are copies.
        """
        return state_of(self.session)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up where `state_dict` was made. Between steps, on every rank; nothing is sent.

        With the same ranks pass at least this rank's own state, and run the same plan or policy: the run goes on bit for bit
        (with another `residual_dtype`, but for rounding). With another number of ranks pass the states of all ranks that
        saved, in one dictionary: their residuals are dealt out so that the sum is kept. A rank whose state is missing begins
        with zero residuals, with a warning that names what is lost.

        Raises ValueError naming what is missing or does not fit, and with `shard_optimizer` StepStateError where the state has
        tensors in another order and the optimizer has state already; the handle is as before then.
        """
        load_state(self.session, state)

    def reset(self) -> None:
        """Go on after a step that a rank left in its forward or backward, by an exception that its script caught. Collective.

        That rank calls it where it caught the exception; the others get StepStateError from their backward of that step and
        call it there. All leave that batch out: gradients are dropped (`grad` is None) and the next backward is a step of its
        own. With error feedback what ranks had computed in the void step travels with the next one. Does nothing when nothing
        failed; raises the failure again when it is one that cannot be mended, such as a dead rank.

        Example::

            try:
                model(batch).mean().backward()
            except (torch.OutOfMemoryError, gw.StepStateError):
                handle.reset()
                continue
        """
        reset(self.session.reducer)
        self.session.began_s = None

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches: wrap the training loop in it, on every rank.

        A rank whose loop has ended takes part in the steps of the others with zero gradients; means are still over all
        ranks. When the last one has ended, all get the parameters and buffers of the highest rank that trained last; the
        optimizer state of the others stays where their own loop ended. One forward and one backward a step.

        Example::

            with handle.join():
                for batch in loader:
                    model(batch).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        """
        session, reducer = self.session, self.session.reducer
        if isinstance(session.schedule, ShardsOptimizer):
            session.schedule.check_join()
        reducer.control.joining, reducer.active = True, list(range(session.group.world_size))
        try:
            yield
            session.join_the_others()
        finally:
            reducer.control.joining = False

    def attach(self) -> None:
        """Take in what became of the model's parameters: added layers, thawed or converted ones (`model.to(dtype)`), others
        in their place (`load_state_dict(assign=True)`). Collective.

        A training forward calls it by itself when it sees such a change; only a model that trains in eval mode, or by
        calling its parts, needs it. All ranks get rank 0's parameters and buffers. Residuals of tensors that stay are kept.

        Raises StepStateError on all ranks when not all of them came to it, DisagreementError when they changed
        differently, PlanError when the plan is a fixed one and does not fit.
        """
        self.session.attach()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of the model down so that their norm, as if they were one vector, is at most `max_norm`. Returns
        what it was. Between backward and `optimizer.step()`, on every rank.

        Equal to torch.nn.utils.clip_grad_norm_. In the `pipelined` schedule it waits for all gathers, as that does. Where
        gradients travel uncompressed in two phases, and with `shard_optimizer`, it waits for all reduce phases and one number
        of every rank: equal to rounding then, and collective. In the
        `delayed` schedule gradients are each rank's own.
        """
        parameters, schedule = self.session.parameters.values(), self.session.schedule
        norm = None
        if isinstance(schedule, ClipsGradients):
            norm = schedule.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm is None:
            schedule.settle()
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def optimizer_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """With `shard_optimizer`: what the optimizer's own `state_dict()` would be if no rank had only a shard, on the CPU.
        Collective: every rank calls it. With `rank`, a rank of the group, only that one gets it, the others an empty one.

        An ordinary optimizer's `load_state_dict` takes it. Raises StepStateError where optimizers are whole.

        Example::

            state = handle.optimizer_state_dict(rank=0)
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": state}, path)
        """
        if not isinstance(self.session.schedule, ShardsOptimizer):
            raise StepStateError(_WHOLE.format("state_dict"))
        return self.session.schedule.optimizer_state_dict(rank)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """With `shard_optimizer`: take up what `optimizer_state_dict` or an ordinary optimizer's `state_dict` returned. Every
        rank passes the whole state, between steps, and keeps its shard; nothing is sent. Any number of ranks may have saved it.

        Raises what the optimizer's own `load_state_dict` raises, and StepStateError where optimizers are whole.
        """
        if not isinstance(self.session.schedule, ShardsOptimizer):
            raise StepStateError(_WHOLE.format("load_state_dict"))
        self.session.schedule.load_optimizer_state_dict(state)

    def flush(self) -> None:
        """Wait until nothing is under way, and weights, gradients and optimizers are as after an ordinary step.

        In the `backward` schedule nothing ever is under way between steps. Needs no other rank; launches nothing.
        """
        self.session.settle()

    def detach(self) -> None:
        """Make the model an ordinary one again. Gradients are no longer synchronised."""
        session = self.session
        session.detach()
        REGISTRY.forget(session.model, session.parameters.values())
