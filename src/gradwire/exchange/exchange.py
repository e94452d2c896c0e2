"""The exchange: named tensors in, their means over the ranks of a group out. It knows no model, no autograd and no hook.

A step of an exchange:

1. `begin` gives every lane its list of tasks. Lists are static: cut from the plan's launch order once, the same on all ranks.
2. `ready` says that tensors hold this rank's values: one tensor by name, or places of a bucket that the caller has filled. A
   bucket with all its tensors ready goes to the lanes that have tasks of it. A lane does its tasks strictly in order and waits
   for the bucket of the next one; it never takes another because it happens to be ready.
3. Tasks behind the gate, a position in the launch order, wait until `open_gate` or `wait`. Only plans whose gathers run during
   the next forward have some.
4. `wait` waits for a tensor, a bucket, or the whole step. A failure of a lane reaches whoever waits.

Pieces (chunks of buckets) go round the lanes. On CPU a lane blocks in its collectives, so several lanes keep the wire busy
while one encodes. On CUDA nothing blocks, one lane submits everything, and the gather of a piece is put behind the
reduce of the bucket's next, so that the codec of one runs while the other is on the wire.
"""

import queue
import statistics
import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradwire.collectives import Route, Scheme, ShardedSum, TwoPhase, share_scratch
from gradwire.core import Plan, codes_on_cpu, launch_tasks, near, printable, show, tasks_by_lane
from gradwire.errors import GradwireError, PlanError, StepStateError
from gradwire.exchange.layout import BucketBuffers, Slot, build_buckets, launches, random_streams
from gradwire.exchange.plans import PlanLike, changing_specs, info_of, plan_for, warn_of_embeddings
from gradwire.exchange.residual_store import Remembered, State, added_up, for_other_ranks
from gradwire.exchange.states import read_state, warn_of_lost, write_state
from gradwire.exchange.stats import BucketStats, DeviceTimes, ExchangeStats
from gradwire.exchange.tensors import TensorLike, checked_tensors, device_of, fitting, like, outside_modes, tensor_facts
from gradwire.kernels import Addresses, tensor_key
from gradwire.renames import new_spelling
from gradwire.transport import (
    TAGS,
    Group,
    Lanes,
    LanesObserver,
    Link,
    LinkError,
    Mark,
    Meter,
    QueuedStep,
    SilentLink,
    Streams,
    TlsOption,
)

T = TypeVar("T")
_GIVE_UP, _OPEN = -1, -2
"""Signals that a lane may get in place of a bucket that is ready."""
BOTH, REDUCE, GATHER = "both", "reduce", "gather"
"""The phases that a step runs."""


