"""The residuals of all buckets, by tensor name: to save, to load, and to carry over to another set of buckets.

Encode 0 is the rank's own: its residual is as large as the gradient. Encode 1 is the owner's, of the sum: its residual
covers the rank's shards. A residual of encode 1 is a part of the mean gradient that was not sent, and so is one of
encode 0: when shards change owners, adding the one to the other loses nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from gradwire.collectives import TwoPhase
from gradwire.core.checks import printable
from gradwire.engine.layout import BucketBuffers

__all__ = ["Residuals", "unsent"]


class Residuals:
    """Views of the residuals of one set of buckets."""

    def __init__(self, buckets: list[BucketBuffers], rank: int) -> None:
        self._buckets, self._rank = buckets, rank

    def _runs(self) -> Iterator[tuple[int, str, int, torch.Tensor, torch.Tensor]]:
        """(encode, tensor name, first element, elements of the tensor, the residual's run) of every residual."""
        for buffers in self._buckets:
            for chunk, start in zip(buffers.chunks, buffers.bounds, strict=False):
                for encode, residual in enumerate(chunk.residuals):
                    begin = start
                    if encode == 1 and isinstance(chunk, TwoPhase):
                        begin += chunk.piece.bounds[self._rank]
                    for slot in buffers.slots:
                        low = max(slot.offset, begin)
                        high = min(slot.offset + slot.view.numel(), begin + residual.numel())
                        if low < high:
                            yield encode, slot.name, low - slot.offset, slot.view, residual[low - begin : high - begin]

    def state(self) -> dict[str, torch.Tensor]:
        """`residual/{encode}/{tensor}`: one-dimensional float32, as long as the tensor, zero where nothing is kept."""
        state: dict[str, torch.Tensor] = {}
        for encode, name, first, tensor, run in self._runs():
            key = f"residual/{encode}/{name}"
            if key not in state:
                state[key] = torch.zeros(tensor.numel(), dtype=run.dtype, device=run.device)
            state[key][first : first + run.numel()] = run
        return state

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError unless `state` has exactly what `load` takes."""
        expected = {f"residual/{encode}/{name}": tensor.numel() for encode, name, _, tensor, _ in self._runs()}
        for key in sorted(expected.keys() ^ state.keys()):
            where = "the state has no" if key in expected else "this plan keeps no"
            raise ValueError(
                f"{where} {printable(key)}: it was saved under another plan. Use the plan it was saved with."
            )
        _check_sizes({key: value.numel() for key, value in state.items()}, expected)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `state` of the same rank and plan returned, when `check` finds nothing wrong with it."""
        for encode, name, first, _, run in self._runs():
            run.copy_(state[f"residual/{encode}/{name}"].reshape(-1)[first : first + run.numel()])

    def carried(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet of each tensor, both encodes added up."""
        return unsent([self.state()])

    def names(self) -> list[str]:
        """Tensors of which there are residuals."""
        return list(dict.fromkeys(name for _, name, *_ in self._runs()))

    def check_carried(self, carried: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError where `take_over` would lose something."""
        expected = {name: tensor.numel() for _, name, _, tensor, _ in self._runs()}
        for name in carried:
            if name not in expected:
                raise ValueError(
                    f"the state has a residual of {name!r}, of which this plan keeps none: what was not sent would be lost. "
                    "Use the model, and the policy with error feedback, of the run that saved it."
                )
        _check_sizes({name: value.numel() for name, value in carried.items()}, expected)

    def take_over(self, carried: Mapping[str, torch.Tensor]) -> None:
        """Begin with what another set of buckets left, and with zeros where it left nothing. Of the own shard the second
        encode takes it: the first has none."""
        for _, name, first, _, run in self._runs():
            if name in carried:
                run.copy_(carried[name][first : first + run.numel()])
            else:
                run.zero_()
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                if isinstance(chunk, TwoPhase) and (own := chunk.sent_residuals[self._rank]) is not None:
                    own.zero_()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What happens inside leaves no trace in the residuals."""
        tensors = [residual for buffers in self._buckets for chunk in buffers.chunks for residual in chunk.residuals]
        copies = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


def unsent(states: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What ranks have not sent yet of each tensor, all their encodes added up, from what `Residuals.state` returned.

    Raises ValueError for a key that names no tensor, and where sizes differ.
    """
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for key, value in state.items():
            parts = key.split("/", 2)
            if len(parts) != 3 or parts[1] not in ("0", "1"):
                raise ValueError(
                    f"{key} is not residual/0/NAME or residual/1/NAME. Pass what handle.state_dict() returned."
                )
            name, flat = parts[2], value.reshape(-1)
            if name in total and total[name].numel() != flat.numel():
                raise ValueError(
                    f"{printable(key)} has {flat.numel()} elements, and another rank's {total[name].numel()}."
                )
            total[name] = total[name] + flat if name in total else flat
    return total


def _check_sizes(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for key, numel in found.items():
        if numel != expected[key]:
            raise ValueError(f"{key} has {numel} elements where the model's tensor has {expected[key]}.")
