"""Hooks on the model and its gradients that neither keep the handle alive nor travel with copies of the model.

`torch.save(model)`, `pickle` and `copy.deepcopy` take a module apart by its class's reducer. One is registered for the
class of every parallelized model that leaves gradwire's hooks out: what was saved or copied is an ordinary model, and
loads where gradwire is not installed.
"""

import copyreg
import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from gradwire.engine.torch_hooks.arrivals import Arrivals

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class ModelHook:
    """Calls act(owner, ...) as long as the owner lives, and then does nothing."""

    def __init__(self, owner: Any, act: Callable[..., None]) -> None:
        self._owner, self._act = weakref.ref(owner), act

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._act(owner, *arguments)


class Patch(ABC):
    """What stands in an instance's `__dict__` for one of its methods."""

    @abstractmethod
    def before_copy(self) -> None:
        """Called when the instance is about to be copied or pickled, which leaves this out."""


Act = Callable[[Any, int, torch.nn.Parameter], None]


class GradientHooks:
    """Calls coming(owner, index, parameter) when a gradient is accumulated, and ready(.., what was accumulated) after all hooks
    that scripts put on the parameter, as long as the owner lives.

    The second is on the graph's node that accumulates, as DDP's hooks are. A node is kept here, since a parameter does not
    keep its own, and gets another when its memory is replaced: then only the first is called, until `renew`.
    """

    def __init__(
        self,
        owner: Any,
        coming: Act | None,
        ready: Callable[..., None] | None,
        parameters: Iterable[torch.nn.Parameter] = (),
        before: Act | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """`before` is called before the gradient is accumulated. What is None is not called. With `arrivals`,
        `coming` is called only for gradients that are not simply noted there, and `ready` only for those that `renew` names."""
        self._owner, self._ready, self._before = weakref.ref(owner), ready, before
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._of_tensors = []
        for index, reference in enumerate(self._parameters):
            if coming is not None and (parameter := reference()) is not None:
                hook: Callable[..., None] = partial(_act, self._owner, coming, index, reference)
                if arrivals is not None:
                    hook = arrivals.hook(index, hook)
                with _trainable(parameter):
                    self._of_tensors.append(parameter.register_post_accumulate_grad_hook(hook))
        self.renew(None if arrivals is None else ())

    def renew(self, ready: Collection[int] | None = None) -> None:
        """Hook the nodes that parameters have now. `ready`: the indices of those for which `ready` is called; None: all."""
        for handle in self._handles:
            handle.remove()
        self._nodes, self._handles = [], []
        for index, reference in enumerate(self._parameters):
            calls_ready = self._ready is not None and (ready is None or index in ready)
            if (calls_ready or self._before is not None) and (parameter := reference()) is not None:
                with torch.enable_grad(), _trainable(parameter):
                    graph: Any = parameter.expand_as(parameter).grad_fn
                node = graph.next_functions[0][0]
                self._nodes.append(node)
                if calls_ready and self._ready is not None:
                    self._handles.append(
                        node.register_hook(partial(_act_on, self._owner, self._ready, index, reference))
                    )
                if self._before is not None:
                    self._handles.append(
                        node.register_prehook(partial(_act, self._owner, self._before, index, reference))
                    )

    def remove(self) -> None:
        for handle in [*self._handles, *self._of_tensors]:
            handle.remove()
        self._parameters, self._nodes, self._handles, self._of_tensors = [], [], [], []


@contextmanager
def _trainable(parameter: torch.nn.Parameter) -> Iterator[None]:
    """One that was frozen since it was parallelized may be thawed again, so it is hooked as others are."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(not frozen)


def _act(
    owner: "weakref.ref[Any]", act: Act, index: int, reference: "weakref.ref[torch.nn.Parameter]", *arguments: Any
) -> None:
    living, parameter = owner(), reference()
    if living is not None and parameter is not None:
        act(living, index, parameter)


def _act_on(
    owner: "weakref.ref[Any]",
    act: Callable[..., None],
    index: int,
    reference: "weakref.ref[torch.nn.Parameter]",
    made: Any,
    accumulated: tuple[torch.Tensor | None, ...],
) -> None:
    """With what the node accumulated, too."""
    living, parameter = owner(), reference()
    if living is not None and parameter is not None:
        act(living, index, parameter, accumulated[0])


def leave_hooks_behind(model: torch.nn.Module) -> None:
    """From now on copies and pickles of modules of this class are without ModelHooks and Patches."""
    if is_parametrized(model):
        return  # its class is its own and would be kept with it; torch refuses to pickle it, and in copies hooks do nothing
    reduce = copyreg.dispatch_table.get(type(model))
    if not isinstance(reduce, _CopyReducer):
        copyreg.pickle(type(model), _CopyReducer(reduce))


class _CopyReducer:
    """What the class's own reducer returns, without our hooks."""

    def __init__(self, before: Callable[[Any], Any] | None) -> None:
        self._before = before

    def __call__(self, model: torch.nn.Module) -> Any:
        for patch in [value for value in vars(model).values() if isinstance(value, Patch)]:
            patch.before_copy()
        reduced = self._before(model) if self._before else model.__reduce_ex__(2)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            state = {name: value for name, value in reduced[2].items() if not isinstance(value, Patch)}
            for name in _HOOKS:
                if name in state:
                    state[name] = OrderedDict(
                        (key, hook) for key, hook in state[name].items() if not isinstance(hook, ModelHook)
                    )
            reduced = (*reduced[:2], state, *reduced[3:])
        return reduced


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a module returned: in containers that torch knows, and in dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
