"""Encode and decode of one spec as the engine calls them, with the tensors that they write."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from gradwire.collectives import Energies, Learn, Weigh
from gradwire.compressors import compressor_for
from gradwire.core import Spec
from gradwire.core.specs import ElementRun
from gradwire.kernels import Context, Program, Segment, Segments, run_calls


class CodecCalls(NamedTuple):
    """One spec on one gradient of normal numbers."""

    encode: Callable[[], object]
    """Encode; of a method with rounds, all rounds."""
    decode: Callable[[], object]
    """Decode and add; of a method with rounds, the end of the last round."""
    learn: Callable[[], object] | None
    """Once a step of a spec with weights of elements: add the mean to the energies, and find the next step's weights."""
    payload_bytes: int
    written: dict[str, torch.Tensor]
    """The tensors that both calls write."""


def codec_calls(spec: Spec, numel: int, device: str = "cpu") -> CodecCalls:
    """Calls for a gradient of at most `numel` elements, which is a matrix, as square as a power of two of rows allows."""
    compressor = compressor_for(spec)
    rows = 2 ** (int(math.log2(numel)) // 2)
    shape = (rows, numel // rows)
    numel = shape[0] * shape[1]
    gradient = (torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
    energies = Energies.zeros(numel, torch.device(device), spec.element_weights)
    weights = None if energies is None else energies.weights
    segments = Segments((Segment(0, numel, 1, 0, spec.element_bits),), torch.device(device), ("w",), (shape,), weights)
    learn = None
    if energies is not None:
        learning = [*Learn(energies, gradient, segments).calls(), *Weigh(energies, segments).calls()]
        learn = partial(run_calls, learning)
        learn()
    state = [(torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3).to(device) for _ in spec.state]
    kept = dict(zip(spec.state, state, strict=True))
    context = Context(torch.tensor([0, 1, 0, 0], device=device))
    size = spec.payload_bytes([ElementRun(numel, spec.element_bits, shape)], 4)
    if spec.rounds:
        program: Program = compressor.program(gradient, state, segments)  # type: ignore[attr-defined]

        def fill() -> None:
            for number in range(spec.rounds):
                program.fill(number, context)

        payloads = {f"payload {number}": payload for number, payload in enumerate(program.payloads)}
        return CodecCalls(fill, lambda: program.finish(context), None, size, {**payloads, "gradient": gradient, **kept})
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    total = torch.linspace(-1, 1, numel).to(device)
    return CodecCalls(
        lambda: compressor.encode(gradient, state, segments, context, payload),
        lambda: compressor.decode(payload, segments, torch.float32, True, total, context),
        learn,
        size,
        {"payload": payload, "sum": total, **kept},
    )
