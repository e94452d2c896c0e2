"""The checksum of messages is CRC32C: by the processor's instruction, by a table, and in plain Python."""

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.levels import use_level
from gradwire.core import native
from gradwire.core.payload import coded_bytes, qsgd_bytes
from gradwire.kernels import checksum, cpu
from gradwire.kernels.reference.checksum import crc32c as reference
from gradwire.kernels.segments import Segment, Segments

SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 63, 123, 2047, 2048, 4097, 6143, 6144, 6145, 12288 + 5, 100_003]
PROCESSOR = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
"""What it can do, as Linux says."""


def test_the_check_value_of_the_standard() -> None:
    digits = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    assert reference(digits) == checksum.crc32c(digits) == 0xE3069283
    assert reference(torch.zeros(32, dtype=torch.uint8)) == 0x8A9136AA


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("size", SIZES)
def test_all_three_agree(size: int, offset: int) -> None:
    memory = torch.randint(0, 256, (size + offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    values = memory[offset:]
    by_table = checksum._native()(values.data_ptr(), values.nbytes, True)
    assert checksum.crc32c(values) == by_table == reference(values)


def test_ranks_without_the_library_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1001)
    with_library = checksum.crc32c(values)
    monkeypatch.setattr(checksum, "available", lambda: "was not built")
    assert checksum.crc32c(values) == with_library


@pytest.mark.skipif(
    cpu.available() is not None or not {"avx512f", "vpclmulqdq"} <= PROCESSOR,
    reason="encoders sum in a pass of their own",
)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kernel", ["qsgd_encode", "fp8_encode", "natural_encode", "exponential_encode", "cast_encode", "fitted_encode"]
)
def test_an_encoder_that_sums_on_its_way_sums_the_same(kernel: str, dtype: torch.dtype, feedback: bool) -> None:
    """At every level; also where a part of a gradient is not finite and where tensors end in the middle of a block."""
    shapes = [(1,), (37,), (128,), (1000, 1, 130), (4096, 5000), (100_003,), (2**17, 7, 2**16 + 1)]
    for numels, bits, block in itertools.product(shapes, [2, 3, 4, 8], [64, 96, 128]):
        if kernel == "fitted_encode" and bits > 4:
            continue
        x = torch.randn(sum(numels), generator=torch.Generator().manual_seed(bits)).to(dtype)
        if len(numels) == 2:
            x[4500] = torch.inf
        starts = itertools.accumulate(numels, initial=0)
        segments = Segments.of([Segment(at, numel, 7, 0, bits) for at, numel in zip(starts, numels, strict=False)])
        residual, stream = torch.zeros_like(x, dtype=torch.float32) if feedback else None, torch.tensor([3, 1, 0, 0])
        runs = [(numel, bits) for numel in numels]
        sizes, how = {
            "qsgd_encode": (qsgd_bytes(runs, block, "max"), [segments, stream, block, "max", "stochastic"]),
            "exponential_encode": (coded_bytes(runs, block), [segments, stream, block, "max", "nearest"]),
            "fp8_encode": (coded_bytes([(numel, 8) for numel in numels], block), [segments, block, "e4m3"]),
            "natural_encode": (coded_bytes([(numel, 8) for numel in numels], block), [segments, stream, block]),
            "cast_encode": ((2 * x.numel(),), [torch.float16]),
            "fitted_encode": (qsgd_bytes(runs, block, "ls"), [segments, None, block, "uniform"]),
        }[kernel]
        payload = torch.zeros(sum(sizes), dtype=torch.uint8)
        call = cpu.call(kernel, x, residual, *how, payload)
        words = (ctypes.c_int64 * len(call.words))(*call.words)
        summing = native.library()["gw_sum_encode"]
        summing.argtypes, summing.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int64
        for level in cpu.levels():
            with use_level(level):
                assert summing(call.function, words) == checksum.crc32c(payload), (numels, bits, block, level)
