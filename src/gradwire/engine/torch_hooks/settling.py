"""Methods that show or change weights wait first for the last step that the script asked for.

Some schedules finish a step later than `optimizer.step()`, so weights are out of date for a while. The methods that show or
change weights are replaced on the instances of the model, its submodules and the optimizers, never on their classes. A compiled
or wrapped model is covered too, because the outer module calls these methods of the inner one.

Reads without a method are not covered: `model.fc.weight`, or parameters in a list of the script's own. For those there is
`handle.flush()`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

from gradwire.engine.torch_hooks.hooks import Patch, leave_hooks_behind

# parameters(), buffers() and requires_grad_() of a module, and of those around it, walk by named_modules(); to(), half() and
# cuda() by _apply(); load_state_dict() by _load_from_state_dict()
_WALKS = ("parameters", "named_parameters", "named_modules", "get_parameter")
_OF_MODULES = (
    *_WALKS,
    *("state_dict", "eval", "train", "apply", "_apply", "_load_from_state_dict", "load_state_dict", "zero_grad"),
)
_OF_OPTIMIZERS = ("state_dict", "load_state_dict", "add_param_group", "__getstate__")

_F = TypeVar("_F", bound=Callable[..., Any])


class SettleFirst:
    """Calls `settle()` before a script sees or changes the weights of a model, if there is one, or the state of optimizers.

    `settle` must be quick when there is nothing to do. `walk` stands in for it before what only finds parameters, as
    `parameters()` does: a schedule may have reasons to let that through while a step computes. Nothing is called for what
    `settle` itself calls, inside `passing()`, nor for `train()` and `zero_grad()`, which touch no weights and are called in
    every step. Copies and pickles of the model settle first and are without guards. Neither the model nor the optimizers are
    kept alive.

    Example::

        guard = SettleFirst(model, [optimizer], settle=wait_for_the_last_step)
        torch.save(model.state_dict(), path)  # waits first
        guard.remove()
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizers: Iterable[torch.optim.Optimizer],
        settle: Callable[[], None],
        walk: Callable[[], None] | None = None,
    ) -> None:
        self._settle: Callable[[], None] | None = settle
        self._walk = walk or settle
        self._passing = 0
        self._guards: list[Guard] = []
        modules = list(model.modules()) if model is not None else []
        for module in modules:
            leave_hooks_behind(module)
            self._guards += [Guard(self, module, name) for name in _OF_MODULES]
        for optimizer in optimizers:
            self._guards += [Guard(self, optimizer, name) for name in _OF_OPTIMIZERS]

    def settle(self, name: str = "") -> None:
        """Called by guards, before the method of this name."""
        if self._settle is not None and not self._passing:
            with self.passing():
                (self._walk if name in _WALKS else self._settle)()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Guards let everything through inside: for those who know what is under way."""
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1

    def remove(self) -> None:
        """Give every instance back what it had."""
        self._settle = None
        for guard in self._guards:
            guard.remove()
        self._guards = []


def _never_compiled(method: _F) -> _F:
    """Let torch.compile call the method, and trace neither it nor what it calls. As torch.compiler.disable does, which adds
    microseconds to each call: a forward calls guards of all modules."""
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # torch's own, which versions may rename
        return _disable_dynamo(method)  # type: ignore[return-value]
    skip = eval_frame._FrameAction.SKIP
    function: Any = method
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    return method


class Guard(Patch):
    """Stands on one instance for one of its methods."""

    def __init__(self, settling: SettleFirst, owner: Any, name: str) -> None:
        self._settling, self._owner, self._name = weakref.ref(settling), weakref.ref(owner), name
        self._before = owner.__dict__.get(name)
        """The attribute that a script had put on the instance itself."""
        owner.__dict__[name] = self

    @property
    def __func__(self) -> Any:
        """The method's function, by which torch.compile sees whether the method is the class's own."""
        method: Any = self._plain(self._living())
        return method.__func__

    @_never_compiled
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        plain = self._plain(self._living())
        settling = self._settling()
        if settling is None:
            return plain(*arguments, **keywords)
        if self._touches_no_weights(*arguments, **keywords):
            with settling.passing():
                return plain(*arguments, **keywords)
        settling.settle(self._name)
        return plain(*arguments, **keywords)

    def before_copy(self) -> None:
        if (settling := self._settling()) is not None:
            settling.settle()

    def remove(self) -> None:
        """Where a script has put something of its own over the guard since, that stays, and the guard lets it through."""
        owner = self._owner()
        if owner is None or owner.__dict__.get(self._name) is not self:
            return
        if self._before is None:
            del owner.__dict__[self._name]
        else:
            owner.__dict__[self._name] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the copy's own method in copies of an owner whose class copies itself."""
        return getattr, (self._living(), self._name)

    def _living(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"{self._name}() of a model or an optimizer that is gone. Keep the object, not only its method.")
        return owner

    def _plain(self, owner: Any) -> Callable[..., Any]:
        if self._before is not None:
            method: Callable[..., Any] = self._before
            return method
        found: Callable[..., Any] = getattr(type(owner), self._name).__get__(owner)
        return found

    def _touches_no_weights(self, *arguments: Any, **keywords: Any) -> bool:
        if self._name == "train":
            return bool(arguments[0] if arguments else keywords.get("mode", True))
        if self._name == "zero_grad":
            return bool(arguments[0] if arguments else keywords.get("set_to_none", True))
        return False
