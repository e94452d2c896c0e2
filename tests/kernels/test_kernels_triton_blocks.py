"""The Triton kernels of FP8, powers of two and ternary codes give the bytes of the reference."""

import itertools
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_kernels import DTYPES, awkward
from triton_processes import INEXACT, Compile, Interpreter, assert_alike

from gradwire.core.payload import coded_bytes
from gradwire.kernels import kernels_for, reference
from gradwire.kernels.reference.weights import ONE
from gradwire.kernels.segments import Segment, Segments

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STREAM = (2**63 - 1, -5, 2**40 + 7, 3)  # seed, step, encode, rank
SPECIAL = [Segment(8, 123, 1, 8192, 3), Segment(131 + 300, 4097, 2, 0, 5)]
"""Of what `awkward` makes: a partial block that holds a NaN, whole blocks of everything odd, and a block of one element."""

METHODS = {
    "e4m3": (8, 1),
    "e5m2": (8, 1),
    "natural": (8, 1),
    "exponential max stochastic": (0, 1),
    "exponential l2 nearest": (0, 1),
    "two bits": (2, 1),
    "two bits, fixed": (2, 0),
    "terngrad": (2, 1),
    "fitted uniform": (0, 1),
    "fitted lloyd": (0, 1),
    "fitted uniform weights": (0, 1),
    "fitted lloyd weights": (0, 1),
}
"""Bits of an element, 0 for those of its segment, and scales of a block."""
TERNARY = ("terngrad", "fitted uniform", "fitted uniform weights")


def weights_like(x: torch.Tensor) -> torch.Tensor:
    """Weights of x: powers of two from 2^-9 to 2^9."""
    return (torch.arange(x.numel(), device=x.device) * 7 % 19 + ONE - 9).to(torch.uint8)


def encode(
    kernels: Any, method: str, x: torch.Tensor, residual: torch.Tensor | None, rows: Segments, block: int, payload: Any
) -> None:
    weights = weights_like(x) if "weights" in method and residual is not None else None
    stream, words = torch.tensor(STREAM, device=x.device), method.split()
    if words[0] == "natural":
        kernels.natural_encode(x, residual, rows, stream, block, payload)
    elif words[0] == "exponential":
        kernels.exponential_encode(x, residual, rows, stream, block, words[1], words[2], payload)
    elif words[0] == "two":
        kernels.threshold_encode(x, residual, rows, block, 0.3 if "fixed" in words else 0.0, 0.7, payload)
    elif words[0] == "terngrad":
        kernels.terngrad_encode(x, residual, rows, stream, block, 1.3, payload)
    elif words[0] == "fitted":
        kernels.fitted_encode(x, residual, rows, weights, block, words[1], payload)
    else:
        kernels.fp8_encode(x, residual, rows, block, method, payload)


def decode(kernels: Any, method: str, payload: torch.Tensor, rows: Segments, block: int, add: bool, dst: Any) -> None:
    words = method.split()
    if words[0] == "natural":
        kernels.natural_decode(payload, rows, block, add, dst)
    elif words[0] == "exponential":
        kernels.exponential_decode(payload, rows, block, add, dst)
    elif words[0] == "two":
        kernels.threshold_decode(payload, rows, block, 0.3 if "fixed" in words else 0.0, add, dst)
    elif words[0] == "terngrad":
        two = Segments.of([row._replace(bits=2) for row in rows.rows], rows.device)
        kernels.qsgd_decode(payload, two, block, "max", add, dst)
    elif words[0] == "fitted":
        weights = weights_like(dst) if "weights" in words else None
        kernels.fitted_decode(payload, rows, weights, block, words[1], add, dst)
    else:
        kernels.fp8_decode(payload, rows, block, method, add, dst)


def size_of(method: str, rows: list[Segment], block: int) -> int:
    bits, scales = METHODS[method]
    coded = [(row.numel, bits or row.bits) for row in rows]
    return sum(coded_bytes(coded, block, scales, ternary=method in TERNARY))


def run(
    kernels: Any, method: str, x: torch.Tensor, rows: list[Segment], block: int, add: bool, start: int = 0
) -> dict[str, torch.Tensor]:
    """All that an encode and a decode leave behind; what is added was encoded with a residual. `start`: of the payload."""
    if method.startswith("fitted"):
        rows = [row._replace(bits=2 + row.bits % 3) for row in rows]
    segments, device = Segments.of(rows, x.device), x.device
    size = size_of(method, rows, block)
    around = torch.full((size + 2 * start,), 170, dtype=torch.uint8, device=device)
    payload = around[start : start + size]
    residual = torch.linspace(-1, 1, x.numel(), device=device)
    residual[131 + 300 : 131 + 300 + 9 * 128] *= 2.0**-104
    decoded = torch.linspace(-2, 2, x.numel(), device=device).to(torch.float32 if add else x.dtype)
    encode(kernels, method, x, residual if add else None, segments, block, payload)
    decode(kernels, method, payload, segments, block, add, decoded)
    return {"payload": around, "residual": residual, "decoded": decoded}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_reference(interpreter: Interpreter, dtype: torch.dtype, method: str) -> None:
    add = (DTYPES.index(dtype) + list(METHODS).index(method)) % 2 == 0
    interpreter.check(run, method, awkward(dtype), SPECIAL, 128, add, 3 if add else 0)


