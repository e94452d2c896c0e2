"""Local steps above an exchange: the global weights W, their outer optimizer, and rounds among members that come and go.

Every member trains on weights L of its own. A round makes W anew from the mean of the outer gradients W - L, and L takes up W.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

from gradwire.core import LocalSteps
from gradwire.engine import ModelHook, OuterOptimizer, StepHook, leave_hooks_behind, lower_second_moments
from gradwire.errors import PlanError
from gradwire.exchange import Exchange
from gradwire.integrations.member_state import MemberState
from gradwire.integrations.members import Members
from gradwire.integrations.trained import StepWatch, TrainedParameters

__all__ = ["LocalRounds", "OuterSteps", "check_rounds"]


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


class LocalRounds:
    """The `local` schedule among members that come and go.

    A round asks for the quorum when its local steps are over. Who joins then sends zeros and counts for nothing in the mean, and
    trains when it has the others' weights. A round whose exchange fails is made again, with the members that are left: no local
    step is lost.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        outer: OuterSteps,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: LocalSteps,
        share: Callable[[], None] = lambda: None,
    ) -> None:
        """share: called when this rank has the W of its own tensors, to get those of others."""
        self.is_paused = False
        self._members: Members | None = None
        self._every, self._local_steps = schedule.every, 0
        self._outer, self._share = outer, share
        self.trained = TrainedParameters(model)
        leave_hooks_behind(model)
        self._hooks: list[Any] = [model.register_forward_pre_hook(ModelHook(self, LocalRounds._before_forward), prepend=True)]
        self._hooks.append(StepWatch.of_members(self.trained, optimizers))
        self._hooks += [each.register_step_pre_hook(StepHook(self, LocalRounds._before_step)) for each in optimizers]
        if schedule.second_moment == "mean":
            lower = StepHook(self, LocalRounds._lower_second_moments)
            self._hooks += [each.register_step_post_hook(lower) for each in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(StepHook(self, LocalRounds._after_step)))

    def begin(self, members: Members) -> None:
        """Train among these members."""
        self._members = members

    def state(self, of_model: MemberState) -> MemberState:
        """The state of the model, which comes without L, and W."""

        def save() -> dict[str, Any]:
            return {**of_model.save(), "outer": self._outer.state()}

        def load(state: dict[str, Any]) -> None:
            of_model.load(state)
            self._outer.load(state["outer"])

        return MemberState(save, load)

    def shown(self) -> AbstractContextManager[None]:
        """Inside, the model holds W."""
        return self._outer.shown()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, model: torch.nn.Module, inputs: object) -> None:
        joins = self._members is not None and self._members.exchange is None and not self._local_steps
        if joins and model.training and torch.is_grad_enabled():
            self._round()

    def _before_step(self, *_: object) -> None:
        self.trained.check()

    def _lower_second_moments(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        ranks = self._members.parts if self._members is not None else 1
        lower_second_moments(optimizer, ranks, self.trained.parameters.values())

    def _after_step(self, *_: object) -> None:
        self._local_steps += 1
        if self._local_steps >= self._every:
            self._round()

    @torch.no_grad()
    def _round(self) -> None:
        members = self._members
        assert members is not None
        while True:
            found = members.meet()
            if not isinstance(found, Exchange):  # a round that the others made
                self._outer.step(found)
                members.commit()
                if members.is_behind:
                    continue
                break
            if members.parts:  # else all members begin, with the weights of one of them
                means = self._outer.gradients(members.factor)
                members.begin(found)
                found.ready_all(means)
                if not members.end(found):
                    continue
                self._outer.step(means)
            members.commit()
            break
        self._share()
        self._outer.take_up()
        self._local_steps = 0
