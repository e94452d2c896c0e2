"""The handle: what `parallelize` returns, and what keeps a model synchronised."""

import hashlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from gradwire.core.plan import Plan
from gradwire.core.specs import Spec
from gradwire.engine.attachment import Attachment
from gradwire.engine.codec_time import codec_seconds
from gradwire.engine.memory import added_up
from gradwire.engine.registry import REGISTRY
from gradwire.engine.states import read_state, split, warn_of_lost, write_state
from gradwire.engine.stats import BucketStats, Stats
from gradwire.errors import GradwireError, PayloadError, PlanError, StepStateError

if TYPE_CHECKING:
    from gradwire.profiler import Profiling
    from gradwire.record.recording import Recording
    from gradwire.record.run import Decision
    from gradwire.sim.timeline import Timeline

__all__ = ["Handle"]


class Handle(Attachment):
    """Keeps the gradients of one model synchronised. Made by `gradwire.parallelize`.

    It lives as long as the model, whether or not it is kept, until `detach()`.
    """

    _recording: "Recording | None" = None

    @property
    def plan(self) -> Plan:
        """The plan that is executed. One made from a policy is made again after the first step, when the order in which
        gradients become ready is known."""
        return self._plan

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate into `grad`; the first one outside synchronises the sum, as under DDP."""
        before, self._steps.synchronise = self._steps.synchronise, False
        try:
            yield
        finally:
            self._steps.synchronise = before

    def stats(self) -> Stats:
        """What happened so far on this rank. Needs no other rank."""
        from gradwire.record.memory import memory_of

        buckets, reports = self._executor.buckets, list(self._reports)
        correcting, part = self._steps.correcting()
        pairs = zip_longest(buckets, correcting)
        of_buckets = tuple(BucketStats.of(usual, self._group.grid, other, part) for usual, other in pairs)
        return Stats(
            steps=self._steps.step,
            wire_bytes=sum(each.wire_bytes for each in of_buckets),
            intra_bytes=sum(each.intra_bytes for each in of_buckets),
            inter_bytes=sum(each.inter_bytes for each in of_buckets),
            gradient_bytes=sum(each.gradient_bytes for each in of_buckets),
            exposed_us=1e6 * statistics.median([r.exposed_s for r in reports]) if reports else 0.0,
            before_first_gradient=self._first_gradient.median,
            codec_us=1e6 * statistics.median([r.codec_s for r in reports]) if reports else 0.0,
            memory=memory_of(buckets),
            buckets=of_buckets,
            decisions=self.decisions,
        )

    def time_codec(self, repeats: int = 5) -> float:
        """CPU seconds that one step's encodes and decodes take when nothing else runs: the median of `repeats`.

        Sends nothing. Call it between steps; gradients and residuals are as before afterwards.
        """
        self._steps.flush()
        try:
            return codec_seconds(self._executor, self._memory, self._group, repeats)
        except PayloadError as error:
            raise StepStateError(
                f"the codecs cannot be timed before the present plan has run a step: {error}. Call this after one."
            ) from error

    def profile(
        self, folder: str | os.PathLike[str], steps: int = 20, specs: Sequence[Spec] = ()
    ) -> AbstractContextManager["Profiling"]:
        """Measure the model, the links and the codecs inside an ordinary training loop. See `gradwire.profiler.Profiling`."""
        from gradwire.profiler import Profiling

        model = self._model()
        assert model is not None
        if self.driver is not None and self.driver.searching:
            raise PlanError(
                "plans are still being tried on this job, so steps are not alike. Profile when handle.decision is there, which "
                "takes 40 to 80 steps, or with a plan of your own."
            )
        return Profiling(model, self._parameters, lambda: self._steps, self._group, folder, steps, specs)

    def record(
        self, folder: str | os.PathLike[str], error_steps: int = 20, decision: "Decision | None" = None
    ) -> "Recording":
        """Record an ordinary training loop for `gradwire report`. See `gradwire.record.recording.Recording`.

        `decision` is how the plan came about, where somebody knows more than that it was given.
        """
        from gradwire.record.recording import Recording
        from gradwire.record.run import Decision

        model = self._model()
        assert model is not None
        decided: Decision | Callable[[], Decision]
        if decision is None and self.driver is not None:
            decided = self.driver.recorded
        elif self._policy is None:
            decided = decision or Decision(by="a plan that was given")
        else:
            decided = decision or Decision(by=f"a policy with {self._policy.default!r} as default")
        self._recording = Recording(
            model,
            self._parameters,
            lambda: self._steps,
            self._group,
            lambda: self._executor,
            self.stats,
            folder,
            error_steps,
            decided,
        )
        return self._recording

    def timeline(self) -> "Timeline":
        """One step as the last recording measured it, of the simulator's form. Raises StepStateError where there is none."""
        if self._recording is None:
            raise StepStateError("nothing was recorded: train a few steps inside handle.record(FOLDER) first.")
        return self._recording.timeline()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's step, plan and residuals, keys `rank{r}/...`, safe for torch.distributed.checkpoint.

        Of the plan it holds what a policy makes it from again, and its digest. The tensors are copies.
        """
        self._steps.flush()
        step, memory = self._steps.step, self._memory.state() | self._steps.state() | self._decided(self._plan)
        return write_state(self._group, step, self._order, self._digest_of(self._plan), memory)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up where `state_dict` was made. Between steps, on every rank; nothing is sent.

        With the same ranks pass at least this rank's own state, and run the same plan or policy: the run goes on bit for bit
        (with another `residual_dtype`, but for rounding). With another number of ranks pass the states of all ranks that
        saved, in one dictionary: their residuals are dealt out so that the sum is kept. A rank whose state is missing begins
        with zero residuals, with a warning that names what is lost.

        Raises ValueError naming what is missing or does not fit, and with `shard_optimizer` StepStateError where the state has
        tensors in another order and the optimizer has state already; the handle is as before then.
        """
        self._steps.flush()
        saved = read_state(state, self._group)
        if sorted(saved.order) != sorted(self._order):
            raise ValueError(
                f"the state's order numbers {len(saved.order)} tensors, not each of the {len(self._order)} trainable ones of "
                "the model once: it was saved with another model, or other parameters of it were frozen."
            )
        plan = self._plan_to_resume(saved)
        if saved.own and plan.schedule != self._schedule:
            before = self._plan
            self._change_to(plan)
            try:
                return self.load_state_dict(state)
            except ValueError:
                self._change_to(before)
                raise
        if saved.own and saved.plan != (digest := self._digest_of(plan)):
            raise ValueError(
                f"the state was saved under plan {saved.plan[:16]}, and this handle runs plan {digest[:16]}: shards "
                "and residuals lie elsewhere. Parallelize with the policy or the plan of the run that saved it, and the model in "
                "the memory format that it had."
            )
        usable = plan == self._plan and not self._built.outdated(saved.step)
        built = self._built if usable else self._assemble(plan, saved.step)
        memory, extra = split(saved.memory[0] if saved.own else {})
        carried = {} if saved.own else added_up(split(each)[0] for each in saved.memory)
        if saved.own:
            built.memory.check(memory)
            self._steps.check(saved, extra)
        else:
            built.memory.check_carried(carried)
            warn_of_lost(saved.missing, built.memory.names())
        self._use(built)
        self._order, self._order_known = saved.order, self._policy is not None
        if saved.own:
            self._memory.load(memory)
        else:
            self._memory.take_over(carried)
        self._steps.step = saved.step
        self._steps.load(saved, extra)
        self._resumed(saved)

    def _digest_of(self, plan: Plan) -> str:
        """Where shards and residuals lie: in the memory format, too, of tensors that have one of their own."""
        strides = {name: p.stride() for name, p in self._parameters.items() if not p.is_contiguous()}
        digest = plan.state_digest()
        return hashlib.sha256(f"{digest} {strides}".encode()).hexdigest() if strides else digest

    def reset(self) -> None:
        """Go on after a backward that a rank left in the middle, by an exception that its script caught. Collective.

        That rank calls it where it caught the exception; the others get StepStateError from their backward of that step and
        call it there. Gradients are dropped (`grad` is None) and the next backward is a step of its own. With error feedback
        what ranks had computed in the void step travels with the next one. Does nothing when nothing failed; raises the
        failure again when it is one that cannot be mended, such as a dead rank.

        Example::

            try:
                loss.backward()
            except (torch.OutOfMemoryError, gw.StepStateError):
                handle.reset()
                continue
        """
        self._steps.reset()
        self._began_s = None

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
        self._steps.check_join()
        self._steps.joining, self._steps.active = True, list(range(self._group.world_size))
        try:
            yield
            self._join_the_others()
        finally:
            self._steps.joining = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of the model down so that their norm, as if they were one vector, is at most `max_norm`. Returns
        what it was. Between backward and `optimizer.step()`, on every rank.

        Equal to torch.nn.utils.clip_grad_norm_. In the `pipelined` schedule it waits for all gathers, as that does. Where
        gradients travel uncompressed in two phases, and with `shard_optimizer`, it waits for all reduce phases and one number
        of every rank: equal to rounding then, and collective. In the
        `delayed` schedule gradients are each rank's own.
        """
        return self._steps.clip_grad_norm_(self._parameters.values(), max_norm, norm_type)

    def optimizer_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """With `shard_optimizer`: what the optimizer's own `state_dict()` would be if no rank had only a shard, on the CPU.
        Collective: every rank calls it. With `rank`, a rank of the group, only that one gets it, the others an empty one.

        An ordinary optimizer's `load_state_dict` takes it. Raises StepStateError where optimizers are whole.

        Example::

            state = handle.optimizer_state_dict(rank=0)
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": state}, path)
        """
        return self._steps.optimizer_state_dict(rank)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """With `shard_optimizer`: take up what `optimizer_state_dict` or an ordinary optimizer's `state_dict` returned. Every
        rank passes the whole state, between steps, and keeps its shard; nothing is sent. Any number of ranks may have saved it.

        Raises what the optimizer's own `load_state_dict` raises, and StepStateError where optimizers are whole.
        """
        self._steps.load_optimizer_state_dict(state)

    def flush(self) -> None:
        """Wait until nothing is under way, and weights, gradients and optimizers are as after an ordinary step.

        In the `backward` schedule nothing ever is under way between steps. Needs no other rank; launches nothing.
        """
        self._steps.flush()

    def detach(self) -> None:
        """Make the model an ordinary one again. Gradients are no longer synchronised."""
        for hook in self._module_hooks:
            hook.remove()
        if self.driver is not None:
            self.driver.detached()
        with suppress(GradwireError):  # what failed before was told then
            self._steps.flush()
        self._steps.detach()
        for lane in [*self._lanes, self._control]:
            lane.stop()
        REGISTRY.forget(self._model(), self._parameters.values())
