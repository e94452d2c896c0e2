"""Numbers and decisions of a handle for a framework's log and its progress bar."""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median

from gradwire.api import Handle
from gradwire.auto import AutoDecision
from gradwire.engine import Observer

__all__ = ["Tracked", "lines_to"]


class Tracked(Observer):
    """The numbers of one handle, for the log of a framework."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._ended_s: float | None = None
        self._steps_s = deque[float](maxlen=100)
        self._decision: object = None
        handle.session.observers.add(self)

    def finished(self, exposed_s: float) -> None:
        now = time.perf_counter()
        if self._ended_s is not None:
            self._steps_s.append(now - self._ended_s)
        self._ended_s = now

    def facts(self) -> dict[str, float]:
        """Numbers for a log.

        `gradwire_sent_mb`: megabytes that this rank sends in a step. `gradwire_exposed_ms`: the wait for gradients at the end of
        backward. `gradwire_step_ms`: the median time of the last 100 steps. `gradwire_decisions`: the decisions so far;
        `gradwire_predicted_ms`: the step that the last decision of auto predicted.
        """
        stats, decision = self._handle.stats(), self._handle.decision
        facts = {
            "gradwire_sent_mb": stats.wire_bytes / 1e6,
            "gradwire_exposed_ms": stats.exposed_us / 1e3,
            "gradwire_decisions": float(stats.decided),
        }
        if self._steps_s:
            facts["gradwire_step_ms"] = 1e3 * median(self._steps_s)
        if isinstance(decision, AutoDecision):
            facts["gradwire_predicted_ms"] = decision.chosen.predicted_us / 1e3
        return facts

    def new_decision(self) -> str:
        """The line of the last decision, once; '' if there is no new one."""
        decision = self._handle.decision
        if decision is None or decision is self._decision:
            return ""
        self._decision = decision
        return str(decision)


class _Lines(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(f"gradwire: {record.getMessage()}")


def lines_to(write: Callable[[str], None]) -> Callable[[], None]:
    """Write gradwire's lines, such as decisions, with `write`: above a progress bar. Where the script has set up logging, its
    own handlers write them. Returns what ends this."""
    logger = logging.getLogger("gradwire")
    if logger.hasHandlers():
        return lambda: None
    handler = _Lines(write)
    logger.addHandler(handler)
    return partial(logger.removeHandler, handler)
