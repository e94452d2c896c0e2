"""Two sets of weights: the global ones, W, the same on all ranks, and a rank's own, L, on which its next step computes.

The model's parameters hold one of the two. They hold L from the training forward of a step to its `optimizer.step()`, and W
whenever a script may look. While they hold L a copy of W is kept; while they hold W a copy of L is, until the next training
forward takes it. So the `delayed` schedule needs one more copy of the weights, and two while a script looks.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradwire.engine.drift import checksums
from gradwire.engine.stepping import outermost
from gradwire.errors import PlanError

__all__ = ["Move", "TwoWeights", "check_local_updates", "local_move"]

Moments = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
_PIECE = 1 << 16
"""Elements."""


class TwoWeights:
    """The weights of some parameters, which hold W at first, and L = W.

    All methods that write do so in place, under `torch.no_grad()`: parameters stay the same objects in the same memory, and
    autograd tells of a graph that needs what was written over.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """By name."""
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._versions: list[int] = []
        """Of the parameters when they came to hold L."""
        self._warned = False
        self._global = [parameter.detach().clone() for parameter in self._parameters]
        self._local: list[torch.Tensor] | None = None
        self._global_sums: list[int] | None = None
        """Of L that was loaded: checksums of the W that it belongs to."""
        self._show_global = True

    @property
    def global_weights(self) -> list[torch.Tensor]:
        """W as it is after the last update that landed. Not to be written."""
        return [p.detach() for p in self._parameters] if self._show_global else self._global

    @property
    def local_weights(self) -> list[torch.Tensor]:
        """L, on which the next step computes. Not to be written."""
        if self._show_global:
            self._forget_stale()
            if self._local is not None:
                return self._local
        return [parameter.detach() for parameter in self._parameters]

    @torch.no_grad()
    def show_global(self, keep_local: bool = True) -> None:
        """The parameters hold W from now on. Without `keep_local` L is forgotten: the next step computes on W."""
        if not keep_local:
            self._local = self._global_sums = None
        if not self._show_global:
            self._warn_of_writes()
            if keep_local:
                self._local = [parameter.detach().clone() for parameter in self._parameters]
            _copy(self._global, self._parameters)
            self._show_global = True

    @torch.no_grad()
    def show_local(self) -> None:
        """The parameters hold L from now on.

        What a script did to W in the meantime counts. Then L is not of this W any more, and the next step computes on W.
        """
        if not self._show_global:
            return
        self._forget_stale()
        _copy(self._parameters, self._global)
        if self._local is not None:
            _copy(self._local, self._parameters)
            self._local = None
        self._hold_local()

    def _hold_local(self) -> None:
        self._show_global = False
        self._versions = [parameter._version for parameter in self._parameters]

    def _warn_of_writes(self) -> None:
        """What is written into L is lost with it. This rank alone may do so, and others would wait for it if it raised."""
        changed = [
            name
            for name, parameter, version in zip(self._names, self._parameters, self._versions, strict=True)
            if parameter._version != version
        ]
        if changed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{changed[0]!r} was changed between a training forward and optimizer.step(), as by Embedding(max_norm=...) or "
                "weight decay by hand. In the delayed schedule the parameters hold this rank's own weights there, which go with "
                "the step, so the change is lost. Do it after optimizer.step(), or use another schedule.",
                stacklevel=2,
            )

    def _forget_stale(self) -> None:
        """Forget L if the parameters, which hold W, do not hold the W that it belongs to."""
        if self._local is None:
            return
        if self._global_sums is not None:
            same = checksums(self._parameters) == self._global_sums
        else:
            same = all(torch.equal(p, kept) for p, kept in zip(self._parameters, self._global, strict=True))
        if not same:
            self._local = None
        elif self._global_sums is not None:
            _copy(self._parameters, self._global)
        self._global_sums = None

    @torch.no_grad()
    def update(self, gradients: Iterable[torch.Tensor | None], step: Callable[[], None]) -> None:
        """W becomes what `step` makes of it with these gradients in `grad`. The parameters hold W afterwards, and their own
        gradients again."""
        self.show_global()
        own = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            with outermost(self._parameters[0].device):
                step()
        finally:
            for parameter, gradient in zip(self._parameters, own, strict=True):
                parameter.grad = gradient
            if self._local is not None:
                _copy(self._parameters, self._global)  # what a script does to W from now on is seen by the difference

    @torch.no_grad()
    def local_update(self, moves: "Iterable[Move | None]") -> None:
        """L = W moved, which the parameters then hold. None is no move."""
        self.show_global(keep_local=False)
        for parameter, kept, move in zip(self._parameters, self._global, moves, strict=True):
            if move is None:
                kept.copy_(parameter)
            else:
                move.apply(parameter.detach(), kept)
        self._hold_local()

    @torch.no_grad()
    def take_local(self, values: Sequence[torch.Tensor], global_sums: list[int]) -> None:
        """Take L as it was saved, and the checksums of the W that it belongs to. It counts if the parameters hold that W when
        the next step begins, whether they are loaded before or after this."""
        self.show_global(keep_local=False)
        self._local, self._global_sums = [value.clone() for value in values], global_sums


