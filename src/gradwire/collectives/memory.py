"""What encodes remember between steps, and the memory in which a residual that is stored narrow is used.

A residual may be stored in fewer bytes than the float32 that an encode reads and writes. Then it is widened before the
encode, to the scratch of the lane that runs it, and narrowed after it. A lane does one thing after the other, so one
scratch, as large as the largest of its encodes, serves them all.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from gradwire.collectives.streams import Mark, Streams

__all__ = ["Memory", "Store", "share_scratch"]


class Store(Protocol):
    """A residual in fewer bytes; see gradwire.compressors.stores."""

    held: torch.Tensor
    """The bytes."""

    def widen(self, residual: torch.Tensor) -> None:
        """Write it to `residual`, float32."""
        ...

    def narrow(self, residual: torch.Tensor, random: torch.Tensor) -> None:
        """Hold `residual`, which is finite. `random` keys the rounding, as in gradwire.compressors.base."""
        ...

    def narrow_changed(self, residual: torch.Tensor, random: torch.Tensor) -> None:
        """The same, slower: what `widen` gave is held as it was, and what is not finite is not held."""
        ...


class _Scratch:
    """Room for one residual."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=torch.float32, device=device)
        self.free: Mark = None
        """The moment from which nobody uses it."""


class Memory:
    """What is remembered of the elements of a piece that are encoded at once: by name, as 'residual', a float32 number of
    each."""

    def __init__(
        self,
        names: Sequence[str],
        encode: str,
        start: int,
        end: int,
        store: Store | None,
        random: torch.Tensor,
        copy: bool = False,
    ) -> None:
        """Of elements start..end of the piece, by the encode of this number; 'left' is what goes into the next gradient
        before any encode. `store` is None where the residual is float32. `random`, on the piece's device, keys the rounding of
        what is stored narrow. `copy`: a lower rank encodes the very same values: what is lost there is lost once."""
        self.names, self.encode, self.copy = tuple(names), encode, copy
        self.start, self.end, self.numel, self.device = start, end, end - start, random.device
        self._store, self._random = store, random
        sizes = {name: 0 if store and name == "residual" else self.numel for name in names}
        self._tensors = {name: torch.zeros(sizes[name], dtype=torch.float32, device=self.device) for name in names}
        self._scratch: _Scratch | None = None

    @property
    def state(self) -> list[torch.Tensor]:
        """What an encode takes. A residual that is stored narrow is in it from `take` until `leave` or `keep`."""
        return list(self._tensors.values())

    @property
    def held(self) -> list[torch.Tensor]:
        """The memory that outlasts a step."""
        if self._store is None:
            return self.state
        return [self._store.held, *(tensor for name, tensor in self._tensors.items() if name != "residual")]

    @property
    def narrow(self) -> bool:
        """Whether the residual is stored in fewer bytes than it is used in."""
        return self._store is not None

    # ---- in a step, on a lane

    @contextmanager
    def open(self, streams: Streams, source: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """`state` for one encode of `source`, which stays as it is."""
        self.take(streams)
        yield self.state
        self.keep(streams, source)

    def take(self, streams: Streams) -> None:
        """Make `state` valid."""
        if self._store is not None:
            assert self._scratch is not None, "share_scratch comes first"
            streams.wait(self._scratch.free)
            self._store.widen(self._tensors["residual"])

    def leave(self, streams: Streams) -> None:
        """`state` was not changed."""
        if self._scratch is not None:
            self._scratch.free = streams.mark()

    def keep(self, streams: Streams, source: torch.Tensor) -> None:
        """`state` was changed by an encode of `source`. Where that is not finite the residual stays what it was."""
        if self._store is not None:
            # on a device the question would make the host wait: there such a block is rounded once more
            usual = source.device.type != "cpu" or _is_moderate(source)
            keep = self._store.narrow if usual else self._store.narrow_changed
            keep(self._tensors["residual"], self._random)
        self.leave(streams)

    # ---- between steps

    def read(self) -> dict[str, torch.Tensor]:
        """Everything, as float32 by name; a residual that is stored narrow as a copy."""
        if self._store is None:
            return self._tensors
        residual = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        self._store.widen(residual)
        return self._tensors | {"residual": residual}

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Take what `read` gave after it was changed in place. What was not changed stays as it is, bit for bit."""
        if self._store is not None:
            self._store.narrow_changed(values["residual"], self._random)

    def clear(self) -> None:
        """Set everything to zero."""
        values = self.read()
        for value in values.values():
            value.zero_()
        self.write(values)

    def add(self, name: str, start: int, values: torch.Tensor) -> None:
        """Add these values of the piece's elements from `start` on to what is remembered by a name, where it is.

        What is not finite is left out, and so are elements that are not remembered here.
        """
        low, high = max(start, self.start), min(start + values.numel(), self.end)
        if name in self.names and low < high:
            everything = self.read()
            part = everything[name][low - self.start : high - self.start]
            total = part + values[low - start : high - start]
            part.copy_(torch.where(total.isfinite(), total, part))
            self.write(everything)

    def use(self, scratch: _Scratch) -> None:
        """Widen the residual to this memory from now on."""
        self._scratch = scratch
        part = scratch.flat[: self.numel]
        self._tensors["residual"].set_(part.untyped_storage(), 0, part.shape, part.stride())  # a program may hold it


def share_scratch(memories: Iterable[Memory]) -> None:
    """Give one scratch to all of one lane that store a residual narrow."""
    narrow = [memory for memory in memories if memory.narrow]
    if narrow:
        scratch = _Scratch(max(memory.numel for memory in narrow), narrow[0].device)
        for memory in narrow:
            memory.use(scratch)


def _is_moderate(source: torch.Tensor) -> bool:
    """Whether the sum of squares is finite: then every element is, and none is beyond 2^64."""
    return math.isfinite(torch.linalg.vector_norm(source, dtype=torch.float32).item())
