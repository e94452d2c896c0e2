"""What a compressor is: encode and decode as functions of (tensor, state, context), nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.core.specs import ElementRun, Spec
from gradwire.errors import PayloadError
from gradwire.kernels import Segments, kernels_for
from gradwire.kernels.reference.indices import DAMAGED


@dataclass(frozen=True)
class Context:
    """What an encode may depend on beside the tensor.

    random: int64 tensor of (seed, step, encode number, rank) on the tensor's device; it keys the random stream, so that
    a resumed run repeats it and ranks differ. A tensor, since a host number would be frozen by graph capture.
    stream: the device stream the work is queued on, torch's current one too; None on CPU, where work is done when the
    call returns.
    """

    random: Tensor
    stream: torch.Stream | None = None

    def on(self, stream: torch.Stream | None) -> "Context":
        """The same for work on this stream."""
        return self if stream is self.stream else replace(self, stream=stream)


class Compressor(ABC):
    """Encodes runs of elements of a flat buffer to payloads. One instance serves all tensors of a family of specs.

    A flat buffer here is a contiguous 1-D tensor, `segments` says which tensors' elements it holds. Buffers are made by
    the caller, once; nothing here allocates what grows.
    """

    encodes_own_part = False
    """Whether the sum over ranks is one of decoded values only: who adds up then encodes and decodes the own part too,
    instead of adding it as it is."""

    ranks = 1
    """Over how many ranks gradients are averaged; src has been divided by it. Set by the engine."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @property
    def state(self) -> tuple[str, ...]:
        """Names of what encode remembers of every element, as in the spec."""
        return self.spec.state

    def for_sum(self) -> "Compressor":
        """What encodes the sum over ranks again, where a scheme does."""
        return self

    def payload_bytes(self, segments: Segments, dtype: torch.dtype) -> int:
        """Bytes of the payload of these segments when the gradient has this dtype. Static: never depends on values."""
        key = self.spec, dtype
        if (found := segments.payload_bytes.get(key)) is None:  # asked in every decode
            found = segments.payload_bytes[key] = self.spec.payload_bytes(runs_of(segments), dtype.itemsize)
        return found

    @abstractmethod
    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        """Write the payload (uint8, `payload_bytes` long) of src.

        `state` has a tensor (float32, as long as src) for each name in `self.state`, in that order, or is empty: then
        nothing is remembered, and a spec that would lose what it cannot remember only loses it. A residual is added to
        src first and left what was lost.
        """

    @abstractmethod
    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        """Write what the payload holds to dst, or add it. `dtype` is the dtype of the gradient that was encoded.

        Raises PayloadError for a payload of another size.
        """

    def check(self, payload: Tensor, segments: Segments, dtype: torch.dtype) -> None:
        """Raise PayloadError unless the payload has the size that the segments take."""
        expected = self.payload_bytes(segments, dtype)
        if payload.numel() != expected or payload.dtype != torch.uint8:
            raise PayloadError(
                f"a payload of {payload.numel()} elements of {payload.dtype} is not one of {self.spec!r}: "
                f"{segments.numel} elements in {len(segments.rows)} segments take {expected} bytes of uint8. Ranks run "
                "different plans or versions, or the bytes were cut."
            )


class KernelCompressor(Compressor):
    """A compressor with one kernel for each direction, called as

    encoder(src, residual, segments, [random stream,] *settings, payload)
    decoder(payload, segments, [dtype,] *settings, add, dst)
    """

    def __init__(
        self,
        spec: Spec,
        encoder: tuple[Any, ...],
        decoder: tuple[Any, ...],
        *,
        random: bool = False,
        typed: bool = False,
    ) -> None:
        """encoder, decoder: the name of a kernel, then its settings. random: the encoder takes the random stream. typed: the
        payload holds numbers of the gradient's dtype, which the decoder takes."""
        super().__init__(spec)
        self.encoder, self.decoder, self.random, self.typed = encoder, decoder, random, typed

    def encode(
        self, src: Tensor, state: Sequence[Tensor], segments: Segments, context: Context, payload: Tensor
    ) -> None:
        name, *settings = self.encoder
        stream = [context.random] if self.random else []
        getattr(kernels_for(src.device.type), name)(src, residual_in(state), segments, *stream, *settings, payload)

    def decode(
        self, payload: Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: Tensor, context: Context
    ) -> None:
        self.check(payload, segments, dtype)
        name, *settings = self.decoder
        try:
            getattr(kernels_for(dst.device.type), name)(
                payload, segments, *([dtype] if self.typed else []), *settings, add, dst
            )
        except RuntimeError as error:
            if DAMAGED not in str(error):
                raise
            raise PayloadError(
                f"{DAMAGED}: no encode of {self.spec!r} writes these bytes, and nothing was decoded. Ranks run different plans "
                "or versions, or the bytes were changed. Run the same plan and version on all ranks."
            ) from error


def runs_of(segments: Segments) -> list[ElementRun]:
    """What sizes follow from."""
    shapes = segments.shapes or [()] * len(segments.rows)
    return [ElementRun(row.numel, row.bits, shape) for row, shape in zip(segments.rows, shapes, strict=True)]


def residual_in(state: Sequence[Tensor]) -> Tensor | None:
    """The residual, for compressors that remember nothing else."""
    return state[0] if state else None
