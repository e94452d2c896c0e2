"""A piece of a bucket, on which a scheme works, and the interface of the codecs that encode it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gradwire.collectives.codec_state import Memory, Store
from gradwire.kernels import Scattered, cpu


class Codec(Protocol):
    """The part of a compressor that schemes use; see gradwire.compressors.base."""

    @property
    def state(self) -> tuple[str, ...]: ...

    @property
    def encodes_own_part(self) -> bool: ...

    @property
    def runs_in_c(self) -> bool: ...

    def for_sum(self) -> "Codec": ...

    def summing(self, terms: int, ranks: int) -> "Codec": ...

    def payload_bytes(self, segments: Any, dtype: torch.dtype) -> int: ...

    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: Any) -> None: ...

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None: ...

    def encode_calls(self, src: Any, state: Any, segments: Any, context: Any, payload: Any) -> list[Any]: ...

    def decode_calls(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> list[Any]: ...


class Program(Protocol):
    """The rounds of a codec whose payloads are summed on the wire; see gradwire.compressors.base."""

    payloads: list[torch.Tensor]
    """The payload of each round, float32."""
    shared: dict[str, torch.Tensor]
    """State that is the same on all ranks, by tensor name."""

    def fill(self, round_number: int, context: Any) -> None:
        """Write the round's payload. State may change in the last round and in `finish`."""
        ...

    def finish(self, context: Any) -> None:
        """Write the sum of gradients to the flat buffer."""
        ...


class SummedCodec(Protocol):
    """A codec with a `Program`."""

    @property
    def state(self) -> tuple[str, ...]: ...

    def program(self, flat: Any, state: Any, segments: Any) -> Program: ...


class Runs(Protocol):
    """The places at which a piece may be cut."""

    def cut(self, start: int, end: int, parts: int) -> Sequence[int]:
        """parts + 1 edges between `start` and `end` at which the codec allows a cut."""
        ...

    def between(self, start: int, end: int) -> Any:
        """The segments of these elements, with offsets from `start`."""
        ...


@dataclass(frozen=True)
class Piece:
    """A run of a bucket's elements, cut into one shard per rank."""

    flat: torch.Tensor
    """The gradient before the exchange, the sum after it; empty where `apart` is given."""
    bounds: tuple[int, ...]
    """world_size + 1 edges: shard j is flat[bounds[j]:bounds[j + 1]]."""
    shards: Sequence[Any]
    """Segments of each shard, with offsets from the shard's start."""
    whole: Any
    """Segments of the whole piece."""
    reduce_dtype: torch.dtype
    contexts: Sequence[Any]
    """One context for each encode of a scheme."""
    store_for: Callable[[Any], Store | None]
    """The store of the residual of some segments; None for float32."""
    store_contexts: Sequence[Any]
    """For each encode the context of its store."""
    runs: Runs
    apart: Scattered | None = None
    """The gradient where autograd left it, for schemes that read it and write the sum there. Given only to these."""

    @property
    def gradient(self) -> torch.Tensor | Scattered:
        """The gradient before the exchange, the sum after it, wherever it lies."""
        return self.flat if self.apart is None else self.apart

    def values(self, start: int, end: int) -> torch.Tensor:
        """These elements as they are now; a copy where they lie apart."""
        if self.apart is None:
            return self.flat[start:end]
        values = torch.empty(end - start, dtype=self.apart.dtype)
        elements = replace(self.apart[start:end], factor=1.0)
        cpu.run([cpu.call("gather_rows", elements, self.runs.between(start, end), False, values)])
        return values

    def memory(
        self, codec: Codec | SummedCodec, encode: int, start: int, end: int, segments: Any, copy: bool = False
    ) -> Memory:
        """The memory of one encode of elements start..end, which are these segments."""
        store = self.store_for(segments) if "residual" in codec.state else None
        return Memory(codec.state, str(encode), start, end, store, self.store_contexts[encode].random, copy)
