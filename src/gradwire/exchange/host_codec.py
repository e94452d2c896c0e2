"""CPU offload: a codec that works on copies in the host's memory, for comp:cpu and decomp:cpu of a bucket on a GPU."""

import threading
from collections.abc import Sequence

import torch

from gradwire.kernels import Compressor, Context, Segments, WrappingCompressor
from gradwire.transport import standing_in


class Staging:
    """Memory for the copies: one buffer for each use, as large as the largest so far, page-locked for a GPU.

    Bounded: a lane encodes and decodes one payload at a time, and returns when the copies back are done.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def like(self, use: str, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of the tensor's size and dtype. What it holds is from the last time."""
        nbytes = tensor.numel() * tensor.element_size()
        if use not in self._buffers or self._buffers[use].numel() < nbytes:
            self._buffers[use] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        return self._buffers[use][:nbytes].view(tensor.dtype)


OFFLOAD_WORKERS = 1
"""Codecs of a process that work on the host at the same time: `cpu_workers` of the simulator."""
_WORKERS = threading.BoundedSemaphore(OFFLOAD_WORKERS)


class HostCodec(WrappingCompressor):
    """Encodes and decodes where the tensors are not. What goes in and out lies on the bucket's device.

    At most `OFFLOAD_WORKERS` codecs work at once; copies do not count.
    """

    def __init__(self, codec: Compressor, staging: Staging | None = None) -> None:
        super().__init__(codec.spec, codec)
        self._staging = staging or Staging()
        self._on_host: dict[int, tuple[Segments, Segments]] = {}

    def around(self, inner: Compressor) -> "HostCodec":
        """Wrap another codec, with the same memory for copies."""
        return HostCodec(inner, self._staging)

    def encode(
        self, src: torch.Tensor, state: Sequence[torch.Tensor], segments: Segments, context: Context, payload: torch.Tensor
    ) -> None:
        """Gradient and state to the host, encode there, payload and state back."""
        host_src = self._fetched("source", src)
        host_state = [self._fetched(f"state {number}", tensor) for number, tensor in enumerate(state)]
        host_context = Context(self._fetched("random", context.random))
        host_payload = self._staging.like("payload", payload)
        _wait_for(payload)
        with _WORKERS:
            self.inner.encode(host_src, host_state, self._segments(segments), host_context, host_payload)
        payload.copy_(host_payload, non_blocking=True)
        for tensor, host in zip(state, host_state, strict=True):
            tensor.copy_(host, non_blocking=True)
        _wait_for(payload)

    def decode(
        self, payload: torch.Tensor, segments: Segments, dtype: torch.dtype, add: bool, dst: torch.Tensor, context: Context
    ) -> None:
        """Payload to the host (and what it is added to), decode there, values back."""
        host_payload = self._fetched("payload", payload)
        host_dst = self._fetched("source", dst) if add else self._staging.like("source", dst)
        host_context = Context(self._fetched("random", context.random))
        _wait_for(payload)
        with _WORKERS:
            self.inner.decode(host_payload, self._segments(segments), dtype, add, host_dst, host_context)
        dst.copy_(host_dst, non_blocking=True)
        _wait_for(payload)

    def _fetched(self, use: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._staging.like(use, tensor).copy_(tensor, non_blocking=True)

    def _segments(self, segments: Segments) -> Segments:
        """Return these rows with their table in the host's memory."""
        found = self._on_host.get(id(segments))
        if found is None:  # the original is kept too, so that its id stays its own
            weights = None if segments.weights is None else torch.empty_like(segments.weights, device="cpu")
            host = Segments(segments.rows, torch.device("cpu"), segments.names, segments.shapes, weights)
            found = self._on_host[id(segments)] = (segments, host)
        if segments.weights is not None and found[1].weights is not None:
            found[1].weights.copy_(segments.weights)
        return found[1]


def _wait_for(tensor: torch.Tensor) -> None:
    """Until copies from and to the tensor's device are done: those queued on the current stream."""
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()


def codec_on(where: str, codec: Compressor, device: str) -> Compressor:
    """Return the compressor that encodes and decodes on `where` for gradients on `device`; both are "cpu" or "gpu".

    On an accelerator that stands in for a GPU, codecs that change nothing take no time, and neither do those whose sums are taken
    in rounds.
    """
    if where != device:
        return HostCodec(codec)
    accelerator = standing_in()
    if device == "cpu" or accelerator is None or codec.spec.rounds or not codec.spec.encodes:
        return codec
    made: Compressor = accelerator.codec(codec)
    return made
