"""Hooks on the model and its gradients that neither keep the handle alive nor travel with copies of the model.

`torch.save(model)`, `pickle` and `copy.deepcopy` take a module apart by its class's reducer. One is registered for the
class of every parallelized model that leaves gradwire's hooks out: what was saved or copied is an ordinary model, and
loads where gradwire is not installed.

A hook in Python takes a microsecond or more, most of it for Python's lock. So there is one hook for each gradient, which does
next to nothing (`Arrivals`), and a second one only for a few (see `Reducer.gradient_ready`).
"""

import copyreg
import dataclasses
import sys
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from gradwire.errors import StepStateError

_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_state_dict_pre_hooks": (),
}
"""Where modules keep hooks by their numbers, and what else they keep by the numbers of these."""


class ModelHook:
    """Calls act(owner, ...) as long as the owner lives, and then does nothing."""

    def __init__(self, owner: Any, act: Callable[..., None]) -> None:
        self._owner, self._act = weakref.ref(owner), act

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._act(owner, *arguments)


class StepHook(ModelHook):
    """One on an optimizer's step. Where torch.compile has compiled the step, it calls this and does not trace it. It does nothing
    in a step that only makes the optimizer's state."""

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> None:
        _, positional, named = arguments
        if not makes_state(positional[1:], named):
            super().__call__(*arguments)


