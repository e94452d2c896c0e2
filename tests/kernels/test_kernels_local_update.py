"""Local updates: every SIMD level and Triton give what the reference gives."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_kernels import DTYPES, FASTER, REFERENCE, awkward, built, others_run_during, same
from triton_processes import INEXACT, Compile, Interpreter, assert_alike

from gradwire.kernels import cpu, kernels_for, reference
from gradwire.kernels.reference.local_update import LocalUpdate

interpreted = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BY = {
    "SGD": LocalUpdate(0.1),
    "SGD with momentum": LocalUpdate(0.1, 1.9, 0.81),
    "Adam, its second step": LocalUpdate(1e-3 / 0.19, 0.1, 0.9, 0.999 / 0.001999, 0.001 / 0.001999, 1e-8),
    "uphill": LocalUpdate(-3.0, 0.25, 0.75, 0.5, 0.5, 1e-3),
}
CASES = list(itertools.product(BY, DTYPES, (False, True), (False, True)))


def run(kernels: Any, by: LocalUpdate, tensors: list[torch.Tensor], squares: bool, mean: bool) -> dict[str, torch.Tensor]:
    weight, gradient, estimate, moment = tensors
    out = torch.full_like(weight, 7)
    kernels.local_update(weight, gradient, estimate if squares else None, moment if mean else None, by, out)
    return {"out": out, "weight": weight}


def tensors_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Weights, gradients, estimates of squares, moments; gradients with all that is special."""
    gradient = awkward(dtype)
    generator = torch.Generator().manual_seed(8)
    weight, squares, mean = (torch.randn(gradient.numel(), generator=generator).to(dtype) for _ in range(3))
    squares = squares * squares
    squares[::7] = 0
    return [weight, gradient, squares, mean]


@built
@pytest.mark.parametrize(("name", "dtype", "squares", "mean"), CASES, ids=str)
def test_levels_give_what_the_reference_gives(name: str, dtype: torch.dtype, squares: bool, mean: bool) -> None:
    expected = run(REFERENCE.kernels, BY[name], tensors_of(dtype), squares, mean)
    assert same(expected["weight"], tensors_of(dtype)[0])
    for way in FASTER:
        with way.chosen():
            assert_alike(expected, run(way.kernels, BY[name], tensors_of(dtype), squares, mean))


@built
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_a_large_tensor(threads: int) -> None:
    generator = torch.Generator().manual_seed(9)
    tensors = [torch.rand(5 * 2**16 + 13, generator=generator) for _ in range(4)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        by = BY["Adam, its second step"]
        assert_alike(run(reference, by, tensors, True, True), run(cpu, by, tensors, True, True))
    finally:
        torch.set_num_threads(before)


def test_float64_is_reckoned_in_float64() -> None:
    by, tensors = BY["Adam, its second step"], [torch.full((3,), value, dtype=torch.float64) for value in (1, 3, 2, 5)]
    out = run(reference, by, tensors, True, True)["out"]
    expected = 1 - by.rate * (by.own * 3 + by.momentum * 5) / ((by.kept * 2 + by.taken * 9) ** 0.5 + by.eps)
    assert torch.allclose(out, torch.full((3,), expected, dtype=torch.float64), rtol=1e-15, atol=0)


def call(module: Any, **others: torch.Tensor) -> None:
    given = {name: torch.ones(8) for name in ("weight", "gradient", "squares", "mean", "out")} | others
    out = given.pop("out")
    module.local_update(*given.values(), BY["SGD"], out)


OTHERS = {
    "a short gradient": {"gradient": torch.ones(7)},
    "moments of another dtype": {"squares": torch.ones(8).bfloat16()},
    "a result with holes": {"out": torch.ones(16)[::2]},
    "a long mean": {"mean": torch.ones(9)},
}
WORDS = "contiguous, of the weight's dtype and as long as it|contiguous flat buffer"


@built
@pytest.mark.parametrize("name", OTHERS)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=WORDS):
        call(cpu, **OTHERS[name])


@built
def test_other_numbers_and_weights_with_holes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="float32, bfloat16 and float16"):
        call(cpu, weight=torch.ones(8).double())
    with pytest.raises(RuntimeError, match="must be contiguous"):
        call(cpu, weight=torch.ones(16)[::2])


@built
def test_the_gil_is_released_meanwhile() -> None:
    tensors = [torch.ones(1 << 22) for _ in range(4)]
    work: Callable[[], Any] = lambda: run(cpu, BY["SGD"], tensors, True, True)  # noqa: E731
    assert others_run_during(work, 500)


# ---- Triton


@interpreted
@pytest.mark.parametrize(("name", "dtype", "squares", "mean"), CASES[::3], ids=str)
def test_triton_gives_what_the_reference_gives(
    interpreter: Interpreter, name: str, dtype: torch.dtype, squares: bool, mean: bool
) -> None:
    interpreter.check(run, BY[name], tensors_of(dtype), squares, mean)


POINTERS = ("weight", "gradient", "squares", "mean", "out")
FLOATS = dict.fromkeys(("rate", "own", "momentum", "kept", "taken", "eps"), "fp32")
COMPILED = {
    f"{dtype} sm_{arch} squares {squares}": Compile(
        "local_update_kernel",
        {**dict.fromkeys(POINTERS, f"*{dtype}"), "numel": "i32", **FLOATS},
        {"SQUARES": squares, "MEAN": True, "TILE": 1024},
        arch,
    )
    for dtype, arch, squares in (("fp32", 90, True), ("bf16", 90, True), ("fp16", 80, True), ("fp32", 80, False))
}


@interpreted
@pytest.mark.parametrize("name", COMPILED)
def test_the_kernel_compiles_for_cuda_to_exact_arithmetic(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found
    assert INEXACT.findall(found) == []
    if COMPILED[name].constants["SQUARES"]:
        assert "sqrt.rn.f32" in found
        assert "div.rn.f32" in found


@interpreted
@pytest.mark.parametrize("name", OTHERS)
def test_triton_refuses_tensors_that_do_not_fit(name: str) -> None:
    from gradwire.kernels import triton

    with pytest.raises(RuntimeError, match=WORDS):
        call(triton, **OTHERS[name])


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("name", "dtype", "squares", "mean"), CASES, ids=str)
def test_a_gpu_gives_what_the_reference_gives(name: str, dtype: torch.dtype, squares: bool, mean: bool) -> None:
    expected = run(reference, BY[name], tensors_of(dtype), squares, mean)
    found = run(kernels_for("cuda"), BY[name], [each.cuda() for each in tensors_of(dtype)], squares, mean)
    assert_alike(expected, {key: value.cpu() for key, value in found.items()})
