"""What compressors remember of all buckets, by tensor name: to save, to load, and to carry over to another set of buckets.

Encode 0 is the rank's own: what it remembers is as large as the gradient. Encode 1 is the owner's, of the sum: it covers
the rank's shards. What is remembered of encode 1 is a part of the mean gradient, and so is that of encode 0 (gradients are
divided by the number of ranks first): when shards change owners, adding the one to the other loses nothing.

What is shared (PowerSGD's factors) is the same on all ranks, and of another size than the tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gradwire.collectives import TwoPhase
from gradwire.core.checks import printable
from gradwire.engine.layout import BucketBuffers

__all__ = ["Remembered", "added_up"]

SHARED = "shared"

State = Mapping[str, torch.Tensor]


class _Run(NamedTuple):
    """A part of what is remembered of a tensor."""

    key: str
    """Of the whole, `{what}/{encode}/{tensor}`."""
    first: int
    """The part's first element."""
    numel: int
    """Of the whole."""
    part: torch.Tensor

    @property
    def carried_key(self) -> str:
        return _without_encode(self.key)


class Remembered:
    """Views of what one set of buckets remembers."""

    def __init__(self, buckets: list[BucketBuffers], rank: int) -> None:
        self._buckets, self._rank = buckets, rank

    def _runs(self, change: bool = False) -> Iterator[_Run]:
        """With `change` what is written to the parts is remembered."""
        for buffers in self._buckets:
            for chunk, start in zip(buffers.chunks, buffers.bounds, strict=False):
                for name, value in chunk.shared.items():
                    yield _Run(f"{SHARED}/0/{name}", 0, value.numel(), value)
                for encode, memories in enumerate(chunk.memory):
                    for memory in memories:
                        values = memory.read()
                        yield from _parts(values, encode, start + memory.start, buffers)
                        if change:
                            memory.write(values)

    def state(self) -> dict[str, torch.Tensor]:
        """`{what}/{encode}/{tensor}`: one-dimensional float32, zero where nothing is kept."""
        state: dict[str, torch.Tensor] = {}
        for run in self._runs():
            if run.key not in state:
                state[run.key] = torch.zeros(run.numel, dtype=run.part.dtype, device=run.part.device)
            state[run.key][run.first : run.first + run.part.numel()] = run.part
        return state

    def check(self, state: State) -> None:
        """Raises ValueError unless `state` has exactly what `load` takes."""
        expected = {run.key: run.numel for run in self._runs()}
        for key in sorted(expected.keys() ^ state.keys()):
            where = "the state has no" if key in expected else "this plan keeps no"
            raise ValueError(
                f"{where} {printable(key)}: it was saved under another plan. Use the plan it was saved with."
            )
        _check_sizes({key: value.numel() for key, value in state.items()}, expected)

    def load(self, state: State) -> None:
        """Take what `state` of the same rank and plan returned, when `check` finds nothing wrong with it."""
        for run in self._runs(change=True):
            run.part.copy_(state[run.key].reshape(-1)[run.first : run.first + run.part.numel()])

    def carried(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet of each tensor, and else remembers, both encodes added up: `{what}/{tensor}`."""
        return added_up([self.state()])

    def names(self) -> list[str]:
        """Tensors of which something is remembered."""
        return list(dict.fromkeys(run.carried_key.partition("/")[2] for run in self._runs()))

    def check_carried(self, carried: State) -> None:
        """Raises ValueError where `take_over` would lose something."""
        expected = {run.carried_key: run.numel for run in self._runs()}
        for key in carried:
            if key not in expected:
                what, _, name = key.partition("/")
                raise ValueError(
                    f"the state has a {what} of {name!r}, of which this plan keeps none: what was not sent would be lost. "
                    "Use the model, and the policy with error feedback, of the run that saved it."
                )
        _check_sizes({key: value.numel() for key, value in carried.items()}, expected)

    def fitting(self, carried: State) -> dict[str, torch.Tensor]:
        """What `take_over` can take of it."""
        expected = {run.carried_key: run.numel for run in self._runs()}
        return {key: value for key, value in carried.items() if expected.get(key) == value.numel()}

    def take_over(self, carried: State) -> None:
        """Begin with what another set of buckets left, and with zeros where it left nothing (with the first factors, where
        no shared ones). Of the own shard the second encode takes it: the first has none."""
        for run in self._runs(change=True):
            if run.carried_key in carried:
                run.part.copy_(carried[run.carried_key][run.first : run.first + run.part.numel()])
            elif not run.key.startswith(f"{SHARED}/"):
                run.part.zero_()
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                if isinstance(chunk, TwoPhase):
                    chunk.own[self._rank].clear(chunk.of_sum.names)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What happens inside leaves no trace in what is remembered."""
        copies = [(held, held.clone()) for held in self.held()]
        try:
            yield
        finally:
            for held, copy in copies:
                held.copy_(copy)

    def held(self) -> Iterator[torch.Tensor]:
        """The memory itself."""
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                yield from chunk.shared.values()
                for memories in chunk.memory:
                    for memory in memories:
                        yield from memory.held


def _parts(values: State, encode: int, begin: int, buffers: BucketBuffers) -> Iterator[_Run]:
    """By tensor, what an encode remembers from the bucket's element `begin` on."""
    for what, whole in values.items():
        for slot in buffers.slots:
            low, high = max(slot.offset, begin), min(slot.offset + slot.view.numel(), begin + whole.numel())
            if low < high:
                key, part = f"{what}/{encode}/{slot.name}", whole[low - begin : high - begin]
                yield _Run(key, low - slot.offset, slot.view.numel(), part)


def added_up(states: Iterable[State]) -> dict[str, torch.Tensor]:
    """`{what}/{tensor}` from what `Remembered.state` of several ranks returned: all their encodes added up, but of what is
    shared the first.

    Raises ValueError for a key that names no tensor, and where sizes differ.
    """
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for key, value in state.items():
            parts = key.split("/", 2)
            if len(parts) != 3 or parts[1] not in ("0", "1"):
                raise ValueError(
                    f"{printable(key)} is not WHAT/0/NAME or WHAT/1/NAME. Pass what handle.state_dict() returned."
                )
            name, flat = _without_encode(key), value.reshape(-1)
            if name not in total:
                total[name] = flat
                continue
            if total[name].numel() != flat.numel():
                raise ValueError(
                    f"{printable(key)} has {flat.numel()} elements, and another rank's {total[name].numel()}."
                )
            if parts[0] != SHARED:
                total[name] = total[name] + flat
    return total


def _without_encode(key: str) -> str:
    what, _, name = key.split("/", 2)
    return f"{what}/{name}"


def _check_sizes(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for key, numel in found.items():
        if numel != expected[key]:
            raise ValueError(f"{printable(key)} has {numel} elements where the model's tensor has {expected[key]}.")
