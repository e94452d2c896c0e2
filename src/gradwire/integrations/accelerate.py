"""gradwire in Hugging Face Accelerate, in place of DistributedDataParallel.

Call `prepare` in place of `accelerator.prepare`. The model is not wrapped: Accelerate prepares the model as for an evaluation
(device, mixed precision, compilation), and `gw.parallelize` is called on the model. All else is Accelerate's own.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step

from gradwire.api import Handle
from gradwire.core import show
from gradwire.errors import PlanError
from gradwire.integrations.handles import NoSync, load_handle, save_handle
from gradwire.integrations.trackers import Tracked
from gradwire.integrations.whole_optimizers import heed_options_of_ddp, parallelize_whole, refuse_shards

__all__ = ["prepare"]

_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


_INSIDE = "gradwire_inside"
"""The attribute of a patched step that has the step inside."""


def prepare(accelerator: Accelerator, *objects: Any, plan: Any = "auto", **options: Any) -> tuple[Any, ...]:
    """Prepare objects as `accelerator.prepare` does, with gradwire in place of DDP for the model among the objects.

    objects: one model, and any number of optimizers, data loaders and schedulers. plan and options: as in `gw.parallelize`. Every
    rank calls it. Returns the prepared objects in their order. The handle is the last one of the list `accelerator.gradwire`. A
    script of one process, without a launcher, trains as without gradwire. `accelerator.free_memory` detaches the handles of all
    models; another `prepare` of the same model replaces its handle.

    `accelerator.accumulate`, `no_sync`, `trigger_sync_in_backward`, `backward` and `clip_grad_norm_` work as before. `save_state`
    also writes a file of every rank, `gradwire_{n}/gradwire-rank{r}.pt` for the n-th handle. `load_state` reads these, and the
    run goes on bit for bit. `log` adds the numbers of `Tracked.facts` and the text of each decision, `gradwire_decision`, so all
    trackers get them.

    `broadcast_buffers=False` in Accelerate's DistributedDataParallelKwargs leaves each rank its own buffers.

    Raises PlanError unless there is one model, where Accelerate shards it (DeepSpeed, FSDP, ..), for a communication hook in
    DistributedDataParallelKwargs, and for a plan with `shard_optimizer`; also as `gw.parallelize`.

    Example, in a script started by `accelerate launch` or torchrun::

        from gradwire.integrations.accelerate import prepare

        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, plan="auto")
    """
    places = [at for at, each in enumerate(objects) if isinstance(each, torch.nn.Module)]
    if len(places) != 1:
        raise PlanError(f"{len(places)} models were passed to prepare(). Call it once for each model that trains.")
    if accelerator.distributed_type in _SHARDED:
        raise PlanError(
            f"Accelerate shards the model ({show(str(accelerator.distributed_type))}), and gradwire averages gradients of whole "
            "models. Configure Accelerate for plain data parallelism: `accelerate config`, no DeepSpeed and no FSDP."
        )
    refuse_shards(plan, "Accelerate")
    if not dist.is_initialized():
        return _as_tuple(accelerator.prepare(*objects))
    wraps = accelerator.prepare_model
    accelerator.prepare_model = partial(wraps, evaluation_mode=True)
    try:
        prepared = _as_tuple(accelerator.prepare(*objects))
    finally:
        accelerator.prepare_model = wraps
    model, optimizers = prepared[places[0]], [each for each in prepared if isinstance(each, torch.optim.Optimizer)]
    handles = _handles_of(accelerator)
    handles.forget([each for each in handles if not each.attached or each.session.model is model])
    heed_options_of_ddp(accelerator.ddp_handler, model)
    handle = parallelize_whole(model, plain_optimizers(optimizers) or None, plan, options, "Accelerate")
    model.no_sync = NoSync(handle)
    handles.add(handle)
    return prepared


def plain_optimizers(optimizers: Iterable[Any]) -> list[Any]:
    """The optimizers inside those of Accelerate, whose steps then are those that a schedule puts in their place."""
    for each in optimizers:
        if type(each) is AcceleratedOptimizer and each.scaler is not None:
            each.__class__ = _ScaledOptimizer
    return [getattr(each, "optimizer", each) for each in optimizers]


class _ScaledOptimizer(AcceleratedOptimizer):
    """An optimizer with a GradScaler. With each step Accelerate puts back the `step` that the optimizer inside had when it was
    prepared, and schedules put another one in its place after that. Here it is the one from before the step."""

    @property
    def _optimizer_patched_step_method(self) -> Any:
        """Is read as a step begins."""
        step = self.optimizer.step
        step = getattr(step, _INSIDE, step)  # where the last step raised, Accelerate did not put it back
        self.__dict__["_optimizer_original_step_method"] = step
        patched = patch_optimizer_step(self, step)
        setattr(patched, _INSIDE, step)
        return patched

    @_optimizer_patched_step_method.setter
    def _optimizer_patched_step_method(self, step: Any) -> None:
        """Do nothing: Accelerate sets it where a copy is loaded."""


def _as_tuple(prepared: Any) -> tuple[Any, ...]:
    return prepared if isinstance(prepared, tuple) else (prepared,)


class _OwnHandles(list[Handle]):
    """The handles of the models that train, and their numbers for trackers."""

    def __init__(self) -> None:
        super().__init__()
        self._tracked: list[Tracked] = []

    def add(self, handle: Handle) -> None:
        self.append(handle)
        self._tracked.append(Tracked(handle))

    def forget(self, dead: Iterable[Handle]) -> None:
        """Detach handles of an earlier preparation. Their states belong to no model that trains."""
        for handle in dead:
            model, at = handle.session.model, self.index(handle)
            handle.detach()
            del self[at], self._tracked[at]
            if model is not None:
                vars(model).pop("no_sync", None)

    def folders(self, folder: str) -> list[tuple[Handle, Path]]:
        """The folder of each handle in a folder of Accelerate's."""
        return [(handle, Path(folder, f"gradwire_{at}")) for at, handle in enumerate(self)]

    def facts(self) -> dict[str, Any]:
        """Numbers and new decisions for trackers. The names of the second model begin with `gradwire_1_`, and so on."""
        found: dict[str, Any] = {}
        for at, each in enumerate(self._tracked):
            own: dict[str, Any] = each.facts()
            if decision := each.new_decision():
                own["gradwire_decision"] = decision
            found |= {name.replace("gradwire_", f"gradwire_{at}_", 1) if at else name: value for name, value in own.items()}
        return found


