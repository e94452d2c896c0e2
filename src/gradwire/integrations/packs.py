"""The exchanges of the buffers that FSDP2 reduces, and residuals that follow a parameter from buffer to buffer.

FSDP2 packs only the parameters of a module that have a gradient. So a buffer of one module may hold other parameters in the next
step: heads that are used in turns, layers that are frozen or thawed.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.exchange import SHARED, Exchange, State, added_up, followed, read_state
from gradwire.integrations.handles import resume_together
from gradwire.integrations.pack_content import Pack
from gradwire.integrations.resharding import ALL_RANKS, whole_residuals
from gradwire.transport import Group

__all__ = ["ModulePacks"]


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
        self._resumes = False
        """Whether it began with a state that is not empty."""
        self._others: Mapping[int, Mapping[str, Any]] = {}
        """States of another number of ranks, until there is a group."""
        self._wholes: dict[str, Tensor] = {}
        """`{what}/{parameter}`: residuals from these states, not cut into shards yet."""
        self._wholes_of = ALL_RANKS
        """The rank in the group whose residuals these are; ALL_RANKS: those of all ranks, the same on each."""

    def exchange_of(
        self, pack: Pack, tensors: Mapping[str, Tensor], make: Callable[[int], Exchange], group: ProcessGroup, place: int | None
    ) -> Exchange:
        """The exchange of a pack, which begins its next step. All ranks ask for the same packs in the same order.

        make: makes one for a step. place: the number of this rank's shard, if the exchange has only that; None: all shards."""
        if pack not in self.exchanges:
            made = make(self.step)
            if self._others:
                self._wholes, self._others = whole_residuals(self._others, group.rank(), group.size()), {}
                self._wholes_of = ALL_RANKS if place is None else group.rank()
            self._cut(pack, group, place)
            self._make_room(pack, [*tensors], made.group)
            saved = self._saved.pop(pack, {})
            if self._resumes:  # on all ranks: they compare their steps when they meet
                resume_together(made, saved)
            if not saved:
                made.residuals.take_over(self._take(pack, [*tensors], made.flats[0].device))
            self.exchanges[pack] = made
        exchange = self.exchanges[pack]
        if exchange.outdated(self.step):  # the warm-up of a spec has ended
            before, exchange = exchange, make(self.step)
            exchange.keep_residuals_of(before)
            self.exchanges[pack] = exchange
        exchange.step, self.step = self.step, self.step + 1
        return exchange

    def follow(self, factor: float, left_out: bool) -> None:
        """See `Remembered.follow`."""
        for exchange in self.exchanges.values():
            exchange.residuals.follow(factor, left_out)
        self._kept, self._wholes = (followed(each, factor, left_out) for each in (self._kept, self._wholes))
        self._saved = {pack: _followed(state, factor, left_out) for pack, state in self._saved.items()}
        self._others = {rank: _followed_packs(state, factor, left_out) for rank, state in self._others.items()}

    def state(self) -> dict[str, Any]:
        """The content that `load` takes."""
        packs = {**self._saved, **{pack: exchange.state_dict() for pack, exchange in self.exchanges.items()}}
        state = {"step": self.step, "packs": [(tuple(pack), state) for pack, state in packs.items()], "kept": self._kept}
        # from another number of ranks, and not used yet
        state |= {"others": dict(self._others)} if self._others else {}
        return state | ({"wholes": (self._wholes_of, self._wholes)} if self._wholes else {})

    def load(self, saved: Mapping[str, Any]) -> None:
        """Begin with what `state` returned. Raises ValueError if it is something else."""
        try:
            self.step, self._kept = int(saved["step"]), dict(saved["kept"])
            self._saved = {Pack(*pack): state for pack, state in saved["packs"]}
            self._others, self._resumes = saved.get("others", {}), self.step > 0
            self._wholes_of, self._wholes = saved.get("wholes", (ALL_RANKS, {}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "the state does not say which parameters its residuals belong to: an older gradwire saved it, or it is damaged. "
                "Leave it out; residuals then begin at zero."
            ) from error

    def load_others(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Begin with the residuals that another number of ranks saved, by global rank. Raises ValueError if these ranks did not
        save together."""
        steps = {rank: int(state["step"]) for rank, state in saved.items()}
        if len({*steps.values()}) > 1:
            raise ValueError(f"ranks saved after different numbers of exchanges: {steps}. Pass the states of one save.")
        # the ranks that saved had not used what others saved before them
        self._others = next((state["others"] for state in saved.values() if "others" in state), saved)
        self.step = max(steps.values(), default=0)

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

    def _cut(self, pack: Pack, group: ProcessGroup, place: int | None) -> None:
        """Keep a shard of the whole residuals of the pack's parameters. A reduce-scatter does not encode the shard of the rank
        itself, so the rank takes the residuals of the shard before its own."""
        at = (group.rank() - 1) % group.size() if place is None else 0
        kinds, parts = {key.partition("/")[0] for key in self._wholes}, zip(pack.names, pack.numels, strict=True)
        for what, (name, numel) in product(kinds, parts):
            if (whole := self._wholes.pop(f"{what}/{name}", None)) is not None:
                self._kept[f"{what}/{at}/{name}"] = shard_of(whole, at if place is None else place, numel)

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


def shard_of(whole: Tensor, place: int, numel: int) -> Tensor:
    """Return the shard with this number, of so many elements, padded with zeros."""
    part = whole[place * numel : (place + 1) * numel]
    return torch.nn.functional.pad(part, (0, numel - part.numel()))


def _followed_packs(saved: Mapping[str, Any], factor: float, left_out: bool) -> dict[str, Any]:
    """The state of a module's packs after `Remembered.follow`."""
    made = {**saved, "packs": [(pack, _followed(state, factor, left_out)) for pack, state in saved["packs"]]}
    made["kept"] = followed(saved["kept"], factor, left_out)
    if "wholes" in saved:
        rank, wholes = saved["wholes"]
        made["wholes"] = rank, followed(wholes, factor, left_out)
    return made


def _followed(saved: Mapping[str, Any], factor: float, left_out: bool) -> dict[str, Any]:
    """The state of an exchange after `Remembered.follow`, with the same keys."""
    made = dict(saved)
    for key, value in saved.items():
        _, _, memory = key.partition("/")  # behind the rank
        if "/" in memory and isinstance(value, Tensor):
            kept = followed({memory: value}, factor, left_out)
            made[key] = kept[memory] if kept else torch.zeros_like(value)  # a state has all keys
    return made
