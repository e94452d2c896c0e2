"""The base class of compressors: encode and decode as functions of (tensor, state, context), or as lists of kernel calls.

It is declared here because collectives run compressors, and know none of `gradwire.compressors`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor

from gradwire.core import RAW, ElementRun, Spec, show
from gradwire.errors import PayloadError, PlanError, SpecError
from gradwire.kernels.segments import Segments

KernelCall = tuple[Any, ...]
"""The name of a kernel, then its arguments: ("qsgd_decode", payload, segments, 128, "max", True, total). A function of Python may
stand for the name; then C++ cannot run the call."""


_MOST_INDEXED = 2**31 - 1
"""kMaxGroup in csrc/sparse_layout.hpp."""
_MOST_BYTES = 2**20
"""The most bytes of a payload for each element. A spec that gives more is wrong."""


@dataclass(frozen=True)
class Context:
    """The input of an encode in addition to the tensor.

    random: int64 tensor of (seed, step, encode number, rank) on the tensor's device: the key of the random stream. A resumed
    run repeats the stream, and ranks differ. A tensor, since graph capture would freeze a host number.
    stream: torch's current stream, in which the work is done; None on CPU, where the work is done when the call returns.
    """

    random: Tensor
    stream: torch.Stream | None = None

    def on(self, stream: torch.Stream | None) -> "Context":
        """This context for another stream."""
        return self if stream is self.stream else replace(self, stream=stream)


class Program(Protocol):
    """The rounds of a compressor whose payloads are summed on the wire."""

    payloads: list[Tensor]
    """The payload of each round, float32."""
    shared: dict[str, Tensor]
    """State that is the same on all ranks, by tensor name."""

    def fill(self, round_number: int, context: Context) -> None:
        """Write the round's payload. State may change in the last round and in `finish`."""
        ...

    def finish(self, context: Context) -> None:
        """Write the sum of gradients to the flat buffer."""
        ...


class Compressor(ABC):
    """Encodes runs of elements of a flat buffer to payloads. One instance serves all tensors of a family of specs.

    A flat buffer is a contiguous 1-D tensor; `segments` says which elements of which tensors it holds. Callers make it once.
    A subclass writes `encode` and `decode`. A subclass of `gradwire.compressors.KernelCompressor` lists kernels instead.
    """

    encodes_own_part = False
    """Whether the sum over ranks has decoded values only. Then the owner encodes and decodes its own part too."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the state tensors of an encode, as in the spec."""
        return self.spec.state

    def for_sum(self) -> "Compressor":
        """The compressor that encodes the sum over ranks, in schemes that encode twice."""
        return self

    def summing(self, terms: int, ranks: int) -> "Compressor":
        """The compressor for sums of the gradients of `terms` ranks, each divided by the number of all `ranks`. It is another one
        where the method compares with a fixed magnitude, which is meant for gradients as scripts see them."""
        return self

    def payload_bytes(self, segments: Segments, dtype: torch.dtype) -> int:
        """Bytes of the payload of these segments for a gradient of this dtype. Independent of values. Raises PlanError for more
        elements than indices can number, and SpecError if the spec gives no whole number."""
        key = self.spec, dtype
        if (found := segments.payload_bytes.get(key)) is None:  # asked in every decode
            found = segments.payload_bytes[key] = _bytes_of(self.spec, tuple(runs_of(segments)), dtype.itemsize)
        return found

    @abstractmethod
    def encode(self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor) -> None:
        """Write the payload (uint8, `payload_bytes` long) of src.

        `state` has a tensor (float32, as long as src) for each name in `self.state`, in that order. If `state` is empty, the
        error of the encode is lost. A residual is added to src, and the encode writes the new error to the residual.
        """

    @abstractmethod
    def decode(self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context) -> None:
        """Write the decoded values to dst, or add them. `dtype` is the dtype of the gradient that was encoded.

        Raises PayloadError for a payload of another size.
        """

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[KernelCall]:
        """The calls that `encode` runs; they keep the tensors' memory."""
        return [(self.encode, src, state, segments, context, payload)]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[KernelCall]:
        """The calls that `decode` runs. Raises PayloadError for a payload of another size."""
        return [(self.decode, payload, segments, dtype, add, dst, context)]

    @property
    def runs_in_c(self) -> bool:
        """Whether the C++ library of this machine has all kernels of the lists: then C++ runs whole phases without Python. The
        same on all ranks with the same version."""
        return False

    @property
    def batches(self) -> bool:
        """Whether `encode_calls` and `decode_calls` take a `Batch` of payloads."""
        return False

    def adds_payloads(self, segments: Segments) -> bool:
        """Whether one call can add up the payloads of several ranks for these segments."""
        return self.batches

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> Program:
        """The rounds of one flat buffer, which holds the gradient before and the sum after, for specs with `rounds`."""
        raise PlanError(f"{self.spec!r} has no rounds: its payloads are gathered. Use scheme='allgather' or 'alltoall'.")

    def check(self, payload: Tensor, segments: Segments, dtype: torch.dtype) -> None:
        """Raise PayloadError unless the payload has the size that the segments take."""
        expected = self.payload_bytes(segments, dtype)
        if payload.numel() != expected or payload.dtype != torch.uint8:
            raise PayloadError(
                f"a payload of {payload.numel()} elements of {payload.dtype} is not one of {self.spec!r}: "
                f"{segments.numel} elements in {len(segments.rows)} segments take {expected} bytes of uint8. Ranks run "
                "different plans or versions, or the bytes were cut. Run the same plan and version on all ranks."
            )


