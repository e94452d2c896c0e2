"""The seam between a session and whoever decides what it runs. The engine itself decides nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gradwire.core.plan import Plan
from gradwire.core.tensors import TensorInfo
from gradwire.planner.policy import Policy

if TYPE_CHECKING:
    from gradwire.engine.session import Session

__all__ = ["Driver", "FirstDriver"]


class Driver(Protocol):
    """Decides what a session runs, on all ranks alike."""

    @property
    def decisions(self) -> Sequence[Any]:
        """All so far, the last one last."""
        ...

    @property
    def searching(self) -> bool:
        """Whether the plan that runs is only being tried, so that a run which resumes is to decide anew."""
        ...

    def finished(self, session: "Session") -> None:
        """A step counted; called at the end of its backward, on every rank. May change the session's plan."""
        ...

    def recorded(self) -> Any:
        """What was decided last, as the `Decision` of a recorded run."""
        ...

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Why it would not go on under a plan that was saved; '' if it would. own: what the policy it begins with makes."""
        ...

    def resumed(self, session: "Session", same_ranks: bool, searching: bool) -> None:
        """The session took up a saved state, and with it the plan that was saved. same_ranks: by the ranks that run now.
        searching: it was only being tried."""
        ...

    def detached(self) -> None:
        """The session let go of the model."""
        ...


class FirstDriver(Driver, Protocol):
    """One that says what to begin with, too."""

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """What runs on so many ranks until something is decided."""
        ...
