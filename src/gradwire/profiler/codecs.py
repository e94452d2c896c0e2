"""Measures encodes and decodes by size, on one thread, because a lane has one thread.

Each call takes the next part of a buffer larger than the caches, because a gradient is seldom in a cache during training.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from gradwire.compressors import Compressor, Context, compressor_for
from gradwire.core import CodecCosts, Costs, ElementRun, Made, Spec
from gradwire.costs import fit_points
from gradwire.exchange import codec_on
from gradwire.kernels import Segment, Segments
from gradwire.profiler.clock import Clock
from gradwire.transport import kind_of

SIZES = tuple(4096 * 2**power for power in range(13))
"""Bytes of gradient: 4 KB to 16 MB; every second one is a corner of the curve."""
SECONDS = 0.02
_REPEATS = (3, 30)
_BUFFER_BYTES = 64 * 2**20
_COLUMNS = 1024
"""Columns of the matrices for methods that need matrices."""


def measure_codecs(
    specs: Sequence[Spec],
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    offload: bool = False,
) -> Costs:
    """Measure each spec except Identity. The curves are fitted through medians by least squares.

    offload: for gradients on a GPU also measure codecs on CPUs, with the copies from the GPU and back. sizes: bytes of
    gradient, ascending; every second one is a corner of a curve. seconds: about the time for one size.
    """
    kind, codecs = kind_of(device), []
    numel = min(_BUFFER_BYTES, 4 * sizes[-1]) // 4
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(numel, generator=generator, dtype=torch.float32).mul_(1e-3).to(device)
    buffers = (gradients, torch.zeros_like(gradients))
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for spec in dict.fromkeys(spec for spec in specs if spec.encodes):
            for where in ("gpu", "cpu") if offload and kind == "gpu" and not spec.rounds else (kind,):
                codec = codec_on(where, compressor_for(spec), kind)
                calls = (_calls(spec, codec, nbytes // 4, *buffers) for nbytes in sizes)
                times = [[_median_us(call, device, seconds) for call in both] for both in calls]
                curves = (fit_points(list(zip(sizes, us, strict=True)), sizes[::2]) for us in zip(*times, strict=True))
                encode, decode = (tuple((nbytes, round(us, 3)) for nbytes, us in curve) for curve in curves)
                codecs.append(CodecCosts(spec=spec, device=where, encode=encode, decode=decode))
    return Costs(codecs=tuple(codecs), made=Made.now())


def _calls(
    spec: Spec, codec: Compressor, numel: int, gradient: torch.Tensor, total: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: encode the gradient's next `numel` float32, and add a decode to the total's next part."""
    device = gradient.device
    shape = (numel // _COLUMNS, _COLUMNS) if numel >= 2 * _COLUMNS else (1, numel)
    segments = Segments((Segment(0, numel, 1, 0, spec.element_bits),), device, ("measured",), (shape,))
    gradients, totals = _parts(gradient, numel), _parts(total, numel)
    context = Context(torch.tensor([0, 1, 0, 0], device=device))
    first = next(gradients)
    state = [torch.zeros(numel, dtype=torch.float32, device=device) for _ in spec.state]
    if spec.rounds:
        program = codec.program(first, state, segments)
        fills = [partial(program.fill, number, context) for number in range(spec.rounds)]
        return lambda: [fill() for fill in fills], lambda: program.finish(context)
    size = spec.payload_bytes([ElementRun(numel, spec.element_bits, shape)], 4)
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    codec.encode(first, state, segments, context, payload)
    return (
        lambda: codec.encode(next(gradients), state, segments, context, payload),
        lambda: codec.decode(payload, segments, torch.float32, True, next(totals), context),
    )


def _parts(buffer: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Cycle through the parts of a buffer."""
    return itertools.cycle(buffer[: len(buffer) // numel * numel].reshape(-1, numel).unbind())


def _median_us(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    clock = Clock(device)
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _REPEATS[0] or (len(times) < _REPEATS[1] and time.perf_counter() < began + seconds):
        start = clock.mark()
        call()
        times.append(clock.us(start, clock.mark()))
    return max(1e-3, statistics.median(times))
