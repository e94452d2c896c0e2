"""The `local` schedule among members that come and go: rounds of outer gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gradwire.core import LocalSteps
from gradwire.engine import CountingHook, ModelHook, StepHook, leave_hooks_behind, lower_second_moments
from gradwire.exchange import Exchange
from gradwire.integrations.member_state import MemberState
from gradwire.integrations.members import Members
from gradwire.integrations.outer_steps import OuterSteps
from gradwire.integrations.trained import StepWatch, TrainedParameters

__all__ = ["LocalRounds"]


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
        self.uncounted = 0
        """Committed steps of the members that were no rounds: 1 once this member has begun. The first one says that members have
        equal weights, so that who comes later takes theirs."""
        self._outer, self._share = outer, share
        self.trained = TrainedParameters(model)
        leave_hooks_behind(model)
        self._hooks: list[Any] = [model.register_forward_pre_hook(ModelHook(self, LocalRounds._before_forward), prepend=True)]
        self._hooks.append(StepWatch.of_members(self.trained, optimizers))
        self._hooks += [each.register_step_pre_hook(StepHook(self, LocalRounds._before_step)) for each in optimizers]
        if schedule.second_moment == "mean":
            lower = StepHook(self, LocalRounds._lower_second_moments)
            self._hooks += [each.register_step_post_hook(lower) for each in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(CountingHook(self, LocalRounds._after_step)))

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

    def momenta(self) -> dict[str, torch.Tensor]:
        """Copies of the outer momenta."""
        return {name: each.clone() for name, each in self._outer.momenta().items()}

    def take_momenta(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `momenta` returned. Raises ValueError for those of other tensors."""
        self._outer.take_momenta(momenta)

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
        ranks = self._members.taking_part if self._members is not None else 1
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
            means = {} if isinstance(found, Exchange) else found  # a round that the others made
            if isinstance(found, Exchange) and members.parts:  # else all members begin, with the weights of one of them
                means = self._outer.gradients(members.factor)
                members.begin(found)
                found.ready_all(means)
                if not members.end(found):
                    continue
            if not members.begins:  # nobody has trained: the weights would follow the momentum of a checkpoint
                self._outer.step(means)
            if not isinstance(found, Exchange):  # no local step of this member: if the others end here, it has nothing to send
                self._outer.begin_anew()
            members.commit()
            if not members.is_behind:
                break
        self.uncounted = 1
        self._share()
        self._outer.take_up()
        self._local_steps = 0
