"""The seam between a handle and whoever decides what it runs. The engine itself decides nothing."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradwire.core.plan import Plan
from gradwire.core.tensors import TensorInfo
from gradwire.engine.states import Saved
from gradwire.planner.policy import Policy

if TYPE_CHECKING:
    from gradwire.engine.handle import Handle
    from gradwire.record.run import Decision

__all__ = ["Driven", "Driver", "FirstDriver"]


class Driver(Protocol):
    """Decides what a handle runs, on all ranks alike."""

    @property
    def decisions(self) -> Sequence[Any]:
        """All so far, the last one last."""
        ...

    @property
    def searching(self) -> bool:
        """Whether the plan that runs is only being tried, so that a run which resumes is to decide anew."""
        ...

    def finished(self, handle: "Handle") -> None:
        """A step counted; called at the end of its backward, on every rank. May change the handle's plan."""
        ...

    def recorded(self) -> "Decision":
        """What was decided last, for a record of the run."""
        ...

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Why it would not go on under a plan that was saved; '' if it would. own: what the policy it begins with makes."""
        ...

    def resumed(self, handle: "Handle", same_ranks: bool, searching: bool) -> None:
        """The handle took up a saved state, and with it the plan that was saved. same_ranks: by the ranks that run now.
        searching: it was only being tried."""
        ...

    def detached(self) -> None:
        """The handle let go of the model."""
        ...


class FirstDriver(Driver, Protocol):
    """One that says what to begin with, too."""

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """What runs on so many ranks until something is decided."""
        ...


class Driven:
    """What a handle has of its driver: nothing, where the user chose the plan."""

    driver: Driver | None = None
    _plan: Plan
    _policy: Policy | None
    _plan_of: Callable[[Policy, list[int]], Plan]
    _why_not: Callable[[Plan], str]

    @property
    def decision(self) -> Any:
        """With plan="auto", `gw.AdaptiveBits` or `gw.Tuned`: what was decided last, with what was predicted and measured. None
        before that, and for a plan of the user's own. Its str() says it in a line."""
        decisions = self.decisions
        return decisions[-1] if decisions else None

    @property
    def decisions(self) -> tuple[Any, ...]:
        """All decisions so far."""
        return tuple(self.driver.decisions) if self.driver is not None else ()

    def _decided(self, plan: Plan) -> dict[str, torch.Tensor]:
        """What a state keeps of a plan that nothing but this run knows."""
        if self.driver is None:
            return {}
        kept = {"decided": torch.frombuffer(bytearray(plan.to_json(None).encode()), dtype=torch.uint8)}
        return kept | {"searching": torch.tensor(1)} if self.driver.searching else kept

    def _plan_to_resume(self, saved: Saved) -> Plan:
        """The plan with which a state is taken up."""
        if self.driver is not None and saved.decided is not None:
            other = saved.decided.schedule != self._plan.schedule
            assert self._policy is not None
            own = self._plan_of(self._policy, saved.order)
            if why := self.driver.refuses(saved.decided, own) or (self._why_not(saved.decided) if other else ""):
                raise ValueError(f"the state was saved under a plan that this handle does not run: {why}")
            return saved.decided
        return self._plan if self._policy is None else self._plan_of(self._policy, saved.order)

    def _resumed(self, saved: Saved) -> None:
        if self.driver is not None:
            self.driver.resumed(self, saved.own, saved.searching)  # type: ignore[arg-type]  # every Driven is a Handle

    def _step_ended(self) -> None:
        if self.driver is not None:
            self.driver.finished(self)  # type: ignore[arg-type]
