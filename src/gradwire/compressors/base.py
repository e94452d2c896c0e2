"""The base class of compressors: encode and decode as functions of (tensor, state, context)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.core import ElementRun, Spec
from gradwire.errors import PayloadError
from gradwire.kernels import Segments, cpu, kernels_for
from gradwire.kernels.cpu import Call
from gradwire.kernels.reference.indices import DAMAGED


@dataclass(frozen=True)
class Context:
    """The input of an encode beside the tensor.

    random: int64 tensor of (seed, step, encode number, rank) on the tensor's device: the key of the random stream. A resumed
    run repeats the stream, and ranks differ. A tensor, since graph capture would freeze a host number.
    stream: torch's current stream, in which the work is done; None on CPU, where the work is done when the call returns.
    """

    random: Tensor
    stream: torch.Stream | None = None

    def on(self, stream: torch.Stream | None) -> "Context":
        """This context for another stream."""
        return self if stream is self.stream else replace(self, stream=stream)


class Compressor(ABC):
    """Encodes runs of elements of a flat buffer to payloads. One instance serves all tensors of a family of specs.

    A flat buffer is a contiguous 1-D tensor; `segments` says which elements of which tensors it holds. Callers make it once.
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
        """Bytes of the payload of these segments for a gradient of this dtype. Independent of values."""
        key = self.spec, dtype
        if (found := segments.payload_bytes.get(key)) is None:  # asked in every decode
            found = segments.payload_bytes[key] = self.spec.bytes_beside(runs_of(segments), dtype.itemsize)
        return found

    @abstractmethod
    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        """Write the payload (uint8, `payload_bytes` long) of src.

        `state` has a tensor (float32, as long as src) for each name in `self.state`, in that order. If `state` is empty, the
        error of the encode is lost. A residual is added to src, and the encode writes the new error to the residual.
        """

    @abstractmethod
    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        """Write the decoded values to dst, or add them. `dtype` is the dtype of the gradient that was encoded.

        Raises PayloadError for a payload of another size.
        """

    @property
    def runs_in_c(self) -> bool:
        """Whether this machine has `encode_calls` and `decode_calls`: then C++ runs whole phases without Python. The same on all
        ranks with the same version."""
        return False

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[Call]:
        """The kernels that `encode` of these tensors runs; they keep their memory."""
        raise NotImplementedError

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[Call]:
        """The kernels that `decode` of these tensors runs."""
        raise NotImplementedError

    def check(self, payload: Tensor, segments: Segments, dtype: torch.dtype) -> None:
        """Raise PayloadError unless the payload has the size that the segments take."""
        expected = self.payload_bytes(segments, dtype)
        if payload.numel() != expected or payload.dtype != torch.uint8:
            raise PayloadError(
                f"a payload of {payload.numel()} elements of {payload.dtype} is not one of {self.spec!r}: "
                f"{segments.numel} elements in {len(segments.rows)} segments take {expected} bytes of uint8. Ranks run "
                "different plans or versions, or the bytes were cut. Run the same plan and version on all ranks."
            )


class KernelCompressor(Compressor):
    """A compressor with one kernel for each direction, called as

    encoder(src, residual, segments, [random stream,] *settings, payload)
    decoder(payload, segments, [dtype,] *settings, add, dst)

    A kernel with other arguments overrides `encode_with` or `decode_with`.
    """

    def __init__(
        self,
        spec: Spec,
        encoder: tuple[Any, ...] = (),
        decoder: tuple[Any, ...] = (),
        *,
        random: bool = False,
        typed: bool = False,
    ) -> None:
        """encoder, decoder: the name of a kernel, then its settings. random: the encoder takes the random stream. typed: the
        payload holds numbers of the gradient's dtype, which the decoder takes."""
        super().__init__(spec)
        self.encoder, self.decoder, self.random, self.typed = encoder, decoder, random, typed

    def encode_with(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> tuple[Any, ...]:
        """The name of the kernel that encodes, and its arguments. Of a compressor of gradwire's own it is asked once for the same
        tensors, and C++ calls the kernel in every step."""
        name, *settings = self.encoder
        stream = [context.random] if self.random else []
        return name, src, residual_in(state), segments, *stream, *settings, payload

    def decode_with(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor
    ) -> tuple[Any, ...]:
        """The name of the kernel that decodes, and its arguments; as above."""
        name, *settings = self.decoder
        return name, payload, segments, *([dtype] if self.typed else []), *settings, add, dst

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        name, *arguments = self.encode_with(src, state, segments, context, payload)
        getattr(kernels_for(src.device.type), name)(*arguments)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        name, *arguments = self.decode_with(payload, segments, dtype, add, dst)
        with refused(self.spec):
            getattr(kernels_for(dst.device.type), name)(*arguments)

    @property
    def runs_in_c(self) -> bool:
        # a class of another package may do more than call a kernel
        return type(self).__module__.startswith("gradwire.") and kernels_for("cpu") is cpu

    def encode_calls(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> list[Call]:
        return [cpu.call(*self.encode_with(src, state, segments, context, payload))]

    def decode_calls(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> list[Call]:
        self.check(payload, segments, dtype)
        return [cpu.call(*self.decode_with(payload, segments, dtype, add, dst))]


@contextmanager
def refused(spec: Spec) -> Iterator[None]:
    """Raises PayloadError where a kernel finds bytes that no encode of this spec writes."""
    try:
        yield
    except RuntimeError as error:
        if DAMAGED not in str(error):
            raise
        raise PayloadError(
            f"{DAMAGED}: no encode of {spec!r} writes these bytes, and nothing was decoded. Ranks run different plans or "
            "versions, or the bytes were changed. Run the same plan and version on all ranks."
        ) from error


def runs_of(segments: Segments) -> list[ElementRun]:
    """The runs of elements of these segments."""
    shapes = segments.shapes or [()] * len(segments.rows)
    return [ElementRun(row.numel, row.bits, shape) for row, shape in zip(segments.rows, shapes, strict=True)]


def residual_in(state: Sequence[Tensor]) -> Tensor | None:
    """The residual, for compressors without other state."""
    return state[0] if state else None
