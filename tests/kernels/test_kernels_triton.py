"""The Triton kernels give the bytes of the reference: in Triton's interpreter, which needs no GPU, and on a GPU."""

import itertools
import math
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_kernels import DTYPES, awkward, payload_bytes, whole
from triton_processes import INEXACT, Compile, Compiler, Interpreter, assert_alike

from gradwire.kernels import kernels_for, reference
from gradwire.kernels.segments import Segment, Segments, tensor_key

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STREAM = (2**63 - 1, -5, 2**40 + 7, 3)  # seed, step, encode, rank
FULL = 131 + 300  # where the tensor of 4097 elements begins in what `awkward` makes
SPECIAL = [Segment(8, 123, tensor_key("a"), 256, 3), Segment(FULL, 4097, tensor_key("b"), 4096, 4)]
"""A partial block that holds a NaN, whole blocks of everything odd, and a partial block of one element."""


@dataclass(frozen=True)
class Case:
    """One encode and one decode of QSGD."""

    x: torch.Tensor
    rows: list[Segment]
    block: int = 128
    scale: str = "max"
    rounding: str = "stochastic"
    residual: bool = False
    add: bool = False
    unaligned: bool = False
    """Whether the payload begins at an odd byte, and does so when it is read."""

    @property
    def segments(self) -> Segments:
        return Segments.of(self.rows, self.x.device)


def run_qsgd(kernels: Any, case: Case) -> dict[str, torch.Tensor]:
    """All that an encode and a decode leave behind, by name."""
    x, segments, device = case.x, case.segments, case.x.device
    start, size = 3 if case.unaligned else 0, payload_bytes(segments, case.block, case.scale)
    around = torch.full((size + 2 * start,), 170, dtype=torch.uint8, device=device)
    payload = around[start : start + size]
    residual = torch.linspace(-1, 1, x.numel(), device=device) if case.residual else None
    decoded = torch.linspace(-2, 2, x.numel(), device=device).to(torch.float32 if case.add else x.dtype)
    stream = torch.tensor(STREAM, device=device)
    kernels.qsgd_encode(x, residual, segments, stream, case.block, case.scale, case.rounding, payload)
    kernels.qsgd_decode(payload, segments, case.block, case.scale, case.add, decoded)
    out = {"payload": around, "decoded": decoded}
    return out if residual is None else out | {"residual": residual}


def run_cast(kernels: Any, x: torch.Tensor, wire: torch.dtype, unaligned: bool) -> dict[str, torch.Tensor]:
    start = 1 if unaligned else 0
    around = torch.full((2 * x.numel() + 2 * start,), 170, dtype=torch.uint8, device=x.device)
    payload = around[start : start + 2 * x.numel()]
    residual = torch.linspace(-1, 1, x.numel(), device=x.device)
    out = {"written": torch.ones_like(x), "added": x.clone(), "residual": residual, "payload": around}
    kernels.cast_encode(x, None, wire, payload)
    kernels.cast_decode(payload, wire, False, out["written"])
    kernels.cast_decode(payload, wire, True, out["added"])
    kernels.cast_encode(x, residual, wire, payload)
    return out


# ---- in the interpreter


MEANS = list(itertools.product(DTYPES, ("max", "minmax", "l2"), (False, True)))


@pytest.mark.parametrize(("dtype", "scale", "residual"), MEANS, ids=str)
def test_qsgd_has_the_bytes_of_the_reference(interpreter: Interpreter, dtype: torch.dtype, scale: str, residual: bool) -> None:
    which = MEANS.index((dtype, scale, residual))
    rows = [row._replace(bits=2 + (which + 3 * i) % 7) for i, row in enumerate(SPECIAL)]
    rounding = "nearest" if which % 4 == 1 else "stochastic"
    interpreter.check(run_qsgd, Case(awkward(dtype), rows, scale=scale, rounding=rounding, residual=residual, add=which % 2 == 0))


@pytest.mark.parametrize("numel", [13, 64], ids=["partial blocks", "whole blocks"])
def test_tensors_of_one_call_have_their_own_bits(interpreter: Interpreter, numel: int) -> None:
    rows = [Segment(i * 70, numel, tensor_key(f"t{i}"), 32 * i, 2 + i) for i in range(7)]
    x = torch.randn(490, generator=torch.Generator().manual_seed(3))
    interpreter.check(run_qsgd, Case(x, rows, block=32, residual=True, unaligned=True))


@pytest.mark.parametrize(("block", "scale"), [(32, "minmax"), (64, "l2"), (256, "max"), (1024, "l2"), (8192, "minmax")])
def test_blocks_of_any_size(interpreter: Interpreter, block: int, scale: str) -> None:
    x = torch.randn(8192 + 17, generator=torch.Generator().manual_seed(4))
    interpreter.check(run_qsgd, Case(x, [Segment(0, x.numel(), 5, 3 * 8192, 5)], block, scale, unaligned=block == 64))


