"""gradwire in the Trainer of Hugging Face Transformers, in place of DistributedDataParallel.

The Trainer asks Accelerate to prepare the model. Here the model is not wrapped, and `gw.parallelize` is called on it. Gradient
accumulation, clipping, mixed precision, evaluation and checkpoints are the Trainer's own.
"""

import os
import sys
import warnings
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from gradwire.api import Handle
from gradwire.errors import PlanError, StepStateError
from gradwire.integrations.accelerate import plain_optimizers
from gradwire.integrations.handles import NoSync, load_handle, save_handle
from gradwire.integrations.trackers import Tracked, lines_to
from gradwire.integrations.whole_optimizers import heed_options_of_ddp, parallelize_whole, refuse_shards
from gradwire.record.recording import Recording

__all__ = ["GradwireCallback", "use"]


def use(trainer: Trainer, plan: Any = "auto", record: str | os.PathLike[str] = "", **options: Any) -> "GradwireCallback":
    """Let gradwire average the gradients of a Trainer's model, in every `trainer.train()` from now on.

    plan and options: as in `gw.parallelize`. record: a folder for the record of the training, for `gradwire report`. Call it
    after the Trainer is made, on every rank. Returns the callback that it adds to the Trainer. The callback has the `handle`,
    while the Trainer trains and after.

    Each checkpoint gets a file `gradwire-rank{r}.pt` of every rank. `trainer.train(resume_from_checkpoint=...)` reads these
    files, and continues bit for bit. The Trainer's log, and so each tracker, gets the numbers of `Tracked.facts` and the text of
    each decision, `gradwire_decision`. A decision is also a line above the progress bar.

    A Trainer of one process, started without torchrun, trains as without gradwire. Raises PlanError for a Trainer with DeepSpeed
    or FSDP, for a plan with `shard_optimizer`, and if it was called for this Trainer before. `train()` raises the errors of
    `gw.parallelize`.

    Example, in a script started by torchrun::

        trainer = Trainer(model, arguments, train_dataset=dataset)
        gradwire.integrations.transformers.use(trainer, plan="auto")
        trainer.train()
    """
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise PlanError(
            "the Trainer uses DeepSpeed or FSDP, which shard parameters, and gradwire averages gradients of whole ones. Remove "
            "`deepspeed` and `fsdp` from the TrainingArguments."
        )
    if any(isinstance(each, GradwireCallback) for each in trainer.callback_handler.callbacks):
        raise PlanError("use() was called on this Trainer already: one plan averages its gradients. Call it once.")
    refuse_shards(plan, "the Trainer")
    callback = GradwireCallback(trainer, plan, options, record)
    trainer.add_callback(callback)
    return callback


