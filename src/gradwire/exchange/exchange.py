"""The exchange: named tensors in, their means over the ranks of a group out. It knows no model, no autograd and no hook.

A step of an exchange: `begin` starts the lanes. `ready` tells that a tensor holds this rank's values: it is lent to the lanes, or
its values, times 1/world_size, are copied into its place in its bucket. A bucket whose tensors are all ready is taken up by the
lanes, in the plan's launch order. `wait` waits until a tensor, or all, hold the mean.
"""

import statistics
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.core import Plan, near, printable, show
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange.executor import BOTH, GATHER, REDUCE, Executor, TaskTimes
from gradwire.exchange.failures import failures_told, lane_error, not_ready
from gradwire.exchange.layout import Slot, build_buckets, random_streams
from gradwire.exchange.lending import BucketLayout, Lent
from gradwire.exchange.phases import (
    check_two_phases,
    exact_totals,
    own_runs,
    part_totals,
    put_back_shards,
    shards_of,
    share_memory,
    take_shards,
)
from gradwire.exchange.plans import PlanLike, changing_specs, info_of, plan_for
from gradwire.exchange.residual_store import Remembered, added_up
from gradwire.exchange.states import read_state, warn_of_lost, write_state
from gradwire.exchange.stats import BucketStats, ExchangeStats
from gradwire.exchange.tensors import TensorLike, checked_tensors, fitting, like, tensor_facts
from gradwire.transport import Group, Lanes, Meter, SilentLink

__all__ = ["Exchange"]

T = TypeVar("T")


