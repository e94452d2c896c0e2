"""The Triton kernels of PowerSGD: products as of the reference, in full float32, and orthonormal columns."""

from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_kernels import DTYPES
from triton_processes import Compile, Interpreter, assert_alike

from gradwire.kernels import kernels_for, reference

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPES = ((40, 70), (3, 129))


def matrices_of(shapes: tuple[tuple[int, int], ...], rank: int, device: torch.device) -> torch.Tensor:
    rows, offset, p_at, q_at = [], 5, 0, 0
    for height, width in shapes:
        rows.append((offset, height, width, p_at, q_at))
        offset, p_at, q_at = offset + height * width, p_at + height * rank, q_at + width * rank
    return torch.tensor(rows, dtype=torch.int64, device=device)


def run_products(
    kernels: Any, dtype: torch.dtype, rank: int, keep: bool, spoiled: bool = False, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """All three products, of small whole numbers, whose sums are exact in any order."""
    generator, where = torch.Generator().manual_seed(0), torch.device(device)
    height, width = (sum(shape[k] for shape in SHAPES) for k in (0, 1))
    numels = (sum(h * w for h, w in SHAPES) + 5, height * rank, width * rank, width * rank)
    x, p, q, q_sum = (torch.randint(-2, 3, (n,), generator=generator).float().to(where) for n in numels)
    src, matrices = x.to(dtype), matrices_of(SHAPES, rank, where)
    residual = torch.randint(-2, 3, (len(x),), generator=generator).float().to(where)
    if spoiled:
        q_sum[-3] = float("inf")
    kept = residual if keep else None
    out = {"p": torch.zeros_like(p), "q": torch.zeros_like(q), "residual": residual, "dst": src}
    kernels.project(src, kept, matrices, rank, q, out["p"])
    kernels.back_project(src, kept, matrices, rank, p, out["q"])
    kernels.reconstruct(src, kept, matrices, rank, p, q_sum, q)
    return {name: value + 0.0 for name, value in out.items()}  # zeros of either sign are equal


@pytest.mark.parametrize("rank", [1, 3, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_reference(interpreter: Interpreter, dtype: torch.dtype, rank: int) -> None:
    interpreter.check(run_products, dtype, rank, rank != 1, rank == 3 and dtype == torch.float32)


def run_orthogonalise(kernels: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What is true of columns made orthonormal: usual ones, some that say nothing, and some that are not finite."""
    rank, shapes = 4, ((1500, 9), (30, 9), (9, 9), (9, 9))
    matrices = matrices_of(shapes, rank, torch.device(device))
    p = torch.randn(sum(h for h, _ in shapes) * rank, generator=torch.Generator().manual_seed(1)).to(device)
    runs = [p[at : at + h * rank].view(h, rank) for (h, _), at in zip(shapes, matrices[:, 3].tolist(), strict=True)]
    runs[1][:, 2] = runs[1][:, 0] - 2 * runs[1][:, 1]
    runs[2][:, 1:] = 0.0
    runs[3][5, 1] = float("nan")
    given = [run.double() for run in runs]
    kernels.orthogonalise(matrices, rank, p)
    truths = []
    for before, after in zip(given[:3], runs, strict=False):
        q = after.double()
        truths.append(bool(((q.T @ q) - torch.eye(rank, device=device)).abs().max() < 1e-6))
        truths.append(bool(((q @ (q.T @ before)) - before).norm() < 1e-5 * before.norm()))
    return {"true": torch.tensor([*truths, bool(runs[3].isnan().all())])}


def test_columns_become_orthonormal_and_span_what_they_did(interpreter: Interpreter) -> None:
    assert run_orthogonalise(reference)["true"].all()
    interpreter.check(run_orthogonalise)


MATRIX = {"matrices": "*i64", "rank": "i32", "p": "*fp32"}
PRODUCT = {"src": "*bf16", "residual": "*fp32", "q": "*fp32", **MATRIX}
TILE = {"HEIGHT": 32, "WIDTH": 32, "RESIDUAL": True}
COMPILED = {
    "project, sm_90": Compile("project_kernel", PRODUCT, {"RANK": 16, **TILE}, 90),
    "back_project, sm_80": Compile("back_project_kernel", PRODUCT, {"RANK": 16, **TILE}, 80),
    "reconstruct, sm_90": Compile(
        "reconstruct_kernel",
        {"dst": "*fp16", "residual": "*fp32", "q_sum": "*fp32", "q_own": "*fp32", "finite": "*i32", **MATRIX},
        TILE,
        90,
    ),
    "orthogonalise, sm_80": Compile("orthogonalise_kernel", MATRIX, {"TILE": 1024}, 80),
}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_cuda_without_tf32(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found
    assert COMPILED[name].kernel in found
    assert "tf32" not in found


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rank", [1, 3, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_products_of_the_reference(dtype: torch.dtype, rank: int) -> None:
    expected = run_products(reference, dtype, rank, True)
    found = run_products(kernels_for("cuda"), dtype, rank, True, device="cuda")
    assert_alike(expected, {name: value.cpu() for name, value in found.items()})
    assert run_orthogonalise(kernels_for("cuda"), "cuda")["true"].all()
