"""The handle, which `parallelize` returns and which keeps a model synchronised."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gradwire.core import Plan, Spec
from gradwire.engine import REGISTRY, ClipsGradients, Session, ShardsOptimizer, load_state, state_of
from gradwire.errors import PayloadError, PlanError, StepStateError
from gradwire.exchange import Stats
from gradwire.profiler import Profiling
from gradwire.record import Decision
from gradwire.record.recording import Recording
from gradwire.sim import Timeline

_WHOLE = (
    "this handle's schedule leaves optimizers whole, on every rank. Call {}() of the optimizer itself; only "
    "gw.Pipelined(shard_optimizer=True) cuts its state into shards."
)


class Handle:
    """Keeps the gradients of one model synchronised. Made by `gradwire.parallelize`.

    The handle lives as long as the model, or until `detach()`, even if the script does not keep it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        """The reducer, the exchange and the lanes of the model, for extensions of gradwire."""
        self._recording: Recording | None = None
        self._detached = False

    @property
    def attached(self) -> bool:
        """Whether the handle synchronises gradients: its model lives, and `detach()` was not called."""
        return not self._detached and self.session.model is not None

    @property
    def plan(self) -> Plan:
        """The plan that runs. After the first step, when the order of gradients is known, a policy makes its plan again."""
        return self.session.plan

    @property
    def decision(self) -> Any:
        """The last decision of plan="auto", `gw.AdaptiveBits`, `gw.Tuned` or `gw.Delayed(k="auto")`, with its predictions and
        measurements. Its str() is one line of text. None before the first decision, and for a plan that the script chose."""
        return next(reversed(self.decisions), None)

    @property
    def decisions(self) -> tuple[Any, ...]:
        """The last 100 decisions. `handle.stats().decided` counts all of them."""
        return tuple(self.session.driver.decisions) if self.session.driver is not None else ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: the backward of a forward inside sends nothing and adds to `grad`. The first other backward sends the sum.
        As under DDP the place of the forward decides; without a forward of the model that of the backward."""
        reducer = self.session.reducer
        before, reducer.synchronise = reducer.synchronise, False
        try:
            yield
        finally:
            reducer.synchronise = before

    def weight(self, samples: float) -> None:
        """Count this rank's batch with so many samples in the next mean. Call it once for each batch, before its backward, on
        every rank.

        The mean gradient is then the sum over ranks of samples times gradient, divided by the samples of all ranks: the gradient
        of one process with all samples, if each rank's loss is the mean over its own samples. Any unit will do, such as tokens. A
        rank without a batch passes 0, or is inside `join()`. Its gradient does not count, not even NaN: in the `local` schedule
        its optimizer changes nothing in such a step, and `grad` is None afterwards.

        Calls before the same mean add up. So call it for each batch of an accumulation, and in the `local` schedule for each
        local step: an exchange counts the samples of a rank since the last exchange.

        Sends nothing by itself. Call it from the first step on: where a job begins later, that one step sends gradients times
        `n`, which float16 may not hold. If some ranks call it for a step and others do not, the step is void on all ranks, with
        StepStateError. So is a step with SignSGD or Signum in which a rank has no samples: in a vote its zeros would count as 1.
        It also raises StepStateError for a number below 0, for NaN and infinity, and in the schedules `pipelined` and `delayed`,
        whose means are not weighted.

        Example::

            for batch, labels in loader:
                handle.weight(len(batch))
                loss_of(model(batch), labels).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        """
        session = self.session
        if not session.schedule.traits.weighs_batches:
            raise StepStateError(
                f"handle.weight() was called in the {session.plan.schedule.word} schedule, whose means are not weighted. Use the "
                "backward or the local schedule, or give every rank batches of the same size."
            )
        session.reducer.batches.add(samples)

    def stats(self) -> Stats:
        """Return statistics of this rank so far. Needs no other rank."""
        return self.session.stats()

    def time_codec(self, repeats: int = 5) -> float:
        """Measure the CPU seconds of one step's encodes and decodes when nothing else runs. Returns the median of `repeats`.

        Sends nothing. Call it between steps; gradients and residuals are as before afterwards.
        """
        self.session.settle()
        try:
            return self.session.exchange.time_codec(repeats)
        except PayloadError as error:
            raise StepStateError(
                f"the codecs cannot be timed before the present plan has run a step: {error}. Call this after one."
            ) from error

    def profile(
        self, folder: str | os.PathLike[str], steps: int = 20, specs: Sequence[Spec] = ()
    ) -> AbstractContextManager[Profiling]:
        """Measure the model, the links and the codecs inside an ordinary training loop. See `gradwire.profiler.Profiling`."""
        if self.session.driver is not None and self.session.driver.searching:
            raise PlanError(
                "plans are still being tried on this job, so steps are not alike. Profile later, or with a plan of your own: "
                "handle.decision is there after at most 15 steps, and a second look at it tries another plan for 12."
            )
        return Profiling(self.session, folder, steps, specs)

    def record(self, folder: str | os.PathLike[str], error_steps: int = 20, decision: Decision | None = None) -> Recording:
        """Record an ordinary training loop for `gradwire report`. See `gradwire.record.recording.Recording`.

        decision: the origin of the plan, if the caller knows more than gradwire does.
        Raises StepStateError after `detach()`.
        """
        if not self.attached:
            raise StepStateError(
                f"handle.record({os.fspath(folder)!r}) was called on a handle that is detached, or whose model is gone: it "
                "sees no steps, so the record would be empty. Call gw.parallelize again, and record() of the new handle."
            )
        self._recording = Recording(self.session, folder, error_steps, decision)
        return self._recording

    def timeline(self) -> Timeline:
        """Return a step of the last recording, in the simulator's form. Raises StepStateError if nothing was recorded."""
        if self._recording is None:
            raise StepStateError("nothing was recorded: train a few steps inside handle.record(FOLDER) first.")
        return self._recording.timeline()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of this rank: its step, plan and residuals, under the keys `rank{r}/...`.

        The tensors are copies. torch.distributed.checkpoint can save them. The state contains a digest of the plan, and
        the facts that a policy needs to make the plan again.
        """
        return state_of(self.session)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from where `state_dict` was called. Collective: call it between steps, on every rank. All ranks load, or none.

        With the same number of ranks pass at least this rank's own state, and run the same plan or policy. Then the run
        goes on bit for bit; another `residual_dtype` changes the rounding. With another number of ranks pass the states
        of all ranks that saved, in one dictionary. Their residuals are distributed so that their sum stays. A rank
        without a saved state begins with zero residuals, and a warning names the missing state.

        Raises ValueError with the name of what is missing or does not fit; on all ranks if it does not fit on one, and if ranks
        pass states of different steps. With `shard_optimizer` it raises StepStateError if the state has tensors in another order
        and the optimizer has state already. After an error the handle is as before.
        """
        load_state(self.session, lambda: state)

    def reset(self) -> None:
        """Go on after an exception in forward or backward that the script caught. Collective.

        The rank with the exception calls it where it caught it. The other ranks get StepStateError from their backward of that
        step, and call it there. A rank whose loop in `join()` has ended goes on by itself after a step that another rank left.
        All ranks leave that batch out: gradients are dropped (`grad` is None), and the next backward is a new step. With error
        feedback, the gradients that ranks computed in the void step are sent with the next one. Raises a failure that cannot be
        recovered, such as a dead rank.

        Only warns if nothing failed and no training forward of the model began since the last step. So a step of a model in eval
        mode, or of parts that are called without the model, cannot be left before its first gradient. After backward only the
        `local` and `delayed` schedules leave a step: in others the mean was exchanged, and the other ranks step by it.

        Example::

            try:
                model(batch).mean().backward()
            except (torch.OutOfMemoryError, gw.StepStateError):
                handle.reset()
                continue
        """
        self.session.reset()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches: wrap the training loop in it, on every rank.

        A rank whose loop has ended takes part in the steps of the others with zero gradients. Means are still over all ranks, or
        with `weight` over all samples.
        When the last loop has ended, all ranks get the parameters and buffers of the highest rank that trained last, and the
        state of the optimizers that `parallelize` was given; with local steps that stays each rank's own. Gradients stay as they
        were when a rank's own loop ended. A step has one forward and one backward.
        Raises StepStateError for plans with SignSGD or Signum: in a vote zeros count as 1.

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
        voting = next((spec for spec in session.plan.specs if spec.votes), None)
        if voting is not None and session.group.world_size > 1:
            raise StepStateError(
                f"handle.join() was called, and the plan has {voting!r}, a vote of all ranks: zeros of a rank without a batch "
                "count as 1 in it. Give all ranks the same number of batches, or use a spec with magnitudes, such as "
                "gw.EFSignSGD()."
            )
        reducer.control.join(True)
        reducer.active = list(range(session.group.world_size))
        try:
            yield
            session.join_the_others()
        finally:
            reducer.control.join(False)

    def drop_residuals(self) -> None:
        """Forget what error feedback has not sent yet. Call it on all ranks, between steps, where a script leaves out the update
        of a step by itself, such as one whose gradient is not finite. Else the residuals of that step go into the next update.
        A step that a `torch.amp.GradScaler` leaves out needs no call. Sends nothing.

        Example::

            norm = handle.clip_grad_norm_(1.0)
            if norm.isfinite():
                optimizer.step()
            else:
                handle.drop_residuals()
        """
        self.session.drop_residuals()

    def attach(self) -> None:
        """Adopt changes of the model's parameters: added layers, thawed or converted parameters (`model.to(dtype)`), or
        replaced ones (`load_state_dict(assign=True)`). Collective.

        A training forward calls it when it sees such a change. Call it yourself only if the model trains in eval mode,
        or if the script calls parts of the model instead of the model. All ranks get rank 0's parameters and buffers.
        Residuals of tensors that stay are kept.

        Raises StepStateError on all ranks if some ranks do not call it, DisagreementError if ranks changed their models
        differently, and PlanError if the plan is fixed and does not fit.
        """
        self.session.attach()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of the model so that the norm of all of them together is at most `max_norm`.

        Returns the norm before. Call it between backward and `optimizer.step()`, on every rank.

        The result equals that of torch.nn.utils.clip_grad_norm_. In the `pipelined` schedule both wait for all gathers.
        If gradients travel uncompressed in two phases, and with `shard_optimizer`, this method waits only for all
        reduce phases and for one number of every rank. Then the method is collective, and its result is equal up to
        rounding. In the `delayed` schedule gradients are each rank's own.
        """
        parameters, schedule = self.session.parameters.values(), self.session.schedule
        norm = None
        if isinstance(schedule, ClipsGradients):
            norm = schedule.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm is None:
            if schedule.traits.sends_in_backward:  # else gradients are each rank's own already
                schedule.settle()
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def optimizer_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the whole optimizer's state with `shard_optimizer`, on the CPU, as `state_dict()` of an ordinary one.

        Collective: every rank calls it. With `rank`, a rank of the group, only that rank gets the state, and the others get an
        empty one. `load_state_dict` of an ordinary optimizer takes it. Raises StepStateError without `shard_optimizer`.

        Example::

            state = handle.optimizer_state_dict(rank=0)
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": state}, path)
        """
        if not isinstance(self.session.schedule, ShardsOptimizer):
            raise StepStateError(_WHOLE.format("state_dict"))
        return self.session.schedule.optimizer_state_dict(rank)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load an optimizer state with `shard_optimizer`: that of `optimizer_state_dict`, or of an ordinary `state_dict`.

        Every rank passes the whole state, between steps, and keeps its shard. Nothing is sent. Any number of ranks may have saved
        the state. Raises what the optimizer's own `load_state_dict` raises, and StepStateError without `shard_optimizer`.
        """
        if not isinstance(self.session.schedule, ShardsOptimizer):
            raise StepStateError(_WHOLE.format("load_state_dict"))
        self.session.schedule.load_optimizer_state_dict(state)

    def flush(self) -> None:
        """Wait until weights, gradients and optimizers are as after an ordinary step. Needs no other rank, and sends nothing.

        In the `backward` schedule there is nothing to wait for between steps.
        """
        self.session.settle()

    def detach(self) -> None:
        """Make the model an ordinary one again. Gradients are no longer synchronised. A second call does nothing."""
        if self._detached:
            return
        session, self._detached = self.session, True
        REGISTRY.forget(session.model, session.parameters.values())
        session.detach()
