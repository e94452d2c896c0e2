"""Lanes: a link and the one thread that submits to it."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from gradwire.transport.link import Link
from gradwire.transport.slices import short_slices

T = TypeVar("T")


class Lane:
    """Runs jobs one after another on its own thread, until `stop` or the exit of the interpreter."""

    def __init__(self, name: str, link: Link) -> None:
        self.link = link
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        # a daemon: a thread that waits for a dead rank must not keep the process alive
        self._thread = threading.Thread(target=_work, args=(self._jobs, link), name=name, daemon=True)
        with short_slices():
            self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread, link)

    def submit(self, job: Callable[[Link], T]) -> "Future[T]":
        """Run job(link) on the lane's thread, after all jobs before it."""
        future: Future[T] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._jobs.put((lambda: job(self.link), future))
        return future

    def cut(self, error: Exception) -> None:
        """Fail all jobs that are not done. For any thread.

        Gloo never ends the wait for a send that had begun when its connection was shut down. The lane's thread may have to wait
        until the timeout; those who wait for the lane need not."""
        for future in list(self._pending):
            with contextlib.suppress(InvalidStateError):  # done meanwhile
                future.set_exception(error)

    def stop(self) -> None:
        """End the thread. A collective that still waits fails, here and on the other ranks."""
        self._finalizer()


def _work(jobs: "queue.SimpleQueue[Any]", link: Link) -> None:
    link.streams.enter_thread()
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            done = partial(future.set_result, job())
        except BaseException as error:
            done = partial(future.set_exception, error)
        with contextlib.suppress(InvalidStateError):  # it was cut
            done()
        del item, job, future, done
    link.close()


def _stop(jobs: "queue.SimpleQueue[Any]", thread: threading.Thread, link: Link) -> None:
    jobs.put(None)
    if thread is threading.current_thread():
        return  # the job in hand dropped the last reference to the lane; the thread ends after it
    thread.join(timeout=1.0)
    if thread.is_alive():
        # the thread waits for a rank that does not answer. If it returned from C++ while the interpreter ends, it would abort
        # the process
        with contextlib.suppress(Exception):
            link.break_off()
        thread.join(timeout=1.0)
    if thread.is_alive():
        link.abandon()
