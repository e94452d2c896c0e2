"""Whether an optimizer may step some parameters earlier than others, or a part of a tensor by itself: tried on a clone."""

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from gradwire.engine.torch_hooks.lazy_tensors import can_wait
from gradwire.engine.torch_hooks.loss_scale import LeftOutHook
from gradwire.engine.torch_hooks.optimizer_step import PastStepHook, announce, is_replaced, step_only

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SILENT = PastStepHook, LeftOutHook
"""Hooks that do nothing in steps of some parameters alone."""
_STEPS = 3
_RATE = 0.1
_MOST_EDGE = 4
_MOST_OF_VECTOR, _MOST_OF_MATRIX = 300, 18
"""Edges of small tensors that are cut."""
_SHARD = 128
"""Shards begin at multiples of so many elements of a tensor."""
_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()


def compiled_frames() -> int:
    """How many functions torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters["frames"]["ok"] if dynamo is not None else 0


def why_whole(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, compiled_before: int) -> str:
    """Why the optimizer cannot step some parameters later than others; '' if it can. `compiled_before` is what `compiled_frames`
    returned before the model was parallelized, when all compiled code was forgotten."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return why_at_once(optimizer) or why_none_later(parameters, model, compiled_before)


def why_at_once(optimizer: torch.optim.Optimizer) -> str:
    """Why its step must be one of all parameters at once; '' if it need not."""
    name = type(optimizer).__name__
    if why := _why_watched(optimizer, "all parameters are stepped at once"):
        return why
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return f"a GradScaler unscales gradients inside {name}.step"
    if optimizer.defaults.get("differentiable"):
        return f"{name} has differentiable=True"
    if optimizer not in _KNOWN:
        _KNOWN[optimizer] = splits(optimizer)
    if not _KNOWN[optimizer]:
        return f"two half steps of {name} are not one whole: it keeps counters or estimates of all its parameters"
    return ""


def why_none_later(parameters: Iterable[torch.nn.Parameter], model: torch.nn.Module | None, compiled_before: int) -> str:
    """Why none of these parameters may get its values later; '' if they may. `compiled_before` as in `why_whole`."""
    if any(not can_wait(parameter) for parameter in parameters):
        return "a parameter is of a class of its own, which cannot wait for its values"
    if model is not None and any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "a part of the model is a ScriptModule, which uses parameters without asking for them"
    if compiled_frames() not in (0, compiled_before):
        return "code was compiled by torch.compile, which uses parameters without asking for them"
    return ""


def splits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two half steps equal one whole, bit for bit, on a clone of it with small parameters, which must move.

    >>> splits(torch.optim.Adam([torch.nn.Parameter(torch.ones(8))]))
    True
    """
    try:
        (whole, all_of_whole), (halves, all_of_halves) = clone(optimizer, _small), clone(optimizer, _small)
        before = [parameter.detach().clone() for parameter in all_of_whole]
        for number in range(_STEPS):
            for parameters in (all_of_whole, all_of_halves):
                for parameter, gradient in zip(parameters, gradients(parameters, number), strict=True):
                    parameter.grad = gradient
            whole.step()
            for half in (all_of_halves[1::2], all_of_halves[::2]):
                step_only(halves, halves.step, halves.param_groups, half)
    except Exception:
        return False  # it is not built like torch's; it steps all at once, as its author meant
    if not moved(all_of_whole, before):
        return False
    return all(torch.equal(one, other) for one, other in zip(all_of_whole, all_of_halves, strict=True))


def moved(parameters: Iterable[torch.Tensor], before: Iterable[torch.Tensor]) -> bool:
    """Whether every tensor has other values than before. A trial in which nothing moves proves nothing: an optimizer in a wrapper
    may step tensors of its own."""
    return not any(p.numel() and torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def clone(
    optimizer: torch.optim.Optimizer, small: Callable[[torch.nn.Parameter, torch.Generator], torch.nn.Parameter]
) -> tuple[Any, list[torch.nn.Parameter]]:
    """An optimizer of the same class and settings with small parameters and their state, and these parameters. `small` makes
    them: two of each kind, the same in every clone."""
    made = object.__new__(type(optimizer))
    left_out = {"state", "param_groups", "step", "_guard", *_HOOKS}
    own = {key: value for key, value in vars(optimizer).items() if key not in left_out and not key.startswith("__")}
    vars(made).update(copy.deepcopy({key: value for key, value in own.items() if not _is_guard(value)}))
    for hooks in _HOOKS:
        if hooks in vars(optimizer):
            vars(made)[hooks] = type(vars(optimizer)[hooks])()
    made.state, made.param_groups = defaultdict(dict), []
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        values = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in values:  # it may be 0, or too small to be seen, at the begin of a warm-up
            values["lr"] = torch.full_like(values["lr"], _RATE) if isinstance(values["lr"], torch.Tensor) else _RATE
        originals = list(_two_of_each_kind(group["params"]))
        two_of_each = [small(original, generator) for original in originals]
        for original, parameter in zip(originals, two_of_each, strict=True):
            if state := _small_state(optimizer.state.get(original, {}), original, parameter):
                made.state[parameter] = state
        made.param_groups.append(values | {"params": two_of_each})
    return made, [parameter for group in made.param_groups for parameter in group["params"]]


def _two_of_each_kind(parameters: list[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """An optimizer may treat matrices and vectors in different ways."""
    seen: dict[tuple[int, torch.dtype], None] = {}
    for parameter in parameters:
        kind = (parameter.dim(), parameter.dtype)
        if kind not in seen:
            seen[kind] = None
            yield from (parameter, parameter)


def _small(parameter: torch.nn.Parameter, generator: torch.Generator) -> torch.nn.Parameter:
    shape = [min(size, _MOST_EDGE) for size in parameter.shape]
    return torch.nn.Parameter(torch.randn(shape, generator=generator, device="cpu").to(parameter.device, parameter.dtype))


def _small_state(state: Mapping[str, Any], original: torch.nn.Parameter, tensor: torch.nn.Parameter) -> dict[str, Any]:
    """The part of a parameter's state that a smaller one could have; nothing where a part of it has a shape of its own."""
    small: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == original.shape:
            small[key] = value.reshape(-1)[: tensor.numel()].reshape(tensor.shape).clone()
        elif isinstance(value, torch.Tensor) and value.dim():
            return {}
        else:
            small[key] = copy.deepcopy(value)
    return small


