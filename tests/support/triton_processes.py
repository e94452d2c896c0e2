"""Processes for tests of Triton kernels: one that interprets them on CPU tensors, and one that compiles them for GPUs.

The interpreter is switched on for a whole process before Triton is loaded, and tests of the rest of gradwire need it off.
"""

import copy
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from test_kernels import raw, same

from gradwire.kernels import kernels_for, reference

__all__ = ["INEXACT", "Compile", "Compiler", "Interpreter", "assert_alike", "compiler", "interpreter"]

INEXACT = re.compile(r"fma\.rn\.f(?:32|64)|div\.(?:full|approx)\S*|sqrt\.approx\S*|\S+\.ftz\S*")
"""PTX that does not round as the reference does."""

Run = Callable[..., dict[str, torch.Tensor]]
"""A function of a module of kernels and more, that returns all that they make, by name."""


def assert_alike(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if not same(value, found[name]):
            differ = (raw(value) != raw(found[name])).nonzero().flatten() // value.element_size()
            raise AssertionError(f"{name} differs at {differ.unique()[:8].tolist()}, {len(differ.unique())} elements")


def _process(**options: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **options)


class Interpreter:
    """Runs functions on interpreted kernels and on the reference."""

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process

    def check(self, function: Run, *arguments: Any) -> None:
        """Raise AssertionError unless both make the same."""
        # copies: tensors move to shared memory while a thread sends them, and the reference may read them at that moment
        found = self._process.submit(_interpreted, function, copy.deepcopy(arguments))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the reference's many small operations are slower on several
        try:
            expected = function(reference, *arguments)
        finally:
            torch.set_num_threads(threads)
        assert_alike(expected, found.result(timeout=120))

    def run(self, function: Run, *arguments: Any) -> dict[str, torch.Tensor]:
        """Return the results of the function on interpreted kernels."""
        return self._process.submit(_interpreted, function, arguments).result(timeout=120)


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    """A process that interprets."""
    with _process(initializer=_interpret) as process:
        yield Interpreter(process)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")  # numpy's, of NaN and overflow
    torch.set_num_threads(1)
    _patch_once()


def _patch_once() -> None:
    """Make Triton replace the functions of its language once for each module of kernels, and for good. It does so again in every
    call that a kernel makes, which takes a third of the time."""
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, dict[str, Any]()

    def once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in done:
            done[module] = patch(function)
        return type(done[module])()  # nothing to restore

    interpreter._patch_lang = once


def _interpreted(function: Run, arguments: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    from gradwire.kernels import triton

    return function(triton, *arguments)


class Compile(NamedTuple):
    """A kernel and what it is compiled for."""

    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    arch: int


class Compiler:
    """Compiles while tests run."""

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process
        self.choice = process.submit(_choose)  # first, before anything has loaded Triton

    def start(self, cases: dict[str, Compile]) -> dict[str, Future[str]]:
        """The PTX of each, when it is made."""
        return {name: self._process.submit(_ptx, case) for name, case in cases.items()}


@contextmanager
def compiler() -> Iterator[Compiler]:
    """A process that compiles."""
    with tempfile.TemporaryDirectory() as cache, _process(initializer=_cache_in, initargs=(cache,)) as process:
        yield Compiler(process)
        process.shutdown(cancel_futures=True)


def _cache_in(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _choose() -> tuple[list[str], str, list[str]]:
    """Return the Triton modules that kernels for CPU load, the name of the module chosen for CUDA, and the names of its
    own functions."""
    kernels_for("cpu")
    loaded = [name for name in sys.modules if name.startswith("gradwire.kernels.triton")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = kernels_for("cuda")
    own = [name for name in reference.__all__ if getattr(chosen, name) is not getattr(reference, name)]
    return loaded, chosen.__name__, own


def _ptx(case: Compile) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gradwire.kernels.triton import launch

    modules = [module for name, module in sys.modules.items() if name.startswith("gradwire.kernels.triton.")]
    function = next(getattr(module, case.kernel) for module in modules if hasattr(module, case.kernel))
    names = function.arg_names
    assert {*case.types, *case.constants} == set(names)
    source = ASTSource(
        function,
        {name: case.types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in case.constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name, kind in case.types.items() if kind[0] == "*"},
    )
    target = GPUTarget("cuda", case.arch, 32)
    return str(triton.compile(source, target=target, options={"num_warps": 4, **launch.OPTIONS}).asm["ptx"])
