"""Local steps above an exchange: the global weights W and their outer optimizer.

Every rank trains on weights L of its own. A round makes W anew from the mean of the outer gradients W - L, and L takes up W.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from gradwire.core import LocalSteps
from gradwire.engine import OuterOptimizer
from gradwire.errors import PlanError
from gradwire.integrations.member_state import check_forms

__all__ = ["OuterSteps", "check_rounds"]


def check_rounds(schedule: Any) -> LocalSteps:
    """Return the schedule. Raises PlanError unless a round exchanges the whole model before the next local step, after as many
    steps of each member."""
    local = cast(LocalSteps, schedule)
    if local.fragments > 1 or local.delay or local.steps_of_ranks:
        raise PlanError(
            f"plan has {local!r}: here a round exchanges the whole model at once, after as many local steps of each member. "
            "Leave out fragments, delay and steps_of_ranks."
        )
    return local


class OuterSteps:
    """The global weights of some tensors, which hold L, and the outer optimizer."""

    def __init__(
        self,
        local: Mapping[str, torch.Tensor],
        schedule: LocalSteps,
        own: Collection[str] | None = None,
        reshard: Callable[[], None] = lambda: None,
    ) -> None:
        """own: the tensors of which this rank makes W; None: all. reshard: called before these tensors are written, which may be
        shards of the model."""
        self.local, self.reshard, self._schedule = dict(local), reshard, schedule
        """L."""
        self.weights = {name: each.detach().clone() for name, each in local.items()}
        """W."""
        self._own = [name for name in local if own is None or name in own]
        self._optimizer = OuterOptimizer(schedule.outer, {name: self.weights[name] for name in self._own})

    def gradients(self, factor: float = 1.0) -> dict[str, torch.Tensor]:
        """The outer gradients W - L of the own tensors, times `factor`."""
        return {name: (self.weights[name] - self.local[name].detach()).mul_(factor) for name in self._own}

    def step(self, means: Mapping[str, torch.Tensor]) -> None:
        """Make W of the mean outer gradients of these tensors."""
        self._optimizer.step(means)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Let L be W: no outer gradient is left."""
        self._write(self.weights)

    @torch.no_grad()
    def take_up(self) -> None:
        """Let L take up W."""
        self.reshard()
        for name, each in self.local.items():
            each.lerp_(self.weights[name], self._schedule.mixing)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the tensors hold W. Afterwards they hold L again."""
        own = {name: each.detach().clone() for name, each in self.local.items()}
        try:
            self._write(self.weights)
            yield
        finally:
            self._write(own)

    def state(self) -> dict[str, Any]:
        """Copies of W and of the outer momentum."""
        kept = {"weights": self.weights, "momenta": self._optimizer.momenta}
        return {what: {name: each.clone() for name, each in values.items()} for what, values in kept.items()}

    def momenta(self) -> dict[str, torch.Tensor]:
        """The outer momentum of each own tensor, zeros before the first step; nothing where the schedule has none."""
        if not self._schedule.outer.momentum:
            return {}
        return {name: torch.zeros_like(self.weights[name]) for name in self._own} | self._optimizer.momenta

    def take_momenta(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `momenta` returned; without any, from zeros. Raises ValueError for momenta of other tensors."""
        check_forms("outer momenta", momenta, self.momenta() if momenta else {})
        self._optimizer.take(momenta)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned; L becomes its "local", or W."""
        for name, each in self.weights.items():
            each.copy_(state["weights"][name])
        self._optimizer.take(state["momenta"])
        self._write(state.get("local", self.weights))

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        self.reshard()
        for name, each in self.local.items():
            each.copy_(values[name])