class GradwireCallback(TrainerCallback):
    """Parallelizes a Trainer's model when it trains, and saves and loads the handle with the Trainer's checkpoints."""

    def __init__(self, trainer: Trainer, plan: Any, options: dict[str, Any], record: str | os.PathLike[str] = "") -> None:
        self.handle: Handle | None = None
        """The handle of the current training, or else of the last one."""
        self._trainer, self._plan, self._options, self._folder = trainer, plan, options, record
        self._model: Any = None
        self._checkpoint: str | None = None
        self._tracked: Tracked | None = None
        self._recording: Recording | None = None
        self._training = ExitStack()
        self._plain_prepare = trainer.accelerator.prepare_model
        self._plain_train, self._plain_log, self._plain_save = trainer.train, trainer.log, trainer._save_checkpoint
        trainer.accelerator.prepare_model = self._prepare_model
        trainer.train, trainer.log, trainer._save_checkpoint = self._train, self._log, self._save

    def _train(self, resume_from_checkpoint: Any = None, *rest: Any, **named: Any) -> Any:
        folder = self._trainer.args.output_dir
        self._checkpoint = get_last_checkpoint(folder) if resume_from_checkpoint is True else resume_from_checkpoint
        with self._training:
            self._training.callback(self._detach)  # after an error, too: another Trainer may train the model
            self._training.callback(lines_to(self._write))
            return self._plain_train(resume_from_checkpoint, *rest, **named)

    def _write(self, line: str) -> None:
        """Write a line above the Trainer's progress bar."""
        callbacks = self._trainer.callback_handler.callbacks
        bars = [each.training_bar for each in callbacks if isinstance(each, ProgressCallback) and each.training_bar is not None]
        bars[0].write(line, file=sys.stderr) if bars else print(line, file=sys.stderr)

    def _prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Replaces Accelerate's method, which wraps a model that trains in DDP."""
        prepared: Any = self._plain_prepare(model, device_placement, evaluation_mode=True)
        if dist.is_initialized() and not evaluation_mode:
            self._parallelize(prepared)
        return prepared

    def _parallelize(self, model: Any) -> None:
        self._detach()
        (optimizer,) = plain_optimizers([self._trainer.optimizer])
        heed_options_of_ddp(self._trainer.accelerator.ddp_handler, model)
        self.handle = parallelize_whole(model, optimizer, self._plan, self._options, "the Trainer")
        self._model = model
        model.no_sync = NoSync(self.handle)  # Accelerate calls it while gradients are accumulated
        self._tracked = Tracked(self.handle)

    def _detach(self) -> None:
        if self._recording is not None:
            self._recording.__exit__(*sys.exc_info())
            self._recording = None
        if self._model is not None and self.handle is not None:
            self.handle.detach()
            del self._model.no_sync
        self._model = None

    def _log(self, logs: dict[str, Any], *rest: Any, **named: Any) -> None:
        if self._tracked is not None and not logs.keys().isdisjoint({"loss", "train_loss"}):
            logs.update(self._tracked.facts())
            if decision := self._tracked.new_decision():
                logs["gradwire_decision"] = decision
        if self._recording is not None and "loss" in logs:
            self._recording.log(logs["loss"])
        self._plain_log(logs, *rest, **named)

    def _save(self, *arguments: Any, **named: Any) -> None:
        """Save the Trainer's checkpoint, with this rank's state. A just-in-time one comes without `on_save`, and maybe in a step,
        where this warns."""
        handle, args, state = self.handle, self._trainer.args, self._trainer.state
        if handle is None or not handle.attached:
            self._plain_save(*arguments, **named)
            return
        handle.flush()  # in the middle of a local step the model holds this rank's own weights
        self._plain_save(*arguments, **named)
        if args.save_only_model:
            return
        folder = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        try:
            save_handle(handle, os.path.join(args.output_dir, folder))
        except StepStateError as error:
            warnings.warn(f"{folder} is saved without this rank's state; residuals begin at zero after it. {error}", stacklevel=2)
            return
        if getattr(args, "enable_jit_checkpoint", False) and (name := _counted_early(handle)):
            warnings.warn(
                f"{folder} is saved between backward and the optimizer's step. Residuals, as that of {name!r}, count "
                "this backward already, and weights do not. So a run that resumes from it is not the same bit for bit.",
                stacklevel=2,
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Load the states that ranks saved with the checkpoint from which the Trainer resumes, and begin the record."""
        if dist.is_initialized() and self._model is None:
            self._take_prepared()
        plain_optimizers([self._trainer.optimizer])  # the Trainer wraps it after the model
        if self._checkpoint and self.handle is not None:
            load_handle(self.handle, self._checkpoint, thaws=True)
        if self._folder and self.handle is not None:
            self._recording = self.handle.record(self._folder).__enter__()

    def _take_prepared(self) -> None:
        """Parallelize a compiled model: where the Trainer prepared it before, in another training or for an evaluation, it does
        not ask Accelerate again."""
        if getattr(self._trainer.accelerator.prepare_model, "__self__", None) is not self:
            raise StepStateError(
                "the Trainer made another Accelerator after gradwire was put in, so DDP averages the gradients. Make the Trainer "
                "anew, and call use(trainer) before train(); a search of hyperparameters needs a Trainer for each trial."
            )
        self._parallelize(self._trainer.model_wrapped)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """End the record, and detach gradwire from the model."""
        self._training.close()


def _counted_early(handle: Handle) -> str:
    """The first tensor with a residual, where gradients were sent and wait for the optimizer's step; or ''."""
    session = handle.session
    sent = session.schedule.traits.sends_in_backward and any(each.grad is not None for each in session.parameters.values())
    return next(iter(session.exchange.residuals.names()), "") if sent else ""
