"""Lanes: links, each with the one thread that submits to it, and the failure that ended their work, if one did."""

import base64
import hashlib
import logging
import queue
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradwire.core import LANES, error_words, lanes_over
from gradwire.errors import CommunicationError, GradwireError, StepStateError
from gradwire.transport.adapters import SLOW_GBPS
from gradwire.transport.agreement import agree
from gradwire.transport.devices import kind_of, offload_lanes
from gradwire.transport.exits import start_store_thread
from gradwire.transport.flight import Flight
from gradwire.transport.grid import site_name
from gradwire.transport.heartbeats import Heartbeats, SilenceNews, usual_silence_s
from gradwire.transport.link import Group, Link
from gradwire.transport.queued import COMPLETE, UNKNOWN_BUCKET, QueuedStep
from gradwire.transport.rendezvous import CONTROL, HEARTBEATS
from gradwire.transport.shared_lanes import LaneSet, a_user, known
from gradwire.transport.slices import short_slices
from gradwire.transport.staged_link import StagedLink
from gradwire.transport.streams import DeviceStreams, Mark
from gradwire.transport.tls import TlsError, TlsOption, wanted_tls
from gradwire.transport.wire import DamagedError, LinkError, transfer
from gradwire.transport.wires import make_wires, meshes_of

T = TypeVar("T")

log = logging.getLogger(__name__)

_STACK_BYTES = 2**23
"""The least stack of a lane's thread. C++ has its buffers there, and scripts may give threads small stacks."""
_stacks = threading.Lock()


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Threads that are started inside have large stacks, whatever `threading.stack_size` or `ulimit -s` says."""
    with _stacks:
        usual = threading.stack_size()
        threading.stack_size(max(usual, _STACK_BYTES))
        try:
            yield
        finally:
            threading.stack_size(usual)


class Lane:
    """Runs jobs one after another on its own thread, until `stop` or the exit of the interpreter."""

    def __init__(self, name: str, link: Link) -> None:
        self.link = link
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        # a daemon: a thread that waits for a dead rank must not keep the process alive
        self._thread = threading.Thread(target=_work, args=(self._jobs, link), name=name, daemon=True)
        with short_slices(), _large_stacks():
            self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread, link, self._pending)

    def submit(self, job: Callable[[Link], T]) -> "Future[T]":
        """Run job(link) on the lane's thread, after all jobs before it. After `stop` the future fails with LinkError."""
        future: Future[T] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._jobs.put((lambda: job(self.link), future))
        # asked after `put`: the thread may have ended already. A forked process has none
        if not (self._finalizer.alive and self._thread.is_alive()):
            _cut([future], _closed())
        return future

    def cut(self, error: Exception) -> None:
        """Fail all jobs that are not done. For any thread. The lane's thread may wait for longer than those who wait for it."""
        _cut(self._pending, error)

    def stop(self) -> None:
        """End the thread. A collective that still waits fails, here and on the other ranks. Jobs that are not done then fail."""
        self._finalizer()


def _cut(futures: "Collection[Future[Any]]", error: Exception) -> None:
    for future in list(futures):
        with suppress(InvalidStateError):  # done meanwhile
            future.set_exception(error)


def _closed() -> LinkError:
    return LinkError(None, ConnectionError("the lane was closed"))


def _work(jobs: "queue.SimpleQueue[Any]", link: Link) -> None:
    # OpenSSL writes to connections that may be closed; the error is enough
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    link.streams.enter_thread()
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            done = partial(future.set_result, job())
        except BaseException as error:
            done = partial(future.set_exception, error)
        with suppress(InvalidStateError):  # it was cut
            done()
        del item, job, future, done
    link.close()


def _stop(jobs: "queue.SimpleQueue[Any]", thread: threading.Thread, link: Link, pending: "set[Future[Any]]") -> None:
    jobs.put(None)
    if thread is threading.current_thread():
        return  # the job in hand dropped the last reference to the lane; the thread ends after it
    thread.join(timeout=1.0)
    if thread.is_alive():
        # the thread waits for a rank that does not answer. If it returned from C++ while the interpreter ends, it would abort
        # the process
        with suppress(Exception):
            link.break_off()
        thread.join(timeout=1.0)
    if thread.is_alive():
        link.abandon()
    _cut(pending, _closed())


class LanesObserver:
    """Measures exchanges on lanes, or delays them. `Lanes.observe` registers it. By default it does nothing."""

    holds = False
    """Whether lanes get no bucket before all buckets of the step are ready, so that nothing is encoded or sent in backward."""
    compares = False
    """Whether steps are compared with each other, so that all must run the same plan."""
    times_device = False
    """Whether steps are timed on the device, where lanes only queue their work (`Exchange.device_times`)."""

    def task_times(self) -> list[Any] | None:
        """The list to which the lanes append the times of each task of the step that begins. None: no times are kept."""
        return None

    def sends(self, slot: Any, values: torch.Tensor) -> None:
        """A tensor is about to be sent. In a bucket's memory it is divided by the number of ranks already."""


