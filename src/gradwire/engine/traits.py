"""In what schedules differ for those who use them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from gradwire.engine.executor import Executor
from gradwire.engine.layout import BucketBuffers
from gradwire.errors import StepStateError

__all__ = ["Traits"]


_WHOLE = (
    "this handle's schedule leaves optimizers whole, on every rank. Call {}() of the optimizer itself; only "
    "gw.Pipelined(shard_optimizer=True) cuts its state into shards."
)


class Traits:
    """As they are for the `backward` schedule."""

    lanes_busy_between_steps: ClassVar[bool] = False
    """Whether lanes may work while the next forward runs: the same on all ranks, whatever scripts do."""
    acts_before_gradients: ClassVar[bool] = False
    """Whether `before_gradient` does anything."""
    sends_buffers: ClassVar[bool] = False
    """Whether its exchange brings all ranks rank 0's buffers; else they are sent before a forward."""
    learns_order: ClassVar[bool] = True
    """Whether the order in which gradients come matters to it."""
    keeps_parameters: ClassVar[bool] = False
    """Whether the model's trainable parameters must stay as they are, and only its buffers may change."""
    first_gradient_s = -1.0
    """When the first gradient of the last step came (time.perf_counter); -1 where no gradient is sent in backward."""
    on_begin: Callable[[], None] = staticmethod(lambda: None)
    """Called when the first gradient of a step came, before anything is sent."""
    step: int
    """Steps so far: the number of the next one."""
    stepped: bool = True
    """Whether this rank's script did step the optimizer after the last backward, where the schedule knows."""

    @property
    def next_step(self) -> int:
        """The number of the step whose forward begins next."""
        return self.step

    def flush(self) -> None:
        """Wait until nothing is under way and all that a script can see is as it should be. Launches nothing."""

    def when_idle(self, act: Callable[[], None]) -> None:
        """Do something between steps: at once, or where a step is in hand when that is over. Collective, as steps are."""
        act()

    def correcting(self) -> tuple[Sequence[BucketBuffers], float]:
        """The buckets that some steps run instead of the plan's, and the part of all steps that these are."""
        return (), 0.0

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """See `Handle.clip_grad_norm_`."""
        self.flush()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def optimizer_state_dict(self, rank: int | None) -> dict[str, Any]:
        """See `Handle.optimizer_state_dict`."""
        raise StepStateError(_WHOLE.format("state_dict"))

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Handle.load_optimizer_state_dict`."""
        raise StepStateError(_WHOLE.format("load_state_dict"))

    def check_executor(self, executor: Executor) -> None:
        """Raises StepStateError where `attach` cannot take these buckets in place of the present ones."""

    def check_parameters(self, model: torch.nn.Module) -> None:
        """Raises StepStateError where the model's trainable parameters changed and must not."""

    def check_join(self) -> None:
        """Raises StepStateError where ranks cannot have different numbers of batches."""

    def before_forward(self, module: torch.nn.Module) -> None:
        """The model's forward begins."""
        if not torch.is_grad_enabled():
            self.flush()
