"""The memory of encodes between steps, such as residuals, which may be stored in fewer bytes than float32.

A residual that is stored narrow is widened to float32 before an encode, into scratch memory, and narrowed after it. All encodes
of a lane share one scratch, as large as the largest of them, because a lane runs one task at a time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from gradwire.transport import Mark, Streams


class Store(Protocol):
    """A residual in fewer bytes; see gradwire.compressors.stores."""

    held: torch.Tensor

    def widen(self, residual: torch.Tensor) -> None:
        """Write the stored residual to `residual`, float32."""

    def narrow(self, residual: torch.Tensor, random: torch.Tensor) -> None:
        """Store `residual`, which is finite. `random` keys the rounding, as in gradwire.compressors.base."""

    def narrow_changed(self, residual: torch.Tensor, random: torch.Tensor) -> None:
        """Store `residual`, slower: unchanged blocks keep their bytes, and values that are not finite are left out."""


class _Scratch:
    """Memory for one residual."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=torch.float32, device=device)
        self.free: Mark = None
        """The end of the last use."""


class Memory:
    """The state of one encode: by name, such as 'residual', one float32 for each element."""

    def __init__(
        self,
        names: Sequence[str],
        encode: str,
        start: int,
        end: int,
        store: Store | None,
        random: torch.Tensor,
        copy: bool = False,
        within: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """encode: the number of the encode, or 'left' for values to add to the next gradient. start, end: its elements of the
        piece. store: None if the residual is float32. random: keys the rounding of the store, on the piece's device. copy: a
        lower rank encodes the same values, so that their loss counts there. within: the state's tensors, part of those of
        several encodes (`JointMemory.part`); None: memory of its own."""
        self.names, self.encode, self.copy = tuple(names), encode, copy
        self.start, self.end, self.numel, self.device = start, end, end - start, random.device
        self._store, self._random = store, random
        sizes = {name: 0 if store and name == "residual" else self.numel for name in names}
        if within is None:
            self._tensors = {name: torch.zeros(sizes[name], dtype=torch.float32, device=self.device) for name in names}
        else:
            self._tensors = dict(within)
        self._scratch: _Scratch | None = None

    @property
    def state(self) -> list[torch.Tensor]:
        """The state tensors. A residual that is stored narrow is valid from `take` until `leave` or `keep`."""
        return list(self._tensors.values())

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors that persist between steps."""
        if self._store is None:
            return self.state
        return [self._store.held, *(tensor for name, tensor in self._tensors.items() if name != "residual")]

    @property
    def narrow(self) -> bool:
        """Whether the residual is stored in fewer bytes than float32."""
        return self._store is not None

    # ---- in a step, on a lane

    @contextmanager
    def open(self, streams: Streams, source: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """`state` for one encode of `source`."""
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
        """End the use of `state` without changes."""
        if self._scratch is not None:
            self._scratch.free = streams.mark()

    def keep(self, streams: Streams, source: torch.Tensor) -> None:
        """End the use of `state` after an encode of `source`. Where `source` is not finite the residual stays unchanged."""
        if self._store is not None:
            # on a GPU this check would make the host wait, so that such a block is rounded once more
            usual = source.device.type != "cpu" or _is_moderate(source)
            keep = self._store.narrow if usual else self._store.narrow_changed
            keep(self._tensors["residual"], self._random)
        self.leave(streams)

    # ---- between steps

    def read(self) -> dict[str, torch.Tensor]:
        """The state as float32 by name; a copy of a residual that is stored narrow."""
        if self._store is None:
            return self._tensors
        residual = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        self._store.widen(residual)
        return self._tensors | {"residual": residual}

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Store the values of `read` after changes in place. Unchanged values stay the same, bit for bit."""
        if self._store is not None:
            self._store.narrow_changed(values["residual"], self._random)

    def clear(self) -> None:
        """Set everything to zero. What is zero already is only read: new memory takes no page that nothing is kept in."""
        values = self.read()
        changed = [value.zero_() for value in values.values() if value.any()]
        if changed:
            self.write(values)

    def add(self, name: str, start: int, values: torch.Tensor) -> None:
        """Add values for the piece's elements from `start` on to the state of this name. Elements outside this memory and sums
        that are not finite are left out."""
        low, high = max(start, self.start), min(start + values.numel(), self.end)
        if name in self.names and low < high:
            everything = self.read()
            part, more = everything[name][low - self.start : high - self.start], values[low - start : high - start]
            if part.device.type == "cpu" and _is_moderate(part) and _is_moderate(more):
                part.add_(more)  # without memory for the sum
            else:
                total = part + more
                part.copy_(torch.where(total.isfinite(), total, part))
            self.write(everything)

    def use(self, scratch: _Scratch) -> None:
        """Widen the residual into this scratch from now on."""
        self._scratch = scratch
        part = scratch.flat[: self.numel]
        self._tensors["residual"].set_(part.untyped_storage(), 0, part.shape, part.stride())  # a program may hold it


class JointMemory:
    """The state of the encodes of successive elements, zeros at first, for one call that does several of these encodes."""

    def __init__(self, names: Sequence[str], numel: int, device: torch.device) -> None:
        self._tensors = {name: torch.zeros(numel, dtype=torch.float32, device=device) for name in names}

    @property
    def state(self) -> list[torch.Tensor]:
        """The state tensors of all these elements."""
        return list(self._tensors.values())

    def part(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """The state tensors of some of these elements, by name."""
        return {name: tensor[start:end] for name, tensor in self._tensors.items()}

    @contextmanager
    def open(self, streams: Streams, source: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Return `state`: no part of it is stored narrow."""
        yield self.state


def share_scratch(memories: Iterable[Memory]) -> None:
    """Give one scratch to all memories of a lane that store a residual narrow."""
    narrow = [memory for memory in memories if memory.narrow]
    if narrow:
        scratch = _Scratch(max(memory.numel for memory in narrow), narrow[0].device)
        for memory in narrow:
            memory.use(scratch)


def _is_moderate(source: torch.Tensor) -> bool:
    """Whether the sum of squares is finite: then every element is finite and at most 2^64."""
    return math.isfinite(torch.linalg.vector_norm(source, dtype=torch.float32).item())