class Lanes:
    """A control lane, and the lanes that carry gradients. All ranks of the group make them at the same point.

    Exchanges that use the same lanes run one after another. After a failure all of them raise it, until `mend`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | Group | None,
        silence_s: float | None = None,
        tls: TlsOption = None,
        device: torch.device | None = None,
    ) -> None:
        """Connects the control lane. Collective. silence_s: after so long without a sign of life a machine counts as dead; None:
        see `usual_silence_s`. tls: whether connections between ranks are encrypted; None: as the environment says. device: that
        of the gradients, if it is known: ranks of a group of NCCL alone meet on it. Raises StepStateError without
        torch.distributed, PlanError on a rank that is not in the group."""
        tls = wanted_tls(tls)
        self.group = process_group if isinstance(process_group, Group) else replace(Group.of(process_group), tls=tls)
        self.device = torch.device("cpu")
        """The device of the gradients."""
        self._silence_s = usual_silence_s(self.group.timeout.total_seconds()) if silence_s is None else silence_s
        # a margin below the caller's timeout, so that the error is raised, with the ranks' names, within it
        self._timeout = timedelta(seconds=0.85 * self.group.timeout.total_seconds())
        # the lanes of a model on the CPU too, which saves round trips; those of a GPU are known when the model is
        early = [] if torch.cuda.is_available() else [*map(str, range(LANES)), *meshes_of(LANES)]
        with _begins(self.group, device):
            self.group = self.group.meet(self._timeout, [CONTROL, HEARTBEATS, *early])
        self.shared = LaneSet(self.group.met.name)
        """The lanes themselves, which other handles may use too."""
        self._heartbeats: Heartbeats | None = None
        self._use(self.group.met.name)
        self.control = self._lane(CONTROL, torch.device("cpu"))
        """The lane for messages between ranks other than gradients."""
        _say_if_uneven(self.group)
        self.data: list[Lane] = []
        """For gradients."""
        self.offload = 0
        """How many of these, the last ones, take the buckets with codecs on CPUs."""
        self.staged = False
        """Whether gradients lie on a device and travel through the host's memory."""
        self._at_once = LANES
        """How many pieces are exchanged at a time: more where some ranks are far apart."""

    @classmethod
    def of_handle(
        cls, process_group: dist.ProcessGroup | Group | None, silence_s: float | None, tls: TlsOption, device: torch.device | None
    ) -> "Lanes":
        """The lanes of a new handle with parameters on this device: those of the group's other handles, if every rank has them
        and may share them. Collective. Raises what the constructor does."""
        if isinstance(process_group, Group):
            return cls(process_group, silence_s, tls, device)
        group = Group.of(process_group)
        key = silence_s, wanted_tls(tls), device, group.machine_name(), site_name()
        of_group = known(group.process_group)
        of_group.handles += 1
        if of_group.handles > 1:  # else no rank has any
            user: Lanes | None = a_user(group.process_group, key)
            with _begins(group, device):
                shares = _all_have(group, user)
            if shares:
                assert user is not None
                return user._for_another_handle()
        made = cls(process_group, silence_s, tls, device)
        made.shared.is_open = True
        of_group.sets.append((key, weakref.ref(made.shared)))
        return made

    def _for_another_handle(self) -> "Lanes":
        made = copy(self)
        made._use(hashlib.blake2s(f"{self.shared.name}/{self.shared.joined}".encode(), digest_size=8).hexdigest())
        return made

    def _use(self, name: str) -> None:
        """Begin as a new user of these lanes, with a name that is equal on all ranks and nobody else's."""
        self.name = name
        """Equal on all ranks and unlike that of any other lanes."""
        self.first_tag = self.shared.add(self)
        """The first of the tags of this user's messages."""
        self.place: Callable[[], Callable[[], str] | None] = lambda: None
        """Returns what says which step this user comes to next, or is in."""
        self.end_left: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns what ends a step that this user left in the middle."""
        self.flight = Flight(self._own_rank, self.group.global_ranks, self.name)
        """The record of the lanes' work."""
        self.failure: GradwireError | None = None
        self._ended: GradwireError | None = None
        """Why another thread ended what is under way."""
        self.mendable = False
        """Whether `mend` can end the failure: nothing is under way on any rank."""
        self.running: weakref.WeakMethod[Callable[[], None]] | None = None
        """Ends the waits of the last user of the lanes."""
        self.observers: list[LanesObserver] = []
        """Observers of the exchanges on these lanes."""
        self.value_observers: list[LanesObserver] = []
        """The observers that look at the values that are sent."""
        self._queued: Future[int] | None = None
        """The result of `QueuedStep.await_end` of the last step that was queued on a device."""
        self._incomplete: tuple[int, int] | None = None
        """The step whose queued operations failed on this rank, and the first bucket. No lock guards it: torch.compile traces
        what looks at it."""

    @property
    def _own_rank(self) -> int:
        return self.group.global_ranks[self.group.rank]

    def _lane(self, name: str, device: torch.device, staged: bool = False) -> Lane:
        make = StagedLink if staged else Link
        lane = Lane(f"gradwire-{self.group.met.name}-{name}", make(self.group, name, device, self._timeout))
        self.shared.lanes.append(lane)
        return lane

    def open(self, facts: Mapping[str, Any], device: torch.device | None) -> None:
        """Compare facts with all ranks, and connect the lanes that carry gradients of this device. Collective; a rank that
        failed has no device, and its facts say why. Raises DisagreementError on all ranks, CommunicationError."""
        round_trip_us = self.group.met.round_trip_us
        if device is not None and not self.data:
            self._choose(device)
            self._at_once = self._lanes_over(round_trip_us)
            if problem := self.group.met.why_too_few(self._meshes()):
                facts = {**facts, "error": problem}
        told = self._told_first(lambda link: agree(link, facts, self.group.global_ranks, round_trip_us))
        if device is not None and not self.data:
            self._at_once = self._lanes_over(max(told))
            if self._at_once > self._lanes_over(min(told)):  # some did not know how many connections they will have
                problem = self.group.met.why_too_few(self._meshes())
                self._told_first(lambda link: agree(link, {"error": problem} if problem else {}, self.group.global_ranks))
            self._connect(self._meshes())

    def _choose(self, device: torch.device) -> None:
        """Choose the kind of lanes that carry gradients of this device."""
        self.device, self.offload = device, offload_lanes(device)
        between = self._is_slow_between_nodes() or (self.group.met.encrypts and self.group.grid.nodes > 1)
        self.staged = self.group.stages(device) or (device.type == "cuda" and between)

    def _meshes(self) -> list[str]:
        """The names of the meshes of the lanes that carry gradients."""
        names = self._lane_names() if self.staged or self.device.type == "cpu" else []
        return names + ([] if self.group.met.why_no_wires() else meshes_of(self._wire_count()))

    def _lane_names(self) -> list[str]:
        """The names of the lanes that carry gradients."""
        return [*map(str, range((self._at_once if self.staged or self.device.type == "cpu" else 1) + self.offload))]

    @property
    def far_lanes(self) -> list[Lane]:
        """The lanes that share a far link with the first one; none over a near link, where one lane alone finds the rate."""
        return self.data[1:] if self._at_once > LANES and kind_of(self.device) == "cpu" else []

    def _lanes_over(self, round_trip_us: float) -> int:
        return lanes_over(round_trip_us / 2, self.group.world_size)

    def _wire_count(self) -> int:
        """How many of these lanes have wires, where all ranks can run phases in C++."""
        return self._at_once if self.group.has_wires and (self.staged or kind_of(self.device) == "cpu") else 0

    def _connect(self, names: Sequence[str]) -> None:
        """Connect the lanes that were chosen. `names`: of their meshes."""
        meeting = self.group.met
        self._told_first(lambda link: meeting.connect(names))
        try:
            self.data += [self._lane(name, self.device, self.staged) for name in self._lane_names()]
        except LinkError as error:
            raise CommunicationError(
                f"rank {self._own_rank}: the lanes for gradients could not be connected. (The backend said: {error})"
            ) from error
        self._told_first(lambda link: self.data[0].link.streams.enter_thread())  # marks are asked for there
        made = self._told_first(lambda link: make_wires(link, self.group, self._wire_count()))
        for lane, wire in zip(self.data, made, strict=False):
            lane.link.wire = wire
        if self.group.world_size > 1:
            beats = {rank: each for rank, each in meeting.mesh(HEARTBEATS).items() if isinstance(each, socket.socket)}
            thread, news = f"gradwire-{meeting.name}-heartbeats", SilenceNews(meeting.key, meeting.name)
            self._heartbeats = Heartbeats(beats, thread, self.shared.silence, self._silence_s, news)
        meeting.start()
        self._roll_call = RollCall(self.group, meeting.name)

    def alone(self) -> None:
        """Use lanes of its own from now on, if others use these or may join. Collective, between steps."""
        self.shared.is_open = False
        if self.shared.joined > 1:
            self._move()

    def use_here(self) -> None:
        """This thread is about to use these lanes, between steps: use others if these belong to another thread's handles, or are
        shut down because a handle went in the middle of a step. The same on all ranks, if their threads do the same."""
        if self.shared.why_not_here():
            self._move()

    def _move(self) -> None:
        self.first_incomplete()
        if self.shared.remove(self):
            self._close()
        self.shared = LaneSet(f"{self.name}-own")
        self.shared.thread, self.first_tag = None, self.shared.add(self)
        self.data, self._heartbeats = [], None
        try:
            self._choose(self.device)
            names = self._meshes()
            self.group = self.group.meet_apart(self.shared.name, self._timeout, [CONTROL, HEARTBEATS, *names])
            self.control = self._lane(CONTROL, torch.device("cpu"))
            self._connect(names)
        except LinkError as error:
            raise CommunicationError(
                f"rank {self._own_rank}: the handle could not connect lanes of its own, for another thread or after another "
                f"handle went in the middle of a step: not all ranks did the same. Restart. (The backend said: {error})"
            ) from error

    def _is_slow_between_nodes(self) -> bool:
        """Whether the adapters of some node are known to be slow."""
        known_gbps = [each for each in self.group.met.gbps if each is not None]
        is_known = len(known_gbps) == self.group.world_size
        return self.group.grid.nodes > 1 and is_known and min(known_gbps) < SLOW_GBPS

    def _told_first(self, job: Callable[[Link], T]) -> T:
        """The result of a job on the control lane, before there is a roll call."""
        try:
            return self.control.submit(job).result()
        except LinkError as error:
            raise CommunicationError(
                f"rank {self._own_rank}: ranks could not compare models and plans: one died, stalled "
                f"or did not make the same call; see its own log. (The backend said: {error})"
            ) from error

    def stop(self) -> None:
        """End the threads, if no other handle uses them. What the last step has queued on a device completes before. A collective
        that a thread is stuck in fails, here and on the other ranks."""
        self.first_incomplete()
        if self.shared.remove(self):
            self._close()
        elif self.shared.joined > 1:
            self.data, self._heartbeats = [], None

    def abort(self) -> None:
        """End the threads and close all connections at once, also in the middle of a step. Waits of other ranks for this one
        fail. Nobody may use these lanes afterwards: `begin` and `check` raise StepStateError."""
        ended = StepStateError("these lanes were aborted, so no step can begin. Make another exchange or handle.")
        self.failure = self.failure or ended
        self.shared.failure = self.shared.failure or self.failure
        self.shared.break_off()
        self.shared.remove(self)
        self._close()
        if (roll_call := getattr(self, "_roll_call", None)) is not None:  # None: the lanes were never connected
            roll_call.close()

    def _close(self) -> None:
        self.shared.is_open = False
        for lane in reversed(self.shared.lanes):
            lane.stop()
        if self._heartbeats is not None:
            self._heartbeats.stop()
        self.group.met.close()

    def run(self, lane: Lane, job: Callable[[Link], None]) -> None:
        """Do something on a lane that touches tensors which the caller's stream has written. Returns when the caller's stream
        may use what it wrote. Raises what the job does."""
        streams = lane.link.streams
        ready = streams.mark()
        shared = self.shared.joined > 1

        def run(link: Link) -> Mark:
            with link.streams.encoding(ready):
                if shared:
                    self._check_turn(link, torch.device("cpu") if lane is self.control else self.device)
                job(link)
                return link.streams.mark()

        streams.wait(lane.submit(run).result())

    def _check_turn(self, link: Link, device: torch.device) -> None:
        """Raises StepStateError where this rank's job and rank 0's are jobs of two handles."""
        tag = torch.tensor([self.first_tag], device=device)
        with transfer():
            link.broadcast(tag).wait()
        if int(tag) != self.first_tag:
            raise LinkError(0, ConnectionError(f"a message with tag {int(tag)} came where {self.first_tag} was expected"))

    # ---- observers

    def observe(self, observer: LanesObserver, on: bool = True) -> None:
        """Register an observer, from the next step on, or remove it. Does nothing if that is done already."""
        if on and observer not in self.observers:
            self.observers.append(observer)
        elif not on and observer in self.observers:
            self.observers.remove(observer)
        self.value_observers = [each for each in self.observers if type(each).sends is not LanesObserver.sends]

    @contextmanager
    def observed(self, observer: LanesObserver) -> Iterator[None]:
        """Register an observer for the steps inside."""
        self.observe(observer)
        try:
            yield
        finally:
            self.observe(observer, on=False)

    @property
    def holds(self) -> bool:
        """Whether an observer wants buckets held back until all are ready."""
        return any(observer.holds for observer in self.observers)

    @property
    def times_device(self) -> bool:
        """Whether an observer wants steps to be timed on the device."""
        return any(observer.times_device for observer in self.observers) and self.queues

    # ---- steps whose operations are queued on a device

    @property
    def queues(self) -> bool:
        """Whether lanes only queue their work, on a device."""
        return isinstance(self.data[0].link.streams, DeviceStreams)

    def step_queued(self, step: QueuedStep) -> None:
        """The last operation of a step was queued. From now on the control lane waits for its end on the device: so a script
        that waits for the device itself does not wait for ever."""
        if step.is_on_device:
            self._queued = self.control.submit(partial(self._await_end, step))

    def _await_end(self, step: QueuedStep, control: Link) -> int:
        # less than other ranks wait for this one's next report
        bucket = step.await_end(self._timeout.total_seconds() / 2, control.has_lost_a_rank)
        if bucket != COMPLETE:
            self._incomplete = step.step, bucket
            self._break_off_data()
        return bucket

    def _break_off_data(self) -> None:
        for lane in self.data:
            lane.link.break_off()

    def first_incomplete(self) -> int:
        """Wait until the operations of the last step have completed. Returns COMPLETE, or the first bucket with one that
        failed."""
        if self._queued is None:
            return COMPLETE
        try:
            return self._queued.result()
        except LinkError:  # it was cut
            return UNKNOWN_BUCKET

    def await_queued(self) -> None:
        """Wait until the operations of the last step have completed. Raises CommunicationError if one failed."""
        self.first_incomplete()
        self.check()

    def check_queued(self) -> None:
        """Wait until the operations of the last step have completed. Raises CommunicationError if one failed, and for no other
        failure: what the last good step left can be saved."""
        if self.first_incomplete() != COMPLETE or self._incomplete is not None:
            self.check()

    def _incomplete_here(self) -> GradwireError:
        assert self._incomplete is not None
        step, bucket = self._incomplete
        return self._fail_all(_incomplete({self._own_rank: bucket}, step))

    def incomplete(self, buckets: Mapping[int, int], step: int) -> GradwireError:
        """The error to raise, on all ranks alike, where operations of a step failed after the step had counted. `buckets`: the
        first one on each such rank, or UNKNOWN_BUCKET."""
        self._break_off_data()  # the control lane may still bring reports to other ranks
        return self.fail(_incomplete(buckets, step))

    # ---- failures

    def begin(self, step: int) -> None:
        """A step begins. Raises the failure, if there is one."""
        if self.device.type == "cpu":
            self.use_here()
        self.check()
        self.shared.begins(self)
        self.flight.begin(step)

    def check(self) -> None:
        """Raises the failure, if there is one. A step that the thread left in another handle ends: lanes wait for it."""
        self.shared.check_process()
        self.failure = self.failure or self.shared.failure
        if self.failure is not None:
            raise self.failure.again()
        if self._incomplete is not None:
            raise self._incomplete_here()
        if self.shared.joined == 1:  # torch.compile, which traces forwards to here, cannot trace what asks for the thread
            return
        if (before := self.shared.before(self)) is not None and (end := before.end_left()) is not None:
            end()

    def fail(self, error: GradwireError, mendable: bool = False) -> GradwireError:
        """Make everything raise this error from now on. Returns the error."""
        if not mendable:
            with suppress(Exception):
                words = f"{error} What lanes did is in {self.flight.write(str(error))}."
                error = error.again(words)
        self.failure, self.mendable = error.again(), mendable
        if self.shared.is_broken and not mendable:
            self.shared.failure = self.shared.failure or self.failure
        if self.running is not None and (give_up := self.running()) is not None:
            give_up()
        return error

    def mend(self) -> None:
        """Forget the failure."""
        self.failure, self.mendable = None, False

    def failed_here(self, what: str, cause: BaseException, step: int, bucket: int | None = None) -> GradwireError:
        """The error to raise when this rank could not do its part. All other ranks get its words."""
        kind: type[GradwireError] = type(cause) if isinstance(cause, GradwireError) else StepStateError
        words = error_words(cause)
        sizes = " Does `encode` write more than `payload_bytes` of the spec declares?" if "must match" in words else ""
        error = kind(
            f"step {step}: rank {self._own_rank} could not do its part of {what}: {words}. The network is not at fault.{sizes} "
            "All other ranks fail in this step too; restart all from a checkpoint."
        )
        return self._fail_all(error.about([self._own_rank], step, bucket))

    @contextmanager
    def leaving_with_reason(self) -> Iterator[None]:
        """Guard work of this rank before its first exchange. If it fails, the caller stops the lanes, and ranks that wait for it
        get the words of the error."""
        try:
            yield
        except BaseException as error:
            if not self.shared.has_others(self):  # those go on, and a later failure of theirs has other words
                with suppress(Exception):
                    self._roll_call.sign(error_words(error), self._patience_s)
            raise

    def _fail_all(self, error: GradwireError) -> GradwireError:
        """Tell all ranks this error, and end their waits."""
        if self.shared.forked_from is not None:
            return error
        with suppress(Exception):  # no thread, no memory: the others then find that this rank is gone
            self._roll_call.sign(str(error), self._patience_s)
        self.shared.break_off()
        return self.fail(error)

    def end(self, error: GradwireError) -> None:
        """End the waits of the thread that uses the lanes with this error, from another thread, and tell all ranks."""
        self._ended = error
        with suppress(Exception):
            self._roll_call.sign(str(error), self._patience_s)
        self.shared.break_off()

    def step_given_up(self) -> None:
        """A step was given up in the middle, and nobody will end it: other handles leave these lanes."""
        if self.shared.has_others(self) and not self.shared.is_broken:
            self.shared.left_in_a_step = True
            self.shared.break_off()

    @property
    def _patience_s(self) -> float:
        """For the rendezvous store."""
        return min(2.0, self.group.timeout.total_seconds() / 10)

    def broken(self, what: str, cause: BaseException, step: int, bucket: int | None = None) -> GradwireError:
        """The error to raise when what was waited for failed. It names the ranks that were waited for."""
        if self.shared.forked_from is not None:
            return self.shared.of_another_process()
        if self._ended is not None:
            return self.fail(self._ended.again())
        if self.failure is None and self._incomplete is not None:
            return self._incomplete_here()
        group = self.group
        peer = group.global_ranks[cause.peer] if isinstance(cause, LinkError) and cause.peer is not None else None
        if isinstance(cause, DamagedError):
            return self._fail_all(
                CommunicationError(
                    f"step {step}: bytes of {what} were changed on their way from rank {peer} to rank {self._own_rank}: {cause}. "
                    "No rank may use this step's gradients. Restart all ranks from a checkpoint; if this comes again, test the "
                    "memory and the network adapters of the two machines."
                ).about([] if peer is None else [peer], step, bucket)
            )
        if crossed := self._crossed(cause, peer):
            return self._fail_all(crossed)
        self.shared.break_off()  # ranks that wait for this one need not wait for the timeout
        gone = self._heartbeats.gone() if self._heartbeats is not None else []
        accuses = gone or ([] if peer is None else [group.global_ranks.index(peer)])
        # the machine of a rank that is known to be dead may host the store
        patience_s = min(0.5, self._patience_s) if self._beats_missing() else self._patience_s
        silent, told, is_known, accused = self._roll_call.missing(patience_s, accuses)
        beats = self._beats_missing()  # news may have come meanwhile
        dead = [rank for rank in silent if group.global_ranks.index(rank) in beats]
        waited_for = [rank for rank in silent if rank in accused]
        others = [rank for rank in silent if rank not in accused]
        if told:
            who, blamed = "; ".join(f"rank {rank} says: {words}" for rank, words in told.items()), [*told]
        elif dead:
            who = f"{_ranks(dead)} did not answer, nor did the kernel of the machine: it lost power, or the network to it failed"
            blamed = dead
        elif waited_for:
            who, blamed = f"{_ranks(waited_for)} did not answer", waited_for
            if others:
                who += f", nor, so far, did {_ranks(others)}, which may be busy or wait too"
        elif silent and not accused:
            who, blamed = f"{_ranks(silent)} did not answer", silent
        elif silent:
            blamed = []
            who = f"all that were waited for are alive, so a link between two of them failed; {_ranks(silent)} may be busy"
        else:
            blamed = []
            who = f"all of {_ranks(group.global_ranks)} are alive, so the link between them failed"
        if not is_known and not dead:
            who += ". The rendezvous store did not answer either, so no rank was asked whether it is alive"
        counts = "did not run the same number of backward passes, or of optimizer steps where these are local"
        guess = "" if told else f" A rank died, stalled, or {counts}; see its own log."
        error = CommunicationError(
            f"step {step}: rank {self._own_rank} waited for {what}: {who.removesuffix('.')}.{guess} These ranks cannot go on: "
            f"restart from a checkpoint. (The backend said: {str(cause).strip() or type(cause).__name__})"
        )
        return self.fail(error.about(blamed, step, bucket))

    def _beats_missing(self) -> list[int]:
        """The ranks within the group whose machines do not answer."""
        return self._heartbeats.silent() if self._heartbeats is not None else []

    def _crossed(self, cause: BaseException, peer: int | None) -> GradwireError | None:
        """The error where rank `peer` sent a message of another handle."""
        tag, place = re.search(r"with tag (\d+)", str(cause)), self.place()
        other = self.shared.sender(int(tag[1])) if tag is not None else None
        theirs = other.place() if other is not None and other is not self else None
        if place is None or theirs is None:
            return None
        return StepStateError(
            f"handles crossed: rank {self._own_rank} is in {place()}, and rank {peer} is in {theirs()}. Each waits for the "
            "other. Run the backwards of several models in the same order on all ranks."
        )

    @contextmanager
    def told(self, what: str, step: int) -> Iterator[None]:
        """Guard an exchange of other values than gradients: a link that fails becomes an error that names what was waited for."""
        try:
            yield
        except LinkError as error:
            raise self.broken(what, error, step) from error


