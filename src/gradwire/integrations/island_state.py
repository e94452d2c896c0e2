"""The state of a rank of `gw.islands`: how it is saved, and how all ranks load theirs, or none."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gradwire.exchange import Exchange
from gradwire.integrations.island_calls import gather_rows
from gradwire.integrations.member_state import check_forms
from gradwire.integrations.outer_steps import OuterSteps

__all__ = ["IslandState"]

_NOT_LOADED = -1


class IslandState:
    """Global and local weights, outer momenta and residuals of a rank. Keys are `rank{r}/...`: no two ranks have the same."""

    def __init__(
        self, outer: OuterSteps, exchange: Exchange | None, inside: dist.ProcessGroup, between: dist.ProcessGroup
    ) -> None:
        self._outer, self._exchange = outer, exchange
        self._inside, self._between = inside, between
        self._prefix = f"rank{dist.get_rank()}/"

    def save(self, steps: int) -> dict[str, Any]:
        """Copies of this rank's state. It has the same keys in every step."""
        parts = {**self._outer.state(), "local": self._outer.local, "momenta": self._outer.momenta()}
        state = {f"{self._prefix}{part}/{name}": each.detach().clone() for part in parts for name, each in parts[part].items()}
        residuals = self._exchange.state_dict() if self._exchange is not None else {}
        state |= {f"{self._prefix}residuals/{key.removeprefix(self._prefix)}": each for key, each in residuals.items()}
        return {**state, f"{self._prefix}steps": torch.tensor(steps)}

    def load(self, state: Mapping[str, Any]) -> int:
        """Take what `save` returned on this rank, and return its steps. Collective. Raises ValueError on all ranks, which then
        have changed nothing, if one cannot load its state, and if these are of different steps."""
        problem: Exception | None = None
        steps, found, before = _NOT_LOADED, {}, {}
        try:
            found = self._read(state)
            self._check(found)
            if self._exchange is not None:
                before = self._exchange.state_dict()
                self._exchange.load_state_dict(found["residuals"])
            steps = int(found["steps"])
        except Exception as error:  # the other ranks wait for this one
            problem = error
        everybody = self._of_all_ranks(steps)
        if _NOT_LOADED not in everybody and len({*everybody}) == 1:
            self._outer.load(found)
            return steps
        if before and self._exchange is not None:
            self._exchange.load_state_dict(before)
        if problem is not None:
            raise ValueError(f"this rank could not load its state, so no rank goes on: {problem}") from problem
        if _NOT_LOADED in everybody:
            raise ValueError("another rank could not load its state, so no rank goes on. See the logs of all ranks.")
        raise ValueError(
            f"ranks loaded states of different steps: {everybody}. Load the states of one save. If these are, islands made "
            "different numbers of optimizer steps, and would wait for each other's exchanges: all have to make the same number."
        )

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of this rank's state."""
        if "weights" in state:  # gradwire 0.3 saved it: without ranks, and without local weights
            return {**state, "local": state["weights"]}
        own = {key.removeprefix(self._prefix): value for key, value in state.items() if key.startswith(self._prefix)}
        if "steps" not in own:
            raise ValueError(f"the state has no {self._prefix}steps: other ranks saved it. Load the state of this rank.")
        parts: dict[str, Any] = {"weights": {}, "local": {}, "momenta": {}, "residuals": {}, "steps": own.pop("steps")}
        for key, value in own.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[self._prefix + name if part == "residuals" else name] = value
        return parts

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of other tensors."""
        own = self._outer.momenta() if state["momenta"] else {}
        for part, expected in {"weights": self._outer.weights, "local": self._outer.local, "momenta": own}.items():
            check_forms(part, state[part], expected)
        if int(state["steps"]) < 0:
            raise ValueError(f"the state was saved after {int(state['steps'])} steps.")

    def _of_all_ranks(self, number: int) -> list[int]:
        """The numbers of all ranks, island by island."""
        found = torch.tensor([number], device=next(iter(self._outer.weights.values())).device)
        for group in (self._inside, self._between):
            found = torch.cat(gather_rows(group, found))
        return [int(each) for each in found.tolist()]
