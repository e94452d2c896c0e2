"""Measures encodes and decodes by size, on one thread, because a lane has one thread.

On CPUs processor time counts, so that other ranks on the same processors do not.
Each call takes the next part of a buffer larger than the caches, and the next of some states, because gradients and states are
seldom in a cache during training. States of less than 64 KB are.

`cached_codecs` measures each spec once on a machine. Its file is `codecs-<key>.json` in `$GRADWIRE_CACHE_DIR`, or else in the
folder `gradwire` of `$XDG_CACHE_HOME` or `~/.cache`. The key is made of the processor or GPU, the versions of torch and gradwire,
the buffers, the kernels and their library, so other machines and kernels have files of their own. An unreadable file is measured
anew; one that cannot be written costs each run that. So do specs of other packages, which other runs could not read.
"""

import hashlib
import itertools
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path

import torch
from msgspec.structs import replace

from gradwire._version import __version__
from gradwire.collectives import Energies, Learn, Weigh
from gradwire.compressors import Compressor, Context, compressor_for
from gradwire.core import LIBRARY, CodecCosts, Costs, ElementRun, Made, Spec, make_folder, processor_name, write_whole
from gradwire.costs import fit_points
from gradwire.errors import GradwireError
from gradwire.exchange import codec_on
from gradwire.kernels import Segment, Segments, kernels_for, run_calls
from gradwire.profiler.clock import Clock
from gradwire.transport import kind_of

SIZES = tuple(4096 * 2**power for power in range(13))
"""Bytes of gradient: 4 KB to 16 MB; every second one is a corner of the curve."""
SECONDS = 0.02
_REPEATS = (3, 30)
_BUFFER_BYTES, _MOST_STATES = 64 * 2**20, 64
"""Bytes of a buffer, and the most states that calls take in turn."""
_Own = tuple[list[torch.Tensor], Energies | None, Segments]
"""The state, energies and segments of a bucket."""
_CURVES = "encode", "decode", "weigh"
_COLUMNS = 1024
"""Columns of the matrices for methods that need matrices."""