@pytest.mark.parametrize("method", METHODS)
def test_tensors_of_few_elements_have_their_own_bits(interpreter: Interpreter, method: str) -> None:
    numels = (0, 13, 1, 64, 8, 33)
    offsets = itertools.accumulate(numels, initial=0)
    rows = [Segment(at, n, i, 32 * i, 3 + i) for i, (at, n) in enumerate(zip(offsets, numels, strict=False))]
    x = torch.randn(sum(numels), generator=torch.Generator().manual_seed(3))
    interpreter.check(run, method, x, rows, 32, True)


def weigh(kernels: Any, mean: torch.Tensor, rows: list[Segment], block: int, floor: float) -> dict[str, torch.Tensor]:
    """The energies and weights after a mean; one block has none before."""
    segments = Segments.of(rows, mean.device)
    energy = torch.linspace(-9, 9, mean.numel(), device=mean.device).exp2()
    energy[rows[0].offset : rows[0].offset + block] = 0.0
    weights = torch.zeros(mean.numel(), dtype=torch.uint8, device=mean.device)
    kernels.weigh_elements(energy, segments, block, floor, weights)
    before = weights.clone()
    kernels.learn_energy(mean, segments, 0.98, energy)
    kernels.weigh_elements(energy, segments, block, floor, weights)
    return {"energy": energy, "before": before, "weights": weights}


