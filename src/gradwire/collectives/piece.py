"""What schemes work on: a piece of a bucket, and the codecs that encode it, of which they know these functions alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradwire.collectives.memory import Memory, Store

__all__ = ["Codec", "Piece", "Program", "Runs", "SummedCodec"]


class Codec(Protocol):
    """The part of a compressor that schemes use; see gradwire.compressors.base."""

    @property
    def state(self) -> tuple[str, ...]: ...

    @property
    def encodes_own_part(self) -> bool: ...

    def for_sum(self) -> "Codec": ...

    def payload_bytes(self, segments: Any, dtype: torch.dtype) -> int: ...

    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: Any) -> None: ...

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None: ...


class Program(Protocol):
    """One piece's work with a codec whose payloads are summed on the wire, in rounds; see gradwire.compressors.base."""

    payloads: list[torch.Tensor]
    """Of each round, float32: what is summed."""
    shared: dict[str, torch.Tensor]
    """What is remembered and the same on all ranks, by tensor name."""

    def fill(self, round_number: int, context: Any) -> None:
        """Write the round's payload. State changes in the last round only, or when it is finished."""
        ...

    def finish(self, context: Any) -> None:
        """Write the sum of gradients to the flat buffer."""
        ...


class SummedCodec(Protocol):
    """A codec of such payloads."""

    @property
    def state(self) -> tuple[str, ...]: ...

    def program(self, flat: Any, state: Any, segments: Any) -> Program: ...


class Runs(Protocol):
    """How a piece may be cut."""

    def cut(self, start: int, end: int, parts: int) -> Sequence[int]:
        """parts + 1 edges of elements start..end of the piece, at which the codec allows it to be cut."""
        ...

    def between(self, start: int, end: int) -> Any:
        """Segments of these elements, offsets counted from `start`."""
        ...


@dataclass(frozen=True)
class Piece:
    """A run of a bucket's flat buffer, cut into one shard per rank."""

    flat: torch.Tensor
    """The run itself: every rank's gradient before, the sum after."""
    bounds: tuple[int, ...]
    """world_size + 1 elements: shard j is flat[bounds[j]:bounds[j + 1]]."""
    shards: Sequence[Any]
    """Segments of each shard, offsets counted from the shard's start."""
    whole: Any
    """Segments of the run."""
    reduce_dtype: torch.dtype
    contexts: Sequence[Any]
    """One context for each encode that a scheme may have."""
    store_for: Callable[[Any], Store | None]
    """Where the residual of some segments is stored; None: as the float32 that encodes use."""
    store_contexts: Sequence[Any]
    """One context for each encode: that of what it stores."""
    runs: Runs

    def memory(
        self, codec: Codec | SummedCodec, encode: int, start: int, end: int, segments: Any, copy: bool = False
    ) -> Memory:
        """For what the codec remembers of elements start..end, which are these segments, when they are encoded at once."""
        store = self.store_for(segments) if "residual" in codec.state else None
        return Memory(codec.state, str(encode), start, end, store, self.store_contexts[encode].random, copy)
