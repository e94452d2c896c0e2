"""Whether an optimizer may step a part of a tensor by itself: tried on a clone."""

from typing import Any

import torch

from gradwire.engine.seams.optimizer_state import part_of_state
from gradwire.engine.seams.splitting import clone, gradients, has_hooks, moved
from gradwire.engine.seams.stepping import is_replaced

__all__ = ["elementwise", "why_not_sharded"]

_STEPS = 3
_CUT = 128
"""Shards begin at multiples of so many elements of a tensor."""
_MOST_OF_VECTOR, _MOST_EDGE = 300, 18


def why_not_sharded(optimizer: torch.optim.Optimizer, tried: bool = False) -> str:
    """Why ranks cannot step a shard each; '' if they can. `tried`: a clone was tried before, and only hooks may be new."""
    name = type(optimizer).__name__
    if has_hooks(optimizer):
        return f"{name} has step hooks, which expect that whole parameters are stepped"
    if is_replaced(optimizer):
        return f"something else stands in place of {name}.step, and may expect that whole parameters are stepped"
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
        most = _MOST_OF_VECTOR if parameter.dim() == 1 else _MOST_EDGE
        shape = [min(size, most) for size in parameter.shape]
        return torch.nn.Parameter(torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype))

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
    edges = [0, _CUT] if flat.numel() > _CUT else [0]
    ends = [*edges[1:], flat.numel()]
    return [(a, torch.nn.Parameter(flat[a:b].clone())) for a, b in zip(edges, ends, strict=True)]


def _is_known(value: Any, part: torch.nn.Parameter) -> bool:
    """Whether shards of it can be joined again."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 or value.shape == part.shape
    return value is None or isinstance(value, (bool, int, float))
