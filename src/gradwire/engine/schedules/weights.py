"""Two sets of weights: the global weights W, the same on all ranks, and the local weights L, on which the next step computes.

The model's parameters hold one of the two sets; a copy of the other set is kept. They hold L from the training forward of a step
to its `optimizer.step()`, and W whenever a script may look. During `optimizer.step()` the parameters borrow the memory of the
copy of W. So the `delayed` schedule needs one more copy of the weights, and two while a script looks.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from gradwire.core import Delayed, Plan, printable
from gradwire.engine.control import RankReports, checksums
from gradwire.engine.reducer import Reducer
from gradwire.engine.torch_hooks.optimizer_step import outermost
from gradwire.errors import PlanError
from gradwire.exchange import LOCAL, Exchange, Slot
from gradwire.kernels import LocalUpdate, in_memory, kernels_for, reference
from gradwire.transport import Mark

Moments = tuple[LocalUpdate, torch.Tensor | None, torch.Tensor | None]
"""A local update for a rate of 1, and the squares and the mean that it takes."""


class TwoWeights:
    """W and L of some parameters. At first the parameters hold W, and L = W.

    All writes are in place, under `torch.no_grad()`. So parameters stay the same objects, and autograd notices a graph that
    needs the values of before.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], keeps_writes: bool = False) -> None:
        """parameters: by name. `keeps_writes`: what a script writes into L stays in L."""
        self._keeps_writes = keeps_writes
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._versions: list[int] = []
        """The versions of the parameters when they came to hold L."""
        self._warned = False
        self._global = [_same_memory(parameter).copy_(parameter.detach()) for parameter in self._parameters]
        self._home: list[torch.Tensor] | None = None
        """The parameters' own memory while they are lent some."""
        self._local: dict[int, torch.Tensor] | None = None
        """L by the place of the parameter; of a parameter that is not in it, L = W. None: L = W of all."""
        self._global_sums: list[int] | None = None
        """Checksums of the W to which the loaded L belongs."""
        self._show_global = True
        self.computing = False
        """Whether a training forward has begun whose `optimizer.step()` has not come."""

    @property
    def copies(self) -> list[torch.Tensor]:
        """The tensors that hold W while the parameters hold L: always the same ones."""
        return self._global

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in addition to the parameters now."""
        return sum(weight.nbytes for weight in [*self._global, *(self._local or {}).values()])

    @property
    def global_weights(self) -> list[torch.Tensor]:
        """W after the last update that landed. Read only."""
        return [p.detach() for p in self._parameters] if self._show_global else self._global

    @property
    def local_weights(self) -> list[torch.Tensor]:
        """L, on which the next step computes. Read only."""
        if self._show_global:
            self._forget_stale()
            if (local := self._local) is not None:
                return [local.get(place, parameter.detach()) for place, parameter in enumerate(self._parameters)]
        return [parameter.detach() for parameter in self._parameters]

    @torch.no_grad()
    def show_global(self, keep_local: bool = True) -> None:
        """Let the parameters hold W. Without `keep_local` forget L: the next step computes on W."""
        if not keep_local:
            self._local = self._global_sums = None
        if not self._show_global:
            self._warn_of_writes()
            if keep_local:
                self._local = {place: parameter.detach().clone() for place, parameter in enumerate(self._parameters)}
            _copy(self._global, self._parameters)
            self._show_global = True

    @torch.no_grad()
    def show_local(self) -> bool:
        """Let the parameters hold L. If the script has changed W in the meantime, L is out of date, and the next step computes
        on the changed W. Returns whether the parameters held W, and L was kept."""
        if not self._show_global:
            return False
        self._forget_stale()
        _copy(self._parameters, self._global)
        kept = self._local is not None
        if self._local is not None:
            for place, own in self._local.items():
                self._parameters[place].copy_(own)
            self._local = None
        self._hold_local()
        return kept

    def _hold_local(self) -> None:
        self._show_global = False
        self._versions = [parameter._version for parameter in self._parameters]

    def _warn_of_writes(self) -> None:
        """Warn of writes into L, which are lost. No error: this rank alone may have written, and the others would wait for it."""
        if self._keeps_writes:
            return
        changed = [
            name
            for name, parameter, version in zip(self._names, self._parameters, self._versions, strict=True)
            if parameter._version != version
        ]
        if changed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{changed[0]!r} was changed in place while the parameters held this rank's own weights, which the delayed "
                "schedule drops with the step: the change is lost. Change weights after optimizer.step(), and where you keep a "
                "list of them, call handle.flush() before the change. For changes inside a step, as by "
                "Embedding(max_norm=...), use another schedule.",
                stacklevel=2,
            )

    def _forget_stale(self) -> None:
        """Forget L if the parameters, which hold W, do not hold the W that it belongs to."""
        if self._local is None:
            return
        if self._global_sums is not None:
            same = checksums(self._parameters) == self._global_sums
        else:
            same = all(torch.equal(self._parameters[place], self._global[place]) for place in self._local)
        if not same:
            self._local = None
        elif self._global_sums is not None:
            _copy(self._parameters, self._global)
        self._global_sums = None

    @torch.no_grad()
    def update(self, gradients: Mapping[int, torch.Tensor | None], step: Callable[[Sequence[torch.nn.Parameter]], None]) -> None:
        """Call `step` with these parameters, which hold W, and these gradients in `grad`. The parameters hold the new W
        afterwards, and their own gradients again."""
        self.show_global()
        chosen = [self._parameters[index] for index in gradients]
        own = [parameter.grad for parameter in chosen]
        for parameter, gradient in zip(chosen, gradients.values(), strict=True):
            parameter.grad = gradient
        try:
            with outermost(self._parameters[0].device):
                step(chosen)
        finally:
            for parameter, gradient in zip(chosen, own, strict=True):
                parameter.grad = gradient
            if self._local is not None:
                _copy(self._parameters, self._global)  # what a script does to W from now on is seen by the difference

    @contextmanager
    def shown(self, lend: bool) -> Iterator[None]:
        """Inside, the parameters hold W, and L is forgotten. Afterwards they hold the L of a `local_update` inside, or W.

        With `lend` parameters that held L have the memory of the other copy inside, and no weight is copied for a step. That is
        for optimizers that keep no other tensors over the parameters' memory.
        """
        if not lend:
            self.show_global(keep_local=False)
        self._local = self._global_sums = None
        if not self._show_global:
            self._warn_of_writes()
            self._home = [parameter.data for parameter in self._parameters]
            self._move_to(self._global)
            self._show_global = True
        try:
            yield
        finally:
            if self._home is not None:
                self._go_home()
                with torch.no_grad():
                    _copy(self._global, self._parameters)

    def _go_home(self) -> None:
        assert self._home is not None
        self._move_to(self._home)
        self._home = None

    def _move_to(self, memory: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, memory, strict=True):
            parameter.data = tensor

    @torch.no_grad()
    def local_update(self, moves: "Iterable[LocalMove | None]") -> None:
        """Set L to W after each parameter's local update, and let the parameters hold L. None: L = W."""
        moves = list(moves)  # all or nothing
        if self._home is not None:
            self._go_home()
        else:
            _copy(self._parameters, self._global)
        for parameter, weight, move in zip(self._parameters, self._global, moves, strict=True):
            if move is None:
                parameter.copy_(weight)
            else:
                move.apply(weight, parameter.detach())
                torch.autograd.graph.increment_version(parameter)
        self._hold_local()

    def state(self) -> dict[str, torch.Tensor]:
        """L, and checksums of the W that it belongs to. Fields as in `gradwire.exchange.states`."""
        local = zip(self._names, self.local_weights, strict=True)
        sums = [number - 2**64 if number >= 2**63 else number for number in checksums(self.global_weights)]
        saved = {f"{LOCAL}0/{name}": weight.detach().reshape(-1).clone() for name, weight in local}
        return saved | {"weights": torch.tensor(sums)}

    @torch.no_grad()
    def take_local(self, local: Mapping[str, torch.Tensor], global_sums: list[int]) -> None:
        """Take L as it was saved, by tensor, and the checksums of the W that it belongs to. It counts if the parameters hold that
        W when the next step begins, whether they are loaded before or after this. Without any L = W."""
        self.show_global(keep_local=False)
        if local:
            named = enumerate(zip(self._names, self._parameters, strict=True))
            self._local = {place: local[name].reshape(parameter.shape).clone() for place, (name, parameter) in named}
            self._global_sums = global_sums

    def kept_local(self) -> dict[str, torch.Tensor]:
        """L of the parameters that still hold the W that it belongs to, by name, for `go_on_with` after a change of the model.
        The parameters hold W. A parameter may have another dtype now."""
        if self._global_sums is not None:
            self._forget_stale()
        kept = {}
        for place, own in (self._local or {}).items():
            parameter, weight = self._parameters[place].detach(), self._global[place]
            if torch.equal(parameter, weight.to(parameter.dtype)):
                kept[self._names[place]] = own.to(parameter.dtype)
        return kept

    def go_on_with(self, local: Mapping[str, torch.Tensor]) -> None:
        """Go on with this L of some parameters, by name. The parameters hold W; L of the others is W, whatever it is made until
        the next step begins."""
        places = {name: place for place, name in enumerate(self._names)}
        self._local = {places[name]: own for name, own in local.items()} or None


