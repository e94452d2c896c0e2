"""The Triton kernels of signs give the bytes of the reference."""

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
from gradwire.kernels.segments import Segment, Segments

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SPECIAL = [Segment(8, 123, 1, 0, 1), Segment(131 + 300, 4097, 2, 0, 1)]
"""Of what `awkward` makes: a run with a NaN, and one of everything odd, longer than a program by one element."""


def run_signs(
    kernels: Any,
    x: torch.Tensor,
    rows: list[Segment],
    block: int,
    means: int,
    with_state: bool,
    unaligned: bool = False,
) -> dict[str, torch.Tensor]:
    """All that an encode and two decodes leave behind; without means the signs of a momentum."""
    segments, device = Segments.of(rows, x.device), x.device
    start, size = 3 if unaligned else 0, sum(coded_bytes([(row.numel, 1) for row in rows], block, means))
    around = torch.full((size + 2 * start,), 170, dtype=torch.uint8, device=device)
    payload = around[start : start + size]
    state = torch.linspace(-1, 1, x.numel(), device=device)
    out = {"payload": around, "written": torch.ones_like(x), "added": torch.linspace(-2, 2, x.numel(), device=device)}
    out["state"] = state
    if means:
        kernels.mean_sign_encode(x, state if with_state else None, segments, block, means, payload)
    else:
        kernels.sign_encode(x, state if with_state else None, 0.9, segments, payload)
    kernels.sign_decode(payload, segments, block, means, False, out["written"])
    kernels.sign_decode(payload, segments, block, means, True, out["added"])
    return out


MEANS = [(0, 0), (32, 1), (64, 2), (512, 1), (1024, 2), (0, 1), (0, 2)]


@pytest.mark.parametrize(("block", "means"), MEANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_have_the_bytes_of_the_reference(interpreter: Interpreter, dtype: torch.dtype, block: int, means: int) -> None:
    with_state = (DTYPES.index(dtype) + MEANS.index((block, means))) % 2 == 0
    interpreter.check(run_signs, awkward(dtype), SPECIAL, block, means, with_state, block == 64)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("block", "means"), [(0, 0), (128, 2), (0, 2)])
def test_runs_of_few_elements_or_none(interpreter: Interpreter, block: int, means: int, with_state: bool) -> None:
    numels = (0, 1, 7, 9, 511, 513)
    offsets = itertools.accumulate(numels, initial=0)
    rows = [Segment(at, numel, 1, 0, 1) for at, numel in zip(offsets, numels, strict=False)]
    x = torch.randn(sum(numels), generator=torch.Generator().manual_seed(7))
    interpreter.check(run_signs, x, rows, block, means, with_state)
    interpreter.check(run_signs, x, [], block, means, with_state)


def test_blocks_larger_than_a_program_of_smaller_ones(interpreter: Interpreter) -> None:
    x = torch.randn(8192 + 17, generator=torch.Generator().manual_seed(8))
    interpreter.check(run_signs, x, [Segment(0, x.numel(), 1, 0, 1)], 8192, 2, True)


def decode_bytes(kernels: Any, seed: int) -> dict[str, torch.Tensor]:
    out, generator, rows = {}, torch.Generator().manual_seed(seed), [Segment(0, 700, 1, 0, 1)]
    for block, means in ((0, 0), (0, 1), (32, 2), (128, 1)):
        size = (sum(coded_bytes([(700, 1)], block, means)),)
        payload = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        out[f"{block} {means}"] = torch.zeros(700)
        kernels.sign_decode(payload, Segments.of(rows), block, means, False, out[f"{block} {means}"])
    return out


def test_payloads_of_any_bytes_decode_as_by_the_reference(interpreter: Interpreter) -> None:
    interpreter.check(decode_bytes, 0)


def run_means(kernels: Any, means: int) -> dict[str, torch.Tensor]:
    """Signs of runs that are longer than a piece of a sum, and than the pieces of a program."""
    numels = (5, 40000)
    x = torch.randn(sum(numels), generator=torch.Generator().manual_seed(10)).exp()
    segments = Segments.of([Segment(0, 5, 1, 0, 1), Segment(5, 40000, 1, 0, 1)])
    payload = torch.zeros(sum(coded_bytes([(n, 1) for n in numels], 0, means)), dtype=torch.uint8)
    kernels.mean_sign_encode(x - 1, None, segments, 0, means, payload)
    return {"payload": payload}


@pytest.mark.parametrize("means", [1, 2])
def test_means_of_long_runs(interpreter: Interpreter, means: int) -> None:
    interpreter.check(run_means, means)


TYPES = {"src": "*fp32", "state": "*fp32", "table": "*i64", "payload": "*u8", "keep": "fp32", "rest": "fp32"}
COMPILED = {
    "means, sm_80": Compile(
        "sign_encode_kernel",
        TYPES,
        {"SPAN": 4096, "BLOCK": 512, "MEANS": 1, "KNOWN": False, "STATE": True, "ALIGNED": True},
        80,
    ),
    "momentum, sm_90": Compile(
        "sign_encode_kernel",
        TYPES,
        {"SPAN": 4096, "BLOCK": 4096, "MEANS": 0, "KNOWN": False, "STATE": True, "ALIGNED": True},
        90,
    ),
    "means of pieces, sm_80": Compile(
        "piece_sums_kernel",
        {"src": "*fp16", "residual": "*fp32", "table": "*i64", "sums": "*fp64", "counts": "*i32"},
        {"MEANS": 2, "RESIDUAL": True},
        80,
    ),
    "means of runs, sm_90": Compile(
        "run_means_kernel",
        {"sums": "*fp64", "counts": "*i32", "table": "*i64", "payload": "*u8"},
        {"MEANS": 2},
        90,
    ),
    "decode, sm_90": Compile(
        "sign_decode_kernel",
        {"payload": "*u8", "table": "*i64", "dst": "*fp32"},
        {"SPAN": 4096, "BLOCK": 512, "MEANS": 2, "ADD": True, "ALIGNED": True},
        90,
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_cuda_to_exact_arithmetic(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found
    assert COMPILED[name].kernel in found
    assert INEXACT.findall(found) == []


def test_wrong_sizes_are_refused_in_words() -> None:
    from gradwire.kernels import triton

    segments, x = Segments.of([Segment(0, 300, 1, 0, 1)]), torch.ones(300)
    with pytest.raises(RuntimeError, match="has 37 bytes where the segments take 38"):
        triton.sign_encode(x, None, 0.9, segments, torch.zeros(37, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="reach element 300"):
        triton.sign_decode(torch.zeros(38, dtype=torch.uint8), segments, 0, 0, False, x[:299])
    with pytest.raises(RuntimeError, match="block of 48"):
        triton.mean_sign_encode(x, None, segments, 48, 1, torch.zeros(54, dtype=torch.uint8))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("block", "means"), [*MEANS, (128, 1), (8192, 2), (512, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bytes_of_the_reference(dtype: torch.dtype, block: int, means: int) -> None:
    large = torch.randn(2**20 + 1, generator=torch.Generator().manual_seed(9)).to(dtype)
    whole = [Segment(0, large.numel(), 1, 0, 1)]
    for (x, rows), with_state in itertools.product(((awkward(dtype), SPECIAL), (large, whole)), (False, True)):
        expected = run_signs(reference, x, rows, block, means, with_state)
        found = run_signs(kernels_for("cuda"), x.cuda(), rows, block, means, with_state)
        assert_alike(expected, {name: value.cpu() for name, value in found.items()})