def _incomplete(buckets: Mapping[int, int], step: int) -> GradwireError:
    """See `Lanes.incomplete`."""
    each = "; ".join(
        f"rank {rank}, {'in some bucket' if bucket == UNKNOWN_BUCKET else f'from bucket {bucket} on'}"
        for rank, bucket in buckets.items()
    )
    error = CommunicationError(
        f"step {step}: sums that were queued on the device never arrived, or not in time, on {each}. The step had counted "
        "already, so weights of ranks may differ. A rank died or stalled, or the link between ranks failed; see the logs of "
        "all ranks. These ranks cannot go on: restart from a checkpoint."
    )
    known_bucket = next((bucket for bucket in buckets.values() if bucket != UNKNOWN_BUCKET), None)
    return error.about([*buckets], step, known_bucket)


@contextmanager
def _begins(group: Group, device: torch.device | None) -> Iterator[None]:
    """Guard the first exchange of new lanes, on the caller's group. On the GPU of the gradients, if they are on one: the current
    one may be another rank's."""
    try:
        with nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device):
            yield
    except LinkError as error:
        if isinstance(error.__cause__, TlsError):
            raise CommunicationError(f"rank {group.global_ranks[group.rank]}: {error}. No rank begins.") from error
        raise CommunicationError(
            f"rank {group.global_ranks[group.rank]}: ranks could not begin: one died, stalled or did not make the same call; see "
            f"its log. (The backend said: {error})"
        ) from error