def test_random_numbers_far_inside_a_huge_tensor(interpreter: Interpreter) -> None:
    """Counters are 32 bits wide and go round."""
    x = torch.rand(600, generator=torch.Generator().manual_seed(5))
    interpreter.check(run_qsgd, Case(x, [Segment(0, 600, 2**63 - 1, 2**33 - 256, 4)]))
    interpreter.check(run_qsgd, Case(x, [Segment(0, 600, 0, 2**40, 4)], block=32))


@pytest.mark.parametrize("numels", [(), (0,), (0, 1, 0), (7, 8, 9), (127, 128, 129)], ids=str)
def test_tensors_of_few_elements_or_none(interpreter: Interpreter, numels: tuple[int, ...]) -> None:
    offsets = itertools.accumulate(numels, initial=0)
    rows = [Segment(at, numel, 1, 0, 4) for at, numel in zip(offsets, numels, strict=False)]
    interpreter.check(run_qsgd, Case(torch.arange(1.0, sum(numels) + 1), rows, scale="minmax"))


def decode_bytes(kernels: Any, seed: int) -> dict[str, torch.Tensor]:
    out, generator = {}, torch.Generator().manual_seed(seed)
    for scale, bits in (("max", 4), ("minmax", 3), ("l2", 8)):
        segments = whole(300, bits)
        size = (payload_bytes(segments, 32, scale),)
        payload = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        out[scale] = torch.zeros(300)
        kernels.qsgd_decode(payload, segments, 32, scale, False, out[scale])
    return out


@pytest.mark.parametrize("seed", [0, 1])
def test_payloads_of_any_bytes_decode_as_by_the_reference(interpreter: Interpreter, seed: int) -> None:
    interpreter.check(decode_bytes, seed)


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_have_the_bytes_of_the_reference(
    interpreter: Interpreter, dtype: torch.dtype, wire: torch.dtype, unaligned: bool
) -> None:
    edges = [65504.0, 65519.99, 65520.0, 6.1e-5, 6.097e-5, 5.96e-8, 2.98e-8, 2.99e-8, 1e-45, -0.0, 3.3961e38, 1e-38]
    edges += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, math.inf, -math.inf, math.nan]
    interpreter.check(run_cast, torch.cat([awkward(dtype).float(), torch.tensor(edges)]).to(dtype), wire, unaligned)


# ---- compiled


ENCODE = {"residual": "*fp32", "weights": "*u8", "table": "*i64", "stream": "*i64", "payload": "*u8"}
CAST = {"payload": "*i16", "numel": "i32"}


def qsgd_constants(block: int, scale: int, aligned: bool, **others: bool) -> dict[str, Any]:
    rows = 32 if aligned else 4  # fewer than in earnest compile faster, to the same operations
    each = {
        "ROWS": rows,
        "BLOCK": block,
        "CODE": scale == 1,
        "TERNARY": scale != 1 and block >= 64,
        "WEIGHTED": False,
        "ALIGNED": aligned,
        **others,
    }
    return each | {"FACTOR": 0.0} | ({"NORM": scale == 2} if "STOCHASTIC" in others else {})


