"""Steps of optimizers: who asks for one, what stands in place of one, and steps of some parameters alone."""

import os
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import optimizer as torch_optimizer

from gradwire.engine.torch_hooks.hooks import StepHook, makes_state
from gradwire.errors import StepStateError

_HEARERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_own = threading.local()
os.register_at_fork(after_in_child=_HEARERS.clear)  # steps of a forked process are its own affair


def hear(hearer: Any) -> None:
    """Call its `before_step(optimizer)` before each step that a script asks for, as long as it lives."""
    _HEARERS.add(hearer)
    if announce not in torch_optimizer._global_optimizer_pre_hooks.values():
        torch_optimizer.register_optimizer_step_pre_hook(announce)


def hear_no_more(hearer: Any) -> None:
    """Tell it of nothing from now on."""
    _HEARERS.discard(hearer)


def announce(optimizer: torch.optim.Optimizer, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> None:
    """The hook. Steps inside `own_steps` are gradwire's, and were announced when the script asked for them."""
    if not torch.compiler.is_compiling() and not getattr(_own, "inside", False) and not makes_state(arguments[1:], named or {}):
        for hearer in list(_HEARERS):
            hearer.before_step(optimizer)


@contextmanager
def own_steps() -> Iterator[None]:
    """Tell nobody of the steps inside."""
    before, _own.inside = getattr(_own, "inside", False), True
    try:
        yield
    finally:
        _own.inside = before


class PassedOptimizers:
    """The optimizers whose steps a schedule counts, and where others step the model: a schedule that trains ranks apart would
    exchange nothing then, without a word."""

    _MOST = 10
    """Steps of another optimizer while none of these steps. A GradScaler may leave some of theirs out; and a wrapper may step
    one of them, or be one of them and step another."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._passed = weakref.WeakSet(optimizers)
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._passed

    def check(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, torch.nn.Parameter | None]],
        counts: str,
        cure: str,
        others_train: bool = True,
    ) -> None:
        """It is about to step those of its parameters that have a gradient. Raises StepStateError if it is another one, and none
        of those passed steps any more. named: its parameters that the model has, as far as they live. counts: who counts their
        steps, and where they were passed. Without `others_train` it also raises for a parameter that none of those passed has:
        only a wrapper of theirs may step then."""
        if optimizer in self._passed:
            self._others.clear()
            return
        steps_now = {name: each for name, each in named if each is not None and each.grad is not None}
        if not steps_now:
            return
        name = next(iter(steps_now))
        if not others_train and self._passed:
            theirs = {id(each) for passed in self._passed for group in passed.param_groups for each in group["params"]}
            if lacking := [name for name, each in steps_now.items() if id(each) not in theirs]:
                raise StepStateError(
                    f"{type(optimizer).__name__} steps {lacking[0]!r}, which no optimizer that was passed has: {counts}. What "
                    "another one writes is lost, or differs from rank to rank. Pass one optimizer with all parameters that are "
                    "trained, in several param_groups, or use schedule='backward'."
                )
        self._others[optimizer] = steps = self._others.get(optimizer, 0) + 1
        if steps >= self._MOST or not self._passed:
            raise StepStateError(
                f"{type(optimizer).__name__} steps {name!r}, and no optimizer steps that was passed: {counts}. So ranks train "
                f"apart, and nothing is averaged any more. Pass all optimizers that step the model. For a new one {cure}."
            )


Groups = list[dict[str, Any]]
"""An optimizer's `param_groups`."""
Whole = Callable[[], Any]
"""The step as it was before: of all parameters."""


class Stepping:
    """Lets `optimizer.step()` of each of these call `act(optimizer, whole)`, until `remove()`.

    What it returns is what the script gets; `whole()` is the step as it was before. Works with learning-rate schedulers,
    which stand before `step` themselves, made earlier or later, and with several of its kind. Keeps neither the owner of
    the bound method `act` nor optimizers alive; without the owner steps are as before. A closure is refused.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], act: Callable[[Any, Whole], Any]) -> None:
        self._act: weakref.WeakMethod[Callable[[Any, Whole], Any]] | None = weakref.WeakMethod(act)
        # weakly, also our method: tensors that wait keep schedules alive where no garbage collector looks, and an optimizer may
        # have hooks that keep the model
        self._ours: list[tuple[weakref.ref[torch.optim.Optimizer], weakref.ref[types.MethodType]]] = []
        for optimizer in optimizers:
            before = optimizer.__dict__.get("step")
            ours = types.MethodType(self._stepper(before, type(optimizer).step), optimizer)
            self._ours.append((weakref.ref(optimizer), weakref.ref(ours)))
            optimizer.step = ours  # type: ignore[method-assign]

    def _stepper(self, before: Any, type_step: Any) -> Callable[..., Any]:
        reference = weakref.ref(self)

        @_disable_dynamo
        def step(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
            stand_in = before if before is not None else types.MethodType(type(optimizer).step, optimizer)

            def whole() -> Any:
                try:
                    with own_steps():
                        return stand_in(*arguments, **named)
                except BaseException as error:
                    error._gradwire_of_script = True  # type: ignore[attr-defined]
                    raise

            stepping = reference()
            act = stepping._act() if stepping is not None and stepping._act is not None else None
            if act is None or makes_state(arguments, named):
                return stand_in(*arguments, **named)
            announce(optimizer)
            if any(argument is not None for argument in [*arguments, *named.values()]):
                raise StepStateError(
                    f"{type(optimizer).__name__}.step was called with a closure (or another argument): it would run backward "
                    "inside the step, and this schedule steps parameters after it. Call backward() first and step() without "
                    "one, or use schedule='backward'."
                )
            # torch's schedulers warn unless the step that they stood before was called first; it may be called later
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return act(optimizer, whole)

        step.before = before  # type: ignore[attr-defined]
        step.__wrapped__ = type_step if before is None else before  # type: ignore[attr-defined]
        if hasattr(before, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    def remove(self) -> None:
        """Steps are as before. Where something else stands before ours since, ours stays and only calls on."""
        self._act = None
        for reference, ours in self._ours:
            optimizer, own = reference(), ours()
            if optimizer is None or own is None or optimizer.__dict__.get("step") is not own:
                continue
            before = vars(optimizer)["step"].__func__.before
            if before is None:
                del optimizer.step
            else:
                optimizer.step = before  # type: ignore[method-assign]
        self._ours = []


class PastStepHook(StepHook):
    """A step pre-hook that calls act(owner, ...) where a step passes by what `Stepping` put in its place: the script bound the
    method, or compiled it, before. Steps of some parameters alone are as without this hook."""

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> None:
        if not getattr(_own, "inside", False):
            super().__call__(*arguments)


def is_of_script(error: BaseException) -> bool:
    """Whether the script's own step raised it."""
    return hasattr(error, "_gradwire_of_script")


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something that is neither ours nor a learning-rate scheduler's stands in place of the step of its class."""
    step = vars(optimizer).get("step")
    while step is not None:
        step = getattr(step, "__func__", step)
        if step is type(optimizer).step:
            return False
        step = getattr(step, "__wrapped__", None)
    return "step" in vars(optimizer)


def snapshot(optimizer: torch.optim.Optimizer) -> Groups:
    """Its groups with the values they have now (a scheduler may change the rate before they are used)."""
    return [_copied(group) for group in optimizer.param_groups]


@contextmanager
def outermost(device: torch.device) -> Iterator[None]:
    """Run a step as in the outermost lines of a script: without the inference mode, no_grad, autocast or torch.func transform
    that may surround the caller."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        temporarily_clear_interpreter_stack(),
    ):
        yield


def step_only(optimizer: torch.optim.Optimizer, whole: Whole, groups: Groups, parameters: Collection[torch.nn.Parameter]) -> None:
    """Step these parameters with the values of these groups; the optimizer's own groups are as before afterwards.

    Equal to what the parameters get in a whole step for optimizers that keep their state by parameter alone.
    """
    _step_parts(optimizer, whole, _parts(groups, parameters))


def step_later(
    optimizer: torch.optim.Optimizer, whole: Whole, groups: Groups, parameters: Collection[torch.nn.Parameter]
) -> None:
    """Do what `step_only` does, for a whole step that the script asked for when the groups had these values. Values that the
    step writes into its groups, such as a count of steps, are written into the optimizer's own groups."""
    parts = _parts(groups, parameters, keep_empty=True)
    before = [_copied(part) for part in parts]
    _step_parts(optimizer, whole, [part for part in parts if part["params"]])
    for own, part, values in zip(optimizer.param_groups, parts, before, strict=False):
        for key, value in part.items():
            if key == "params" or (key in values and _alike(value, values[key])):
                continue
            if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                own[key].copy_(value)
            else:
                own[key] = value


def step_in_place_of(
    optimizer: torch.optim.Optimizer, whole: Whole, stand_ins: Mapping[int, Sequence[torch.nn.Parameter]]
) -> None:
    """Step these tensors in place of the parameters of these ids, and nothing else, in the optimizer's own groups."""
    own = optimizer.param_groups
    before = [group["params"] for group in own]
    try:
        for group in own:
            group["params"] = [each for p in group["params"] for each in stand_ins.get(id(p), ())]
        optimizer.param_groups = [group for group in own if group["params"]]
        whole()
    finally:
        optimizer.param_groups = own
        for group, parameters in zip(own, before, strict=True):
            group["params"] = parameters


def _parts(groups: Groups, parameters: Collection[torch.nn.Parameter], keep_empty: bool = False) -> Groups:
    chosen = {id(parameter) for parameter in parameters}
    parts = [group | {"params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    return [group for group in parts if group["params"] or keep_empty]


def _step_parts(optimizer: torch.optim.Optimizer, whole: Whole, parts: Groups) -> None:
    own = optimizer.param_groups
    optimizer.param_groups = parts
    try:
        whole()
    finally:
        optimizer.param_groups = own


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A group with the values that it has now."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