def gradients(parameters: list[torch.nn.Parameter], number: int) -> list[torch.Tensor]:
    """Normal ones for such parameters, others for each number."""
    generator = torch.Generator().manual_seed(1 + number)
    return [torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype) for p in parameters]


def _is_guard(value: Any) -> bool:
    """Something that was put on the instance in place of a method."""
    return callable(value) and not isinstance(value, type)


def _why_watched(optimizer: torch.optim.Optimizer, expected: str) -> str:
    """The things that may expect steps as they were, in words; '' if nothing does."""
    name = type(optimizer).__name__
    pre, post = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    own = [hook for hooks in _HOOKS for hook in getattr(optimizer, hooks, {}).values()]
    if any(hook is not announce and type(hook) not in _SILENT for hook in (*pre.values(), *post.values(), *own)):
        return f"{name} has step hooks, which expect that {expected}"
    if is_replaced(optimizer):
        return f"something else stands in place of {name}.step, and may expect that {expected}"
    return ""


# ---- parts of tensors


def why_not_sharded(optimizer: torch.optim.Optimizer, tried: bool = False) -> str:
    """Why ranks cannot step a shard each; '' if they can. `tried`: a clone was tried before, and only hooks may be new."""
    name = type(optimizer).__name__
    if why := _why_watched(optimizer, "whole parameters are stepped"):
        return why
    if optimizer.defaults.get("differentiable"):
        return f"{name} has differentiable=True"
    if not tried and not elementwise(optimizer):
        return (
            f"a step of {name} on a part of a tensor is not that part of its step on the whole: it looks at norms, rows or "
            "shapes, or needs a closure"
        )
    return ""


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step on parts of flattened tensors equals the step on the tensors, bit for bit, on a clone with small ones.

    >>> elementwise(torch.optim.Adam([torch.nn.Parameter(torch.ones(20, 20))]))
    True
    >>> elementwise(torch.optim.Adafactor([torch.nn.Parameter(torch.ones(20, 20))]))
    False
    """

    def small(parameter: torch.nn.Parameter, generator: torch.Generator) -> torch.nn.Parameter:
        most = _MOST_OF_VECTOR if parameter.dim() == 1 else _MOST_OF_MATRIX
        shape = [min(size, most) for size in parameter.shape]
        return torch.nn.Parameter(torch.randn(shape, generator=generator, device="cpu").to(parameter.device, parameter.dtype))

    try:
        (whole, tensors), (cut, _) = clone(optimizer, small), clone(optimizer, small)
        parts = {tensor: _parts(tensor) for tensor in tensors}
        before = [tensor.detach().clone() for tensor in tensors]
        for group, of_whole in zip(cut.param_groups, whole.param_groups, strict=True):
            group["params"] = [part for tensor in of_whole["params"] for _, part in parts[tensor]]
        for tensor, of_tensor in parts.items():
            for first, part in of_tensor if tensor in whole.state else ():
                cut.state[part] = part_of_state(whole.state[tensor], tensor, first, part.numel())
        for number in range(_STEPS):
            for tensor, gradient in zip(tensors, gradients(tensors, number), strict=True):
                tensor.grad = gradient
                for first, part in parts[tensor]:
                    part.grad = gradient.reshape(-1)[first : first + part.numel()]
            whole.step()
            cut.step()
    except Exception:
        return False  # it is not built like torch's
    if not moved(tensors, before):
        return False
    of_parts = {part: cut.state.get(part, {}) for of_tensor in parts.values() for _, part in of_tensor}
    if not all(_is_known(value, part) for part, state in of_parts.items() for value in state.values()):
        return False
    joined = [torch.cat([part.detach() for _, part in parts[tensor]]) for tensor in tensors]
    return all(torch.equal(one.reshape(-1), other) for one, other in zip(tensors, joined, strict=True))


def _parts(tensor: torch.nn.Parameter) -> list[tuple[int, torch.nn.Parameter]]:
    """Parts of the flattened tensor, each with its first element."""
    flat = tensor.detach().reshape(-1)
    edges = [0, _SHARD] if flat.numel() > _SHARD else [0]
    ends = [*edges[1:], flat.numel()]
    return [(a, torch.nn.Parameter(flat[a:b].clone())) for a, b in zip(edges, ends, strict=True)]


def _is_known(value: Any, part: torch.nn.Parameter) -> bool:
    """Whether shards of it can be joined again."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 or value.shape == part.shape
    return value is None or isinstance(value, (bool, int, float))


def part_of_state(state: Mapping[str, Any], like: torch.Tensor, first: int, numel: int) -> dict[str, Any]:
    """The state of a run of a parameter's elements, cut from the state of all. `like` has the parameter's shape,
    and the strides in whose order elements count. Copies."""
    part = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == like.shape:
            part[key] = in_order(value, like)[first : first + numel].clone()
        else:
            part[key] = copy.deepcopy(value)
    return part


def in_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Its elements in the order in which those of `like` lie: a view where the strides are the same."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((like.numel(),), (1,))
