"""A joiner catches up with the others, which make steps meanwhile.

The others are at step t when a joiner comes. A thread of the joiner takes part in their steps from t on: it sends zeros, and
keeps the means. Meanwhile the joiner fetches the state of step t. Then its script makes the steps from t on with the kept means,
so that it has the weights of the others. Nobody uses the gradients that it computes in these steps.

A step that the joiner makes again waits for no link, so it is shorter than a step of the others. When one kept mean is left the
thread ends, and the others wait for that one step of the joiner.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gradwire.exchange import Exchange, TensorMeta
from gradwire.integrations.meetings import quorum_key
from gradwire.transport import LinkError

__all__ = ["CatchUp", "Means"]

log = logging.getLogger(__name__)

Means = dict[str, torch.Tensor]
"""The mean gradients of one step."""


class CatchUp:
    """The kept means of the others' steps, and the thread that takes part in them."""

    def __init__(self, exchange: Exchange, tensors: Mapping[str, TensorMeta], quorum: Any, ask: Callable[[], Any]) -> None:
        """quorum: of the first step. ask: returns the quorum of the next one, which is to count this member as behind."""
        self._exchange, self._tensors, self._ask = exchange, tensors, ask
        self.named: Any = None
        """The quorum of other members that ended it; None where a step failed, or nothing did."""
        self._changed = threading.Condition()
        self._means: deque[Means] = deque()
        self._has_state = self._waits = self._is_over = self._failed = False
        self._more = 0
        """How many steps to follow at most, once the state is there: as many as came before it."""
        self._thread = threading.Thread(target=self._follow, args=(quorum,), name="gradwire-catch-up", daemon=True)
        self._thread.start()

    def state_came(self) -> None:
        """This member has the state from before the first kept mean."""
        with self._changed:
            self._has_state, self._more = True, len(self._means)

    def next(self) -> Means | None:
        """The means of the next step that the others made, once they made it. None if this member makes the next step with them.
        Raises LinkError where their steps could not be followed."""
        with self._changed:
            self._waits = True
            self._changed.wait_for(lambda: self._means or self._is_over)
            self._waits = False
            self._check()
            return self._means.popleft() if self._means else None

    def check(self) -> None:
        """Raises LinkError where the others' steps could not be followed."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._failed:
            raise LinkError(None, ConnectionError("the members changed before this one had caught up"))

    @property
    def is_behind(self) -> bool:
        """Whether means are left, or are still to come."""
        with self._changed:
            return bool(self._means) or not self._is_over

    def join(self) -> None:
        """Wait for the end of the thread, whose steps fail."""
        self._thread.join()

    def _follow(self, quorum: Any) -> None:
        try:
            for means in self._steps(quorum):
                with self._changed:
                    self._means.append(means)
                    self._more -= self._has_state
                    caught_up = self._waits and len(self._means) == 1
                    self._is_over = self._has_state and (caught_up or self._more < 0)
                    self._changed.notify()
                    if self._is_over:
                        return
        except Exception as error:
            log.info("the others' steps could not be followed: %s", error)
        finally:
            with self._changed:
                self._failed, self._is_over = not self._is_over, True
                self._changed.notify()

    def _steps(self, first: Any) -> Iterator[Means]:
        """The means of the others' steps, until one fails or the members change."""
        quorum = first
        while quorum_key(quorum) == quorum_key(first):
            self._exchange.step = quorum.max_step
            means = {name: each.zeros() for name, each in self._tensors.items()}
            self._exchange.begin()
            self._exchange.ready_all(means)
            if not self._exchange.finish_quietly():
                return
            self._exchange.wait()
            yield means
            quorum = self._ask()
        self.named = quorum
