"""`python -m benchmarks variants`: Triton kernels that trainings launch compile, without a GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.variants import ARCHES, Noted, Variant, compiled, covering, in_a_process

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")


def compile_all() -> list[tuple[int, int, int]]:
    """Run the command. For compute capabilities 8.0 and 9.0: kernels, variants that were compiled, variants that are launched."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks", "variants", "--arch", "80", "90", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (\S+) \| (\d\.\d) \| +(\d+) \| +(\d+) \| +(\d+) \| +(\d+) \|", done.stdout, re.MULTILINE)
    assert [arch for _, arch, *_ in rows] == ["8.0", "9.0"]
    assert all(errors == "0" for *_, errors in rows)
    return [(int(kernels), int(variants), int(launched)) for _, _, kernels, variants, launched, _ in rows]


@pytest.mark.slow
@pytest.mark.thorough
@needs_triton
def test_every_kernel_compiles_with_every_value_of_its_constants_to_exact_arithmetic() -> None:
    found = in_a_process(ARCHES, whole=False)
    assert [each.arch for each in found] == [*ARCHES]
    for each in found:
        assert each.errors == []
        assert 20 < each.kernels <= each.variants < each.launched and each.launched > 150


@pytest.mark.slow
@pytest.mark.thorough
@needs_triton
def test_every_variant_compiles() -> None:
    for kernels, variants, launched in compile_all():
        assert kernels > 20 and variants > 150 and launched >= variants


def variant(kernel: str, *arguments: object, **constants: object) -> Variant:
    return Variant(SimpleNamespace(__name__=kernel), arguments, constants)


def test_the_small_set_has_every_kernel_for_each_gpu_and_every_value_once() -> None:
    both, add, block, other = (
        variant("encode", ADD=True, BLOCK=64),
        variant("encode", ADD=True, BLOCK=128),
        variant("encode", ADD=False, BLOCK=128),
        variant("decode", ADD=True),
    )
    assert covering([both, add, block, other], [80]) == {80: [both, block, other]}
    assert covering([both, add, block, other], [80, 90]) == {80: [both, other], 90: [block, other]}
    assert covering([both, block, add], [80, 90]) == {80: [both], 90: [block]}
    assert covering([], [80]) == {80: []}


@needs_triton
def test_code_that_rounds_in_another_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    def made_of(ptx: str, module: str) -> Variant:
        kernel = SimpleNamespace(__name__=ptx[:3], fn=SimpleNamespace(__module__=f"gradwire.kernels.triton.{module}"))
        kernel.warmup = lambda *arguments, **options: SimpleNamespace(hash=ptx, asm={"ptx": ptx})
        return Variant(kernel, (), {})

    monkeypatch.setattr(driver, "set_active", lambda made: None)
    wrong = made_of("div.full.f32 %f1, %f2, %f3;", "coded"), made_of("wgmma.m64n8k8.f32.tf32.tf32", "low_rank")
    exact = made_of("div.rn.f32 %f1, %f2, %f3;", "coded"), made_of("fma.rn.f32 %f1, %f2, %f3, %f4;", "low_rank")
    found = compiled(90, Noted(), [*wrong, *exact])
    assert found.variants == 4
    assert found.errors == [
        "div with {} does not round as the reference does: div.full.f32",
        "wgm with {} does not round as the reference does: tf32",
    ]


def test_variants_differ_by_what_triton_compiles_for() -> None:
    numbers = torch.zeros(64)
    keys = [
        variant("a", argument, BLOCK=block).key
        for argument, block in (
            *((numbers, 64), (numbers, 128), (numbers[1:], 64), (numbers.half(), 64)),
            *((1, 64), (16, 64), (5, 64), (2**31, 64), (1.5, 64)),
        )
    ]
    assert len({*keys}) == len(keys)
    assert variant("a", numbers[4:], 5, 0.5, BLOCK=64).key == variant("a", numbers[8:], 7, 1.5, BLOCK=64).key
    assert variant("a", 32, BLOCK=64).key == variant("a", 48, BLOCK=64).key != variant("b", 48, BLOCK=64).key
