"""The parameters in the buffers that FSDP2 reduces and gathers, and residuals that follow a parameter from buffer to buffer.

FSDP2 packs only the parameters of a module that have a gradient. So a buffer of one module may hold other parameters in the next
step: heads that are used in turns, layers that are frozen or thawed.
"""

import sys
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from gradwire.errors import PlanError
from gradwire.exchange import SHARED, Exchange, State, added_up, looks_up_rows, read_state
from gradwire.transport import Group

__all__ = ["ModulePacks", "Pack", "pack_of", "packed_embeddings"]

_PACKERS = ("foreach_reduce", "foreach_all_gather")


class Pack(NamedTuple):
    """The content of a buffer: shards of parameters, one after another, the same for each rank."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    """Elements of one rank's shard of each parameter, with FSDP2's padding."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str

    def overlaps(self, other: "Pack") -> bool:
        """Whether the two have a parameter in common, and the same ranks."""
        return self.ranks == other.ranks and not set(self.names).isdisjoint(other.names)


def pack_of(shard: Tensor, group: ProcessGroup) -> Pack:
    """The content of the buffer for which FSDP2 makes the present call. `shard`: one rank's part of the buffer.

    FSDP2 passes a buffer without names. The function of FSDP2 that fills the buffer has the list of parameters.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name not in _PACKERS and frame.f_back is not None:
        frame = frame.f_back
    parameters: list[Any] = frame.f_locals.get("fsdp_params", [])
    numels = tuple(each.padded_sharded_param_size.numel() for each in parameters)
    if frame.f_code.co_name == "foreach_reduce" and sum(numels) != shard.numel():
        raise PlanError(
            f"FSDP2 reduces {shard.numel()} elements of each rank, and gradwire found parameters with {sum(numels)}. Residuals "
            f"would be added to other parameters. This gradwire does not know the FSDP2 of torch {torch.__version__}: update it."
        )
    names = tuple(each._param_fqn or each._module_info.param_name for each in parameters)
    return Pack(names, numels, tuple(get_process_group_ranks(group)), str(shard.dtype).removeprefix("torch."))


class ModulePacks:
    """The exchanges of one module's buffers. No two have a parameter in common.

    A pack that shares a parameter with others replaces them. Their residuals are kept by parameter until one has it again.
    """

    def __init__(self) -> None:
        self.step = 0
        """The number of the next exchange, which seeds stochastic rounding."""
        self.exchanges: dict[Pack, Exchange] = {}
        self._kept: dict[str, Tensor] = {}
        """`{what}/{at}/{parameter}`, the parameter's part of the exchange's tensor number `at`."""
        self._saved: dict[Pack, dict[str, Tensor]] = {}
        """States of exchanges that are not made yet."""

    def exchange_of(self, pack: Pack, tensors: Mapping[str, Tensor], make: Callable[[], Exchange]) -> Exchange:
        """The exchange of a pack, which begins its next step. All ranks ask for the same packs in the same order."""
        if pack not in self.exchanges:
            made = make()
            self._make_room(pack, [*tensors], made.group)
            if (saved := self._saved.pop(pack, None)) is not None:
                made.load_state_dict(saved)
            else:
                made.residuals.take_over(self._take(pack, [*tensors], made.flats[0].device))
            self.exchanges[pack] = made
        exchange = self.exchanges[pack]
        exchange.step, self.step = self.step, self.step + 1
        return exchange

    def state(self) -> dict[str, Any]:
        """The content that `load` takes."""
        packs = {**self._saved, **{pack: exchange.state_dict() for pack, exchange in self.exchanges.items()}}
        return {"step": self.step, "packs": [(tuple(pack), state) for pack, state in packs.items()], "kept": self._kept}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Begin with what `state` returned. Raises ValueError if it is something else."""
        try:
            self.step, self._kept = int(saved["step"]), dict(saved["kept"])
            self._saved = {Pack(*pack): state for pack, state in saved["packs"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "the state does not say which parameters its residuals belong to: an older gradwire saved it, or it is damaged. "
                "Leave it out; residuals then begin at zero."
            ) from error

    def _make_room(self, pack: Pack, tensors: list[str], group: Group) -> None:
        """Keep by parameter what the packs that overlap with this one remember."""
        for other in [each for each in self.exchanges if each.overlaps(pack)]:
            self._keep(other, tensors, self.exchanges.pop(other).residuals.carried())
        for other in [each for each in self._saved if each.overlaps(pack) and each != pack]:
            self._keep(other, tensors, added_up(read_state(self._saved.pop(other), group).memory))

    def _keep(self, pack: Pack, tensors: list[str], carried: State) -> None:
        for key, whole in carried.items():
            what, _, tensor = key.partition("/")
            if what != SHARED:  # factors of another size: each pack begins with its own
                parts = whole.reshape(-1).split(pack.numels)
                for name, part in zip(pack.names, parts, strict=True):
                    self._kept[f"{what}/{tensors.index(tensor)}/{name}"] = part.clone()

    def _take(self, pack: Pack, tensors: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return the kept residuals of the pack's parameters, in the form of `Remembered.take_over`, and forget them here."""
        taken: dict[str, Tensor] = {}
        for what, (at, tensor) in product({key.partition("/")[0] for key in self._kept}, enumerate(tensors)):
            parts = [self._kept.pop(f"{what}/{at}/{name}", None) for name in pack.names]
            if any(part is not None for part in parts):
                pairs = zip(parts, pack.numels, strict=True)
                filled = [torch.zeros(n, device=device) if p is None else p.to(device) for p, n in pairs]
                taken[f"{what}/{tensor}"] = torch.cat(filled)
        return taken


def packed_embeddings(modules: Mapping[str, Any]) -> set[str]:
    """The names of the modules, among those that `fully_shard` was called on, whose buffers hold an embedding."""
    groups = {name: module._get_fsdp_state()._fsdp_param_group for name, module in modules.items()}
    packed = {name: [each._module_info.module for each in group.fsdp_params] for name, group in groups.items() if group}
    return {name for name, owners in packed.items() if any(map(looks_up_rows, owners))}