class Exchange:
    """Averages named tensors over the ranks of a process group, in place, by a plan.

    tensors: names and tensors, of float32, bfloat16, float16 or float64, in the order in which they usually become ready; or
    `TensorMeta`, where `ready` will bring the tensors. Views are fine; one device.
    plan: a spec (`gw.QSGD(bits=4)` for every tensor), a `gw.Policy`, a `gw.Plan` or the path of a plan's JSON file.
    process_group: the ranks; default all.

    Collective: every rank of the group makes it, with the same names, shapes, dtypes and plan, and makes the same steps. Each
    step all tensors become ready once, in any order. Means are the same on all ranks, bit for bit.

    Raises PlanError if the plan does not fit the tensors, DisagreementError on all ranks if ranks differ, StepStateError where
    torch.distributed is not initialised. Its methods raise CommunicationError where a rank died or stalled, naming it.

    Example, on every rank::

        exchange = gw.Exchange({"weight": weight}, plan=gw.QSGD(bits=4))
        exchange.average_()          # begin, ready and wait for all tensors
        exchange.close()
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorLike],
        plan: PlanLike,
        process_group: dist.ProcessGroup | Group | None = None,
    ) -> None:
        lanes = Lanes(process_group)
        problem, made, checked, device = None, None, {}, None
        try:
            checked = checked_tensors(tensors)
            infos = [info_of(name, like(tensor)) for name, tensor in checked.items()]
            made, _ = plan_for(plan, infos, lanes.group.world_size, lanes.group.grid.ranks_per_node_if_even)
            device = like(next(iter(checked.values()))).device
        except Exception as error:
            problem = error
        try:
            lanes.open(tensor_facts(made, checked, problem), device)
            if problem is not None:
                raise problem
            assert made is not None
            self._build(lanes, checked, made, 0, None, True)
        except BaseException as error:
            lanes.stop()
            raise (problem if problem is not None else error) from None
        self._tensors.update(checked)
        self._own_lanes()

    @classmethod
    def on(
        cls,
        lanes: Lanes,
        tensors: Mapping[str, torch.Tensor],
        plan: Plan,
        step: int,
        flats: Sequence[torch.Tensor] | None = None,
        in_place: bool = False,
    ) -> "Exchange":
        """An exchange on lanes that others use too, one after another, with the specs of this step. `flats`: of another exchange
        of the same tensors. `in_place`: tensors are lent where possible. Raises PlanError for what this version cannot run."""
        made = cls.__new__(cls)
        made._build(lanes, tensors, plan, step, flats, in_place)
        return made

    def _build(
        self,
        lanes: Lanes,
        tensors: Mapping[str, TensorLike],
        plan: Plan,
        step: int,
        flats: Sequence[torch.Tensor] | None,
        in_place: bool,
    ) -> None:
        likes = {name: like(tensor) for name, tensor in tensors.items()}
        self._tensors: dict[str, TensorLike] = {}
        self._owns_lanes = self._closed = False
        self.lanes, self.group, self.plan = lanes, lanes.group, plan
        self.step = step
        """The number of the step that begins next, or runs."""
        self.made_for = step
        """The step whose specs it runs."""
        self._changing = changing_specs(plan)
        self.random = [random_streams(plan, lanes.group.rank, next(iter(likes.values())).device)]
        self._lent = Lent(name for bucket in plan.buckets for name in bucket.tensors if in_place)
        self._buckets = build_buckets(plan, likes, lanes.group, self.random[0], step, flats, self._lent.addresses)
        self.slots = {slot.name: slot for buffers in self._buckets for slot in buffers.slots}
        """The place of each tensor, by name."""
        self._executor = Executor(plan, self._buckets, lanes)
        share_memory(self._executor.tasks, self._buckets)
        self.residuals = Remembered(self._buckets)
        """What compressors keep from step to step, by tensor."""
        self._sizes = [len(buffers.slots) for buffers in self._buckets]
        self._left: list[int] = []
        self._phases = BOTH
        self._sources: dict[str, torch.Tensor] = {}
        """The tensors of the step that runs, and have not been waited for."""
        self._meters: list[Meter] = []

    def begin(self, phases: str = BOTH) -> None:
        """Begin a step. phases: "both"; or "reduce" or "gather" alone, where every bucket of the plan has two phases
        (`scheme="alltoall"`).

        After "reduce" each rank holds the mean of its own shards, `own_shards`. In "gather" each rank gives its shards as
        they are, and gets those of all ranks. Raises StepStateError where a step runs, PlanError for a plan without two phases.
        """
        self._check_open()
        if self._sources or self._left:
            raise StepStateError(
                f"begin() was called while step {self.step} runs. Call wait() first: it ends the step."
            )
        if phases not in (BOTH, REDUCE, GATHER):
            raise PlanError(f"phases is {show(phases)}: write {BOTH!r}, {REDUCE!r} or {GATHER!r}.")
        if phases != BOTH:
            check_two_phases(self._buckets, phases)
            part_totals(self._buckets)
        self.begin_step(self.step, phases)

    def ready(self, name: str, tensor: torch.Tensor | None = None) -> None:
        """A tensor holds this rank's values. `tensor` stands in for the one that the exchange was made with, in this step: of the
        same shape and dtype. It must not be changed before `wait`, and may hold anything until then.

        Raises StepStateError without `begin`, for a name that is ready already, for a tensor that does not fit, and without a
        tensor where the exchange was made with a `TensorMeta`.
        """
        self._check_open()
        source = self._source_of(name, tensor)
        slot = self.slots[name]
        with torch.no_grad():
            if slot.apart:
                self._lent.lend(slot, source.detach())
            elif self._phases == GATHER:
                slot.view.copy_(source)
            else:
                torch.mul(source.detach(), 1.0 / self.group.world_size, out=slot.view)
        self._sources[name] = source
        if self._phases == GATHER and self._left[slot.bucket] == 1:
            take_shards(self._buckets[slot.bucket], self.lanes.data[0].link.streams)
        self.count(slot, owes=self._phases != GATHER)

    def wait(self, name: str | None = None) -> None:
        """Wait until a tensor, or without a name every tensor, holds the mean over ranks. The wait for all ends the step.

        Raises StepStateError where tensors of the step are not ready, CommunicationError where another rank failed.
        """
        self._check_open()
        if not self._left:
            if name is None:
                return
            raise StepStateError(f"wait({name!r}) was called and no step runs. Call begin() and ready() first.")
        names = [self._known(name)] if name is not None else list(self.slots)
        # lanes take buckets in launch order, so those before it must be ready too
        order = list(dict.fromkeys(bucket for bucket, _ in self.plan.launch))
        last = max(order.index(self.slots[each].bucket) for each in names)
        buckets = order if self.lanes.hold else order[: last + 1]
        if missing := [
            slot.name
            for bucket in buckets
            for slot in self._buckets[bucket].slots
            if self._left[bucket] and slot.name not in self._sources
        ]:
            raise not_ready(missing)
        if name is None:
            self._meters = self.finish()
        else:
            self._executor.open_gate()
            self.await_bucket(self.slots[name].bucket)
        for each in names:
            if (source := self._sources.pop(each, None)) is not None:
                self._put_back(self.slots[each], source)
        if name is None:
            self._left, self._sources = [], {}
            self._lent.give_back()
            for slot in self.slots.values() if self._phases != GATHER else ():
                slot.owed = None
            self.step += 1
            if self.outdated(self.step):
                self._make_anew()

    def average_(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """One whole step: replace every tensor by its mean over ranks. `tensors` stand in for those that the exchange was made
        with, by name: for all of them. Raises StepStateError, before anything is sent, for a name that is missing or unknown."""
        for name in tensors or ():
            self._known(name)
        given: Mapping[str, TensorLike] = self._tensors if tensors is None else tensors
        sources = {name: fitting(name, given.get(name), slot.view, slot.device) for name, slot in self.slots.items()}
        self.begin()
        for name, source in sources.items():
            self.ready(name, source)
        self.wait()

    @property
    def own_shards(self) -> dict[str, list[tuple[int, int]]]:
        """By tensor, the runs of elements (first, end) that this rank sums in the reduce phase and gives in the gather phase, as
        they lie in memory. Raises PlanError for a plan without two phases."""
        check_two_phases(self._buckets, "own_shards")
        return own_runs(self._buckets)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's step, plan and residuals, keys `rank{r}/...`; copies. Between steps."""
        self._check_idle("state_dict")
        return write_state(
            self.group, self.step, range(len(self.slots)), self.plan.state_digest(), self.residuals.state()
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` was made: this rank's own state, or with another number of ranks the states of all ranks
        that saved, in one dictionary. Between steps, on every rank; sends nothing. Raises ValueError naming what does not fit."""
        self._check_idle("load_state_dict")
        saved = read_state(state, self.group)
        if saved.own and saved.plan != self.plan.state_digest():
            raise ValueError(
                f"the state was saved under plan {saved.plan[:16]}, and this exchange runs plan "
                f"{self.plan.state_digest()[:16]}: residuals lie elsewhere. Use the plan that saved it."
            )
        made = self if not self.outdated(saved.step) else self._with_specs_of(saved.step)
        if saved.own:
            made.residuals.check(saved.memory[0])
            made.residuals.load(saved.memory[0])
        else:
            carried = added_up(saved.memory)
            made.residuals.check_carried(carried)
            warn_of_lost(saved.missing, made.residuals.names())
            made.residuals.take_over(carried)
        self._become(made)
        self.step = saved.step

    def stats(self) -> ExchangeStats:
        """What it did so far, on this rank."""
        codec_us = 1e6 * sum(meter.codec_seconds for meter in self._meters)
        return ExchangeStats.of(self.step, self.bucket_stats(), self._buckets, codec_us)

    def bucket_stats(self, other: "Exchange | None" = None, part: float = 0.0) -> tuple[BucketStats, ...]:
        """What each bucket holds and sends. `other` exchanges the same buckets in this part of all steps."""
        others = other._buckets if other is not None else [None] * len(self._buckets)
        pairs = zip(self._buckets, others, strict=True)
        return tuple(BucketStats.of(usual, self.group.grid, each, part) for usual, each in pairs)

    def stats_of_steps(self, steps: int, buckets: tuple[BucketStats, ...], codec_us: float) -> ExchangeStats:
        """Statistics with numbers that the caller counts itself."""
        return ExchangeStats.of(steps, buckets, self._buckets, codec_us)

    @contextmanager
    def recorded(self) -> Iterator[list[TaskTimes]]:
        """What the lanes do inside, task by task, in the order in which the tasks end: moments of time.perf_counter."""
        before, self.lanes.times = self.lanes.times, []
        try:
            yield self.lanes.times
        finally:
            self.lanes.times = before

    def time_codec(self, repeats: int) -> float:
        """CPU seconds of one step's encodes and decodes, the median of `repeats`, when nothing else runs. Sends nothing; leaves
        tensors and residuals as they were. Between steps. Raises PayloadError before the plan has run a step."""
        link: Any = SilentLink(self.group)
        changed = [*self.residuals.held(), *self.flats]
        copies = [tensor.clone() for tensor in changed]
        seconds = []
        for slot in self.slots.values():
            if slot.apart:
                self._lent.lend(slot, slot.empty().zero_())
        try:
            for _ in range(repeats):
                meter = Meter()
                for task in sorted((t for tasks in self._executor.tasks for t in tasks), key=lambda t: t.phase):
                    scheme = self._buckets[task.bucket].chunks[task.chunk]
                    scheme.post(link, 0, (task.phase,))
                    scheme.run(task.phase, link, meter, None)
                seconds.append(meter.codec_seconds)
        finally:
            self._lent.give_back()
            for tensor, copy in zip(changed, copies, strict=True):
                tensor.copy_(copy)
        return statistics.median(seconds)

    def close(self) -> None:
        """End the lanes' threads; a step that runs is given up. The exchange cannot be used after."""
        self._closed = True
        self._executor.give_up()
        if self._owns_lanes:
            self.lanes.stop()

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat buffer of each bucket; empty where tensors are lent."""
        return [buffers.flat for buffers in self._buckets]

    @property
    def numels(self) -> list[int]:
        """The elements of each bucket."""
        return [buffers.numel for buffers in self._buckets]

    @property
    def compressed_bytes(self) -> list[int]:
        """The bytes of the compressed tensors of each bucket."""
        return [sum(slot.view.nbytes for slot in buffers.compressed) for buffers in self._buckets]

    def flat_of(self, bucket: int) -> torch.Tensor:
        """The flat buffer of a bucket; empty where its tensors are lent."""
        return self._buckets[bucket].flat

    def layouts(self) -> Iterator[BucketLayout]:
        """The place of each bucket in memory, for a caller that fills whole runs of slots itself."""
        for buffers in self._buckets:
            lent = self._lent if buffers.slots[0].apart else None
            yield BucketLayout(buffers.slots, buffers.flat, buffers.aliases, lent)

    def own_sums(self) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
        """This rank's shards, after the reduce phase, by tensor: begin and end in the tensor's bucket, and the sums."""
        for buffers in self._buckets:
            yield from shards_of(buffers)

    def exact_sums(self) -> list[torch.Tensor]:
        """This rank's shards of all means, after the reduce phase. Empty, on all ranks alike, where what is gathered may differ
        from them: a bucket is compressed, has no shards, or sums in another dtype than its tensors'."""
        return exact_totals(self._buckets)

    def residuals_replaced_in(self, other: "Exchange") -> Remembered:
        """What is kept for the buckets that the other exchange, made by `mixed` of this one, has not."""
        pairs = zip(self._buckets, other._buckets, strict=True)
        return Remembered([own for own, running in pairs if own is not running])

    def keep_residuals_of(self, before: "Exchange") -> None:
        """Begin with the residuals of another exchange that fit."""
        self.residuals.take_over(self.residuals.fitting(before.residuals.carried()))

    def outdated(self, step: int) -> bool:
        """Whether in this step a spec is another one than in the step it was made for."""
        return any(spec.at_step(step) != spec.at_step(self.made_for) for spec in self._changing)

    def begin_step(self, step: int, phases: str = BOTH, buckets: Sequence[int] | None = None) -> None:
        """Start the lanes for the step of this number, with these buckets; None: all."""
        self.lanes.begin(step)
        self._lent.give_back()
        self.step, self._left, self._phases = step, list(self._sizes), phases
        for keys in self.random:
            keys[:, :, 1] = step
        self._executor.start(phases, buckets)

    @property
    def last_task(self) -> "Future[Any] | None":
        """Done with the last task of the step that runs, with None where a lane failed. None where tasks wait for the gate, and
        where no step runs."""
        return self._executor.last_task

    def fill(self, slot: Slot, tensor: torch.Tensor | None, share: torch.Tensor) -> None:
        """Put this part of a tensor in its place, or zeros; where the bucket has no memory lend a copy. `count` must follow."""
        if slot.apart:
            self._lent.lend(slot, slot.empty().copy_(tensor) if tensor is not None else slot.empty().zero_())
        elif tensor is None:
            slot.view.zero_()
        else:
            torch.mul(tensor.detach(), share, out=slot.view)

    def count(self, *slots: Slot, owes: bool = True) -> None:
        """Slots of one bucket are filled, or their tensors lent. The last one of a bucket hands the bucket to the lanes."""
        for slot in slots:
            if owes and slot.owed is not None:  # what is lent is divided by the ranks later
                slot.add_owed(*((self._lent.of(slot), self.group.world_size) if slot.apart else (slot.view, 1)))
        if (watch := self.lanes.watch) is not None:
            for slot in slots:
                watch(slot, self._lent.of(slot) if slot.apart else slot.view)
        bucket = slots[0].bucket
        self._left[bucket] -= len(slots)
        if not self._left[bucket]:
            self._executor.ready(bucket)

    def take_back(self, slot: Slot) -> None:
        """No rank uses the sum of this slot: residuals take it back."""
        self._buckets[slot.bucket].take_back(slot)

    def await_bucket(self, bucket: int) -> None:
        """Wait for all tasks of a bucket."""
        with failures_told(self._executor, self.step):
            self._executor.await_bucket(bucket)

    def await_gate(self) -> None:
        """Wait for all tasks before the gate."""
        with failures_told(self._executor, self.step):
            self._executor.await_gate()

    def await_result(self, other: "Future[T]") -> T:
        """Wait for something else while lanes go on."""
        with failures_told(self._executor, self.step):
            return self._executor.await_result(other)

    def finish(self, *others: "Future[Any]") -> list[Meter]:
        """Open the gate, wait for all tasks and for other futures; what the lanes measured."""
        with failures_told(self._executor, self.step):
            return self._executor.finish(*others)

    def finish_quietly(self, *others: "Future[Any]") -> bool:
        """Like `finish`, but raises nothing: a failure is the other ranks' or is known. Returns whether all went well."""
        try:
            self._executor.finish(*others)
        except Exception:
            return False
        return True

    def open_gate(self) -> None:
        """Let the tasks behind the gate run, after what the caller has queued."""
        self._executor.open_gate()

    def mark_changed(self) -> None:
        """Let autograd know that lent tensors hold other values: scripts may use them from now on."""
        self._lent.tell_autograd()

    def release(self) -> None:
        """Return lent tensors to the script: all tasks of the step are done."""
        self._lent.give_back()

    def drain(self) -> None:
        """Wait for the lanes' last task or failure."""
        self._executor.drain()

    def give_up(self) -> None:
        """Let the lanes go, and forget a step that was left in the middle."""
        self._executor.give_up()

    def check_lanes(self) -> None:
        """Raises if a lane has failed in this step."""
        if (failed := self._executor.failure()) is not None:
            raise lane_error(self._executor, failed, self.step)

    def _check_open(self) -> None:
        if self._closed:
            raise StepStateError("this exchange was closed. Make another one.")
        self.lanes.check()

    def _check_idle(self, method: str) -> None:
        self._check_open()
        if self._left:
            raise StepStateError(f"{method}() was called while step {self.step} runs. Call wait() first.")

    def _known(self, name: str) -> str:
        if name not in self.slots:
            raise StepStateError(f"the exchange has no tensor {printable(name)}{near(name, self.slots)}.")
        return name

    def _source_of(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        slot = self.slots[self._known(name)]
        if not self._left:
            raise StepStateError(f"ready({name!r}) was called and no step runs. Call begin() first.")
        if name in self._sources or not self._left[slot.bucket]:
            raise StepStateError(f"ready({name!r}) was called twice in step {self.step}. Call it once for each tensor.")
        return fitting(name, self._tensors.get(name) if tensor is None else tensor, slot.view, slot.device)

    @torch.no_grad()
    def _put_back(self, slot: Slot, source: torch.Tensor) -> None:
        if slot.apart:
            self._lent.put_back(slot, source)
        elif self._phases != REDUCE:
            source.detach().copy_(slot.view)
        if self._phases == REDUCE:
            put_back_shards(self._buckets[slot.bucket], slot, source)

    def _make_anew(self) -> None:
        """Go on with the specs of the step that begins next. What compressors remember is kept."""
        made = self._with_specs_of(self.step)
        made.keep_residuals_of(self)
        self._become(made)

    def _with_specs_of(self, step: int) -> "Exchange":
        likes = {name: like(tensor) for name, tensor in self._tensors.items()}
        return Exchange.on(self.lanes, likes, self.plan, step, in_place=True)

    def _become(self, made: "Exchange") -> None:
        """Go on with the buckets of another exchange of the same tensors."""
        if made is not self:
            kept = self._tensors, self._meters
            vars(self).update(vars(made))
            self._tensors, self._meters = kept
            self._own_lanes()

    def _own_lanes(self) -> None:
        """Stop the lanes with this exchange, and when it is dropped in the middle of a step let them go."""
        self._owns_lanes = True
        if (release := vars(self).get("_release")) is not None:
            release.detach()
        self._release = weakref.finalize(self, self._executor.give_up)
