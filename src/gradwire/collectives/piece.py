"""A piece of a bucket, on which a scheme works."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch

from gradwire.collectives.codec_state import Memory, Store
from gradwire.core import ElementWeights
from gradwire.kernels import Compressor, Context, Scattered, Segments, run_calls
from gradwire.kernels.reference.weights import ONE, forget_energy


class Runs(Protocol):
    """The places at which a piece may be cut."""

    def cut(self, start: int, end: int, parts: int) -> Sequence[int]:
        """parts + 1 edges between `start` and `end` at which the codec allows a cut."""

    def between(self, start: int, end: int) -> Segments:
        """The segments of these elements, with offsets from `start`."""


@dataclass(frozen=True)
class Energies:
    """The energies and weights of elements, the same on all ranks; see `gradwire.kernels.reference.weights`."""

    energy: torch.Tensor
    """float32, flat."""
    weights: torch.Tensor
    """uint8, flat: those of the step that runs, which follow from the energies before the step."""
    how: ElementWeights

    @staticmethod
    def zeros(numel: int, device: torch.device, how: ElementWeights | None) -> "Energies | None":
        """Return the energies of so many elements before the first step; None where elements have no weights."""
        if how is None:
            return None
        energy = torch.zeros(numel, dtype=torch.float32, device=device)
        return Energies(energy, torch.full((numel,), ONE, dtype=torch.uint8, device=device), how)

    def __getitem__(self, run: slice) -> "Energies":
        return replace(self, energy=self.energy[run], weights=self.weights[run])


@dataclass(frozen=True)
class Piece:
    """A run of a bucket's elements, cut into one shard per rank."""

    flat: torch.Tensor
    """The gradient before the exchange, the sum after it; empty where `apart` is given."""
    bounds: tuple[int, ...]
    """world_size + 1 edges: shard j is flat[bounds[j]:bounds[j + 1]]."""
    whole: Segments
    """Segments of the whole piece."""
    reduce_dtype: torch.dtype
    contexts: Sequence[Context]
    """One context for each encode of a scheme."""
    store_for: Callable[[Segments], Store | None]
    """The store of the residual of some segments; None for float32."""
    store_contexts: Sequence[Context]
    """For each encode the context of its store."""
    runs: Runs
    batched: bool = False
    """Whether one call is to encode or decode the payloads of several shards: each call is a launch on a device."""
    apart: Scattered | None = None
    """The gradient where autograd left it, for schemes that read it and write the sum there. Given only to these."""
    energies: Energies | None = None
    """Energies of the piece's elements, if elements have weights. The segments have the weights too."""

    @cached_property
    def shards(self) -> list[Segments]:
        """Segments of each shard, with offsets from the shard's start."""
        return [self.runs.between(start, end) for start, end in pairwise(self.bounds)]

    @property
    def gradient(self) -> torch.Tensor | Scattered:
        """The gradient before the exchange, the sum after it, wherever it lies."""
        return self.flat if self.apart is None else self.apart

    def values(self, start: int, end: int) -> torch.Tensor:
        """The current values of these elements; a copy if the elements are not contiguous."""
        if self.apart is None:
            return self.flat[start:end]
        return gathered(replace(self.apart[start:end], factor=1.0), self.runs.between(start, end))

    def forget(self, start: int, end: int) -> None:
        """The current values of these elements, which are the mean, do not count: the energies become those before the step."""
        if self.energies is not None:
            forget_energy(self.values(start, end), self.energies.how.keep, self.energies.energy[start:end])

    def memory(
        self,
        codec: Compressor,
        encode: int,
        start: int,
        end: int,
        segments: Segments,
        copy: bool = False,
        within: Mapping[str, torch.Tensor] | None = None,
    ) -> Memory:
        """The memory of one encode of elements start..end, which are these segments. within: see `Memory`."""
        store = self.store_for(segments) if "residual" in codec.state else None
        return Memory(codec.state, str(encode), start, end, store, self.store_contexts[encode].random, copy, within)


def gathered(elements: Scattered, segments: Segments) -> torch.Tensor:
    """A copy of elements that lie apart, times their factor."""
    values = torch.empty(elements.count, dtype=elements.dtype)
    run_calls([("gather_rows", elements, segments, False, values)])
    return values