class Exchange:
    """Averages named tensors over the ranks of a process group, in place, by a plan.

    tensors: names and tensors, of float32, bfloat16, float16 or float64, in the order in which they usually become ready; or
    `TensorMeta`, where `ready` will bring the tensors. Views are fine; one device.
    plan: a spec (`gw.QSGD(bits=4)` for every tensor), a `gw.Policy`, a `gw.Plan` or the path of a plan's JSON file.
    process_group: the ranks; default all.
    tls: whether connections between ranks are encrypted: as for `gw.parallelize`.

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
        tls: TlsOption = None,
    ) -> None:
        lanes = Lanes(process_group, tls=tls, device=device_of(tensors))
        problem, made, checked, device = None, None, {}, None
        try:
            checked = checked_tensors(tensors)
            infos = [info_of(name, like(tensor), getattr(tensor, "embedding", False)) for name, tensor in checked.items()]
            made, policy = plan_for(plan, infos, lanes.group.world_size, lanes.group.grid.ranks_per_node_if_even)
            warn_of_embeddings(infos, made, policy)
            device = like(next(iter(checked.values()))).device
        except Exception as error:
            problem = error
        try:
            lanes.open(tensor_facts(made, checked, problem), device)
            if problem is not None:
                raise problem
            assert made is not None
            with lanes.leaving_with_reason():
                self._build(lanes, checked, made, 0, None, True)
        except BaseException as error:
            lanes.stop()
            failure = problem if problem is not None else error
            raise failure from failure.__cause__
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

    @outside_modes
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
        """The tensors that compressors keep from step to step, by tensor."""
        self.share = torch.tensor(1.0 / lanes.group.world_size, dtype=torch.float64, device="cpu")
        """The factor of this rank's values in a mean."""
        self.weight = 1.0
        """The factor of this rank's values in a sum, before it is divided by the number of ranks."""
        self.sent: set[Slot] = set()
        """The places whose tensors are ready in this step."""
        self._left: list[int] = []
        """How many tensors of each bucket are not ready yet; empty between steps."""
        self._ready_on: dict[int, torch.Stream | None] = {}
        """The stream on which a tensor of a bucket became ready last, in this step."""
        self._chosen: Sequence[int] = ()
        """The buckets of this step."""
        self._phases, self._counts_steps = BOTH, True
        self._sources: dict[str, torch.Tensor] = {}
        """The tensors that `wait` writes means to."""
        self.meters: list[Meter] = []
        """The times that the lanes measured in the last step."""

    def begin(self, phases: str = BOTH, step: int | None = None, buckets: Iterable[int] | None = None) -> None:
        """Begin a step.

        phases: "both"; or "reduce" or "gather" alone, where every bucket of the plan has two phases (`scheme="alltoall"`). After
        "reduce" each rank holds the mean of its own shards, `own_shards`. In "gather" each rank gives its shards as they are,
        and gets those of all ranks.
        step: the number of the step, from a caller that counts steps itself. `wait` then only waits: the caller uses means where
        they lie, calls `release`, and takes another exchange when specs change.
        buckets: the numbers of the buckets of this step, the same on all ranks. None: all.

        Raises StepStateError if a step runs, and for a number that no bucket has; PlanError for a plan without two phases.
        """
        self._counts_steps = step is None
        if step is None:
            step = self.step
            self._check_open()
            if self._left:
                raise StepStateError(f"begin() was called while step {step} runs. Call wait() first: it ends the step.")
        chosen: Sequence[int] = range(len(self._buckets)) if buckets is None else tuple(dict.fromkeys(buckets))
        for bucket in () if buckets is None else chosen:
            self._check_number(bucket, f"begin(buckets={[*chosen]})")
        if phases not in (BOTH, REDUCE, GATHER):
            raise PlanError(f"phases is {show(phases)}: write {BOTH!r}, {REDUCE!r} or {GATHER!r}.")
        if phases != BOTH:
            check_two_phases(self._buckets, phases)
            for sum_apart in _sums_apart(chunk for buffers in self._buckets for chunk in buffers.chunks):
                sum_apart.share_total(None)  # in memory of its own: a step ends with the sums, or begins with them
        self._ready_on = {}
        self.lanes.begin(step)
        self._lent.give_back()
        self.step, self._phases, self.sent = step, phases, set()
        self._chosen = chosen
        self._left = [len(each.slots) if each.index in self._chosen else 0 for each in self._buckets]
        for keys in self.random:
            keys[:, :, 1].fill_(step)  # an assignment would make a tensor first
        self._executor.start(phases, chosen)

    def weigh(self, weight: float) -> None:
        """Multiply this rank's values by `weight` in the steps that begin from now on. With 0 the rank sends zeros."""
        self.weight = weight
        self.share.fill_(weight / self.group.world_size)

    def multiply(self, slots: Iterable[Slot], factor: float) -> None:
        """Multiply the means of a step whose tasks are done, before `release`. Results of votes stay as they are."""
        means = [slot for slot in slots if not self._buckets[slot.bucket].bucket.spec_of(slot.name).votes]
        if means:
            torch._foreach_mul_([self._lent.of(slot) if slot.apart else slot.view for slot in means], factor)

    def place(self, slot: Slot, tensor: torch.Tensor | None) -> None:
        """Put this rank's part of the mean in a place: zeros for None. If the bucket has no memory, lend a copy. `ready` must
        follow."""
        if not self.weight:
            tensor = None
        if slot.apart:
            self._lent.lend(slot, slot.empty().copy_(tensor).mul_(self.weight) if tensor is not None else slot.empty().zero_())
        elif tensor is None:
            slot.view.zero_()
        else:
            torch.mul(tensor.detach(), self.share, out=slot.view)

    def ready(self, what: str | Sequence[Slot], tensor: torch.Tensor | None = None) -> None:
        """A tensor holds this rank's values. `tensor` stands in for the one that the exchange was made with, in this step: of the
        same shape and dtype. It must not be changed before `wait`, and may hold anything until then.

        what: the tensor's name; or places of one bucket that the caller has filled, or whose tensors it has lent.

        Raises StepStateError without `begin`, for a name that is ready already or whose bucket is not in the step, for a tensor
        that does not fit, and without a tensor where the exchange was made with a `TensorMeta`.
        """
        slots = (self._placed(what, tensor),) if isinstance(what, str) else what
        bucket = slots[0].bucket
        if self._phases != GATHER:
            for slot in slots:
                if slot.owed is not None:  # what is lent is divided by the ranks later
                    slot.add_owed(*((self._lent.of(slot), self.group.world_size) if slot.apart else (slot.view, 1)))
        for observer in self.lanes.value_observers:
            for slot in slots:
                observer.sends(slot, self._lent.of(slot) if slot.apart else slot.view)
        self.sent.update(slots)
        self._left[bucket] -= len(slots)
        if len(slots) < len(self._buckets[bucket].slots):  # the others may become ready on other streams
            self._ready_on[bucket] = self._executor.streams.after(self._ready_on.get(bucket))
        if not self._left[bucket]:
            if self._phases == GATHER:
                for chunk in self._buckets[bucket].chunks:  # this rank gives its shards of the flat buffer as they are
                    assert isinstance(chunk, (TwoPhase, ShardedSum))
                    chunk.take_shard(self._executor.streams)
            self._executor.ready(bucket)

    @torch.no_grad()
    def ready_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call `ready` for each of these tensors, by name: on a GPU in few operations. Raises what `ready` raises."""
        pairs = [(self._checked(name), name, tensor) for name, tensor in tensors.items()]
        if self._phases == GATHER or not pairs or not launches(pairs[0][0].device):
            for _, name, tensor in pairs:
                self.ready(name, tensor)
            return
        by_bucket: dict[int, list[Slot]] = {}
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot, name, tensor in pairs:
            if slot.apart or not self.weight:
                self._placed(name, tensor)
            else:
                source = self._sources[name] = fitting(name, tensor, slot.view, slot.device)
                copied.append((slot.view, source.detach()))
            by_bucket.setdefault(slot.bucket, []).append(slot)
        if copied:
            views, sources = map(list, zip(*copied, strict=True))
            torch._foreach_copy_(views, sources)
            torch._foreach_mul_(views, float(self.share))
        for slots in by_bucket.values():
            self.ready(slots)

    def wait(self, what: str | int | None = None, others: Sequence["Future[Any]"] = ()) -> None:
        """Wait until a tensor holds the mean over ranks, by name; all tensors of a bucket, by number; or None: all. The wait for
        all ends the step, and waits for the `others` too.

        Raises StepStateError where tensors of the step are not ready, and for what is not in the step; CommunicationError where
        another rank failed, and what one of the others raises.
        """
        if self._counts_steps:
            self._check_open()
        if not self._left and what is not None:
            raise StepStateError(f"wait({what!r}) was called and no step runs. Call begin() and ready() first.")
        bucket = what if isinstance(what, int) else None if what is None else self.slots[self._known(what)].bucket
        if bucket is not None:
            self._check_chosen(bucket, f"wait({what!r})")
        if any(self._left):
            self._check_ready(bucket)
        if self._left or others:
            with self._failures_named():
                if bucket is None:
                    self.meters = self._executor.finish(others, self.step)
                else:
                    self._executor.open_gate()
                    self._executor.await_tasks(bucket)
        if self._sources:
            slots: Iterable[Slot] = self.slots.values() if bucket is None else self._buckets[bucket].slots
            names = [what] if isinstance(what, str) else [slot.name for slot in slots]
            self._put_back({each: source for each in names if (source := self._sources.pop(each, None)) is not None})
        if bucket is None and self._left:
            self._left = []
            if self._counts_steps:
                self._end_step()

    def _end_step(self) -> None:
        """The step counts, and the next one is another."""
        self._lent.give_back()
        for slot in self.sent if self._phases != GATHER else ():
            slot.owed = None
        self.step += 1
        if self._owns_lanes and self.outdated(self.step):  # on lanes of others it ends with these specs: they make the next
            made = self._running(self.plan, self.step)
            made.keep_residuals_of(self)
            self._become(made)

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
        """The runs of elements (first, end) that this rank sums in the reduce phase and gives in the gather phase, by tensor, as
        they lie in memory. Raises PlanError for a plan without two phases."""
        check_two_phases(self._buckets, "own_shards")
        runs: dict[str, list[tuple[int, int]]] = {name: [] for name in self.slots}
        for slot, low, high, _ in self.own_sums():
            runs[slot.name].append((low - slot.offset, high - slot.offset))
        return runs

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's step, plan and residuals, keys `rank{r}/...`; copies. Between steps. On a device it waits until the last
        step's sums have arrived."""
        self._check_idle("state_dict")
        self.lanes.await_queued()
        digest = self.plan.state_digest(self.group.world_size)
        return write_state(self.group, self.step, range(len(self.slots)), digest, self.residuals.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` was made: this rank's own state, or with another number of ranks the states of all ranks
        that saved, in one dictionary. Between steps, on every rank; sends nothing. Raises ValueError naming what does not fit."""
        self._check_idle("load_state_dict")
        saved, digest = read_state(state, self.group), self.plan.state_digest(self.group.world_size)
        if saved.own and saved.plan != digest:
            raise ValueError(
                f"the state was saved under plan {saved.plan[:16]}, and this exchange runs plan {digest[:16]}: residuals lie "
                "elsewhere. Use the plan that saved it. Defaults of policies changed between releases: write scheme=, "
                "bucket_bytes= and so on as they were."
            )
        made = self if not self.outdated(saved.step) else self._running(self.plan, saved.step)
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

    def change_to(self, plan: Plan) -> None:
        """Run another plan of the same tensors from the next step on. Between steps, with an equal plan on every rank; sends
        nothing. What residuals hold goes into the new plan's. Raises PlanError, and changes nothing, for a plan that does not
        fit the tensors or that this version cannot run; StepStateError while a step runs."""
        self._check_idle("change_to")
        plan.check_against([info_of(name, like(tensor)) for name, tensor in self._tensors.items()])
        made = self._running(plan, self.step)
        made.residuals.take_over(self.residuals.carried())
        self._become(made)

    def go_on(self, kept: State, step: int, ranks: int) -> None:
        """Begin at this step with what an exchange of the same tensors over other ranks has not sent: `residuals.state()`.
        Between steps, with an equal step on every rank; sends nothing.

        ranks: the number of ranks of that exchange. A rank's own gradient is divided by it, so residuals of that are multiplied
        by the old number of ranks over the new one.
        """
        self._check_idle("go_on")
        made = self if not self.outdated(step) else self._running(self.plan, step)
        made.residuals.take_over(made.residuals.fitting(for_other_ranks(kept, ranks / self.group.world_size)))
        self._become(made)
        self.step = step

    def keep_residuals(self) -> Callable[[], None]:
        """Copy the residuals. Returns the function that puts the copies back, after a step that failed in the middle."""
        copies = [(held, held.clone()) for held in self.residuals.held()]
        owed = [(slot, slot.owed) for slot in self.slots.values()]
        left = [(chunk, chunk.left) for buffers in self._buckets for chunk in buffers.chunks if isinstance(chunk, Route)]

        def put_back() -> None:
            for chunk, memory in left:
                chunk.left = memory
            for held, copied in copies:
                held.copy_(copied)
            for slot, own in owed:
                slot.owed = own

        return put_back

    @property
    def device_times(self) -> DeviceTimes | None:
        """The times of the last step on the device, if lanes only queue their work and an observer of the lanes wants times."""
        return self._executor.device_times

    def stats(self) -> ExchangeStats:
        """Statistics of the steps so far, on this rank."""
        codec_us = 1e6 * sum(meter.codec_seconds for meter in self.meters)
        return ExchangeStats.of(self.step, self.bucket_stats(), self._buckets, codec_us)

    def bucket_stats(self, other: "Exchange | None" = None, part: float = 0.0) -> tuple[BucketStats, ...]:
        """Statistics of each bucket. `other` exchanges the same buckets in this part of all steps."""
        others = other._buckets if other is not None else [None] * len(self._buckets)
        pairs = zip(self._buckets, others, strict=True)
        return tuple(BucketStats.of(usual, self.group.grid, each, part) for usual, each in pairs)

    def stats_of_steps(self, steps: int, buckets: tuple[BucketStats, ...], codec_us: float) -> ExchangeStats:
        """Statistics with numbers that the caller counts itself."""
        return ExchangeStats.of(steps, buckets, self._buckets, codec_us)

    @contextmanager
    def recorded(self) -> Iterator["list[TaskTimes]"]:
        """Yield the times of the tasks that the lanes do inside, in the order in which the tasks end."""
        times: list[TaskTimes] = []
        with self.lanes.observed(_KeepsTimes(times)):
            yield times

    def time_codec(self, repeats: int) -> float:
        """CPU seconds of one step's encodes and decodes, the median of `repeats`, when nothing else runs. Sends nothing; leaves
        tensors and residuals as they were. Between steps. Raises PayloadError before the plan has run a step."""
        link: Any = SilentLink(self.group)
        put_back, copies = self.keep_residuals(), [flat.clone() for flat in self.flats]
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
            put_back()
            for flat, copy in zip(self.flats, copies, strict=True):
                flat.copy_(copy)
        return statistics.median(seconds)

    def close(self) -> None:
        """End the lanes' threads; a step that runs is given up. The exchange cannot be used after."""
        self._closed = True
        self._executor.give_up()
        if self._owns_lanes:
            self.lanes.stop()

    def abort(self) -> None:
        """End the step that runs, the lanes' threads and all connections at once. Waits of other ranks for this one fail.
        Afterwards only `residuals` may be used."""
        self._closed = True
        self._executor.give_up()
        self.lanes.abort()

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

    @property
    def encoded(self) -> list[BucketBuffers]:
        """The buckets with compressed tensors."""
        return [buffers for buffers in self._buckets if buffers.bucket.main_spec.encodes]

    def layouts(self) -> Iterator["BucketLayout"]:
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
        shards = []
        for buffers in self._buckets:
            plain = not buffers.bucket.main_spec.encodes
            for chunk in buffers.chunks:
                if not (plain and isinstance(chunk, TwoPhase) and chunk.total.dtype == buffers.flat.dtype):
                    return []
                shards.append(chunk.total)
        return shards

    def residuals_replaced_in(self, other: "Exchange") -> Remembered:
        """The residuals of the buckets that the other exchange, made by `mixed_with` of this one, replaces."""
        pairs = zip(self._buckets, other._buckets, strict=True)
        return Remembered([own for own, running in pairs if own is not running])

    def mixed_with(self, others: "Exchange", chosen: Collection[int], plan: Plan) -> "Exchange":
        """The buckets of this exchange, but for the chosen ones, which are those of the others, in the same flat buffers. `plan`:
        of these buckets.

        All three may run, one after another. Pieces may lie on other lanes in each of them: call `take_turn` before a step of one
        that did not run the last step.
        """
        made = copy(self)
        made.plan = plan
        made._buckets = [(others if index in chosen else self)._buckets[index] for index in range(len(plan.buckets))]
        made.slots = {slot.name: slot for buffers in made._buckets for slot in buffers.slots}
        made._executor = Executor(plan, made._buckets, made.lanes)
        made.residuals = Remembered(made._buckets)
        made.random = [*self.random, *others.random]
        return made

    def take_turn(self) -> None:
        """Call this before a step, if another exchange with some of the buckets ran the last step."""
        share_memory(self._executor.tasks, self._buckets)

    def keep_residuals_of(self, before: "Exchange") -> None:
        """Begin with the residuals of another exchange that fit."""
        self.residuals.take_over(self.residuals.fitting(before.residuals.carried()))

    def outdated(self, step: int) -> bool:
        """Whether in this step a spec is another one than in the step it was made for."""
        return any(spec.at_step(step) != spec.at_step(self.made_for) for spec in self._changing)

    def warms_up(self, step: int) -> bool:
        """Whether in this step a spec is another one than in late steps."""
        return any(spec.at_step(step) != spec.settled for spec in self._changing)

    @property
    def last_task(self) -> "Future[Any] | None":
        """A future that completes with the last task of the step; its result is None if a lane failed. None if tasks wait for the
        gate, or no step runs."""
        step = self._executor.running
        return None if self._executor.has_gate or not step.lanes else step.progress.at_gate

    def take_back(self, slot: Slot) -> None:
        """No rank uses the sum of this slot: residuals take it back."""
        self._buckets[slot.bucket].take_back(slot)

    def await_gate(self) -> None:
        """Wait for all tasks before the gate."""
        with self._failures_named():
            self._executor.await_tasks()

    def await_result(self, other: "Future[T]") -> T:
        """Wait for something else while lanes go on."""
        with self._failures_named():
            return self._executor.await_result(other)

    def finish_quietly(self, *others: "Future[Any]") -> bool:
        """Like `wait` for all, but raises nothing: a failure is the other ranks' or is known. Returns whether all went well."""
        try:
            self._executor.finish(others, self.step)
        except Exception:
            return False
        return True

    def own_failure(self) -> BaseException | None:
        """The error with which this rank failed to do its own part of the step; None where a link failed, or nothing."""
        failed = self._executor.failure()
        return None if failed is None or isinstance(failed.cause, LinkError) else failed.cause

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
        if self._executor.running.progress.has_failed and (failed := self._executor.failure()) is not None:
            raise self._error_of(failed)

    if not TYPE_CHECKING:  # or each misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"an exchange has no attribute {name!r}.{new_spelling('Exchange', name)}")

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """Guard a wait for lanes. If another rank or a link failed, raises CommunicationError that names the bucket and the
        ranks that were waited for; StepStateError if another thread gave up the step; otherwise an error of this rank."""
        try:
            yield
        except Abandoned:
            raise self._given_up() from None
        except TaskFailed as error:
            raise self._error_of(error) from error.cause
        except LinkError as error:
            if self._closed:
                raise self._given_up() from error
            after = f"the control exchange at the end of backward, after bucket {self.plan.launch[-1][0]}"
            raise self.lanes.broken(self._executor.waiting_for() or after, error, self.step) from error

    def _given_up(self) -> StepStateError:
        """The error of a wait for a step that another thread gave up."""
        return StepStateError(
            f"step {self.step} was given up while this thread waited for it: another thread ended the exchange or its handle, by "
            "close(), abort() or detach(). What the step exchanged is not complete. End it after its last step."
        )

    def _error_of(self, failed: "TaskFailed") -> GradwireError:
        if self._closed and isinstance(failed.cause, LinkError):  # its own end closed the connections
            return self._given_up()
        raised = self.lanes.broken if isinstance(failed.cause, LinkError) else self.lanes.failed_here
        return raised(self._executor.in_words(failed.task), failed.cause, self.step, failed.task.bucket)

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

    @torch.no_grad()
    def _placed(self, name: str, tensor: torch.Tensor | None) -> Slot:
        """Put a tensor in its place, or lend it. Returns the place."""
        slot = self._checked(name)
        source = fitting(name, self._tensors.get(name) if tensor is None else tensor, slot.view, slot.device)
        if slot.apart and (self.weight == 1 or self._phases == GATHER):  # kernels divide what is lent by the ranks alone
            self._lent.lend(slot, source.detach())
        elif self._phases == GATHER:
            slot.view.copy_(source)
        else:
            self.place(slot, source.detach())
        self._sources[name] = source
        return slot

    def _checked(self, name: str) -> Slot:
        """The place of a tensor that may become ready now."""
        self._check_open()
        slot = self.slots[self._known(name)]
        if not self._left:
            raise StepStateError(f"ready({name!r}) was called and no step runs. Call begin() first.")
        self._check_chosen(slot.bucket, f"ready({name!r})")
        if slot in self.sent:
            raise StepStateError(f"ready({name!r}) was called twice in step {self.step}. Call it once for each tensor.")
        return slot

    def _check_number(self, bucket: int, call: str) -> None:
        """Raises StepStateError for a bucket that the plan does not have."""
        if bucket not in range(len(self._buckets)):
            raise StepStateError(
                f"{call} was called, and no bucket has the number {show(bucket)}: nothing would be sent for it. The plan has "
                f"{len(self._buckets)}, numbered from 0. `exchange.slots[name].bucket` is the number of a tensor's bucket."
            )

    def _check_chosen(self, bucket: int, call: str) -> None:
        """Raises StepStateError where `begin` left out the bucket: nothing would be sent, and a wait would never end."""
        if bucket not in self._chosen:
            self._check_number(bucket, call)
            tensors, chosen = self.plan.buckets[bucket].tensors, [*self._chosen]
            raise StepStateError(
                f"{call} was called, and bucket {bucket} ({_first_and_last(tensors)}) is not in step {self.step}, since "
                f"begin(buckets={chosen}) left it out: its tensors are not exchanged. Add it to `buckets` on every rank, or call "
                "ready() and wait() for the tensors of the step alone."
            )

    def _check_ready(self, bucket: int | None) -> None:
        """Raises StepStateError where a lane would wait for a tensor that is not ready before it is done with this bucket; None:
        with all."""
        needed = self._executor.needed_for(None if self.lanes.holds else bucket, self._phases)
        unready = [each for each in needed if self._left[each]]
        if missing := [slot.name for each in unready for slot in self._buckets[each].slots if slot not in self.sent]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StepStateError(
                f"wait() was called before {missing[0]!r}{more} became ready: their buckets cannot be sent. Call ready() for "
                "each tensor in every step. Plans that send them before this bucket's last part, as with gw.Pipelined(), need "
                "them before this wait()."
            )

    @torch.no_grad()
    def _put_back(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Write means to the tensors of these names."""
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, source in sources.items():
            slot = self.slots[name]
            if slot.apart:
                self._lent.put_back(slot, source)
            elif self._phases != REDUCE:
                copied.append((source.detach(), slot.view))
            if self._phases == REDUCE:
                put_back_shards(self._buckets[slot.bucket], slot, source)
        if copied:
            tensors, views = map(list, zip(*copied, strict=True))
            torch._foreach_copy_(tensors, views)

    def _running(self, plan: Plan, step: int) -> "Exchange":
        likes = {name: like(tensor) for name, tensor in self._tensors.items()}
        return Exchange.on(self.lanes, likes, plan, step, in_place=True)

    def _become(self, made: "Exchange") -> None:
        """Go on with the buckets of another exchange of the same tensors."""
        if made is not self:
            kept, weight = (self._tensors, self.meters), self.weight
            vars(self).update(vars(made))
            self._tensors, self.meters = kept
            self.weigh(weight)
            self._own_lanes()

    def _own_lanes(self) -> None:
        """Stop the lanes with this exchange, and when it is dropped in the middle of a step let them go."""
        self._owns_lanes = True
        if (release := vars(self).get("_release")) is not None:
            release.detach()
        self._release = weakref.finalize(self, self._executor.give_up)


# ---- the tasks of a step, on lanes


class PhaseTask(NamedTuple):
    bucket: int
    chunk: int
    phase: int


class TaskTimes(NamedTuple):
    """When a lane did a task, in seconds of time.perf_counter."""

    task: PhaseTask
    option: tuple[str, ...]
    """The option of the task's bucket."""
    began: float
    ended: float
    codec: list[tuple[float, float]]
    """Encodes and decodes within it, in order."""


class TaskFailed(Exception):
    """Something failed on a lane; carries where."""

    def __init__(self, task: PhaseTask, cause: BaseException) -> None:
        super().__init__(f"{task}: {cause}")
        self.task, self.cause = task, cause


class Abandoned(Exception):
    """The step was given up before all buckets were ready."""


class _Progress:
    """How far one step is. A new one for every step: what a given-up step left in the old one is not seen again."""

    def __init__(self, lanes: int, tasks: Sequence[int], before_gate: int = 0) -> None:
        """`tasks[b]` is the number of tasks of bucket b, `before_gate` that of tasks before the gate."""
        self.arrivals: list[queue.SimpleQueue[tuple[int, Mark]]] = [queue.SimpleQueue() for _ in range(lanes)]
        self.done: list[Future[list[Mark] | None]] = [Future() for _ in tasks]
        """For each bucket, the marks of its tasks in the streams; None when a lane failed. The error is the lane's alone: it
        holds the frames it passed, and through them all this."""
        self.at_gate: Future[list[Mark] | None] = Future()
        """The marks of the tasks before the gate, as in `done`."""
        self.failed: Future[None] = Future()
        """Never done unless a lane fails."""
        self.has_failed = False
        """Whether it is done. A future's `done()` takes a lock."""
        self.is_open = False
        """Whether the gate was opened."""
        self._left, self._left_before_gate = list(tasks), before_gate
        self._marks: list[list[Mark]] = [[] for _ in tasks]
        self._marks_before_gate: list[Mark] = []
        self._lock = threading.Lock()

    def tell(self, what: int, mark: Mark = None, lanes: Collection[int] | None = None) -> None:
        """Something happened that these lanes may wait for; None: all. It wakes them."""
        for lane, arrivals in enumerate(self.arrivals):
            if lanes is None or lane in lanes:
                arrivals.put((what, mark))

    def task_done(self, bucket: int, behind: bool, mark: Mark) -> None:
        with self._lock:
            if not behind:
                self._marks_before_gate.append(mark)
                self._left_before_gate -= 1
                if not self._left_before_gate and not self.at_gate.done():
                    self.at_gate.set_result(self._marks_before_gate)
            self._marks[bucket].append(mark)
            self._left[bucket] -= 1
            if not self._left[bucket] and not self.done[bucket].done():
                self.done[bucket].set_result(self._marks[bucket])

    def lane_done(self, result: "Future[Any]") -> None:
        """A lane did its last task, or failed, or was cut."""
        if result.exception() is not None:
            self.fail()

    def fail(self) -> None:
        """A lane failed or was let go."""
        with self._lock:
            self.has_failed = True
            # first `failed`: whoever is woken by another one asks it who is to blame
            waited_for: list[Future[Any]] = [self.failed, *self.done, self.at_gate]
            for future in waited_for:
                if not future.done():
                    future.set_result(None)


class _Planned(NamedTuple):
    """A task of a lane, as it is done in every step."""

    task: PhaseTask
    behind: bool
    """Whether it waits for the gate."""
    words: tuple[object, ...]
    """For the flight recorder."""


class _StepTasks(NamedTuple):
    """The tasks of a step that runs both phases, or one alone."""

    lists: list[list[_Planned]]
    """The tasks of each lane."""
    phases: list[dict[tuple[int, int], list[int]]]
    """The phases of each piece (bucket, chunk), by lane."""
    counts: list[int]
    """How many each bucket has."""
    before_gate: int
    """How many come before the gate."""


class _RunningStep(NamedTuple):
    """The step that a wait began for, whichever step runs meanwhile."""

    progress: _Progress
    lanes: list["Future[tuple[Meter, Mark]]"]
    """The result of each lane; none where no step runs."""

    def failure(self, at: Sequence[PhaseTask | None]) -> TaskFailed | None:
        """The error of a lane that has failed. `at`: the task of each lane."""
        if not self.progress.has_failed:
            return None
        errors = [future.exception() if future.done() else None for future in self.lanes]
        cut = [
            TaskFailed(task or PhaseTask(0, 0, 0), error)
            for task, error in zip(at, errors, strict=False)
            if isinstance(error, LinkError)
        ]
        return next((error for error in errors if isinstance(error, TaskFailed)), cut[0] if cut else None)


class Executor:
    """Runs one set of buckets on the lanes of a group."""

    def __init__(self, plan: Plan, buckets: list[BucketBuffers], lanes: Lanes) -> None:
        self.plan, self.buckets, self.lanes = plan, buckets, lanes
        count = len(lanes.data)
        order = launch_tasks(plan.launch, [len(b.chunks) for b in buckets], count == 1, plan.gate)
        offloaded = [index for index, bucket in enumerate(plan.buckets) if codes_on_cpu(bucket.option)]
        by_lane = tasks_by_lane(order, count - lanes.offload, offloaded, lanes.offload)
        self.tasks = [[PhaseTask(*task) for task in tasks] for tasks in by_lane]
        self._lanes_of = [
            {lane for lane, tasks in enumerate(self.tasks) for task in tasks if task.bucket == bucket.index} for bucket in buckets
        ]
        """The lanes that have tasks of each bucket."""
        self._phases_before_gate = Counter(bucket for bucket, _ in plan.launch[: plan.gate])
        pieces = {(b.index, number): chunk.exchanges for b in buckets for number, chunk in enumerate(b.chunks)}
        if (tags := sum(pieces.values())) > TAGS:
            raise PlanError(
                f"the plan has {len(pieces)} chunks, whose exchanges among {lanes.group.world_size} ranks take {tags} tags of "
                f"messages, and a step has {TAGS}. Choose larger buckets (bucket_bytes) and chunks (chunk_bytes)."
            )
        self._tags = dict(zip(pieces, accumulate(pieces.values(), initial=lanes.first_tag), strict=False))
        self.running = _RunningStep(_Progress(0, ()), [])
        """The step that runs, or ran last. Another thread may replace it by one that is given up."""
        self.streams = Streams()
        self.device_times: DeviceTimes | None = None
        """The times of the last step on the device; None if nobody wanted them."""
        self._at: list[PhaseTask | None] = [None] * count
        self._is_timed = False
        self._held: list[int] = []
        """Buckets that are ready and that the lanes do not get yet."""
        self._awaited = len(buckets)
        """How many buckets the step has."""
        self._parts: dict[tuple[str, Sequence[int]], _StepTasks] = {}
        self.has_gate = plan.gate < len(plan.launch)
        self._order = list(dict.fromkeys(bucket for bucket, _ in plan.launch))
        self._launched: dict[str, list[int]] = {}
        """The bucket of each launch, by the phases that a step runs."""

    def start(self, phases: str = BOTH, buckets: Sequence[int] | None = None) -> None:
        """Begin a step, or the reduce or the gather phase of one alone, where all buckets have the two. `buckets`: of these
        alone."""
        chosen = tuple(range(len(self.buckets))) if buckets is None else tuple(buckets)
        planned = self._of_part(phases, chosen)
        self._awaited, self.streams = len(chosen), self.lanes.data[0].link.streams
        progress = _Progress(len(planned.lists), planned.counts, planned.before_gate)
        self._held, self.lanes.running = [], weakref.WeakMethod(self.give_up)
        self._at = [tasks[0].task if tasks else None for tasks in planned.lists]
        times = [kept for observer in self.lanes.observers if (kept := observer.task_times()) is not None]
        self._is_timed = self.lanes.times_device
        self.running = _RunningStep(progress, results := [])  # first: whoever gives the step up lets all lanes go
        for number, lane in enumerate(self.lanes.data):
            results.append(lane.submit(partial(self._run, number, planned, progress, times)))
        for future in results:
            future.add_done_callback(progress.lane_done)

    def _of_part(self, phases: str, buckets: tuple[int, ...]) -> _StepTasks:
        """The tasks of a step that runs these phases of these buckets."""
        if (phases, buckets) in self._parts:
            return self._parts[phases, buckets]
        words = [bucket.link_tasks for bucket in self.plan.buckets]
        lists, of_lanes = [], []
        for tasks in self.tasks:
            chosen = [task for task in tasks if task.bucket in buckets and self._is_of(task, phases)]
            pieces: dict[tuple[int, int], list[int]] = {}
            for task in chosen:
                pieces.setdefault((task.bucket, task.chunk), []).append(task.phase)
            lists.append(
                [
                    _Planned(
                        task,
                        task.phase >= self._phases_before_gate[task.bucket],
                        ("bucket", task.bucket, "chunk", task.chunk, words[task.bucket][task.phase]),
                    )
                    for task in chosen
                ]
            )
            of_lanes.append(pieces)
        counted = Counter(planned.task.bucket for tasks in lists for planned in tasks)
        before_gate = sum(not planned.behind for tasks in lists for planned in tasks)
        counts = [counted[index] for index in range(len(self.buckets))]
        made = self._parts[phases, buckets] = _StepTasks(lists, of_lanes, counts, before_gate)
        return made

    def _is_of(self, task: PhaseTask, part: str) -> bool:
        if part == BOTH:
            return True
        bucket = self.plan.buckets[task.bucket]
        gathers = task.phase >= len(bucket.link_tasks) - bucket.gathers
        return gathers == (part == GATHER)

    def needed_for(self, bucket: int | None, phases: str) -> list[int]:
        """The buckets whose tasks lanes take before they are done with this one, itself included, in launch order; None: all.

        A single lane takes all of them. The answer is the same for every number of lanes.
        """
        if phases not in self._launched:
            tasks = [PhaseTask(*task) for task in launch_tasks(self.plan.launch, [1] * len(self.buckets), skew=False)]
            self._launched[phases] = [task.bucket for task in tasks if self._is_of(task, phases)]
        launched = self._launched[phases]
        end = len(launched) if bucket is None else len(launched) - launched[::-1].index(bucket)
        return list(dict.fromkeys(launched[:end]))

    def ready(self, bucket: int) -> None:
        self._held.append(bucket)
        if self.lanes.observers and self.lanes.holds and len(self._held) < self._awaited:
            return
        mark = self.streams.mark()
        for each in self._held:
            self.running.progress.tell(each, mark, self._lanes_of[each])
        self._held = []

    def open_gate(self) -> None:
        """Let the tasks behind the gate run, each lane's after its own before it, and after what the caller has queued."""
        progress = self.running.progress
        if not progress.is_open:
            progress.is_open = True
            progress.tell(_OPEN, self.streams.mark())

    def drain(self) -> None:
        """Wait for the lanes' last task or failure."""
        if self.lanes.shared.forked_from is None:
            wait(self.running.lanes)

    def give_up(self) -> None:
        """Let the lanes go that wait for buckets or before the gate, and forget the step."""
        progress, results = self.running
        if not all(future.done() for future in results):
            self.lanes.step_given_up()
        progress.tell(_GIVE_UP)
        self.running = _RunningStep(_Progress(0, [0] * len(self.buckets)), [])  # errors hold the frames they passed
        self.running.progress.fail()

    def failure(self) -> TaskFailed | None:
        """The error of a lane that has failed in this step."""
        return self.running.failure(self._at)

    def waiting_for(self) -> str:
        """The first task that no lane has done yet, in words; '' where all are done."""
        next_ones = [task for task in self._at if task is not None]
        return self.in_words(min(next_ones)) if next_ones else ""

    def in_words(self, task: PhaseTask) -> str:
        """The task, its bucket and its tensors."""
        bucket = self.plan.buckets[task.bucket]
        return f"bucket {task.bucket} ({_first_and_last(bucket.tensors)}), chunk {task.chunk}, {bucket.link_tasks[task.phase]}"

    def await_tasks(self, bucket: int | None = None) -> None:
        """Wait for the tasks of a bucket, or all before the gate. Raises TaskFailed if a lane failed first, Abandoned if the step
        was given up."""
        self.lanes.shared.check_process()
        step = self.running
        try:
            marks = (step.progress.at_gate if bucket is None else step.progress.done[bucket]).result()
            if marks is None:
                raise self._failure_in(step)
        finally:
            del step  # the error has this frame
        for mark in marks:
            self.streams.wait(mark)

    def await_result(self, other: "Future[T]") -> T:
        """Wait for something else while lanes go on. Raises TaskFailed as soon as any lane fails, Abandoned if the step was given
        up."""
        self.lanes.shared.check_process()
        step = self.running
        try:
            either: list[Future[Any]] = [other, step.progress.failed]
            wait(either, return_when=FIRST_COMPLETED)
            if step.progress.failed.done():
                raise self._failure_in(step)
        finally:
            del step
        return other.result()

    def _failure_in(self, step: _RunningStep) -> Exception:
        wait(step.lanes, return_when=FIRST_EXCEPTION)
        return step.failure(self._at) or Abandoned()

    def finish(self, others: Sequence["Future[Any]"], step: int) -> list[Meter]:
        """Open the gate and wait for the step's last task and the other futures. Raises TaskFailed as soon as any lane
        fails, Abandoned if the step was given up, and what another future raises as soon as it does. `step`: its number."""
        self.lanes.shared.check_process()
        running = self.running
        try:
            self.open_gate()
            began, self.device_times = self.streams.timed_mark() if self._is_timed else None, None
            wait([*running.lanes, *others], return_when=FIRST_EXCEPTION)
            if running.progress.failed.done():
                raise self._failure_in(running)
            for future in others:
                if future.done():
                    future.result()
            results, done = [future.result() for future in running.lanes], running.progress.done
        finally:
            del running
        for lane, (_, mark) in zip(self.lanes.data, results, strict=True):
            lane.link.streams.wait(mark)
        if self._is_timed:
            tasks = [task for meter, _ in results for task in meter.on_device or ()]
            self.device_times = DeviceTimes(self.streams, began, self.streams.timed_mark(), tasks)
        last = [(lane.link, mark) for lane, (_, mark) in zip(self.lanes.data, results, strict=True)]
        self.lanes.step_queued(QueuedStep(step, last, done, self._order))
        return [meter for meter, _ in results]

    def _run(
        self, lane: int, planned: _StepTasks, progress: _Progress, times: Sequence[list[TaskTimes]], link: Link
    ) -> tuple[Meter, Mark]:
        try:
            return self._run_tasks(lane, planned, progress, times, link)
        except (TaskFailed, Abandoned):
            progress.fail()
            raise
        except BaseException as error:  # between two tasks
            progress.fail()
            raise TaskFailed(self._at[lane] or PhaseTask(0, 0, 0), error) from error

    def _run_tasks(
        self, lane: int, planned: _StepTasks, progress: _Progress, times: Sequence[list[TaskTimes]], link: Link
    ) -> tuple[Meter, Mark]:
        meter = Meter(spans=[] if times else None, on_device=[] if self._is_timed else None)
        marks: dict[int, Mark] = {}
        for (bucket, chunk), phases in planned.phases[lane].items():
            try:
                self.buckets[bucket].chunks[chunk].post(link, self._tags[bucket, chunk], phases)
            except BaseException as error:
                raise TaskFailed(PhaseTask(bucket, chunk, phases[0]), error) from error
        for task, behind, words in planned.lists[lane]:
            for needed in (task.bucket, _OPEN) if behind else (task.bucket,):
                while needed not in marks:
                    what, mark = progress.arrivals[lane].get()
                    if what == _GIVE_UP:
                        raise Abandoned
                    marks[what] = mark
            self._at[lane] = task
            began, ready = time.perf_counter(), marks[_OPEN if behind else task.bucket]
            doing = self.lanes.flight.doing(*words)
            try:
                self.buckets[task.bucket].chunks[task.chunk].run(task.phase, link, meter, ready)
            except BaseException as error:  # a codec may call sys.exit(): ranks must learn of it too
                raise TaskFailed(task, error) from error
            doing.done()
            ended = time.perf_counter()
            meter.task_seconds += ended - began
            if times:
                done = TaskTimes(task, self.plan.buckets[task.bucket].option, began, ended, meter.take_spans())
                for kept in times:
                    kept.append(done)
            with link.streams.decoding():
                meter.ends(link.streams)
                progress.task_done(task.bucket, behind, link.streams.mark())
        self._at[lane] = None
        with link.streams.decoding():
            return meter, link.streams.mark()


def _first_and_last(tensors: Sequence[str]) -> str:
    """The names of a bucket's tensors, in short."""
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} .. {tensors[-1]}"


class _KeepsTimes(LanesObserver):
    """Keeps the times of all tasks in one list."""

    def __init__(self, times: list[TaskTimes]) -> None:
        self._times = times

    def task_times(self) -> list[TaskTimes]:
        return self._times


# ---- tensors that are exchanged where they lie


class Lent:
    """The tensors of one step that are exchanged where they lie, from the moment they are ready until the step ends.

    A tensor that kernels cannot read as it is, or that shares memory with another one of the same step, is copied first: what the
    mean is written to must be nobody else's.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """names: of all tensors, those of a bucket next to each other; none where all are copied into flat buffers."""
        self._at = {name: number for number, name in enumerate(names)}
        self.addresses = Addresses(map(tensor_key, self._at)) if self._at else None
        """Where kernels find the tensors."""
        self.begins: set[int] = set()
        """The addresses of those that were lent in this step."""
        self._runs: list[tuple[int, int]] = []
        """Begin and end of the memory of those that `lend` lent, ascending."""
        self._changed: list[torch.Tensor] = []
        """Lent tensors of which autograd must know that they change."""

    def number(self, slot: Slot) -> int:
        """Where the tensor is among those of `lend_all`."""
        return self._at[slot.name]

    def of(self, slot: Slot) -> torch.Tensor:
        """The tensor that was lent in this step, or the copy that stands for it."""
        tensor = self.now(slot)
        assert tensor is not None, "nothing was lent"
        return tensor

    def now(self, slot: Slot) -> torch.Tensor | None:
        """Return what `of` returns, or None where nothing is lent yet, or any more."""
        return None if self.addresses is None else self.addresses.tensors[self._at[slot.name]]

    def lend(self, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
        """Work on this tensor, or on a copy. Returns the one of the two that will hold the mean."""
        if not (_is_plain(tensor) and slot.holds(tensor) and self._is_alone(tensor)):
            tensor = slot.empty().copy_(tensor)
        self.lend_all(self._at[slot.name], [tensor], [tensor.data_ptr()])
        return tensor

    def lend_all(self, first: int, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Work on these tensors, numbered from `first` on, which begin at these addresses. They are as slots, and their memory is
        nobody else's."""
        assert self.addresses is not None
        self.addresses.set(first, tensors, addresses)
        self.begins.update(addresses)
        self._changed += tensors if len(tensors) > 1 else [each for each in tensors if not each.is_inference()]

    def put_back(self, slot: Slot, tensor: torch.Tensor) -> None:
        """The tensor that was to be lent holds the mean, also where a copy was lent."""
        if (lent := self.of(slot)).data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(lent)

    def tell_autograd(self) -> None:
        """Scripts may use the tensors from now on, and find the means in them."""
        torch.autograd.graph.increment_version(self._changed)
        self._changed = []

    def give_back(self) -> None:
        if self.addresses is not None and self.begins:
            self.tell_autograd()
            self.begins, self._runs = set(), []
            self.addresses.clear()

    def _is_alone(self, tensor: torch.Tensor) -> bool:
        """Whether no other tensor of the step has a part of its memory. Takes note of it if so."""
        begin, nbytes = tensor.data_ptr(), tensor.nbytes
        if begin in self.begins or not nbytes:
            return not nbytes
        at = bisect_right(self._runs, (begin,))
        before = self._runs[at - 1][1] if at else 0
        if before > begin or (at < len(self._runs) and self._runs[at][0] < begin + nbytes):
            return False
        self._runs.insert(at, (begin, begin + nbytes))
        return True


class BucketLayout(NamedTuple):
    """Where the tensors of one bucket lie."""

    slots: list[Slot]
    flat: torch.Tensor
    aliases: list[torch.Tensor]
    """All tensors of gradwire's own in the memory of the flat buffer, that one first."""
    lent: Lent | None
    """Takes the tensors where the bucket has no memory."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are the numbers in its memory, and no graph may need them."""
    aligned = tensor.data_ptr() % tensor.element_size() == 0
    return type(tensor) is torch.Tensor and aligned and not (tensor.requires_grad or tensor.is_neg())


# ---- the phases of buckets


def check_two_phases(buckets: Sequence[BucketBuffers], what: str) -> None:
    """Raises PlanError unless every bucket has a reduce and a gather phase, and a shard for each rank between the two."""
    for buffers in buckets:
        if buffers.energies is not None:
            raise PlanError(
                f"{what!r} runs one phase, and bucket {buffers.index} has spec {buffers.bucket.main_spec!r}: weights of elements "
                "follow from whole means, which one phase alone gives to no rank. Leave weights out."
            )
        if not all(isinstance(chunk, (TwoPhase, ShardedSum)) for chunk in buffers.chunks):
            raise PlanError(
                f"{what!r} needs two phases, and bucket {buffers.index} has option {list(buffers.bucket.option)}. Use a plan "
                'with scheme="alltoall".'
            )


def share_memory(tasks_of_lanes: Sequence[Sequence[PhaseTask]], buckets: Sequence[BucketBuffers]) -> None:
    """Let the pieces of a lane use the same memory for what they hold no longer than the lane works on them: residuals that are
    stored narrow, and the sums of pieces that lie apart."""
    for tasks in tasks_of_lanes:
        pieces = [buckets[task.bucket].chunks[task.chunk] for task in tasks if task.phase == 0]
        share_scratch(memory for piece in pieces for memory in piece.memory)
        at_once = [task for task, following in pairwise(tasks) if task[:2] == following[:2]]
        sums = _sums_apart(buckets[task.bucket].chunks[task.chunk] for task in at_once)
        if sums:
            memory = torch.empty(max(each.total.numel() for each in sums), dtype=sums[0].total.dtype)
            for each in sums:
                each.share_total(memory)


def _sums_apart(schemes: Iterable[Scheme]) -> list[TwoPhase]:
    """The schemes whose gradients lie apart and whose own sum is not part of them."""
    two_phase = [each for each in schemes if isinstance(each, TwoPhase)]
    return [each for each in two_phase if each.piece.apart is not None and not each.in_place]


def put_back_shards(buffers: BucketBuffers, slot: Slot, tensor: torch.Tensor) -> None:
    """Give a tensor this rank's part of the mean, after a reduce phase alone."""
    own = torch.empty_strided(slot.view.shape, slot.view.stride(), dtype=tensor.dtype, device=tensor.device)
    flat = own.copy_(tensor).as_strided((own.numel(),), (1,))
    for of, low, high, values in shards_of(buffers):
        if of is slot and values.numel():
            flat[low - slot.offset : high - slot.offset] = values
    tensor.detach().copy_(own)


def shards_of(buffers: BucketBuffers) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
    """The tensors' parts in this rank's shards: where they begin and end in the bucket, and the sums; empty where these are part
    of what was lent."""
    for begin, chunk in zip(buffers.bounds, buffers.chunks, strict=False):
        assert isinstance(chunk, (TwoPhase, ShardedSum))
        start, end = begin + chunk.start, begin + chunk.end
        for slot in buffers.slots:
            low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
            if low < high:
                yield slot, low, high, chunk.total[low - start : high - start]
