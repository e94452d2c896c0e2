"""gradwire in Lightning's Trainer: a strategy in place of the one of DistributedDataParallel.

Importing this module registers the strategy's name, so that `Trainer(strategy="gradwire")` works. The module is not wrapped, and
`gw.parallelize` is called on it when Lightning has made its optimizers.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from gradwire.api import Handle
from gradwire.engine import load_state
from gradwire.errors import GradwireError, PlanError, StepStateError
from gradwire.integrations.handles import gather_states
from gradwire.integrations.saved_files import begins_anew, why_others_train
from gradwire.integrations.trackers import Tracked, lines_to
from gradwire.integrations.whole_optimizers import parallelize_whole, refuse_later_steps, refuse_shards
from gradwire.record.recording import Recording

__all__ = ["GradwireStrategy"]

_KEY = "gradwire"


class GradwireStrategy(DDPStrategy):
    """Trains with gradwire's exchange of gradients.

    plan and options: `plan` and the other arguments of `gw.parallelize`, as `options={"accuracy": "exact"}`. Other arguments are
    arguments of Lightning's DDPStrategy that are not passed on to DDP, such as `timeout` and `process_group_backend`. The handle
    is `trainer.strategy.handle`, while the Trainer fits and after. record: a folder for the record of the training, for
    `gradwire report`.

    Accumulation, clipping, manual optimization and mixed precision work as with DDP. A checkpoint holds the states of all ranks
    under the key "gradwire", and `trainer.fit(ckpt_path=...)` continues bit for bit. Every `log_every_n_steps` steps the log gets
    the numbers of `Tracked.facts`. Each logger gets the text of a decision as the hyperparameter `gradwire_decision_{step}`. A
    decision is also a line above the progress bar.

    Raises PlanError for options of DDP, and for a plan with `shard_optimizer`. `fit` raises the errors of `gw.parallelize`.

    Example::

        trainer = lightning.Trainer(strategy=GradwireStrategy(plan=gw.QSGD(bits=4)), devices=2, accelerator="cpu")
    """

    strategy_name = "gradwire"

    def __init__(
        self, plan: Any = "auto", options: Mapping[str, Any] | None = None, record: str | os.PathLike[str] = "", **strategy: Any
    ) -> None:
        super().__init__(**strategy)
        if wrong := sorted(self._ddp_kwargs) or [name for name in strategy if name.startswith("ddp_comm")]:
            raise PlanError(
                f"{wrong[0]!r} is an option of DDP, which this strategy does not use. Leave it out: gradwire needs no option for "
                "unused parameters or bucket sizes. Arguments of gw.parallelize go into options={...}."
            )
        refuse_shards(plan, "Lightning")
        self.handle: Handle | None = None
        self._plan, self._options, self._folder = plan, dict(options or {}), record
        self._tracked: Tracked | None = None
        self._recording: Recording | None = None
        self._training = ExitStack()
        self._saved: dict[str, torch.Tensor] | None = None
        """gradwire's part of the checkpoint that Lightning loads, until the handle takes it up; empty where it has none."""
        self._kept: dict[str, torch.Tensor] | None = None
        """This rank's state at the end of the last fit, on the CPU; None if that ended with an error."""
        self._lacks_state = False
        """Whether the checkpoint that was loaded has optimizer states, and nothing of gradwire."""

    def configure_ddp(self) -> None:
        """Wrap nothing."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Set up the optimizers, then parallelize the module."""
        super().setup_optimizers(trainer)
        self._detach()
        self.handle = parallelize_whole(self.model, self.optimizers or None, self._plan, self._options, "Lightning")
        refuse_later_steps(self.handle, self.lightning_module, self.precision_plugin)
        self._tracked = Tracked(self.handle)
        self._training.callback(self.handle.detach)
        self._training.callback(lines_to(partial(_write, trainer)))
        self._load(self.handle)
        if self._folder:
            self._recording = self._training.enter_context(self.handle.record(self._folder))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own training step inside a call of the module, which marks the begin of a step for gradwire."""
        with self.precision_plugin.train_step_context():
            outputs = self._forward_redirection(self.model, self.lightning_module, "training_step", *args, **kwargs)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._recording is not None and isinstance(loss, torch.Tensor):
            self._recording.log(loss)
        return outputs

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Only accumulate gradients in backwards inside this context."""
        assert self.handle is not None
        with self.handle.no_sync():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Write gradwire's numbers and decisions into the log."""
        trainer = self.lightning_module.trainer
        every = trainer.log_every_n_steps  # 0: never, as with barebones=True
        if self._tracked is not None and every and (trainer.global_step + 1) % every == 0:
            self.lightning_module.log_dict(self._tracked.facts())
            if decision := self._tracked.new_decision():
                for logger in trainer.loggers:
                    logger.log_hyperparams({f"gradwire_decision_{trainer.global_step}": decision})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save Lightning's checkpoint, with the states of all ranks if the checkpoint has optimizer states. After `fit` these are
        the states at its end. Where some rank has none, as after an exception in backward, it warns and saves without them."""
        kept = None if self._tracked is not None else self._kept
        has_state = self._tracked is not None or kept is not None
        if self.handle is not None and has_state and "optimizer_states" in checkpoint:
            checkpoint |= self._gathered(self.handle, kept)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Lightning's checkpoint. gradwire's part is loaded later: by `setup_optimizers`, or where a callback restores it in
        the middle of a fit, by `load_optimizer_state_dict`."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._saved = checkpoint.get(_KEY, {})
        self._lacks_state = bool(checkpoint.get("optimizer_states")) and not self._saved
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of optimizers, and gradwire's part of a checkpoint that was loaded since they were set up."""
        super().load_optimizer_state_dict(checkpoint)
        if self._tracked is None or self.handle is None or self._saved is None:
            return
        try:
            if not self._load(self.handle):
                self.handle.drop_residuals()
        except GradwireError as error:  # after an exception in training, which an error here would hide
            warnings.warn(f"gradwire's part of the checkpoint was not taken up: {error}", stacklevel=2)

    def teardown(self) -> None:
        """Detach gradwire from the module."""
        self._detach()
        self._saved, self._lacks_state = None, False
        super().teardown()

    def _load(self, handle: Handle) -> bool:
        """Take up gradwire's part of the checkpoint, and return whether it could be. Collective."""
        saved = self._saved or {}
        if self._lacks_state:
            why = f"has optimizer states and no {_KEY!r}: it was saved with another strategy, or after a failure"
        else:
            why = why_others_train(handle, saved)
        taken = load_state(handle.session, lambda: saved if saved and not why else None)
        if why:
            warnings.warn(begins_anew("the checkpoint", why), stacklevel=3)
        self._saved, self._lacks_state = None, False
        return taken

    def _detach(self) -> None:
        if self._tracked is not None and self.handle is not None:
            # after an error a checkpoint is saved without it: other ranks may be gone, and would be waited for
            self._kept = None if self.lightning_module.trainer.interrupted else self._state()
        self._training.close()
        self._tracked = self._recording = None

    def _gathered(self, handle: Handle, kept: dict[str, torch.Tensor] | None) -> dict[str, Any]:
        """The states of all ranks under gradwire's key. Nothing, with a warning, in the middle of a step, which all ranks learn;
        and nothing after an exception in training, which an error here would hide."""
        try:
            return {_KEY: gather_states(handle, kept)}
        except Exception as error:
            if not isinstance(error, StepStateError) and not self.lightning_module.trainer.interrupted:
                raise
            warnings.warn(f"the checkpoint is saved without {_KEY!r}; residuals begin at zero after it. {error}", stacklevel=4)
            return {}

    def _state(self) -> dict[str, torch.Tensor]:
        """This rank's state, on the CPU; empty where memory is short for it."""
        assert self.handle is not None
        try:
            return {key: value.cpu() for key, value in self.handle.state_dict().items()}
        except Exception as error:  # the end of a fit goes on
            warnings.warn(f"this rank's state for a later checkpoint could not be kept: {error}", stacklevel=2)
            return {}


def _write(trainer: Trainer, line: str) -> None:
    """Write a line above the Trainer's progress bar."""
    bar = trainer.progress_bar_callback
    bar.print(line) if bar is not None else print(line, file=sys.stderr)


StrategyRegistry.register("gradwire", GradwireStrategy, description="gradwire's exchange of gradients in place of DDP's")
