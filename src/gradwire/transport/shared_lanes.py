"""The handles that use one set of lanes: those of one process group, one device and one thread.

All of them submit to the same lanes, in the order in which their steps begin, which is the same on all ranks. What would end that
order gets lanes of its own: a handle that another thread uses, and one whose lanes wait between backward and `optimizer.step()`.
"""

import os
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import GradwireError, StepStateError
from gradwire.transport.forks import close_in_child
from gradwire.transport.wire import LinkError

_GRACE_S = 0.5
"""For waits that fail by themselves when their connections are shut down: their errors say more."""

TAGS = 2**24
"""Tags of the messages of one handle: the most that a step may have."""
_HANDLES = 2**32 // TAGS
"""After so many handles of one set of lanes the first tags come again: the headers of messages have 32 bits for a tag."""


class LaneSet:
    """One set of lanes, and the handles or exchanges that use it: a `Lanes` of each."""

    def __init__(self, name: str) -> None:
        """name: equal on all ranks, and unlike that of any other set."""
        self.name = name
        self.lanes: list[Any] = []
        """The control lane and those that carry gradients."""
        self.joined = 0
        """How many users it ever had; the same on all ranks."""
        self.thread: int | None = threading.get_ident()
        """The thread whose handles share it; None: any, of its one user."""
        self.is_open = False
        """Whether others may join."""
        self.left_in_a_step = False
        """Whether one of several users went in the middle of a step."""
        self.is_broken = False
        """Whether the connections were shut down."""
        self.failure: GradwireError | None = None
        """Why, for all users."""
        self._now: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: weakref.ref[Any] | None = None
        self.forked_from: int | None = None
        """The process that made the set, in a process that was forked from it since."""
        self._made_by = os.getpid()
        close_in_child(self)

    def close_copies(self) -> None:
        """End the set in a forked process, which has none of its threads. Takes no lock: a thread may have held it. Other ranks
        notice nothing."""
        self.forked_from, self.lanes, self.is_open, self.is_broken = self._made_by, [], False, True

    def check_process(self) -> None:
        """Raises StepStateError in a forked process: nobody there would do what is submitted, and no wait would end."""
        if self.forked_from is not None:
            raise self.of_another_process()

    def of_another_process(self) -> StepStateError:
        """The error for a forked process."""
        return StepStateError(
            f"this process was forked from process {self.forked_from}, which trains, and has neither its threads nor its "
            "connections: nothing can be exchanged or waited for here. Train there. To evaluate or save in a forked "
            "process, call handle.flush() in its parent before the fork. To use the model without other ranks, call "
            "handle.detach() here. Start processes that are to train by spawn."
        )

    def break_off(self) -> None:
        """Fail all waits, here and on the other ranks. For any thread."""
        self.is_open, self.is_broken = False, True
        for lane in self.lanes:
            lane.link.break_off()

    def silence(self) -> None:
        """A machine fell silent: end all waits. In the thread of the heartbeats."""
        self.break_off()
        time.sleep(_GRACE_S)
        for lane in self.lanes:
            lane.cut(LinkError(None, ConnectionError("connections were shut down, since a machine fell silent")))

    def add(self, user: Any) -> int:
        """Add a user. Returns the first tag of its messages, so that no rank takes another handle's message for its own."""
        self._now.add(user)
        self.joined += 1
        return (self.joined - 1) % _HANDLES * TAGS

    def remove(self, user: Any) -> bool:
        """Remove a user. Returns whether it was the last one."""
        if user not in self._now:
            return False
        self._now.discard(user)
        return not self._now

    def has_others(self, user: Any) -> bool:
        """Whether others than this user use it."""
        return any(each is not user for each in self._now)

    def sender(self, tag: int) -> Any:
        """The user whose messages have this tag."""
        return next((each for each in self._now if each.first_tag == tag // TAGS * TAGS), None)

    def begins(self, user: Any) -> None:
        self._last = weakref.ref(user)

    def before(self, user: Any) -> Any:
        """The other user that began the last step, as this thread may have left it in the middle. A backward on a GPU runs in a
        thread of autograd's own, and counts as the thread that called it."""
        last = self._last() if self._last is not None else None
        if last is None or last is user:
            return None
        in_autograd = user.device.type != "cpu" and torch._C._current_graph_task_id() != -1
        return last if in_autograd or self.thread == threading.get_ident() else None

    def why_not_here(self) -> bool:
        """Whether a user must have lanes of its own from now on, in this thread."""
        if self.thread is not None and self.thread != threading.get_ident():
            if self.joined > 1:
                return True
            self.is_open, self.thread = False, None
        return self.left_in_a_step


class _Known:
    """The sets of lanes of the handles of one process group."""

    def __init__(self) -> None:
        self.handles = 0
        """Handles made so far; the same on all ranks."""
        self.sets: list[tuple[tuple[object, ...], weakref.ref[LaneSet]]] = []
        """Sets, with the device and the options that a handle must have."""


_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Known]" = weakref.WeakKeyDictionary()


def known(group: dist.ProcessGroup) -> _Known:
    """The sets of lanes of the handles of this group."""
    return _known.setdefault(group, _Known())


def a_user(group: dist.ProcessGroup, key: tuple[object, ...]) -> Any:
    """A user of the set that a new handle of this thread may use; None without one."""
    of_group = known(group)
    of_group.sets = [(like, each) for like, each in of_group.sets if (found := each()) is not None and found.is_open]
    for like, each in of_group.sets:
        found = each()
        if like == key and found is not None and found.thread == threading.get_ident():
            return next(iter(found._now), None)
    return None