def _copy(sources: Iterable[torch.Tensor], destinations: Iterable[torch.Tensor]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


# ---- the local update (notes D42)


class Move(NamedTuple):
    """A rank's own step of one parameter, without weight decay: what its optimizer's next step would be, were this gradient the
    mean. Of SGD with its momentum; of the moments where the optimizer is Adam or one of its like."""

    gradient: torch.Tensor
    rate: float
    """Of what is subtracted."""
    squares: torch.Tensor | None = None
    """The second-moment estimate of each element so far; None of SGD."""
    mean: torch.Tensor | None = None
    """The first-moment estimate so far, of SGD the momentum; None where the optimizer has none."""
    decay: tuple[float, float] = (1.0, 1.0)
    """What the estimate so far and the gradient's square count in the next one."""
    momentum: float = 0.0
    """What the first moment so far counts in the step; the gradient counts the rest, and of SGD `own`."""
    own: float = 1.0
    corrections: tuple[float, float] = (1.0, 1.0)
    """What the next first and second moment are divided by."""
    eps: float = 0.0

    def apply(self, weight: torch.Tensor, before: torch.Tensor) -> None:
        """`before` becomes the weight as it was, and the weight is moved. A piece at a time, which stays in a cache meanwhile:
        six passes over memory instead of twenty."""
        moments = [moment for moment in (self.squares, self.mean) if moment is not None]
        for piece, old, gradient, *rest in _pieces([weight, before, self.gradient, *moments]):
            old.copy_(piece)
            if self.squares is None:
                piece.add_(gradient, alpha=-self.rate * self.own)
                if rest:
                    piece.add_(rest[0], alpha=-self.rate * self.momentum)
                continue
            squares = (rest[0] * self.decay[0]).addcmul_(gradient, gradient, value=self.decay[1])
            scale = squares.div_(self.corrections[1]).sqrt_().add_(self.eps)
            along = gradient if len(rest) == 1 else gradient.lerp(rest[1], self.momentum)
            piece.addcdiv_(along, scale, value=-self.rate / self.corrections[0])


def local_move(
    optimizer: torch.optim.Optimizer,
    param_group: dict[str, Any],
    parameter: torch.nn.Parameter,
    gradient: torch.Tensor,
    rate: float,
) -> Move | None:
    """The local update of one parameter. None where the optimizer has no estimate yet that the step would be scaled by."""
    rate = -rate if param_group.get("maximize") else rate
    (key, moments_of), state = _MOMENTS[type(optimizer)], optimizer.state.get(parameter, {})
    if state.get(key) is None:
        return Move(gradient, rate) if isinstance(optimizer, torch.optim.SGD) else None
    return Move(gradient, rate, **moments_of(state, param_group), eps=param_group.get("eps", 0.0))


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Pieces at the same places of all, which have one shape; all whole where they do not lie in memory alike."""
    if len({tensor.stride() for tensor in tensors}) > 1 or not tensors[0].is_contiguous():
        yield list(tensors)
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _PIECE):
        yield [each[start : start + _PIECE] for each in flat]


def check_local_updates(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises PlanError for an optimizer whose local update is not known."""
    for optimizer in optimizers:
        if type(optimizer) not in _MOMENTS:
            known = ", ".join(kind.__name__ for kind in _MOMENTS)
            raise PlanError(
                f"the delayed schedule steps each rank's own weights along its own gradient, and for {type(optimizer).__name__} "
                f"such a step is not known; it is for {known}. Use one of them, or gw.Delayed(local_lr=0): then the next "
                "step computes on the global weights, one update behind."
            )


def _of_sgd(state: dict[str, Any], param_group: dict[str, Any]) -> dict[str, Any]:
    kept, taken = param_group["momentum"], 1 - param_group["dampening"]
    own, momentum = (1 + kept * taken, kept * kept) if param_group["nesterov"] else (taken, kept)
    return {"mean": state["momentum_buffer"], "momentum": momentum, "own": own}


def _of_adam(state: dict[str, Any], param_group: dict[str, Any]) -> dict[str, Any]:
    first, second = param_group["betas"]
    steps = float(state["step"]) + 1
    return {
        "squares": state.get("max_exp_avg_sq", state["exp_avg_sq"]),
        "mean": state["exp_avg"],
        "decay": (second, 1 - second),
        "momentum": first,
        "corrections": (1 - first**steps, 1 - second**steps),
    }


def _of_rmsprop(state: dict[str, Any], param_group: dict[str, Any]) -> dict[str, Any]:
    return {"squares": state["square_avg"], "decay": (param_group["alpha"], 1 - param_group["alpha"])}


def _of_adagrad(state: dict[str, Any], param_group: dict[str, Any]) -> dict[str, Any]:
    return {"squares": state["sum"]}


_MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, Moments]] = {
    torch.optim.SGD: ("momentum_buffer", _of_sgd),
    torch.optim.Adam: ("exp_avg_sq", _of_adam),
    torch.optim.AdamW: ("exp_avg_sq", _of_adam),
    torch.optim.NAdam: ("exp_avg_sq", _of_adam),
    torch.optim.RAdam: ("exp_avg_sq", _of_adam),
    torch.optim.RMSprop: ("square_avg", _of_rmsprop),
    torch.optim.Adagrad: ("sum", _of_adagrad),
}
"""Without which key an optimizer has no estimates yet, and what they count."""
