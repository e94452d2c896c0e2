"""The Triton kernels of the sparsifiers select, write, read and remember what the reference does."""

import itertools
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_kernels import DTYPES
from test_kernels_sparse import awkward
from triton_processes import INEXACT, Compile, Interpreter, assert_alike

from gradwire.core.payload import index_bytes, kept_of
from gradwire.kernels import kernels_for, reference
from gradwire.kernels.segments import Segment, Segments

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NUMELS = (0, 1, 130, 4097, 7)
LEAST = 0.03
STREAM = (2**63 - 1, -5, 2**40 + 7, 3)  # seed, step, encode, rank


def rows_of(numels: tuple[int, ...], gap: int = 0) -> list[Segment]:
    offsets = itertools.accumulate((n + gap for n in numels), initial=0)
    return [Segment(at, n, i, 256 * i, 0) for i, (at, n) in enumerate(zip(offsets, numels, strict=False))]


def bytes_of(rows: list[Segment], ratio: float, together: bool, itemsize: int) -> int:
    numels = [sum(row.numel for row in rows)] if together else [row.numel for row in rows]
    return sum(kept_of(n, ratio) * itemsize + index_bytes(kept_of(n, ratio), n) for n in numels)


def run_topk(
    kernels: Any, x: torch.Tensor, rows: list[Segment], ratio: float, together: bool, add: bool, start: int = 0
) -> dict[str, torch.Tensor]:
    """All that an encode and a decode leave behind; what is added was encoded with a residual and without a threshold."""
    device, segments = x.device, Segments.of(rows, x.device)
    size = bytes_of(rows, ratio, together, x.itemsize)
    around = torch.full((size + 2 * start,), 170, dtype=torch.uint8, device=device)
    payload = around[start : start + size]
    residual = torch.linspace(-1, 1, x.numel(), device=device)
    decoded = torch.linspace(-2, 2, x.numel(), device=device).to(torch.float32 if add else x.dtype)
    kernels.topk_encode(x, residual if add else None, segments, ratio, together, 0.0 if add else LEAST, payload)
    kernels.topk_decode(payload, segments, x.dtype, ratio, together, add, decoded)
    return {"payload": around, "residual": residual, "decoded": decoded}


def run_dgc(kernels: Any, x: torch.Tensor, rows: list[Segment], bound: float, memory: bool) -> dict[str, torch.Tensor]:
    payload = torch.zeros(bytes_of(rows, 0.02, False, x.itemsize), dtype=torch.uint8, device=x.device)
    residual, momentum = (torch.linspace(-1, end, x.numel(), device=x.device) for end in (1, 3))
    remembered = (residual, momentum) if memory else (None, None)
    kernels.dgc_encode(x, *remembered, Segments.of(rows, x.device), 0.02, 0.9, bound, payload)
    return {"payload": payload, "residual": residual, "momentum": momentum}


RATIOS = (1e-5, 0.02, 0.3, 1.0)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_has_the_bytes_of_the_reference(interpreter: Interpreter, dtype: torch.dtype, ratio: float) -> None:
    which = DTYPES.index(dtype) + RATIOS.index(ratio)
    x = awkward(sum(NUMELS) + 10 * len(NUMELS), dtype)
    interpreter.check(run_topk, x, rows_of(NUMELS, gap=10), ratio, which % 3 == 0, which % 2 == 0, which % 2)


@pytest.mark.parametrize("together", [False, True])
def test_equal_magnitudes_are_sent_from_the_first(interpreter: Interpreter, together: bool) -> None:
    x = torch.ones(5000)
    x[::3] = -1.0
    interpreter.check(run_topk, x, rows_of((4500, 500)), 0.95, together, False)


def test_no_elements(interpreter: Interpreter) -> None:
    interpreter.check(run_topk, torch.zeros(3), [], 0.1, True, False)
    interpreter.check(run_topk, torch.zeros(3), rows_of((0, 0)), 0.1, False, False)


@pytest.mark.parametrize(("bound", "memory"), [(0.0, True), (2.0, True), (2.0, False)])
def test_dgc_has_the_bytes_of_the_reference(interpreter: Interpreter, bound: float, memory: bool) -> None:
    dtype = torch.float16 if bound and memory else torch.float32
    interpreter.check(run_dgc, awkward(sum(NUMELS), dtype), rows_of(NUMELS), bound, memory)
    clipped = torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(dtype)
    interpreter.check(run_dgc, clipped, rows_of((4900, 100)), bound, memory)


