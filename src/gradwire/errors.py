"""Every error gradwire raises on purpose.

GradwireError
├── FormatError          a JSON file or object is not what its format says
├── SpecError            a compressor spec has an impossible value
├── PlanError            a plan does not fit the model, the devices or this version
├── PayloadError         bytes received are not a payload of the spec that reads them
├── DisagreementError    ranks were started with different models, plans or versions, or their weights drifted apart
├── StepStateError       something happened in a step that its state does not allow
├── CommunicationError   a rank died, stalled or left, or bytes changed on their way; names the bucket and the ranks
├── WriteError           a file could not be written; the old one is whole
└── TestbedError         an emulated cluster could not be made or run

Each message says what happened with the values, why it matters, and what to do. Every error also carries `ranks`, `step` and
`bucket`, for programs.
"""

from collections.abc import Iterable
from typing import Self

__all__ = [
    "CommunicationError", "DisagreementError", "FormatError", "GradwireError", "PayloadError", "PlanError", "SpecError",
    "StepStateError", "TestbedError", "WriteError",
]  # fmt: skip


class GradwireError(Exception):
    """Base of every error that gradwire raises on purpose.

    >>> error = CommunicationError("rank 3 did not answer").about(ranks=[3], step=41, bucket=2)
    >>> error.ranks, error.step, error.bucket
    ((3,), 41, 2)
    """

    ranks: tuple[int, ...] = ()
    """The global ranks that caused the error; empty if the error has no known rank."""
    step: int | None = None
    """The step that failed, counted from 0; None outside of steps."""
    bucket: int | None = None
    """The index of the bucket in the plan; None if the error concerns no single bucket."""

    def about(self, ranks: Iterable[int] = (), step: int | None = None, bucket: int | None = None) -> Self:
        """Set `ranks`, `step` and `bucket`, and return the error."""
        self.ranks, self.step, self.bucket = tuple(ranks), step, bucket
        return self

    def again(self, words: str | None = None) -> Self:
        """Return a new error of the same class, ranks, step and bucket, with the same or other words.

        A raised error holds the frames it passed, and through them the model. Keep such a copy to raise it later.
        """
        return type(self)(*(self.args if words is None else (words,))).about(self.ranks, self.step, self.bucket)


class FormatError(GradwireError, ValueError):
    """A JSON file or object is not what its format says."""


class SpecError(GradwireError, ValueError):
    """A compressor spec has an impossible value."""


class PlanError(GradwireError, ValueError):
    """A plan does not fit the model, the devices or this version of gradwire."""


class PayloadError(GradwireError, ValueError):
    """Bytes received are not a payload of the spec that reads them."""


class DisagreementError(GradwireError, RuntimeError):
    """Ranks were started with different models, plans or library versions, or have different weights."""


class StepStateError(GradwireError, RuntimeError):
    """Something happened in a step that the state of the step does not allow."""


class CommunicationError(GradwireError, RuntimeError):
    """A rank died, stalled or left while others waited for it, or bytes changed on their way."""


class WriteError(GradwireError, OSError):
    """A file could not be written. What stood there before is whole."""


class TestbedError(GradwireError, RuntimeError):
    """An emulated cluster could not be made or run."""

    __test__ = False  # the name begins with Test; it is not one
