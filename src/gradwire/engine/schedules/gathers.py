"""The gather phases of a step that run beside the next forward, bucket by bucket."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from gradwire.engine.leaving import told_to_all
from gradwire.engine.reducer import Reducer
from gradwire.engine.schedules.base import ScheduleEvents
from gradwire.engine.torch_hooks.hooks import ModelHook
from gradwire.engine.torch_hooks.lazy_tensors import raise_later
from gradwire.errors import GradwireError
from gradwire.exchange import Exchange, StepReport


class Gathers:
    """What is under way between two steps. Nothing here launches an exchange: what is waited for comes, whichever rank waits."""

    def __init__(self, reducer: Reducer, model: torch.nn.Module, arrived: Callable[[int], None]) -> None:
        """`arrived`, a bound method, is called for each bucket when its tasks are done; its owner is not kept alive."""
        self._reducer, self._arrived = reducer, weakref.WeakMethod(arrived)
        weakref.finalize(model, ModelHook(self, Gathers._without_model)).atexit = False
        self.under_way: dict[int, None] = {}
        """Buckets that were not waited for yet, in launch order of their gathers."""
        self.exposed_s = 0.0
        """The seconds that were waited for the step."""
        self.lock = threading.RLock()
        """Evaluations may run on threads of their own."""
        self._order: list[int] = []
        self._running_out = threading.Event()
        """Set while lanes run gathers that other ranks wait for."""

    def attach(self) -> None:
        """The exchange is another one."""
        last = {bucket: position for position, (bucket, _) in enumerate(self._reducer.exchange.plan.launch)}
        self._order = sorted(last, key=last.__getitem__)

    def begin(self) -> None:
        """The gate is open, or opens now: all buckets are under way."""
        self._running_out.set()
        self.under_way = dict.fromkeys(self._order)

    def await_sums(self) -> None:
        """Wait for the reduce phases of all buckets."""
        start = time.perf_counter()
        self._reducer.running.await_gate()
        self.exposed_s += time.perf_counter() - start

    @torch.no_grad()
    def settle_bucket(self, bucket: int) -> None:
        """Wait for one bucket, if it is under way."""
        with self.lock:
            self._reducer.lanes.check()
            if bucket not in self.under_way:
                return
            start = time.perf_counter()
            self._reducer.running.wait(bucket)
            self.exposed_s += time.perf_counter() - start
            del self.under_way[bucket]
            if (arrived := self._arrived()) is not None:
                arrived(bucket)

    @told_to_all
    def flush(self) -> bool:
        """Wait for all buckets. Returns whether any was under way."""
        if not self._running_out.is_set():
            return False
        with self.lock:
            failed = self._reducer.lanes.failure is not None
            if not self.under_way and (failed or not self._running_out.is_set()):
                return False
            for bucket in list(self.under_way):
                self.settle_bucket(bucket)
            running = self._reducer.running
            running.wait()
            running.release()
            self._running_out.clear()
            self._reducer.observers.measured(StepReport(running.meters, self.exposed_s))
            return True

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that may wait: gradients and parameters that are still there."""
        for gradient, parameter in zip(self._reducer.gradients, self._reducer.living(), strict=True):
            yield from (tensor for tensor in (gradient.handed, parameter) if tensor is not None)

    def _without_model(self) -> None:
        """The model is gone: wait now. A tensor that waits keeps the schedule, which keeps the optimizer and its parameters, and
        these keep the tensor through C++, where nothing looks for circles. After a failure each use of the tensor raises it."""
        # a lane that collected garbage must not wait for itself
        if threading.current_thread().name.startswith("gradwire-"):
            threading.Thread(target=self._without_model, name="settle without a model", daemon=True).start()
            return
        try:
            self.flush()
        except GradwireError as error:
            for tensor in self.tensors():
                raise_later(tensor, error)

    def forget(self) -> None:
        """Wait for nothing any more."""
        self.under_way = {}
        self._running_out.clear()

    def let_go(self) -> Callable[[], None]:
        """See `Schedule.let_go`."""
        return partial(_let_go, self._reducer.exchange, self._running_out)


def settle_before_backward(schedule: ScheduleEvents, outputs: Iterable[torch.Tensor]) -> None:
    """A backward from these settles before it uses saved tensors: a parameter that was stepped since is refused by torch, as it
    should be."""
    for output in outputs:
        output.register_hook(ModelHook(schedule, lambda schedule, gradient: schedule.settle()))


def _let_go(exchange: Exchange, running_out: threading.Event) -> None:
    """Nobody waits any more; other ranks may still wait for what this one sends."""
    if running_out.is_set() and exchange.lanes.failure is None:
        exchange.drain()
    exchange.give_up()