def measure_codecs(
    specs: Sequence[Spec], device: torch.device, sizes: Sequence[int] = SIZES, seconds: float = SECONDS, offload: bool = False
) -> Costs:
    """Measure each spec except Identity. The curves are fitted through medians by least squares.

    offload: for gradients on a GPU also measure codecs on CPUs, with the copies from the GPU and back. sizes: bytes of
    gradient, ascending; every second one is a corner of a curve. seconds: about the time for one size.
    """
    kind, codecs = kind_of(device), []
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(sizes[-1] // 4, generator=generator, dtype=torch.float32, device="cpu").mul_(1e-3).to(device)
    gradients = gradients.repeat(-(-_BUFFER_BYTES // sizes[-1]))
    buffers = (gradients, torch.zeros_like(gradients))
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for spec in dict.fromkeys(spec for spec in specs if spec.encodes):
            for where in ("gpu", "cpu") if offload and kind == "gpu" and not spec.rounds else (kind,):
                codec = codec_on(where, compressor_for(spec), kind)
                calls = (_calls(spec, codec, nbytes // 4, *buffers, seconds) for nbytes in sizes)
                times = [[_median_us(call, device, seconds) for call in each] for each in calls]
                fits = (fit_points(list(zip(sizes, us, strict=True)), sizes[::2]) for us in zip(*times, strict=True))
                curves = [tuple((nbytes, round(us, 3)) for nbytes, us in curve) for curve in fits]
                codecs.append(CodecCosts(spec=spec, device=where, **dict(zip(_CURVES, curves, strict=False))))
    return Costs(codecs=tuple(codecs), made=Made.now())


def _calls(
    spec: Spec, codec: Compressor, numel: int, gradient: torch.Tensor, total: torch.Tensor, seconds: float
) -> list[Callable[[], object]]:
    """Return two functions: encode the gradient's next `numel` float32, and add a decode to the total's next part.

    If the spec has weights, there is a third function, which finds them and updates the energies. seconds: the longest time for
    making states."""
    device = gradient.device
    shape = (numel // _COLUMNS, _COLUMNS) if numel >= 2 * _COLUMNS else (1, numel)
    row = Segment(0, numel, 1, 0, spec.element_bits)

    def state_of_bucket() -> _Own:
        energies = Energies.zeros(numel, device, spec.element_weights)
        segments = Segments((row,), device, ("measured",), (shape,), None if energies is None else energies.weights)
        return [torch.zeros(numel, dtype=torch.float32, device=device) for _ in spec.state], energies, segments

    gradients, totals = _parts(gradient, numel), _parts(total, numel)
    context = Context(torch.tensor([0, 1, 0, 0], device=device))
    state, _, segments = state_of_bucket()
    if spec.rounds:
        program = codec.program(next(gradients), state, segments)
        fills = [partial(program.fill, number, context) for number in range(spec.rounds)]
        return [lambda: [fill() for fill in fills], lambda: program.finish(context)]
    size = spec.payload_bytes([ElementRun(numel, spec.element_bits, shape)], 4)
    payload = torch.zeros(size, dtype=torch.uint8, device=device)

    def encode(own: _Own | None = None) -> None:
        state, _, segments = own or next(states)
        codec.encode(next(gradients), state, segments, context, payload)

    def weigh(own: _Own | None = None) -> None:
        _, energies, segments = own or next(states)
        assert energies is not None
        run_calls(Weigh(energies, segments).calls())
        run_calls(Learn(energies, next(gradients), segments).calls())

    weighs = [weigh] if spec.element_weights is not None else []
    made, until = list[_Own](), time.perf_counter() + seconds
    while not made or (len(made) < min(_MOST_STATES, len(gradient) // numel) and time.perf_counter() < until):
        made.append(state_of_bucket())
        encode(made[-1])  # the first call with a state allocates
    for call, own in itertools.product(weighs, made):
        call(own)
    states = itertools.cycle(made)
    return [encode, lambda: codec.decode(payload, segments, torch.float32, True, next(totals), context), *weighs]


def _parts(buffer: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Cycle through the parts of a buffer."""
    return itertools.cycle(buffer[: len(buffer) // numel * numel].reshape(-1, numel).unbind())


def _median_us(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    clock = Clock(device, time.thread_time if kind_of(device) == "cpu" else time.perf_counter)
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _REPEATS[0] or (len(times) < _REPEATS[1] and time.perf_counter() < began + seconds):
        start = clock.mark()
        call()
        times.append(clock.us(start, clock.mark()))
    return max(1e-3, statistics.median(times))


_LOGGER = logging.getLogger("gradwire")


def cached_codecs(specs: Sequence[Spec], device: torch.device, sizes: Sequence[int], seconds: float) -> Costs:
    """Return the times of these specs on this machine. Specs that the file lacks are measured, for about `seconds` in all.

    sizes: bytes of gradient, as `measure_codecs` takes them. They are part of the key.
    """
    name, kept = f"codecs-{_key(device, tuple(sizes))}.json", Costs(codecs=())
    with suppress(OSError, GradwireError, RuntimeError):  # SpecError: of a spec that another program brought along
        kept = Costs.load(_folder() / name)
    kind = "cpu" if device.type == "cpu" else "gpu"
    known = {codec.spec for codec in kept.codecs if codec.device == kind}
    missing = [spec for spec in dict.fromkeys(specs) if spec.encodes and spec not in known]
    if not missing:
        return kept
    curves = sum(2 if spec.element_weights is None else 3 for spec in missing)
    measured = measure_codecs(missing, device, sizes, seconds / (len(sizes) * curves))
    costs = Costs(codecs=(*kept.codecs, *measured.codecs), made=measured.made)
    try:
        everyones = replace(costs, codecs=tuple(codec for codec in costs.codecs if _is_everyones(codec.spec)))
        write_whole(make_folder(_folder()) / name, everyones.to_json())
    except (OSError, RuntimeError) as error:
        _LOGGER.debug("codecs' times are measured in each run: %s", error)
    return costs


def _is_everyones(spec: Spec) -> bool:
    """Whether gradwire itself has the classes of a spec and of the specs in it, so that every run on the machine knows them."""
    inside = [value for name in spec.__struct_fields__ if isinstance(value := getattr(spec, name), Spec)]
    return type(spec).__module__.partition(".")[0] == "gradwire" and all(map(_is_everyones, inside))


def _folder() -> Path:
    """Return the folder of gradwire's caches for this user. Raises RuntimeError where the user has no home."""
    if own := os.environ.get("GRADWIRE_CACHE_DIR", ""):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "gradwire"


@cache
def _key(device: torch.device, sizes: tuple[int, ...]) -> str:
    name = processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    library = hashlib.sha256(LIBRARY.read_bytes()).hexdigest() if LIBRARY.exists() else "reference"
    simd, kernels = torch.backends.cpu.get_cpu_capability(), kernels_for(device.type).__name__
    triton = sys.modules["triton"].__version__ if kernels.endswith(".triton") else ""
    versions = torch.__version__, __version__, triton
    text = repr((name, simd, versions, library, kernels, sizes, _BUFFER_BYTES, _MOST_STATES, _CURVES))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
