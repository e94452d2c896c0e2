"""Encode and decode without a group: one tensor in one call, or step by step with the state that a rank keeps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.registry import compressor_for
from gradwire.core import Spec, show, whole
from gradwire.errors import SpecError
from gradwire.kernels import Compressor, Context, Segment, Segments, is_float, tensor_key


class SoleRank:
    """A compressor with the buffers of one flat gradient, as the only rank of a group has them."""

    def __init__(self, compressor: Compressor, segments: Segments, dtype: torch.dtype, state: Sequence[Tensor] = ()) -> None:
        """state: a float32 tensor for each name in `compressor.state`; empty: errors are lost."""
        self._compressor, self._segments, self.state = compressor, segments, state
        self._flat = torch.zeros(segments.numel, dtype=dtype, device=segments.device)
        self._program = compressor.program(self._flat, state, segments) if compressor.spec.rounds else None
        self.payloads = [] if self._program is None else self._program.payloads
        """The payloads of the last step: one payload, or the sum of each round."""

    def step(self, random: Sequence[int], decoded: Tensor) -> Tensor:
        """Encode and decode the gradient in `decoded`, which holds the decoded values afterwards. random: see `Context`."""
        segments, dtype, device = self._segments, self._flat.dtype, self._segments.device
        context = Context(torch.tensor(random, device=device))
        self._flat.copy_(decoded)
        if self._program is not None:
            for number in range(len(self.payloads)):
                self._program.fill(number, context)
            self._program.finish(context)
            return decoded.copy_(self._flat)
        size = self._compressor.payload_bytes(segments, dtype)
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        self._compressor.encode(self._flat, self.state, segments, context, payload)
        self._compressor.decode(payload, segments, dtype, False, decoded, context)
        self.payloads = [payload]
        return decoded


@torch.no_grad()
def roundtrip(tensor: Tensor, spec: Spec, step: int = 0) -> tuple[Tensor, int]:
    """Encode a tensor as `spec` says, and decode the payload: what other ranks get of a gradient, and how many bytes carry it.

    tensor: float32, bfloat16 or float16, of any shape, on any device with kernels. It is not changed.
    spec: the compressor, as in its steps after any warm-up. It begins with a residual and a momentum of zero, and keeps none.
    step: another step draws other random numbers.

    Returns the decoded tensor (shape, dtype and device of `tensor`, contiguous) and the bytes of the payload. Where payloads are
    summed on the wire (PowerSGD, RandomK) the bytes are those of all sums, and the sum is over one rank.

    Raises SpecError if the tensor has another dtype, is sparse or has no values, if the step is no whole number, or if the spec
    has no compressor or cannot encode gradients.

    >>> from gradwire.core import Cast
    >>> decoded, nbytes = roundtrip(torch.tensor([0.5, -1.0, 0.25]), Cast("bfloat16"))
    >>> decoded, nbytes
    (tensor([ 0.5000, -1.0000,  0.2500]), 6)
    """
    if not isinstance(spec, Spec):
        raise SpecError(f"spec is {spec!r}: it must be a spec, such as gw.QSGD(bits=4).")
    _check_tensor(tensor)
    whole("step", step, "the number of a step", error=SpecError)
    row = Segment(0, tensor.numel(), tensor_key("tensor"), 0, spec.element_bits)
    segments = Segments((row,), tensor.device, ("tensor",), (tuple(tensor.shape),))
    state = [torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device) for _ in spec.state]
    rank = SoleRank(compressor_for(spec), segments, tensor.dtype, state)
    decoded = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    rank.step([spec.random_seed, step, 0, 0], decoded)
    return decoded.reshape(tensor.shape), sum(payload.nbytes for payload in rank.payloads)


def _check_tensor(tensor: object) -> None:
    """Refuse everything but a dense tensor with values of a dtype that compressors take."""
    if not isinstance(tensor, Tensor):
        raise SpecError(
            f"the tensor is {show(tensor)}, a {type(tensor).__name__}: compressors take torch tensors. Use torch.as_tensor()."
        )
    if tensor.layout != torch.strided:
        raise SpecError(f"the tensor is sparse ({tensor.layout}), and compressors take dense ones. Convert it with to_dense().")
    if tensor.is_meta:
        raise SpecError("the tensor is on the meta device, so there are no values to encode. Give one on a CPU or a GPU.")
    if not is_float(tensor.dtype):
        raise SpecError(
            f"the tensor is {tensor.dtype}, and compressors take float32, bfloat16 and float16. Convert it with tensor.float()."
        )