def _handles_of(accelerator: Accelerator) -> _OwnHandles:
    """The handles, which `save_state`, `load_state`, `free_memory`, `log` and `trigger_sync_in_backward` heed from now on."""
    if "gradwire" in vars(accelerator):
        return accelerator.gradwire  # type: ignore[no-any-return]
    handles = accelerator.gradwire = _OwnHandles()
    folders: list[str] = []
    load, free, log = accelerator.load_state, accelerator.free_memory, accelerator.log
    trigger = accelerator.trigger_sync_in_backward

    def save_too(models: Any, weights: Any, folder: str) -> None:
        for handle, own in handles.folders(folder):
            if handle.attached:
                save_handle(handle, own)

    def load_too(*arguments: Any, **named: Any) -> None:
        load(*arguments, **named)
        folder = folders.pop()
        for handle, own in handles.folders(folder):  # last: some schedules compare their state with the weights
            if handle.attached:
                load_handle(handle, own)

    def free_too(*objects: Any) -> Any:
        handles.forget(handles[:])
        return free(*objects)

    def log_too(values: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        log(handles.facts() | dict(values), *rest, **named)

    def trigger_too(model: Any) -> AbstractContextManager[None]:
        handle = next((each for each in handles if each.attached and each.session.model is model), None)
        return trigger(model) if handle is None else handle.session.reducer.sending()

    accelerator.register_save_state_pre_hook(save_too)
    accelerator.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
    accelerator.load_state, accelerator.free_memory, accelerator.log = load_too, free_too, log_too
    accelerator.trigger_sync_in_backward = trigger_too
    return handles