def makes_state(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the present step of an optimizer, called with these arguments, is one of torch's `get_state_dict` or
    `set_state_dict`. They step an optimizer without a state once, with gradients and a learning rate of zero."""
    closures = (*arguments, *named.values())
    if not closures or any(each is not None for each in closures):  # torch calls step(closure=None), Accelerate step(None)
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class Patch(ABC):
    """A stand-in for a method, in the `__dict__` of an instance."""

    @abstractmethod
    def before_copy(self) -> None:
        """Called when the instance is about to be copied or pickled, which leaves this out."""


NO_BACKWARD = -2
"""Is the id of no graph task: torch's ids begin at 0, and -1 is outside of a backward."""

_current_task = torch._C._current_graph_task_id


class Arrivals:
    """The gradients that came in a step, by index of their parameters, and the runs that are complete.

    Hooks note the gradients of the backward `task` here. For any other gradient, and for the next one after a run is complete,
    the hook asks the reducer. Arrivals refer to no parameter and to no reducer, since parameters keep their hooks.
    """

    def __init__(self) -> None:
        self.task = NO_BACKWARD
        """The graph task whose gradients are only noted."""
        self.came: dict[int, None] = {}
        """Gradients that were accumulated, in order. Hooks of the script on the last one may follow."""
        self.left: list[int] = []
        """How many gradients of each run did not come yet."""
        self.complete: list[int] = []
        """Runs whose gradients all came, and were not taken yet."""
        self.last_ones: list[int] = []
        """The gradient of each run that comes last in the plan's order, or all gradients. Their nodes have a hook too."""
        self.heard: set[int] = set()
        """Gradients among `last_ones` whose nodes called their hook."""
        self.awaited = False
        """Whether a training forward began whose gradients are to be sent, then or with later ones, and no step began since."""
        self._run_of: dict[int, int] = {}
        self._sizes: list[int] = []

    def attach(self, runs: Sequence[Sequence[int]], hear_all: bool) -> None:
        """Count gradients by these runs, which are lists of indices. `hear_all`: every node must be a living one, since something
        is done before its gradient."""
        self._run_of = {index: number for number, run in enumerate(runs) for index in run}
        self._sizes, self.last_ones = [len(run) for run in runs], []
        for run in runs:
            self.last_ones += run if hear_all else run[-1:]

    def begin(self) -> None:
        self.task, self.came, self.left = NO_BACKWARD, {}, list(self._sizes)
        self.complete, self.heard, self.awaited = [], set(), False

    @property
    def some_silent(self) -> bool:
        """Whether a gradient came whose node should have called its hook and did not."""
        return any(index in self.came and index not in self.heard for index in self.last_ones)

    def hook(self, index: int, ask: Callable[[], object]) -> Callable[..., None]:
        """The hook for an accumulated gradient. `ask` asks the reducer whether the gradient is noted."""

        def coming(*_: object) -> None:
            if (_current_task() == self.task and not self.complete and index not in self.came) or ask():
                self.came[index] = None
                run = self._run_of[index]
                self.left[run] = left = self.left[run] - 1
                if not left:
                    self.complete.append(run)

        return coming


Act = Callable[[Any, int, torch.nn.Parameter], object]


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
        self._owner, self._coming, self._ready, self._before = weakref.ref(owner), coming, ready, before
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._of_tensors = []
        for index, reference in enumerate(self._parameters):
            if coming is not None and (parameter := reference()) is not None:
                hook: Callable[..., Any] = partial(_act, self._owner, coming, index, reference)
                if arrivals is not None:
                    hook = arrivals.hook(index, hook)
                with hookable(parameter):
                    self._of_tensors.append(parameter.register_post_accumulate_grad_hook(hook))
        self.renew(None if arrivals is None else ())

    def renew(self, ready: Collection[int] | None = None) -> None:
        """Hook the nodes that parameters have now. `ready`: the indices of those for which `ready` is called; None: all."""
        for handle in self._handles:
            handle.remove()
        living = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        self._nodes, self._handles = kept_nodes(living) if self._coming is not None else [], []
        for index, reference in enumerate(self._parameters):
            calls_ready = self._ready is not None and (ready is None or index in ready)
            if (calls_ready or self._before is not None) and (parameter := reference()) is not None:
                self._nodes.append(node := _accumulating_node(parameter))
                if calls_ready and self._ready is not None:
                    self._handles.append(node.register_hook(partial(_act_on, self._owner, self._ready, index, reference)))
                if self._before is not None:
                    self._handles.append(node.register_prehook(partial(_act, self._owner, self._before, index, reference)))

    def remove(self) -> None:
        for handle in [*self._handles, *self._of_tensors]:
            handle.remove()
        self._parameters, self._nodes, self._handles, self._of_tensors = [], [], [], []


def kept_nodes(parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
    """The nodes of graphs that accumulate gradients on a GPU. While the caller keeps them, every graph has these.

    A node accumulates on the stream that was current when the node was made. So the gradients of kept nodes come together on one
    stream, whatever streams the forward uses. On a CPU there is no stream, and a node would only keep the shape of its gradient.
    """
    return [_accumulating_node(parameter) for parameter in parameters if parameter.device.type != "cpu"]


def _accumulating_node(parameter: torch.nn.Parameter) -> Any:
    with torch.enable_grad(), hookable(parameter):
        graph: Any = parameter.expand_as(parameter).grad_fn
    return graph.next_functions[0][0]


@contextmanager
def hookable(parameter: torch.nn.Parameter) -> Iterator[None]:
    """One that was frozen since it was parallelized may be thawed again, so it is hooked as others are."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(not frozen)


def _act(
    owner: "weakref.ref[Any]", act: Act, index: int, reference: "weakref.ref[torch.nn.Parameter]", *arguments: Any
) -> object:
    living, parameter = owner(), reference()
    return None if living is None or parameter is None else act(living, index, parameter)


def _act_on(
    owner: "weakref.ref[Any]",
    act: Callable[..., None],
    index: int,
    reference: "weakref.ref[torch.nn.Parameter]",
    made: Any,
    accumulated: tuple[torch.Tensor | None, ...],
) -> None:
    """Call `act` with the tensor that the node accumulated, too."""
    living, parameter = owner(), reference()
    if living is not None and parameter is not None:
        act(living, index, parameter, accumulated[0])


def leave_hooks_behind(model: torch.nn.Module) -> None:
    """Let copies and pickles of modules of this class be without ModelHooks and Patches from now on."""
    if is_parametrized(model):
        return  # its class is its own and would be kept with it; torch refuses to pickle it, and in copies hooks do nothing
    reduce = copyreg.dispatch_table.get(type(model))
    if not isinstance(reduce, _CopyReducer):
        copyreg.pickle(type(model), _CopyReducer(reduce))


class _CopyReducer:
    """Returns the result of the class's own reducer, without our hooks."""

    def __init__(self, before: Callable[[Any], Any] | None) -> None:
        self._before = before

    def __call__(self, model: torch.nn.Module) -> Any:
        for patch in [value for value in vars(model).values() if isinstance(value, Patch)]:
            patch.before_copy()
        reduced = self._before(model) if self._before else model.__reduce_ex__(2)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            state = {name: value for name, value in reduced[2].items() if not isinstance(value, Patch)}
            for name, beside in _HOOKS.items():
                ours = {key for key, hook in state.get(name, {}).items() if isinstance(hook, ModelHook)}
                for each in (name, *beside):
                    if each in state:
                        state[each] = OrderedDict((key, value) for key, value in state[each].items() if key not in ours)
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


_REENTRANT = "CheckpointFunctionBackward"


def has_reentrant(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether the graph of these tensors holds a reentrant checkpoint. Walks the whole graph: not for every step."""
    seen: set[object] = set()
    todo = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _REENTRANT:
            return True
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False


def in_reentrant_backward() -> bool:
    """Whether the running backward was started from a Python autograd function's backward, on this thread."""
    frame = sys._getframe(1)
    engine_seen = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            engine_seen = True
        elif engine_seen and code.co_name == "apply" and code.co_filename.endswith("autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def reentrant_refusal(name: str) -> StepStateError:
    """The error to raise where the first gradient of a step, of the parameter of this name, came from such a backward."""
    return StepStateError(
        f"the first gradient of the step, {name!r}, came from a backward inside the backward (reentrant checkpointing), and "
        "gradwire cannot see where the outer one ends. Nothing was sent. Call the model itself rather than its parts, or use "
        "checkpoint(..., use_reentrant=False)."
    )