def _all_have(group: Group, lanes: Lanes | None) -> bool:
    """Whether all ranks have the same lanes at hand. Collective, on the caller's group."""
    name = bytes(8) if lanes is None else bytes.fromhex(lanes.shared.name)
    on_cpu = any(device.type == "cpu" for device in group.process_group._device_types)
    own = torch.tensor([*name], dtype=torch.uint8, device="cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device()))
    everybody = [torch.empty_like(own) for _ in range(group.world_size)]
    with transfer():
        dist.all_gather(everybody, own, group=group.process_group)
    return any(name) and len({bytes(each.tolist()) for each in everybody}) == 1


def _say_if_uneven(group: Group) -> None:
    """One rank says why one rank of each node exchanges for the others."""
    sizes = sorted({len(members) for members in group.grid.members})
    if group.rank == 0 and len(sizes) > 1:
        log.warning(
            "nodes have %d to %d ranks. By default one rank of each node then adds up its gradients and exchanges the sums, "
            "another one for each bucket. With equally many ranks on every node, or site that has a name, all share this work.",
            sizes[0],
            sizes[-1],
        )


class AnswersToCall(NamedTuple):
    """The result of a roll call, by global rank."""

    silent: list[int]
    """The ranks that did not sign: all others where the store did not answer."""
    told: dict[int, str]
    """The words of the ranks that failed first."""
    is_known: bool
    """Whether the store answered. If it did not, nobody knows which ranks are silent."""
    accused: set[int]
    """The ranks that others waited for, or whose process is gone."""


_HERE = "here"
"""The first word of a rank that waited for others. The ranks that it accuses follow, as numbers within the group."""
_MOST_PATIENCES = 4
"""While ranks sign, a roll call goes on for so many times the patience."""
_LOOK_S, _MOST_LOOK_S, _MANY = 0.05, 0.5, 64
"""How often a rank reads who signed. Of more than so many ranks it reads more rarely: the store sends all pages."""


class RollCall:
    """After a failure the ranks that noticed sign in the rendezvous store, with whom they waited for. Who was waited for and does
    not sign has failed; who was not waited for may be busy.

    All ranks sign on one page, so one request reads all signatures. It goes over a connection of its own, made when a call
    begins: one that each rank held from the start would be half of what the host of the store has open. The store is only
    asked from a thread with a deadline: the rank that hosts it may be the one that died. A rank that could not do its part,
    or got other bytes than were sent, signs with its error, which all others raise too. Signatures are sealed with the
    group's key: others than ranks reach the store too, and what they write counts for nothing.
    """

    _PAGE = "signatures"

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._signed, self._key = group, _HERE, group.met.key
        self._place = group.store(f"{name}/failed")
        """A part of the store, which has no connection of its own."""
        self._store: Any = None
        self._is_closed = False
        self._connecting = threading.Lock()

    def _connected(self) -> Any:
        """The store, where the handle is not closed. Waits for its host."""
        with self._connecting:
            if self._store is None and not self._is_closed:
                # a group's own store has a connection of its own
                store = self._place.clone() if self._group.process_group is not None else self._place
                self._store = None if self._is_closed else store
            return self._store

    def close(self) -> None:
        """Close the connection to the store."""
        self._is_closed, self._store = True, None

    def sign(self, words: str, patience_s: float) -> None:
        """Tell ranks that look for who failed that it was this one, and why."""
        self._signed = words
        self._ask(self._set, patience_s)

    def _set(self, store: Any) -> None:
        rank = str(self._group.rank)
        signature = base64.b64encode(self._key.seal(rank, self._signed)).decode()
        # whatever a stranger wrote before is a line of its own
        store.append(self._PAGE, f"\n{rank} {signature}\n")

    def missing(self, patience_s: float, accuses: Sequence[int] = ()) -> AnswersToCall:
        """Ask who signed, until all did, or nobody has for as long as the patience. When a rank said why it failed, nobody waits
        for others. `accuses`: the ranks within the group that this one waited for."""
        group = self._group
        self._signed = " ".join([_HERE, *map(str, accuses)]) if _waits(self._signed) else self._signed
        signed: dict[int, str] = {}
        asked: list[float] = []

        def call(store: Any) -> None:
            self._set(store)
            latest = deadline = time.monotonic() + patience_s
            latest += (_MOST_PATIENCES - 1) * patience_s
            pause, read = min(_LOOK_S * max(1.0, group.world_size / _MANY), _MOST_LOOK_S, patience_s / 4), 0
            while time.monotonic() < min(deadline, latest) and len(signed) + 1 < group.world_size and not _said(signed):
                before = len(signed)
                page = bytes(store.get(self._PAGE))
                end = page.rfind(b"\n") + 1
                self._read(page[read:end], signed)
                read = end
                signed.pop(group.rank, None)
                asked.append(time.monotonic())
                if len(signed) > before > 0:
                    deadline = asked[-1] + patience_s
                time.sleep(pause)

        self._ask(call, patience_s, asked)
        there = signed.keys() | {group.rank}
        silent = [number for rank, number in enumerate(group.global_ranks) if rank not in there]
        told = {group.global_ranks[rank]: words for rank, words in _said(signed).items()}
        accused = {*accuses, *(int(rank) for words in signed.values() if _waits(words) for rank in words.split()[1:])}
        numbers = {group.global_ranks[rank] for rank in accused if rank < group.world_size}
        return AnswersToCall(silent, told, bool(asked) or group.world_size == 1, numbers)

    def _read(self, lines: bytes, signed: dict[int, str]) -> None:
        """Add the words that ranks of the group signed with, by rank. The first words of a rank that failed count."""
        for line in lines.split(b"\n"):
            rank, _, signature = line.partition(b" ")
            with suppress(ValueError):  # no rank wrote it
                if (words := self._key.unseal(rank.decode(), base64.b64decode(signature, validate=True))) is not None:
                    signed[int(rank)] = words if _waits(signed.get(int(rank), _HERE)) else signed[int(rank)]

    def _ask(self, call: Callable[[Any], None], patience_s: float, asked: Sequence[float] = ()) -> None:
        """`asked`: when the store answered; as long as it does, this waits for the end of the call."""

        def ask() -> None:
            with suppress(Exception):
                if (store := self._connected()) is not None:
                    call(store)

        caller = start_store_thread(ask, "gradwire-roll-call")
        caller.join(patience_s + 0.5)
        while caller.is_alive() and asked and time.monotonic() < asked[-1] + patience_s:
            caller.join(0.1)


def _said(signed: Mapping[int, str]) -> dict[int, str]:
    """The words of the ranks that failed first."""
    return {rank: words for rank, words in signed.items() if not _waits(words)}


def _waits(words: str) -> bool:
    """Whether these are the words of a rank that waited for others.

    >>> _waits("here 3 11"), _waits("here is no memory left")
    (True, False)
    """
    first, *accused = words.split(" ")
    return first == _HERE and all(map(str.isdecimal, accused))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