class WrappingCompressor(Compressor):
    """A compressor around another one, `inner`. `around` makes the same wrapper of a second compressor."""

    def __init__(self, spec: Spec, inner: Compressor) -> None:
        super().__init__(spec)
        self.inner, self.encodes_own_part = inner, inner.encodes_own_part

    @abstractmethod
    def around(self, inner: Compressor) -> Compressor:
        """Return a wrapper of this kind around another compressor."""

    def for_sum(self) -> Compressor:
        return self._around(self.inner.for_sum())

    def summing(self, terms: int, ranks: int) -> Compressor:
        return self._around(self.inner.summing(terms, ranks))

    def _around(self, inner: Compressor) -> Compressor:
        return self if inner is self.inner else self.around(inner)

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> Program:
        return self.inner.program(flat, state, segments)


@lru_cache(maxsize=1024)
def _bytes_of(spec: Spec, runs: tuple[ElementRun, ...], itemsize: int) -> int:
    """Bytes of a payload. Shards have few sizes, and of many ranks there are tens of thousands."""
    indexed = spec.indexed([run for run in runs if run.bits != RAW])
    if indexed > _MOST_INDEXED:
        raise PlanError(
            f"{spec!r} is to encode {indexed} elements of a tensor or a bucket at once, and indices reach to {_MOST_INDEXED}. "
            "Cut buckets into smaller chunks (chunk_bytes=2**30), or give large tensors another spec, such as gw.QSGD(bits=4)."
        )
    size: object = spec.bytes_beside(runs, itemsize)
    if not isinstance(size, SupportsIndex) or (found := index(size)) < 0:
        raise SpecError(
            f"payload_bytes of {spec!r} gives {show(size)}, a {type(size).__name__}: a payload has a whole number of bytes, at "
            "least 0. Return an int; of n bits, -(-n // 8)."
        )
    numel = sum(run.numel for run in runs)
    if found > _MOST_BYTES * (1 + numel):
        raise SpecError(
            f"payload_bytes of {spec!r} gives {found} bytes for {numel} elements, more than {_MOST_BYTES} for each: no machine "
            "has memory for such payloads. Return the bytes that `encode` writes."
        )
    return found


def runs_of(segments: Segments) -> list[ElementRun]:
    """The runs of elements of these segments."""
    shapes = segments.shapes or [()] * len(segments.rows)
    return [ElementRun(row.numel, row.bits, shape) for row, shape in zip(segments.rows, shapes, strict=True)]