def run_blocks(
    kernels: Any, x: torch.Tensor, rows: list[Segment], ratio: float, block: int, add: bool
) -> dict[str, torch.Tensor]:
    device, segments = x.device, Segments.of(rows, x.device)
    kept = sum(row.numel // block * kept_of(block, ratio) + kept_of(row.numel % block, ratio) for row in rows)
    payload = torch.zeros(kept * (x.itemsize + 1), dtype=torch.uint8, device=device)
    residual = torch.linspace(-1, 1, x.numel(), device=device)
    decoded = torch.linspace(-2, 2, x.numel(), device=device).to(torch.float32 if add else x.dtype)
    kernels.block_topk_encode(x, residual if add else None, segments, ratio, block, payload)
    kernels.block_topk_decode(payload, segments, x.dtype, ratio, block, add, decoded)
    return {"payload": payload, "residual": residual, "decoded": decoded}


@pytest.mark.parametrize(("block", "ratio"), [(32, 1e-5), (128, 0.02), (256, 0.3), (64, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_topk_has_the_bytes_of_the_reference(
    interpreter: Interpreter, dtype: torch.dtype, block: int, ratio: float
) -> None:
    add = (DTYPES.index(dtype) + block // 32) % 2 == 0
    interpreter.check(run_blocks, awkward(sum(NUMELS), dtype), rows_of(NUMELS), ratio, block, add)


def run_random(kernels: Any, x: torch.Tensor, rows: list[Segment], ratio: float, keep: bool) -> dict[str, torch.Tensor]:
    """All that an encode and a decode leave behind, of elements of one's own and of the common ones."""
    device, segments = x.device, Segments.of(rows, x.device)
    stream, kept = torch.tensor(STREAM, device=device), sum(kept_of(row.numel, ratio) for row in rows)
    payload = torch.zeros(8 + kept * x.itemsize, dtype=torch.uint8, device=device)
    values = torch.zeros(kept, device=device)
    residual, other = torch.linspace(-1, 1, x.numel(), device=device), torch.linspace(-1, 2, x.numel(), device=device)
    written, added = torch.ones_like(x), torch.linspace(-2, 2, x.numel(), device=device)
    kernels.randomk_encode(x, residual if keep else None, segments, stream, ratio, payload)
    kernels.gather_random(x, other if keep else None, segments, stream, ratio, values)
    kernels.randomk_decode(payload, segments, x.dtype, ratio, keep, added if keep else written)
    kernels.scatter_random(values, segments, stream, ratio, not keep, written if keep else added)
    names = ("payload", "values", "residual", "other", "written", "added")
    return dict(zip(names, (payload, values, residual, other, written, added), strict=True))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_k_has_the_bytes_of_the_reference(interpreter: Interpreter, dtype: torch.dtype, ratio: float) -> None:
    keep = (DTYPES.index(dtype) + RATIOS.index(ratio)) % 2 == 0
    interpreter.check(run_random, awkward(sum(NUMELS), dtype), rows_of(NUMELS), ratio, keep)


# ---- damaged payloads


def damage(kernels: Any) -> dict[str, torch.Tensor]:
    """Two runs, of which one's indices are damaged, written and added; and two blocks, of which one's are."""
    x, rows = torch.linspace(-1, 1, 600), rows_of((300, 300))
    segments, out = Segments.of(rows), {}
    payload = torch.zeros(bytes_of(rows, 0.02, False, 4), dtype=torch.uint8)
    kernels.topk_encode(x, None, segments, 0.02, False, 0.0, payload)
    for name, byte in (("none", None), ("low bits", 48), ("row", 53)):
        broken = payload.clone()
        if byte is not None:
            broken[byte] ^= 255
        for add in (False, True):
            out[f"{name} {add}"] = torch.ones(600)
            kernels.topk_decode(broken, segments, torch.float32, 0.02, False, add, out[f"{name} {add}"])
    blocks = torch.zeros(2 * 2 * 5, dtype=torch.uint8)
    kernels.block_topk_encode(x[:64], None, Segments.of(rows_of((64,))), 0.05, 32, blocks)
    blocks[17] = blocks[16]
    out["block"] = torch.ones(64)
    kernels.block_topk_decode(blocks, Segments.of(rows_of((64,))), torch.float32, 0.05, 32, True, out["block"])
    return out


def test_damaged_indices_become_nan_in_their_run_or_block_alone(interpreter: Interpreter) -> None:
    found = interpreter.run(damage)
    assert not any(found[f"none {add}"].isnan().any() for add in (False, True))
    for name, add in itertools.product(("low bits", "row"), (False, True)):
        broken = found[f"{name} {add}"]
        assert broken[:300].isnan().all()
        assert torch.equal(broken[300:], found[f"none {add}"][300:])
    assert found["block"][:32].isnan().all()
    assert not found["block"][32:].isnan().any()


# ---- compiled


GIVEN = {
    "src": "*fp16", "residual": "*fp32", "momentum": "*fp32", "factors": "*fp32", "decay": "fp32", "table": "*i64",
    "least": "*i32",
}  # fmt: skip
MEMORY = {"TILE": 512, "RESIDUAL": True, "MOMENTUM": True, "CLIP": True}
STRETCHES = {"STRETCHES": 8, "WIDTH": 128, "LONGEST": 128}
BYTES_OF = {"payload": "*u8", "table": "*i64"}
COMPILED = {
    "digits, sm_80": Compile(
        "count_digits_kernel", {"histogram": "*i32", "shift": "i32", "bits": "i32", **GIVEN}, MEMORY, 80
    ),
    "pick a digit, sm_90": Compile(
        "pick_digit_kernel", {"histogram": "*i32", "least": "*i32", "need": "*i32", "shift": "i32"}, {}, 90
    ),
    "count, sm_90": Compile("count_chosen_kernel", {"larger": "*i64", "equal": "*i64", **GIVEN}, MEMORY, 90),
    "send, sm_80": Compile(
        "send_kernel",
        {
            "group_table": "*i64", "take": "*i64", "base": "*i64", "floor": "fp32", "values": "*fp16",
            "indices": "*i64", "ones": "*u8", **GIVEN,
        },
        MEMORY,
        80,
    ),
    "pack, sm_90": Compile(
        "pack_kernel", {"indices": "*i64", "ones": "*u8", "group_table": "*i64", **BYTES_OF}, {"BYTES": 128}, 90
    ),
    "ones, sm_80": Compile("count_ones_kernel", {"counts": "*i64", **BYTES_OF}, {"BYTES": 128}, 80),
    "find, sm_80": Compile(
        "find_indices_kernel", {"group_table": "*i64", "before": "*i64", "indices": "*i64", **BYTES_OF}, {"BYTES": 128}, 80
    ),
    "check, sm_90": Compile(
        "check_kernel",
        {"indices": "*i64", "entries": "*i64", "group_table": "*i64", "damaged": "*i32"},
        {"ENTRIES": 1024},
        90,
    ),
    "squares, sm_90": Compile("squares_kernel", {"src": "*bf16", "table": "*i64", "squares": "*fp64"}, {"TILE": 4096}, 90),
    "norms, sm_80": Compile("norm_kernel", {"squares": "*fp64", "spans": "*i64", "norms": "*fp64"}, {"TILE": 256}, 80),
    "clear, sm_90": Compile(
        "clear_kernel", {"dst": "*bf16", "table": "*i64", "damaged": "*i32"}, {"ADD": False, "TILE": 4096}, 90
    ),
    "write, sm_80": Compile(
        "write_kernel",
        {
            "values": "*bf16", "indices": "*i64", "damaged": "*i32", "entries": "*i64", "pieces": "*i64",
            "pieces_of": "*i64", "dst": "*fp32",
        },
        {"STEPS": 3, "ADD": True, "ENTRIES": 1024},
        80,
    ),
    "blocks, sm_90": Compile(
        "block_topk_encode_kernel",
        {"src": "*fp32", "residual": "*fp32", "table": "*i64", "values": "*fp32", "places": "*u8"},
        {"ROWS": 4, "BLOCK": 256, "RESIDUAL": True},
        90,
    ),
    "blocks back, sm_80": Compile(
        "block_topk_decode_kernel",
        {"values": "*bf16", "places": "*u8", "table": "*i64", "dst": "*fp32"},
        {"ROWS": 4, "BLOCK": 256, "KEPT": 4, "ADD": True},
        80,
    ),
    "draw, sm_80": Compile(
        "gather_kernel",
        {"src": "*fp32", "residual": "*fp32", "stream": "*i64", "table": "*i64", "values": "*fp32"},
        {"KEY": 1, "RESIDUAL": True, **STRETCHES},
        80,
    ),
    "key, sm_90": Compile("key_kernel", {"stream": "*i64", "payload": "*u8"}, {}, 90),
    "scatter, sm_90": Compile(
        "scatter_kernel",
        {"values": "*bf16", "stream": "*u8", "table": "*i64", "dst": "*fp16"},
        {"KEY": 2, "ADD": False, **STRETCHES},
        90,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_cuda_to_exact_arithmetic(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found
    assert COMPILED[name].kernel in found
    assert INEXACT.findall(found) == []


# ---- on a GPU


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bytes_of_the_reference(dtype: torch.dtype, ratio: float) -> None:
    cases = ((awkward(sum(NUMELS), dtype), rows_of(NUMELS)), (awkward(2**20 + 1, dtype), rows_of((2**20 + 1,))))
    for (x, rows), keep in itertools.product(cases, (False, True)):
        for run, arguments in (
            (run_topk, (rows, ratio, keep, keep)),
            (run_blocks, (rows, ratio, 256, keep)),
            (run_random, (rows, ratio, keep)),
            (run_dgc, (rows, 0.0, keep)),
        ):
            expected, found = run(reference, x, *arguments), run(kernels_for("cuda"), x.cuda(), *arguments)
            assert_alike(expected, {name: value.cpu() for name, value in found.items()})