COMPILED = {
    "usual encode, sm_80": Compile(
        "coded_encode_kernel", {"src": "*fp32", **ENCODE}, qsgd_constants(128, 0, True, STOCHASTIC=True, RESIDUAL=False), 80
    ),
    "encode with feedback, sm_90": Compile(
        "coded_encode_kernel", {"src": "*bf16", **ENCODE}, qsgd_constants(128, 0, False, STOCHASTIC=True, RESIDUAL=True), 90
    ),
    "encode by the minimum and maximum, sm_80": Compile(
        "coded_encode_kernel", {"src": "*fp32", **ENCODE}, qsgd_constants(128, 1, False, STOCHASTIC=False, RESIDUAL=False), 80
    ),
    "encode by the norm, sm_90": Compile(
        "coded_encode_kernel", {"src": "*fp16", **ENCODE}, qsgd_constants(64, 2, False, STOCHASTIC=False, RESIDUAL=False), 90
    ),
    **{
        f"{name}, sm_{arch}": Compile(kernel, types, constants, arch)
        for arch in (80, 90)
        for name, kernel, types, constants in (
            (
                "decode", "coded_decode_kernel", {"payload": "*u8", "table": "*i64", "dst": "*fp32", "weights": "*u8"},
                qsgd_constants(128, arch == 90, True, ADD=True),
            ),
            (
                "cast", "cast_encode_kernel", {"src": "*fp32", "residual": "*fp32", **CAST},
                {"BF16": arch == 90, "RESIDUAL": True, "BYTES": False, "TILE": 2048},
            ),
            (
                "cast back", "cast_decode_kernel", {"dst": "*bf16", **CAST},
                {"BF16": arch == 90, "ADD": True, "BYTES": False, "TILE": 2048},
            ),
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compile_meanwhile(ptx: dict[str, Future[str]]) -> None:
    """While the interpreter runs."""


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_cuda_to_exact_arithmetic(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found
    assert COMPILED[name].kernel in found
    assert INEXACT.findall(found) == []


# ---- choice and refusals


def test_triton_is_loaded_for_cuda_only_and_has_all_that_the_reference_has(compiler: Compiler) -> None:
    loaded, chosen, own = compiler.choice.result(timeout=120)
    assert loaded == []
    assert chosen == "gradwire.kernels.triton"
    assert own == reference.__all__


def test_without_triton_the_reference_runs_on_cuda_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gradwire.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels_for.cache_clear()
    with pytest.warns(UserWarning, match=r"on cuda: Triton does not load: .*300 times as long.*pip install triton"):
        assert kernels_for("cuda") is reference
    kernels_for.cache_clear()


def refused(case: Case, size: int | None = None, residual: torch.Tensor | None = None) -> None:
    from gradwire.kernels import triton

    size = payload_bytes(case.segments, 128, "max") if size is None else size
    payload, stream = torch.zeros(size, dtype=torch.uint8), torch.tensor(STREAM)
    triton.qsgd_encode(case.x, residual, case.segments, stream, case.block, "max", "nearest", payload)


PLAIN = Case(torch.ones(300), [Segment(0, 300, 1, 0, 4)])
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "payload too short": (lambda: refused(PLAIN, 167), "has 167 bytes where the segments take 168"),
    "payload too long": (lambda: refused(PLAIN, 169), "has 169 bytes"),
    "flat buffer too short": (lambda: refused(replace(PLAIN, x=torch.ones(299))), "reach element 300 .* has 299"),
    "float64": (lambda: refused(replace(PLAIN, x=torch.ones(300).double())), "float32, bfloat16 and float16"),
    "strided": (lambda: refused(replace(PLAIN, x=torch.ones(600)[::2])), "contiguous"),
    "residual too short": (lambda: refused(PLAIN, residual=torch.zeros(299)), "residual"),
    "one bit": (lambda: refused(replace(PLAIN, rows=[Segment(0, 300, 1, 0, 1)]), 0), "impossible bits"),
    "begins inside a block": (lambda: refused(replace(PLAIN, rows=[Segment(0, 300, 1, 64, 4)])), "impossible bits or"),
    "offset before the start": (lambda: refused(replace(PLAIN, rows=[Segment(-1, 300, 1, 0, 4)])), "segment 0 reaches"),
    "block of 48": (lambda: refused(replace(PLAIN, block=48)), "block of 48"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_sizes_and_dtypes_are_refused_in_words(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        call()


# ---- on a GPU


def to_gpu(case: Case) -> Case:
    return replace(case, x=case.x.cuda())


def on_cpu(out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in out.items()}


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("block", [32, 128, 1024, 8192])
@pytest.mark.parametrize("scale", ["max", "minmax", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bytes_of_the_reference(dtype: torch.dtype, scale: str, block: int) -> None:
    for bits, residual in itertools.product(range(2, 9), (False, True)):
        rounding = "nearest" if residual and scale == "max" else "stochastic"
        rows = [row._replace(bits=bits, first=8192) for row in SPECIAL]
        case = Case(awkward(dtype), rows, block, scale, rounding, residual, add=bits % 2 == 0, unaligned=bits > 5)
        assert_alike(run_qsgd(reference, case), on_cpu(run_qsgd(kernels_for("cuda"), to_gpu(case))))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("megabytes", [1, 64])
@pytest.mark.parametrize("odd", [0, 5], ids=["aligned", "unaligned"])
def test_a_gpu_gives_the_bytes_of_the_reference_at_large_sizes(megabytes: int, odd: int) -> None:
    x = torch.randn(megabytes * 2**18, generator=torch.Generator().manual_seed(6))
    for residual, scale in ((False, "max"), (True, "max"), (False, "minmax")):
        case = Case(x, [Segment(odd, x.numel() - odd, 1, 0, 4)], scale=scale, residual=residual, add=True)
        assert_alike(run_qsgd(kernels_for("cpu"), case), on_cpu(run_qsgd(kernels_for("cuda"), to_gpu(case))))
    for wire in (torch.bfloat16, torch.float16):
        expected = run_cast(reference, x, wire, bool(odd))
        assert_alike(expected, on_cpu(run_cast(kernels_for("cuda"), x.cuda(), wire, bool(odd))))


@pytest.mark.gpu
@gpu
def test_nothing_waits_for_the_gpu() -> None:
    """Once the table of programs is on the device, a call only queues work."""
    case, kernels = to_gpu(replace(PLAIN, residual=True)), kernels_for("cuda")
    segments, stream = case.segments, torch.tensor(STREAM, device="cuda")
    payload = torch.zeros(168, dtype=torch.uint8, device="cuda")
    residual = torch.zeros_like(case.x)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            kernels.qsgd_encode(case.x, residual, segments, stream, 128, "max", "stochastic", payload)
            kernels.qsgd_decode(payload, segments, 128, "max", True, residual)
        finally:
            torch.cuda.set_sync_debug_mode("default")
