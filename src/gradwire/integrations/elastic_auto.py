"""`plan="auto"` among members that come and go: each quorum decides anew, from its own steps alone."""

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.auto import Auto, AutoDecision
from gradwire.core import TensorInfo
from gradwire.errors import CommunicationError
from gradwire.exchange import Exchange
from gradwire.integrations.ddp_job import DDPJob
from gradwire.integrations.members import Members
from gradwire.plan import Policy

__all__ = ["ElasticAuto"]


class ElasticAuto:
    """The driver of the present quorum's exchange, and the job that the driver reads."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[TensorInfo], accuracy: str | float) -> None:
        """tensors: in registration order."""
        self._model: Any = model
        self._tensors, self._accuracy = list(tensors), accuracy
        self._job: DDPJob | None = None

    def plan(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """The policy of a quorum until it decides."""
        return self._driver(ranks).first_policy(tensors, ranks)

    def use(self, exchange: Exchange, all_train: bool) -> None:
        """Drive this exchange from the step on in which all members train: drivers act together, and a joiner that catches up
        has none yet. The decisions and the measurements of another exchange are forgotten."""
        if self._job is not None and self._job.exchange is not exchange:
            self.close()
        if self._job is None and all_train:
            parameters = dict(self._model.named_parameters())
            self._job = DDPJob(self._model, exchange.group, parameters, self._tensors, None)
            self._job.run(exchange, self._driver(exchange.group.world_size))

    def came(self, name: str, gradient: torch.Tensor | None) -> None:
        if self._job is not None and gradient is not None:
            self._job.came([name], [gradient], 0)

    def ended(self, members: Members, exposed_s: float) -> None:
        """A step counts, whose end was waited for so long. Drivers exchange numbers: where a member is gone the quorum ends."""
        if self._job is not None:
            try:
                self._job.ended(exposed_s)
            except CommunicationError:
                self.close()
                members.give_up()

    @property
    def decision(self) -> AutoDecision | None:
        """The last decision for the present members; None before the first."""
        driver = self._job.driver if self._job is not None else None
        return next(reversed(driver.decisions), None) if driver is not None else None

    def close(self) -> None:
        """Drive nothing."""
        if self._job is not None:
            self._job.leave()
            self._job = None

    def _driver(self, ranks: int) -> Auto:
        return Auto(self._accuracy, ("backward",), ranks)
