"""The values that optimizers keep of a model's parameters, made the same on all ranks.

Where all ranks step by the same mean gradients, equal weights stay equal only if optimizers keep equal values. They keep others
on each rank after local steps, and where only some ranks loaded a checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

__all__ = ["OptimizerState"]

_COMPARED = 4096
"""Elements of a tensor that ranks compare, in equal distances. Optimizers that stepped by others differ in nearly all."""


class _StateEntry(msgspec.Struct, array_like=True):
    """A value that an optimizer keeps of a parameter."""

    optimizer: int
    parameter: int
    key: str
    number: bool | int | float | None = None
    shape: list[int] | None = None
    """None for a number."""
    dtype: str = ""
    on_cpu: bool = False


class OptimizerState:
    """The tensors and numbers that these optimizers keep of these parameters. Other values, such as lists, are left alone."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        self._optimizers, self._parameters = optimizers, parameters

    def compared(self) -> list[torch.Tensor]:
        """Tensors that are the same on ranks with the same state."""
        samples = [_sample(tensor) for _, tensor in self._entries() if isinstance(tensor, torch.Tensor)]
        return [self._description(), *samples]

    def send(self, broadcast: Callable[[list[torch.Tensor]], None], is_root: bool) -> None:
        """Make it the root's on all ranks. broadcast: gives these tensors, all of one device, the root's values. Collective."""
        description = self._description()
        length = torch.tensor([len(description)])
        broadcast([length])
        if not is_root:
            description = torch.empty(int(length), dtype=torch.uint8)
        broadcast([description])
        told = msgspec.msgpack.decode(description.numpy().tobytes(), type=list[_StateEntry])
        tensors = [tensor for _, tensor in self._entries() if isinstance(tensor, torch.Tensor)] if is_root else self._take(told)
        for on_cpu in (True, False):
            if chosen := [each for each in tensors if (each.device.type == "cpu") == on_cpu]:
                broadcast(chosen)

    def _take(self, told: Sequence[_StateEntry]) -> list[torch.Tensor]:
        """Keep what the root does. Returns the tensors, in its order, that get its values."""
        tensors, places = list[torch.Tensor](), set[tuple[int, int, str]]()
        for each in told:
            parameter = self._parameters[each.parameter]
            values = self._values(each.optimizer, parameter)
            places.add((each.optimizer, each.parameter, each.key))
            if each.shape is None:
                values[each.key] = each.number
                continue
            dtype, device = getattr(torch, each.dtype), torch.device("cpu") if each.on_cpu else parameter.device
            own: Any = values.get(each.key)
            if not _is_plain(own) or (own.shape, own.dtype, own.device) != (torch.Size(each.shape), dtype, device):
                if each.shape == [*parameter.shape]:  # and of its memory format
                    own = torch.empty_like(parameter, dtype=dtype, device=device)
                else:
                    own = torch.empty(each.shape, dtype=dtype, device=device)
                values[each.key] = own
            tensors.append(own)
        for entry, _ in [*self._entries()]:
            if (entry.optimizer, entry.parameter, entry.key) not in places:
                state, parameter = self._optimizers[entry.optimizer].state, self._parameters[entry.parameter]
                del state[parameter][entry.key]
                if not state[parameter]:
                    del state[parameter]  # an optimizer may ask whether it has stepped this parameter
        return tensors

    def _values(self, optimizer: int, parameter: torch.Tensor) -> dict[str, Any]:
        """The dictionary of the parameter's values; one that is thrown away where this rank has no such optimizer."""
        values: dict[str, Any] = self._optimizers[optimizer].state[parameter] if optimizer < len(self._optimizers) else {}
        return values

    def _description(self) -> torch.Tensor:
        """The names, forms and numbers of all values, as bytes."""
        return torch.frombuffer(bytearray(msgspec.msgpack.encode([entry for entry, _ in self._entries()])), dtype=torch.uint8)

    def _entries(self) -> Iterator[tuple[_StateEntry, Any]]:
        for number, optimizer in enumerate(self._optimizers):
            for index, parameter in enumerate(self._parameters):
                values = optimizer.state.get(parameter)
                for key, value in values.items() if isinstance(values, dict) else ():
                    if not isinstance(key, str):
                        continue
                    if _is_plain(value):
                        on_cpu = value.device.type == "cpu"
                        dtype = str(value.dtype).removeprefix("torch.")
                        yield _StateEntry(number, index, key, None, [*value.shape], dtype, on_cpu), value
                    elif value is None or isinstance(value, bool | int | float):
                        yield _StateEntry(number, index, key, value), value


def _is_plain(value: object) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of the tensor in equal distances."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _COMPARED)].cpu()
