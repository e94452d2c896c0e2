"""The interface between a schedule and the reducer that runs it: events, and properties that callers depend on.

A schedule decides when a step begins, what must be over when backward ends, and what becomes of the means. It is an object of
its own with the methods of `ScheduleEvents`; it holds the reducer, and inherits from nothing. What more it can do it says by
having the methods of one of the other protocols here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from gradwire.engine.control import BackwardState, RankReports
from gradwire.exchange import Exchange, Saved


@dataclass(frozen=True)
class Traits:
    """The properties of a schedule that its callers depend on. The defaults are those of `backward`."""

    sends_in_backward: bool = True
    """Whether gradients are sent as they become ready, and scripts find the means in `grad`."""
    lanes_busy_between_steps: bool = False
    """Whether lanes may work while the next forward runs: the same on all ranks, whatever scripts do."""
    acts_before_gradients: bool = False
    """Whether `before_gradient` does anything."""
    sends_buffers: bool = False
    """Whether its exchange brings all ranks rank 0's buffers; else they are sent before a forward."""
    learns_order: bool = True
    """Whether the order in which gradients come matters to it."""
    trains_alone: bool = False
    """Whether optimizers step by gradients of this rank alone, and no exchange belongs to such a step. What an exchange that
    does not count sent is in the weights still, and is sent by the next one."""
    weighs_batches: bool = False
    """Whether means may be weighted by the samples of each rank (`Handle.weight`)."""
    keeps_parameters: bool = False
    """Whether the model's trainable parameters must stay as they are, and only its buffers may change."""


@dataclass(frozen=True)
class TrainingJob:
    """The parts of the script that a schedule may need."""

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    """Empty where the schedule leaves optimizers alone and none was passed."""
    compiled_before: int
    """The result of `compiled_frames` before the model was parallelized."""


@dataclass(frozen=True)
class Missing:
    """A parameter that got no gradient in this rank's backward."""

    index: int
    own: torch.Tensor | None
    """Its `grad` before."""
    used_anywhere: bool
    """Whether it got one on another rank."""


class Closed(NamedTuple):
    """A step that counts, at the end of its backward."""

    exposed_s: float
    """The seconds that were waited there."""
    missing: list[Missing]
    reports: RankReports


class ScheduleEvents(Protocol):
    """When a step begins, and what becomes of it. All methods but `on_forward` and `settle` are called on all ranks alike."""

    traits: Traits

    def attach(self) -> None:
        """The reducer's parameters or its exchange are others than before."""

    def on_forward(self, module: torch.nn.Module) -> None:
        """The model's forward begins."""

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is about to be accumulated into parameter.grad, or at the end of backward none was. The first call of a step
        comes before `on_begin`; a backward that does not synchronise calls it too."""

    def on_begin(self) -> None:
        """A step is to begin: call `reducer.begin(exchange)` when it may."""

    def on_end(self, told: "Future[RankReports]") -> None:
        """Backward is over and all gradients were handed to the lanes: wait for `told`, what ranks tell of the step, and for as
        much of the exchange as must be over before backward returns."""

    def on_closed(self, closed: Closed) -> None:
        """The step counts: settle what is missing. Where `traits` send in backward, all other means are in `grad` already."""

    def settle(self) -> None:
        """Wait until nothing is under way and all that a script can see is as it should be. Launches nothing."""

    def let_go(self) -> Callable[[], None]:
        """Return the function to call when the model is gone. It must not refer to the schedule."""

    def detach(self) -> None:
        """Leave the model and the optimizers as they were."""


@runtime_checkable
class SeesBackward(Protocol):
    """A schedule that acts when a backward begins."""

    def after_forward(self, outputs: list[torch.Tensor]) -> None:
        """A backward from these will follow, and will synchronise."""


@runtime_checkable
class KeepsState(Protocol):
    """A schedule that leaves something for the next step."""

    def state(self) -> dict[str, torch.Tensor]:
        """Fields as in `gradwire.exchange.states`."""

    def check(self, saved: Saved, state: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError unless `state` is what `load` takes."""

    def load(self, saved: Saved, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `state` returned, when `check` finds nothing wrong with it."""


@runtime_checkable
class EndsLater(Protocol):
    """A schedule whose observers learn of a step's end when the next one begins."""

    @property
    def untold(self) -> bool:
        """Whether a step has ended, and observers do not know it yet."""


@runtime_checkable
class CopiesWeights(Protocol):
    """A schedule with weights in addition to the model's."""

    def weight_bytes(self) -> int:
        """Bytes of these weights now, and of what steps them."""


@runtime_checkable
class ClipsGradients(Protocol):
    """A schedule that can clip gradients before they are gathered."""

    def clip_grad_norm_(self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """See `Handle.clip_grad_norm_`. None: torch's way is to be taken."""


@runtime_checkable
class ShardsOptimizer(Protocol):
    """A schedule that cuts the optimizer's state into shards."""

    def optimizer_state_dict(self, rank: int | None) -> dict[str, Any]:
        """See `Handle.optimizer_state_dict`."""

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Handle.load_optimizer_state_dict`."""

    def check_exchange(self, exchange: Exchange) -> None:
        """Raises StepStateError where this exchange cannot stand in for the present one."""

    def check_parameters(self, model: torch.nn.Module) -> None:
        """Raises StepStateError where the model's trainable parameters changed and must not."""

    def check_join(self) -> None:
        """Raises StepStateError where ranks cannot have different numbers of batches."""


@runtime_checkable
class Launches(Protocol):
    """A schedule that launches steps by itself, when the optimizer steps."""

    def send_nothing(self, state: BackwardState) -> None:
        """Take part in one step with zeros, and no update."""

    def before_reset(self) -> bool:
        """The script calls `reset()`. Return whether this rank had a step in hand."""

    def after_reset(self) -> None:
        """All ranks go on."""


@runtime_checkable
class PutsOff(Protocol):
    """A schedule with a step in hand while others look at the last one."""

    def when_idle(self, act: Callable[[], None]) -> None:
        """Do something between steps: at once, or where a step is in hand when that is over. Collective, as steps are."""


@runtime_checkable
class Corrects(Protocol):
    """A schedule some of whose steps run other buckets than the plan's."""

    def correcting(self) -> tuple[Exchange | None, float]:
        """The exchange that some steps run instead of the plan's, and the part of all steps that these are."""

    def drop_residuals(self) -> None:
        """Forget what the other buckets have not sent yet."""
