"""From a lane that failed to the error that callers get: it names the bucket and the ranks that were waited for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gradwire.errors import GradwireError, StepStateError
from gradwire.exchange.executor import Executor, TaskFailed
from gradwire.transport import LinkError


@contextmanager
def failures_told(executor: Executor, step: int) -> Iterator[None]:
    """Around waiting for lanes. Raises CommunicationError where another rank or a link failed, and a local error otherwise."""
    try:
        yield
    except TaskFailed as error:
        raise lane_error(executor, error, step) from error.cause
    except LinkError as error:
        last = executor.plan.launch[-1][0]
        waited_for = executor.waiting_for() or f"the control exchange at the end of backward, after bucket {last}"
        raise executor.lanes.broken(waited_for, error, step) from error


def lane_error(executor: Executor, failed: TaskFailed, step: int) -> GradwireError:
    """The error to raise for a task that failed."""
    what = executor.in_words(failed.task)
    if isinstance(failed.cause, LinkError):
        return executor.lanes.broken(what, failed.cause, step, failed.task.bucket)
    return executor.lanes.failed_here(what, failed.cause, step, failed.task.bucket)


def not_ready(names: Sequence[str]) -> StepStateError:
    """The error of a wait for tensors of which these are not ready."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return StepStateError(
        f"wait() was called before {names[0]!r}{more} became ready: their buckets cannot be sent. Call ready() for each "
        "tensor in every step."
    )
