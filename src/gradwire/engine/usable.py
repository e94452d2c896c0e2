"""Whether a handle's steps can go on, and the errors that say why not."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.collectives import Group, LinkError
from gradwire.engine.executor import Executor, TaskFailed
from gradwire.engine.failure import RollCall, communication_error, in_words, local_error
from gradwire.errors import GradwireError

__all__ = ["Usable"]


class Usable:
    """Steps that can fail; after a failure each raises it, until one that can be mended is."""

    executor: Executor

    def __init__(self, group: Group, roll_call: RollCall) -> None:
        self.group, self.roll_call = group, roll_call
        self.step = 0
        self.failure: GradwireError | None = None
        self._can_reset = False

    def failed_here(self, what: str, cause: Exception) -> GradwireError:
        """The error to raise when this rank could not do its part; from then on every step raises it. Ends others' waits."""
        self.executor.break_off()
        return self._fail(local_error(what, cause, self.step, self.group))

    def broken(self, what: str, cause: Exception) -> GradwireError:
        """The error to raise when an exchange of this handle failed; from then on every step raises it."""
        return self._fail(communication_error(what, cause, self.step, self.group, self.roll_call))

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Around waiting for lanes: what they raise becomes an error that names what was waited for."""
        try:
            yield
        except TaskFailed as error:
            raise self._lane_failed(error) from error.cause
        except LinkError as error:
            raise self.broken(self._waited_for(), error) from error

    def _lane_failed(self, failed: TaskFailed) -> GradwireError:
        what = in_words(self.executor.plan, failed.task)
        if isinstance(failed.cause, LinkError):
            return self.broken(what, failed.cause)
        return self.failed_here(what, failed.cause)

    def _waited_for(self) -> str:
        plan, task = self.executor.plan, self.executor.waiting_for()
        if task is None:
            return f"the control exchange at the end of backward, after bucket {plan.launch[-1][0]}"
        return in_words(plan, task)

    def _fail(self, error: GradwireError) -> GradwireError:
        # a copy, never raised itself: an error that was raised holds the frames it passed, and with them the model
        self.failure = type(error)(*error.args)
        self.executor.give_up()
        return error

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
