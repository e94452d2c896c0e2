"""What a driver uses of a session, in one place: its ranks, its steps, and its plan."""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch

from gradwire.collectives import Grid, Group, Link, LinkError
from gradwire.core.plan import Plan
from gradwire.core.schedules import Schedule
from gradwire.core.tensors import TensorInfo
from gradwire.engine.reducer import Reducer
from gradwire.engine.session import Session
from gradwire.exchange.agreement import gather_bytes
from gradwire.planner.policy import Policy

__all__ = ["Live"]

T = TypeVar("T")


class Live:
    """A session between two steps. Everything that talks is collective."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def steps(self) -> Reducer:
        return self.session.reducer

    @property
    def group(self) -> Group:
        return self.session.group

    @property
    def grid(self) -> Grid:
        return self.group.grid

    @property
    def step(self) -> int:
        """Steps that counted so far."""
        return self.steps.step

    @property
    def device(self) -> torch.device:
        return self.session.device

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self.session.parameters

    @property
    def infos(self) -> list[TensorInfo]:
        """The trainable tensors, in registration order. Another list when the model changed."""
        return self.session.tensors

    @property
    def plan(self) -> Plan:
        return self.session.plan

    def plan_of(self, policy: Policy) -> Plan:
        """What a policy makes of the tensors in the order in which their gradients become ready: the same on all ranks."""
        return self.session.plan_of(policy)

    @property
    def everybody(self) -> bool:
        """Whether every rank had a batch in this step, which every rank knows."""
        return len(self.steps.active) == self.group.world_size

    @property
    def began_s(self) -> float | None:
        """When the first training forward since the step before began, or where none was seen when the first gradient came
        (time.perf_counter). None: neither was."""
        first_s = self.steps.first_gradient_s
        return self.session.began_s or (first_s if first_s > 0 else None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.session.optimizers

    @property
    def link_us(self) -> float:
        """Time that this rank's lanes spent on links in the last step, and waiting for other ranks."""
        reports = self.session.reports
        return 1e6 * reports[-1].link_s if reports else 0.0

    @property
    def exposed_us(self) -> float:
        """How long the end of the last backward waited for exchanges."""
        reports = self.session.reports
        return 1e6 * reports[-1].exposed_s if reports else 0.0

    def hold(self, on: bool) -> None:
        """Whether in the next steps nothing is sent before the last gradient is there."""
        self.session.lanes.hold = on

    def why_not(self, schedule: Schedule) -> str:
        """Why this rank's script cannot run a schedule, or gains nothing with it; '' if nothing speaks against it."""
        return self.session.why_not(msgspec.structs.replace(self.plan, schedule=schedule))

    def change_to(self, plan: Plan) -> None:
        """Run this plan from the next step on, or where a step is in hand from the one after it. Raises PlanError, on all ranks
        alike, if the engine cannot."""
        if plan is not self.plan and plan.digest() != self.plan.digest():
            self.session.change_to(plan)

    def exchange(self, numbers: Sequence[float]) -> "Callable[[], list[list[float]]]":
        """Send numbers to all ranks; what is returned waits, and gives those of every rank, which may be different many."""
        future = self.session.lanes.control.submit(
            partial(gather_bytes, text=struct.pack(f"<{len(numbers)}d", *numbers))
        )

        def wait() -> list[list[float]]:
            return [
                list(struct.unpack(f"<{len(raw) // 8}d", raw)) for raw in self._told("measured times", future.result)
            ]

        return wait

    def from_first(self, text: str) -> str:
        """What rank 0 has, on all ranks."""
        return self.from_all(text if self.group.rank == 0 else "")[0]

    def from_all(self, text: str) -> list[str]:
        """What each rank has, on all ranks."""
        future = self.session.lanes.control.submit(partial(gather_bytes, text=text.encode() or b" "))
        return [raw.decode().strip() for raw in self._told("what ranks tell of a decision", future.result)]

    def on_lane(self, job: Callable[[Link], T]) -> T:
        """Do something on the first lane, whose link carries gradients."""
        return self._told("the exchanges that measure links", self.session.lanes.data[0].submit(job).result)

    def _told(self, what: str, result: Callable[[], T]) -> T:
        try:
            return result()
        except LinkError as error:
            raise self.steps.broken(what, error) from error
