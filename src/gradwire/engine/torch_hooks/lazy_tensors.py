"""Tensors whose values come later: the first use of such a tensor, of any kind, waits for its values.

A parameter that is still to be stepped, or a gradient that is still on its way, is for that time of a class of its own, as
torch's uninitialized parameters are. Torch hands every use of such a tensor, by operators, methods, attributes, optimizers,
hooks, copies and pickles, to `__torch_function__` first, and there it is made current and gets its own class back. So a
forward in any order, tied weights, functional calls, checkpoints and averages of weights all see what they should.

Not seen is what torch does not see: memory that was shared before, as by numpy or `.data` kept from an earlier step, code
compiled by torch.compile or torch.jit, and C++ extensions that take tensors without torch's dispatch of operators.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch

# Attributes that say what a tensor is and not what it holds, and giving it another gradient or a hook
_LOOKS_AT_NO_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "is_sparse")),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda")),
    *(getattr(torch.Tensor.grad, name) for name in ("__set__", "__delete__")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.element_size),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex),
    *(torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
}

looking = torch._C.DisableTorchFunctionSubclass
"""Inside, tensors are used as they are and nothing is waited for: for those who know what is under way."""


def _use(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in _LOOKS_AT_NO_VALUES:
        with looking():
            return func(*args, **kwargs)
    for tensor in _later_ones([*args, *kwargs.values()]):
        make_current(tensor, wait=True)
    return func(*args, **kwargs)


class LaterParameter(torch.nn.Parameter):
    """A parameter whose step is still to come."""

    __torch_function__: Any = classmethod(_use)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make_current(self, wait=True)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make_current(self, wait=True)
        return self.__reduce_ex__(protocol)


class LaterGradient(torch.Tensor):
    """A gradient whose sum is still on its way."""

    __torch_function__: Any = classmethod(_use)


_LATER: dict[type, type] = {torch.nn.Parameter: LaterParameter, torch.Tensor: LaterGradient}
_USUAL = {later: usual for usual, later in _LATER.items()}


def can_wait(tensor: torch.Tensor) -> bool:
    """Whether `use_later` takes it: it is an ordinary parameter or tensor."""
    return type(tensor) in _LATER


def is_later(tensor: torch.Tensor) -> bool:
    """Whether its values come later."""
    return type(tensor) in _USUAL


def use_later(tensor: torch.Tensor, wait: Callable[[], None]) -> None:
    """Call `wait()` before the tensor's next use; it makes the tensor current, or raises."""
    tensor._gradwire_wait = wait  # type: ignore[attr-defined]
    tensor.__class__ = _LATER[type(tensor)]


def raise_later(tensor: torch.Tensor, error: Exception) -> None:
    """Give up the tensor's wait: each use raises such an error. It keeps nothing but the error's words."""
    vars(tensor).pop("_gradwire_wait", None)  # an ordinary tensor has one where `use_later` itself failed
    if is_later(tensor):
        vars(tensor)["_gradwire_wait"] = partial(_raise, type(error), error.args)


def _raise(kind: type[Exception], words: tuple[Any, ...]) -> NoReturn:
    raise kind(*words)


def make_current(tensor: torch.Tensor, wait: bool = False) -> None:
    """The tensor may be used as any other from now on; with `wait` when what it waits for is there."""
    if not is_later(tensor):
        return
    if wait and (waited_for := vars(tensor).get("_gradwire_wait")) is not None:
        waited_for()
    vars(tensor).pop("_gradwire_wait", None)
    if is_later(tensor):
        tensor.__class__ = _USUAL[type(tensor)]


def _later_ones(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) in _USUAL:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _later_ones(value)
        elif isinstance(value, dict):
            yield from _later_ones(value.values())