def _same_memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    size, stride = parameter.size(), parameter.stride()
    return torch.empty_strided(size, stride, dtype=parameter.dtype, device=parameter.device)


def _copy(sources: Iterable[torch.Tensor], destinations: Iterable[torch.Tensor]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


# ---- the local update


class LocalMove(NamedTuple):
    """A rank's own step of one parameter, without weight decay: what its optimizer's next step would be, were this gradient the
    mean. Of SGD with its momentum; of the moments where the optimizer is Adam or one of its like."""

    gradient: torch.Tensor
    by: LocalUpdate
    squares: torch.Tensor | None = None
    """The second-moment estimate of each element so far; None of SGD."""
    mean: torch.Tensor | None = None
    """The first-moment estimate so far, of SGD the momentum; None where the optimizer has none."""

    def apply(self, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Write the updated weight to `out`: in one pass over memory, where all tensors have the same layout."""
        tensors = weight, self.gradient, self.squares, self.mean, out
        elements = in_memory(*(each for each in tensors if each is not None))
        if elements is None:
            reference.local_update(weight, self.gradient, self.squares, self.mean, self.by, out)
            return
        left = iter(elements)
        *given, into = (None if each is None else next(left) for each in tensors)
        kernels_for(weight.device.type).local_update(*given, self.by, into)


def local_moves(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], schedule: Delayed
) -> Iterator[LocalMove | None]:
    """The local update of each parameter by its own gradient. None is no move."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    numbers = _numbers_on_device(optimizer, schedule)
    for parameter in parameters:
        group, gradient = groups.get(id(parameter)), parameter.grad
        if group is None or gradient is None:
            yield None
            continue
        local_lr, lr = schedule.local_lr, group["lr"]
        rate = schedule.local_ratio * float(numbers.get(id(lr), lr)) if local_lr is None else local_lr
        if schedule.local_step == "sgd" and rate:
            yield LocalMove(gradient, LocalUpdate(-rate if group.get("maximize") else rate))
        else:
            yield local_move(optimizer, group, parameter, gradient, rate, numbers) if rate else None


def _numbers_on_device(optimizer: torch.optim.Optimizer, schedule: Delayed) -> dict[int, float]:
    """The rates and steps that local updates take, as far as they are tensors of a device, by the tensor's id. The host waits for
    the device once for all."""
    values: list[Any] = [group["lr"] for group in optimizer.param_groups] if schedule.local_lr is None else []
    if schedule.local_step != "sgd" and schedule.local_lr != 0 and _MOMENTS[type(optimizer)][1] is _of_adam:
        values += [state["step"] for state in optimizer.state.values() if "step" in state]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and not value.is_cpu]
    if not tensors:
        return {}
    numbers: list[float] = torch.stack([tensor.detach().double().reshape(()) for tensor in tensors]).tolist()
    return dict(zip(map(id, tensors), numbers, strict=True))


def local_move(
    optimizer: torch.optim.Optimizer,
    param_group: dict[str, Any],
    parameter: torch.nn.Parameter,
    gradient: torch.Tensor,
    rate: float,
    numbers: Mapping[int, float] = MappingProxyType({}),
) -> LocalMove | None:
    """The local update of one parameter. None where the optimizer has no estimate yet that the step would be scaled by.
    numbers: those of tensors on a device, by the tensor's id, as far as they were read."""
    rate = -rate if param_group.get("maximize") else rate
    (key, moments_of), state = _MOMENTS[type(optimizer)], optimizer.state.get(parameter, {})
    if state.get(key) is None:
        return LocalMove(gradient, LocalUpdate(rate)) if isinstance(optimizer, torch.optim.SGD) else None
    if (steps := numbers.get(id(state.get("step")))) is not None:
        state = {**state, "step": steps}
    by, squares, mean = moments_of(state, param_group)
    return LocalMove(gradient, by._replace(rate=rate * by.rate, eps=param_group.get("eps", 0.0)), squares, mean)


def check_local(local: Mapping[str, torch.Tensor], sums: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises ValueError unless a state with this L and so many checksums of W is of these parameters."""
    for name, parameter in parameters.items():
        found = local.get(name)
        if found is None or found.numel() != parameter.numel() or found.dtype != parameter.dtype:
            kind = "nothing" if found is None else f"{found.numel()} elements of {found.dtype}"
            raise ValueError(
                f"the state has {kind} in {LOCAL}0/{printable(name)}, where the model's tensor has {parameter.numel()} "
                f"elements of {parameter.dtype}. Pass what handle.state_dict() returned."
            )
    if local.keys() - parameters.keys() or sums != len(parameters):
        raise ValueError(
            f"the state has weights of {len(local)} tensors and checksums of {sums}, and the model has "
            f"{len(parameters)} trainable ones. Pass what handle.state_dict() returned."
        )


def has_local_update(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own whose local update is known."""
    return type(optimizer) in _MOMENTS


def check_local_updates(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises PlanError for an optimizer whose local update is not known."""
    for optimizer in optimizers:
        if not has_local_update(optimizer):
            known = ", ".join(kind.__name__ for kind in _MOMENTS)
            raise PlanError(
                f"the delayed schedule steps each rank's own weights along its own gradient, and for {type(optimizer).__name__} "
                f"such a step is not known; it is for {known}. Use one of them, or gw.Delayed(local_step='sgd'), which takes "
                "the gradient alone, or gw.Delayed(local_lr=0): then the next step computes on the global weights, one update "
                "behind."
            )


def _of_sgd(state: dict[str, Any], param_group: dict[str, Any]) -> Moments:
    kept, taken = param_group["momentum"], 1 - param_group["dampening"]
    own, momentum = (1 + kept * taken, kept * kept) if param_group["nesterov"] else (taken, kept)
    return LocalUpdate(1.0, own, momentum), None, state["momentum_buffer"]


def _of_adam(state: dict[str, Any], param_group: dict[str, Any]) -> Moments:
    first, second = param_group["betas"]
    steps = float(state["step"]) + 1
    of_mean, of_squares = 1 - first**steps, 1 - second**steps
    by = LocalUpdate(1 / of_mean, 1 - first, first, second / of_squares, (1 - second) / of_squares)
    return by, state.get("max_exp_avg_sq", state["exp_avg_sq"]), state["exp_avg"]


_MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, Callable[[dict[str, Any], dict[str, Any]], Moments]]] = {
    torch.optim.SGD: ("momentum_buffer", _of_sgd),
    torch.optim.Adam: ("exp_avg_sq", _of_adam),
    torch.optim.AdamW: ("exp_avg_sq", _of_adam),
    torch.optim.NAdam: ("exp_avg_sq", _of_adam),
    torch.optim.RAdam: ("exp_avg_sq", _of_adam),
    torch.optim.RMSprop: (
        "square_avg",
        lambda s, g: (LocalUpdate(1.0, kept=g["alpha"], taken=1 - g["alpha"]), s["square_avg"], None),
    ),
    torch.optim.Adagrad: ("sum", lambda s, g: (LocalUpdate(1.0, kept=1.0, taken=1.0), s["sum"], None)),
}
"""State keys whose absence means that the optimizer has no estimates yet, and what makes its moments of state and group."""


Update = Callable[[Sequence[torch.nn.Parameter]], None]
"""Makes the global weights of these parameters, with the gradients that they hold."""


@dataclass
class Launched:
    """An exchange under way, until its means are used."""

    exchange: Exchange
    told: "Future[RankReports]"
    sending: "list[Future[Mark]]"
    """Futures of the broadcast of buffers, if there are any."""
    update: Update | None
    """Steps them in the optimizer, with the values that its groups had when the script did."""


def by_bucket(plan: Plan, slots: Sequence[Slot]) -> list[list[int]]:
    """Places of slots, together those of a bucket, in the order in which buckets are launched."""
    buckets: dict[int, list[int]] = {bucket: [] for bucket, _ in plan.launch}
    for index, slot in enumerate(slots):
        buckets[slot.bucket].append(index)
    return list(buckets.values())


def show_for_forward(module: torch.nn.Module, weights: TwoWeights, reducer: Reducer, settle: Callable[[], None]) -> None:
    """Before the model's forward: a training forward computes on L, and others see W."""
    if torch._C._current_graph_task_id() != -1:
        return  # activations are computed again inside a backward
    if not (module.training and torch.is_grad_enabled()):
        if not module.training or not weights.computing:
            settle()
    elif reducer.converted() is None:
        reducer.lanes.check()
        weights.show_local()
        weights.computing = True


def finish_quietly(under_way: list[Launched]) -> None:
    """Other ranks need what this one still sends, also when its script has ended."""
    for launched in under_way:
        launched.exchange.finish_quietly(launched.told, *launched.sending)
