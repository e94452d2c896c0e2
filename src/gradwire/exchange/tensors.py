"""The tensors of an exchange: what it is given, or what it will get."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from gradwire._version import __version__
from gradwire.core import Plan, error_words, show
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange.golden import golden_digests
from gradwire.transport import KERNELS

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class TensorMeta:
    """A tensor that an exchange will get later: contiguous.

    >>> TensorMeta((10, 4)).empty().numel()
    40
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    embedding: bool = False
    """Whether its rows are looked up. Specs without a code for zero leave out embeddings (see `gw.Policy`)."""

    @classmethod
    def of(cls, tensor: torch.Tensor, embedding: bool) -> "TensorMeta":
        """The meta of a tensor of this shape, dtype and device."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, embedding)

    def empty(self) -> torch.Tensor:
        """A tensor of this kind that takes no memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


TensorLike: TypeAlias = torch.Tensor | TensorMeta


def like(tensor: TensorLike) -> torch.Tensor:
    """A tensor of the same kind: this one, or one without memory."""
    return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor.empty()


def device_of(tensors: Mapping[str, TensorLike]) -> torch.device | None:
    """The device of the first tensor; None for what `checked_tensors` refuses."""
    try:
        return like(next(iter(tensors.values()))).device
    except Exception:
        return None


def checked_tensors(tensors: Mapping[str, TensorLike]) -> dict[str, TensorLike]:
    """Raises PlanError for what an exchange cannot average."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise PlanError(f"tensors is {show(tensors)}: pass a mapping of names to tensors, at least one.")
    for name, tensor in tensors.items():
        if not isinstance(tensor, (torch.Tensor, TensorMeta)):
            raise PlanError(f"tensors[{name!r}] is a {type(tensor).__name__}: pass a torch.Tensor or a gw.TensorMeta.")
        if isinstance(tensor, torch.Tensor) and overlaps(tensor):
            raise PlanError(f"tensors[{name!r}] has elements that share memory (an expanded view). Pass a copy: clone().")
        if isinstance(tensor, torch.Tensor) and (tensor.layout != torch.strided or tensor.is_meta):
            raise PlanError(f"tensors[{name!r}] has no dense memory ({tensor.layout}, {tensor.device}).")
    devices = {str(like(tensor).device) for tensor in tensors.values()}
    if len(devices) > 1:
        raise PlanError(f"the tensors lie on {', '.join(sorted(devices))}; an exchange works on one device.")
    return dict(tensors)


def tensor_facts(plan: Plan | None, tensors: Mapping[str, TensorLike], problem: Exception | None) -> dict[str, Any]:
    """The facts that ranks compare, the most important first."""
    if plan is None:
        assert problem is not None
        return {"error": error_words(problem)}
    rows = [(name, like(tensor)) for name, tensor in tensors.items()]
    return {
        "gradwire version": __version__,
        "torch version": torch.__version__,
        "names, shapes and dtypes of the tensors": [[name, list(t.shape), str(t.dtype), t.device.type] for name, t in rows],
        "memory formats of the tensors": [[name, list(t.stride())] for name, t in rows],
        "plan": f"{plan.digest()[:16]} {plan.buckets[0].main_spec!r} {plan.schedule!r}",
        KERNELS: golden_digests(plan, [tensor.dtype for _, tensor in rows], rows[0][1].device),
    }


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor share memory, so that a mean cannot be written into it."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def fitting(name: str, tensor: TensorLike | None, view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor. Raises StepStateError without one, and where it does not fit what the exchange was made with; `view` is its
    place."""
    if not isinstance(tensor, torch.Tensor):
        raise StepStateError(
            f"tensor {name!r} was not given in this step: every rank sends every tensor in every step. Pass it by its name; "
            "for a parameter without gradient pass zeros."
        )
    if tensor.is_sparse or tensor.shape != view.shape or tensor.dtype != view.dtype:
        raise StepStateError(
            f"tensor {name!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, and the exchange was made for "
            f"{tuple(view.shape)} and {view.dtype}, dense. Make another exchange for it."
        )
    if overlaps(tensor):
        raise StepStateError(f"tensor {name!r} has elements that share memory (an expanded view). Pass a copy: clone().")
    if tensor.device != device:
        raise StepStateError(f"tensor {name!r} is on {tensor.device}, and the exchange works on {device}.")
    return tensor


def outside_modes(act: Callable[P, T]) -> Callable[P, T]:
    """For what a script may call in inference mode or inside a transform of torch.func. Nothing could write later into what is
    made in that mode, and torch refuses writes into the model's tensors inside a transform."""

    @wraps(act)
    def outside(*arguments: P.args, **named: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            return act(*arguments, **named)
        grad_enabled = torch.is_grad_enabled()  # the end of inference mode would turn it on
        with torch.inference_mode(False), torch.set_grad_enabled(grad_enabled), temporarily_clear_interpreter_stack():
            return act(*arguments, **named)

    return outside
