"""The scale of the loss that a `torch.amp.GradScaler` multiplied, the residuals that follow it, and the steps that it leaves out.

Residuals are parts of scaled gradients. When the scale changes, they must change by the same factor. When a scaler lowers it,
gradients were not finite, and it left out their step: residuals of that step are dropped. A spec with a magnitude of its own (a
threshold, a clip, signs of size 1) cannot follow: the division by the scale would give means of another size.

A scaler's `scale` puts a hook on the loss. The hook notes the graph task of the backward that begins there, and the scale. Hooks
on gradients, DDP's communication hook, FSDP2's reduce-scatters and the callbacks at the end of a backward run in that task, or in
the task of a reentrant checkpoint inside it.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from gradwire.core import Spec
from gradwire.engine.torch_hooks.hooks import StepHook, in_reentrant_backward, tensors_in
from gradwire.errors import StepStateError
from gradwire.exchange import Exchange
from gradwire.transport import Link, MergedValues, Streams, merge_over_ranks, streams_for

_NO_SCALE = 0.0


class ScaleChange(NamedTuple):
    """The change of the scale of a loss from one backward to the next."""

    factor: float = 1.0
    """The scale over that before."""
    left_out: bool = False
    """Whether the scaler left out the update of the last step, since its gradients were not finite."""

    @property
    def is_any(self) -> bool:
        """Whether anything changed."""
        return self != ScaleChange()


class LossScale:
    """The scale of the losses of one model. Scalers are watched from the first object on.

    Example, in the first hook of each backward, before a step of the exchange begins::

        scale.follow(exchange)
    """

    def __init__(self) -> None:
        self._last = _NO_SCALE
        """The scale of the last backward whose loss a scaler scaled."""
        self._left_out = 0
        """The steps that the scaler had left out until then."""
        watch_scalers()

    def follow(self, exchange: Exchange, joining: bool = False) -> None:
        """Let what the exchange has not sent yet follow `change`. Between its steps. Raises what `change` raises."""
        if (change := self.change(exchange.plan.specs, exchange if joining else None)).is_any:
            exchange.residuals.follow(change.factor, change.left_out)

    def change(self, specs: Iterable[Spec], joining: Exchange | None = None) -> ScaleChange:
        """Return the change of the scale from the last backward to the present one; none where no scaler scaled the loss.

        specs: what this backward sends. joining: the exchange whose ranks tell each other the scale, where some may be without a
        batch and so without a backward; None: each rank knows the scale.

        Raises StepStateError where a scaler scaled the loss and a spec does not follow the scale: on all ranks, which have one
        scale. CommunicationError where a rank of `joining` died or stalled.
        """
        scale, left_out = scale_of_this_backward() or (_NO_SCALE, 0)
        if joining is not None:
            lanes = joining.lanes
            with lanes.told("the scale of the loss", joining.step):
                told = lanes.control.submit(functools.partial(_largest, own=(scale, left_out), tag=lanes.first_tag)).result()
            scale, left_out = told[0], int(told[1])
        if scale == _NO_SCALE:
            return ScaleChange()
        if scale != 1 and (fixed := next((spec for spec in specs if not spec.follows_scale), None)):
            raise StepStateError(
                f"a GradScaler multiplied the loss by {scale:g}, and the plan has {fixed!r}, which has a magnitude of its own (a "
                "threshold, a clip, or signs of size 1). It sees scaled gradients, and the division by the scale gives means of "
                "another size. Train in bfloat16, which needs no GradScaler, or use a spec that follows the scale, such as "
                "gw.QSGD(bits=4)."
            )
        known = self._last != _NO_SCALE
        change = ScaleChange(scale / self._last, left_out != self._left_out) if known else ScaleChange()
        self._last, self._left_out = scale, left_out
        return change

    @property
    def known(self) -> bool:
        """Whether a scaler scaled a loss of this rank, or another rank sent its scale."""
        return self._last != _NO_SCALE

    def forget(self) -> None:
        """The residuals are others, of the scale that comes next."""
        self._last = _NO_SCALE


def _largest(link: Link, own: tuple[float, ...], tag: int) -> Sequence[float]:
    return merge_over_ranks(link, MergedValues(most=own), tag).most


class LeftOutHook(StepHook):
    """A post-hook that does nothing, but for the steps of the optimizer that a GradScaler leaves out: there it calls `act`. Only
    some of the ranks may have gradients that are not finite, and all have to make the same steps."""

    def __init__(self, owner: Any, act: Callable[..., None]) -> None:
        super().__init__(owner, act)
        self.calls = 0
        """The steps that the script asked for and that were not left out; the owner counts them."""
        watch_scalers()

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> None:
        """Do nothing."""

    def left_out(self, *arguments: Any) -> None:
        """Call `act` in place of a step."""
        StepHook.__call__(self, *arguments)


class CountingHook(LeftOutHook):
    """A post-hook that counts the steps of an optimizer, those too that a GradScaler leaves out."""

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        self.left_out(*arguments)


def scale_of_this_backward() -> tuple[float, int] | None:
    """The scale of the loss that the present backward began with, and the steps that its scaler had left out until then. None
    outside of a backward, and if no scaler scaled the loss."""
    return _SCALES.of_backward(torch._C._current_graph_task_id())


def watch_scalers() -> None:
    """Keep track of backwards from scaled losses, and of steps that scalers leave out, from now on."""
    plain, plain_step, plain_update = torch.amp.GradScaler.scale, torch.amp.GradScaler.step, torch.amp.GradScaler.update
    if hasattr(plain, "_gradwire"):
        return

    @functools.wraps(plain)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled():
            for tensor in tensors_in(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_begins, weakref.ref(self)))
        return scaled

    @functools.wraps(plain_step)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        hooks = getattr(optimizer, "_optimizer_step_post_hooks", {}).values()
        counting = [(each, each.calls) for each in hooks if isinstance(each, LeftOutHook)]
        result = plain_step(self, optimizer, *arguments, **named)
        for each, before in counting:
            if each.calls == before:
                each.left_out(optimizer, (optimizer, *arguments), named)
        return result

    @functools.wraps(plain_update)
    def update(self: torch.amp.GradScaler, *arguments: Any, **named: Any) -> None:
        plain_update(self, *arguments, **named)
        _SCALES.updated(self, chosen=(*arguments, *named.values(), None)[0] is not None)

    scale._gradwire = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    torch.amp.GradScaler.update = update  # type: ignore[method-assign]


def _begins(scaler: "weakref.ref[torch.amp.GradScaler]", gradient: torch.Tensor) -> None:
    if (living := scaler()) is not None:
        _SCALES.begins(living, torch._C._current_graph_task_id())


class _Scales:
    """The scales of scalers. Each is copied to the host when it changes, so that backward does not wait for the device."""

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[torch.amp.GradScaler, _ScaleCopy] = weakref.WeakKeyDictionary()
        self._backwards: weakref.WeakKeyDictionary[torch.amp.GradScaler, tuple[int, float, int]] = weakref.WeakKeyDictionary()
        """The graph task of the last backward from a loss of each scaler, its scale, and the steps that the scaler had left out
        until then, until the backward ends."""
        self._seen: weakref.WeakKeyDictionary[torch.amp.GradScaler, tuple[float, int]] = weakref.WeakKeyDictionary()
        """The scale of the last backward, and the steps that the scaler had left out."""

    def begins(self, scaler: torch.amp.GradScaler, task: int) -> None:
        """The backward `task` comes from a loss of this scaler."""
        if task == -1 or task == self._backwards.get(scaler, (-1,))[0]:  # compiled autograd has no task
            return
        self._backwards.pop(scaler, None)
        scale, (before, left_out) = self.of(scaler), self._seen.get(scaler, (0.0, 0))
        copy = self._copies.get(scaler)
        if scale < before and copy is not None and copy.is_of(scaler._scale) and not copy.chosen:
            left_out += 1
        self._seen[scaler] = scale, left_out
        self._backwards[scaler] = task, scale, left_out
        ends = functools.partial(self._ends, weakref.ref(scaler), task)
        # FSDP2's last reduce-scatters are in callbacks of this kind: be behind those that come until then
        _at_the_end(functools.partial(_at_the_end, ends))

    def _ends(self, scaler: "weakref.ref[torch.amp.GradScaler]", task: int) -> None:
        if (living := scaler()) is not None and self._backwards.get(living, (-1,))[0] == task:
            del self._backwards[living]

    def of_backward(self, task: int) -> tuple[float, int] | None:
        """See `scale_of_this_backward`; of the backward that this one runs in, in reentrant checkpointing."""
        running = [*self._backwards.values()] if task != -1 else []
        found = next((each for each in running if each[0] == task), None)
        if found is None and running and in_reentrant_backward():
            found = running[-1]
        return None if found is None else found[1:]

    def updated(self, scaler: torch.amp.GradScaler, chosen: bool) -> None:
        """The scaler may have another scale now. chosen: the script chose it."""
        scale = getattr(scaler, "_scale", None)  # a disabled scaler has none
        if scale is None:
            return
        copy = self._copies.get(scaler)
        if copy is None:
            host = torch.empty(scale.shape, dtype=scale.dtype, device="cpu", pin_memory=scale.is_cuda)
            copy = self._copies[scaler] = _ScaleCopy(host, streams_for(scale.device))
        copy.take(scale, chosen)

    def of(self, scaler: torch.amp.GradScaler) -> float:
        """The scale. Waits for the device before the scaler's first update, and if something else has changed the scale."""
        copy = self._copies.get(scaler)
        return scaler.get_scale() if copy is None or not copy.is_of(scaler._scale) else copy.value()


def _at_the_end(act: Callable[[], None]) -> None:
    """Call `act` at the end of the present backward."""
    Variable._execution_engine.queue_callback(act)


class _ScaleCopy:
    """A copy of one scale on the host."""

    def __init__(self, host: torch.Tensor, streams: Streams) -> None:
        self._host, self._streams = host, streams

    def take(self, scale: torch.Tensor, chosen: bool) -> None:
        """chosen: by the script, and not by the scaler."""
        self.chosen = chosen
        self._host.copy_(scale, non_blocking=True)
        self._mark, self._scale, self._version = self._streams.mark(), weakref.ref(scale), scale._version

    def is_of(self, scale: torch.Tensor | None) -> bool:
        """Whether it is a copy of this tensor as it is now."""
        return scale is not None and self._scale() is scale and scale._version == self._version

    def value(self) -> float:
        """The scale, when the copy is done. What the script queued since then is not awaited."""
        self._streams.synchronize(self._mark)
        return float(self._host)


_SCALES = _Scales()