@pytest.mark.parametrize(("block", "floor"), [(32, 0.01), (128, 1e-6), (1024, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_energies_and_weights_are_those_of_the_reference(
    interpreter: Interpreter, dtype: torch.dtype, block: int, floor: float
) -> None:
    interpreter.check(weigh, awkward(dtype), SPECIAL, block, floor)


@pytest.mark.parametrize(
    ("method", "block"),
    [
        ("e4m3", 256),
        ("natural", 1024),
        ("exponential l2 nearest", 8192),
        ("two bits", 8192),
        ("terngrad", 64),
        ("fitted uniform", 256),
        ("fitted lloyd", 64),
        ("fitted lloyd weights", 256),
    ],
)
def test_blocks_of_any_size(interpreter: Interpreter, method: str, block: int) -> None:
    x = torch.randn(8192 + 17, generator=torch.Generator().manual_seed(4))
    x[: 2 * block] *= 2.0**60  # squares that float32 cannot add up
    x[2 * block : 4 * block] *= 2.0**-60
    interpreter.check(run, method, x, [Segment(0, x.numel(), 5, 3 * 8192, 7)], block, True)


def decode_bytes(kernels: Any, method: str) -> dict[str, torch.Tensor]:
    rows, generator = [Segment(0, 300, 1, 0, 4)], torch.Generator().manual_seed(0)
    block = 64 if method in TERNARY else 32  # smaller ones are not packed in base 3
    payload = torch.randint(0, 256, (size_of(method, rows, block),), dtype=torch.uint8, generator=generator)
    decoded = torch.zeros(300)
    decode(kernels, method, payload, Segments.of(rows), block, False, decoded)
    return {"decoded": decoded}


@pytest.mark.parametrize("method", METHODS)
def test_payloads_of_any_bytes_decode_as_by_the_reference(interpreter: Interpreter, method: str) -> None:
    interpreter.check(decode_bytes, method)


CODES = {"residual": "*fp32", "weights": "*u8", "table": "*i64", "payload": "*u8"}
DECODE = {"payload": "*u8", "table": "*i64", "dst": "*fp32", "weights": "*u8"}
SIZES = {
    "ROWS": 4,
    "BLOCK": 32,
    "TERNARY": False,
    "WEIGHTED": False,
    "ALIGNED": True,
}  # fewer than in earnest compile faster, to the same operations
COMPILED = {
    "FP8, sm_80": Compile(
        "coded_encode_kernel", {"src": "*bf16", "stream": "*i64", **CODES},
        {"CODE": 3, "NORM": False, "FACTOR": 0.0, "STOCHASTIC": False, "RESIDUAL": True, **SIZES}, 80,
    ),
    "Natural, sm_90": Compile(
        "coded_encode_kernel", {"src": "*fp32", "stream": "*i64", **CODES},
        {"CODE": 5, "NORM": False, "FACTOR": 0.0, "STOCHASTIC": True, "RESIDUAL": True, **SIZES}, 90,
    ),
    "exponential levels, sm_80": Compile(
        "coded_encode_kernel", {"src": "*fp16", "stream": "*i64", **CODES},
        {"CODE": 6, "NORM": True, "FACTOR": 0.0, "STOCHASTIC": True, "RESIDUAL": False, **SIZES}, 80,
    ),
    "FP8 back, sm_90": Compile("coded_decode_kernel", DECODE, {"CODE": 4, "FACTOR": 0.0, "ADD": True, **SIZES}, 90),
    "exponential levels back, sm_80": Compile(
        "coded_decode_kernel", DECODE, {"CODE": 6, "FACTOR": 0.0, "ADD": False, **SIZES}, 80
    ),
    "thresholds, sm_90": Compile(
        "coded_encode_kernel", {"src": "*fp32", "stream": "*i64", **CODES},
        {"CODE": 7, "NORM": False, "FACTOR": 0.7, "STOCHASTIC": False, "RESIDUAL": True, **SIZES}, 90,
    ),
    "a fixed threshold, sm_80": Compile(
        "coded_encode_kernel", {"src": "*fp32", "stream": "*i64", **CODES},
        {"CODE": 8, "NORM": False, "FACTOR": 0.3, "STOCHASTIC": False, "RESIDUAL": True, **SIZES}, 80,
    ),
    "thresholds back, sm_80": Compile(
        "coded_decode_kernel", DECODE, {"CODE": 7, "FACTOR": 0.0, "ADD": True, **SIZES}, 80
    ),
    "terngrad, sm_90": Compile(
        "coded_encode_kernel", {"src": "*fp32", "stream": "*i64", **CODES},
        {"CODE": 2, "NORM": False, "FACTOR": 2.5, "STOCHASTIC": True, "RESIDUAL": True, **SIZES, "BLOCK": 64,
         "TERNARY": True}, 90,
    ),
    "fitted, sm_90": Compile(
        "coded_encode_kernel", {"src": "*fp32", "stream": "*i64", **CODES},
        {"CODE": 9, "NORM": False, "FACTOR": 0.0, "STOCHASTIC": False, "RESIDUAL": True, **SIZES, "BLOCK": 64,
         "TERNARY": True}, 90,
    ),
    "lloyd, sm_80": Compile(
        "coded_encode_kernel", {"src": "*bf16", "stream": "*i64", **CODES},
        {"CODE": 10, "NORM": False, "FACTOR": 0.0, "STOCHASTIC": False, "RESIDUAL": True, **SIZES, "WEIGHTED": True}, 80,
    ),
    "lloyd back, sm_90": Compile(
        "coded_decode_kernel", DECODE, {"CODE": 10, "FACTOR": 0.0, "ADD": True, **SIZES, "WEIGHTED": True}, 90
    ),
    "energies, sm_80": Compile(
        "learn_energy_kernel",
        {"mean": "*bf16", "table": "*i64", "energy": "*fp32", "kept": "fp32", "taken": "fp32"},
        {"BLOCK": 128, "ALIGNED": True}, 80,
    ),
    "weights, sm_90": Compile(
        "weigh_elements_kernel", {"energy": "*fp32", "table": "*i64", "weights": "*u8"},
        {"FLOOR": 0.01, "ROWS": 4, "BLOCK": 128, "ALIGNED": True}, 90,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_cuda_to_exact_arithmetic(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found
    assert COMPILED[name].kernel in found
    assert INEXACT.findall(found) == []


def test_wrong_sizes_are_refused_in_words() -> None:
    from gradwire.kernels import triton

    x, segments, stream = torch.ones(300), Segments.of([Segment(0, 300, 1, 0, 4)]), torch.tensor(STREAM)
    with pytest.raises(RuntimeError, match="has 319 bytes where the segments take 320"):
        triton.fp8_encode(x, None, segments, 128, "e4m3", torch.zeros(319, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="four int64"):
        triton.natural_encode(x, None, segments, stream[:3], 128, torch.zeros(320, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="sums in float32"):
        triton.threshold_decode(torch.zeros(76, dtype=torch.uint8), segments, 128, 0.5, True, x.half())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bytes_of_the_reference(dtype: torch.dtype, method: str) -> None:
    large = torch.randn(2**20 + 1, generator=torch.Generator().manual_seed(9)).to(dtype)
    whole = [Segment(0, large.numel(), 1, 0, 6)]
    for (x, rows), block, add in itertools.product(((awkward(dtype), SPECIAL), (large, whole)), (128, 1024), (False, True)):
        expected = run(reference, method, x, rows, block, add)
        found = run(kernels_for("cuda"), method, x.cuda(), rows, block, add)
        assert_alike(expected, {name: value.cpu() for name, value in found.items()})
