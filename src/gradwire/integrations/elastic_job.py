"""A job of members that come and go, as a script sees it."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gradwire.auto import AutoDecision
from gradwire.core import whole
from gradwire.engine import REGISTRY
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import ExchangeStats
from gradwire.integrations.elastic_auto import ElasticAuto
from gradwire.integrations.gradient_means import GradientMeans
from gradwire.integrations.local_rounds import LocalRounds
from gradwire.integrations.members import Members

__all__ = ["ElasticJob"]


class ElasticJob:
    """A model in training among members that come and go, as `gw.elastic` returns it."""

    def __init__(
        self, model: torch.nn.Module, members: Members, means: GradientMeans | LocalRounds, auto: ElasticAuto | None
    ) -> None:
        self._model = weakref.ref(model)
        self._members, self._means, self._auto = members, means, auto
        self._rounds = means if isinstance(means, LocalRounds) else None
        self._left = False

    @property
    def step(self) -> int:
        """The steps that count so far, with local steps the rounds: the same on all members. A joiner has those of the others.
        `load_state_dict` sets it. A script may set it too, before the first step."""
        return self._members.step - (self._rounds.uncounted if self._rounds is not None else 0)

    @step.setter
    def step(self, step: int) -> None:
        self._check_step(step)
        self._members.step = step

    def _check_step(self, step: int) -> None:
        whole("step", step, "the steps of a checkpoint", error=PlanError)
        if self.world_size:
            raise StepStateError(f"step is set to {step}, and the members met already. Set it before the first forward.")

    def state_dict(self) -> dict[str, Any]:
        """The step, and the outer momenta of local steps. Save it with the model, in `global_weights()`, and the optimizers. On
        islands each rank has its own."""
        return {"step": self.step, "momenta": self._rounds.momenta() if self._rounds is not None else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned, before the first step. Members of an earlier checkpoint, or of none, get the state of
        this one. Raises StepStateError after the first step, ValueError for the state of another model or plan. The job is
        then as before."""
        self._check_step(state["step"])
        if self._rounds is not None:
            self._rounds.take_momenta(state["momenta"])
        self._members.step = state["step"]

    @property
    def rank(self) -> int:
        """This member's rank among the present members."""
        return self._members.rank

    @property
    def world_size(self) -> int:
        """The number of present members; 0 before the first step."""
        return self._members.world_size

    @property
    def taking_part(self) -> int:
        """The number of members whose gradients count in the present step: without those that join or catch up."""
        return self._members.taking_part

    @property
    def decision(self) -> AutoDecision | None:
        """The decision of plan="auto" for the present members; None before it, and for any other plan."""
        return self._auto.decision if self._auto is not None else None

    def stats(self) -> ExchangeStats:
        """Statistics since the members changed last. Raises StepStateError where there are none."""
        if self._members.exchange is None:
            raise StepStateError("there are no statistics before the members met. Call stats() after a step.")
        return self._members.exchange.stats()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside average nothing: gradients add up, until a backward outside averages their sum."""
        before, self._means.is_paused = self._means.is_paused, True
        try:
            yield
        finally:
            self._means.is_paused = before

    def global_weights(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that are the same on all members, to evaluate or to save them. Between two rounds
        of local steps these are not the weights that train."""
        return self._rounds.shown() if self._rounds is not None else nullcontext()

    def leave(self) -> None:
        """Leave the job, and the model alone. The others go on. A second call does nothing."""
        if self._left:
            return
        self._left = True
        self._means.detach()
        REGISTRY.forget(self._model(), self._means.trained.parameters.values())
        self._members.leave()
