"""Compiles the Triton kernels that trainings launch, for GPUs that need not be there, by one or several versions of Triton.

    python -m benchmarks variants [--arch 80 90] [--triton VERSION ...]

Each spec makes a step of one rank, with small tensors of a CPU, on Triton's kernels. A launch is compiled for the GPU by
Triton's own compiler and is not run. So this finds every variant of a kernel that such steps launch: its types, its constants,
and what Triton makes of sizes and addresses. `--triton` installs versions into a folder that is removed later, by pip and without
their dependencies; without it the installed version compiles. The exit status is 1 if a variant does not compile.
docs/reference/gpu.md has a result.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

import gradwire as gw
from benchmarks.catalogue import ENTRIES
from gradwire.core import Spec, TensorInfo, example_specs
from gradwire.transport import Grid, Group, Meter, SilentLink

ARCHES = (80, 90)
"""Compute capabilities times ten: an A100 and an H100."""
SHOWN = 5
"""So many errors of a version are printed."""
SHAPES = ((96, 64), (700,), (33, 20), (1,))
CASES = (("float32", 2, 0), ("bfloat16", 4, 3))
"""Dtypes of gradients, numbers of ranks, and the rank whose step it is: the first two ranks add up in another way."""
PIECE_BYTES = 20_000
MESSAGE = 300
"""So many characters of an error are printed."""


class Compiled(msgspec.Struct, frozen=True):
    """The result of one version of Triton for one GPU."""

    triton: str
    arch: int
    kernels: int
    variants: int
    errors: list[str]
    seconds: float


class FakeDriver:
    """The part of a driver of Triton's that compiling uses."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        """The GPU for which kernels are compiled."""
        return self._target

    def get_current_device(self) -> int:
        """The number of the GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The stream of a launch."""
        return 0


class Variants:
    """Compiles in place of launching."""

    def __init__(self) -> None:
        self.compiled: dict[str, str] = {}
        """The kernel of each variant, by the variant's hash."""
        self.errors: dict[str, None] = {}

    def launch(self, kernel: Any, grid: int | tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Stand in for `gradwire.kernels.triton.launch.launch`."""
        from gradwire.kernels.triton.launch import OPTIONS

        if not grid:
            return
        arguments = tuple(arguments[0] if each is None else each for each in arguments)
        try:
            made = kernel.warmup(*arguments, grid=(1,), **constants, **OPTIONS)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[-MESSAGE:]
            self.errors[f"{kernel.__name__} with {constants}: {words}"] = None
            return
        self.compiled[made.hash] = kernel.__name__


@contextmanager
def compiling(arch: int) -> Iterator[Variants]:
    """Calls of kernels on tensors of a CPU compile Triton's kernels inside."""
    from triton.runtime import driver

    from gradwire.exchange import layout
    from gradwire.kernels import triton as kernels

    driver.set_active(FakeDriver(arch))
    variants = Variants()
    with mock.patch.object(layout, "launches", lambda device: True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patches = [
            mock.patch.object(module, attribute, value)
            for name, module in list(sys.modules.items())
            for attribute, value, package in (
                ("kernels_for", lambda device: kernels, "gradwire."),
                ("launch", variants.launch, "gradwire.kernels.triton."),
            )
            if name.startswith(package) and callable(getattr(module, attribute, None))
        ]
        for patch in patches:
            patch.start()
        try:
            yield variants
        finally:
            for patch in patches:
                patch.stop()


def step_of(spec: Spec, dtype: str, size: int, rank: int) -> None:
    """One step of one rank: all encodes and decodes of every piece."""
    from gradwire.exchange.layout import build_buckets, random_streams

    infos = [TensorInfo(f"t{number}", shape, dtype) for number, shape in enumerate(SHAPES)]
    plan = gw.Policy(default=spec, exempt_vectors=False, bucket_bytes=PIECE_BYTES, chunk_bytes=PIECE_BYTES).plan(infos, size)
    tensors = {info.name: torch.zeros(info.shape, dtype=getattr(torch, dtype)) for info in infos}
    nobody: Any = None
    group = Group(nobody, rank, tuple(range(size)), timedelta(seconds=1), Grid.even(1, size, rank))
    link: Any = SilentLink(group)
    for step in (0, 2**20):  # specs that begin with other bits or without factors
        random = random_streams(plan, rank, torch.device("cpu"))
        for buffers in build_buckets(plan, tensors, group, random, step):
            for chunk in buffers.chunks:
                chunk.post(link, 0, range(len(buffers.bucket.link_tasks)))
                for phase in range(len(buffers.bucket.link_tasks)):
                    chunk.run(phase, link, Meter(), None)


def local_updates() -> None:
    """The kernel of local steps between delayed exchanges."""
    from gradwire.kernels import triton as kernels
    from gradwire.kernels.reference.local_update import LocalUpdate

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for squares in (False, True):
            tensors = [torch.zeros(1000, dtype=dtype) for _ in range(5)]
            weight, gradient, second, mean, out = tensors
            update = LocalUpdate(0.1, 1.0, 0.9, 0.9, 0.1, 1e-8)
            kernels.local_update(weight, gradient, second if squares else None, mean, update, out)


def compiled(arch: int) -> Compiled:
    """Compile all variants for one GPU, in this process."""
    import triton

    began = time.perf_counter()
    specs = [*dict.fromkeys([*(entry.spec for entry in ENTRIES), *example_specs()])]
    with compiling(arch) as variants:
        for spec in specs:
            usable = gw.Truncate(4.0, unsafe=True) if isinstance(spec, gw.Truncate) else spec
            for dtype, size, rank in CASES:
                try:
                    step_of(usable, dtype, size, rank)
                except Exception as error:
                    words = f"a step of {usable!r} in {dtype} on {size} ranks: {type(error).__name__}: {error}"
                    variants.errors[words[:MESSAGE]] = None
        local_updates()
    kernels = len({*variants.compiled.values()})
    seconds = round(time.perf_counter() - began, 1)
    return Compiled(triton.__version__, arch, kernels, len(variants.compiled), [*variants.errors], seconds)


def in_a_process(arch: int, site: str = "") -> Compiled:
    """Compile for one GPU in a process of its own, with an empty cache. site: a folder with a version of Triton."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.variants", str(arch)]
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        version = site.rpartition("/")[2] or "the installed one"
        return Compiled(version, arch, 0, 0, [done.stderr.strip()[-MESSAGE:]], 0.0)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Compiled)


def installed(version: str, folder: str) -> str:
    """Install a version of Triton, without what it depends on. Returns its folder."""
    site = os.path.join(folder, version)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, f"triton=={version}"]
    subprocess.run(command, check=True)
    return site


def table(found: list[Compiled]) -> Iterator[str]:
    """The lines to print."""
    yield "| Triton | compute capability | kernels | variants | errors | seconds |"
    yield "|---|---|---:|---:|---:|---:|"
    for each in found:
        arch = f"{each.arch // 10}.{each.arch % 10}"
        yield f"| {each.triton} | {arch} | {each.kernels} | {each.variants} | {len(each.errors)} | {each.seconds:.0f} |"
    for each in found:
        yield from (f"{each.triton}, {each.arch}: {error}" for error in each.errors[:SHOWN])


def run(arguments: list[str]) -> int:
    """Compile with each version for each GPU, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks variants")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHES), help="compute capabilities times ten")
    parser.add_argument("--triton", nargs="+", default=[], metavar="VERSION", help="versions that pip installs for a while")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sites = [installed(version, folder) for version in options.triton] or [""]
        found = [in_a_process(arch, site) for site in sites for arch in options.arch]
    print("\n".join(table(found)))
    return int(any(each.errors for each in found))


if __name__ == "__main__":
    print(msgspec.json.encode(compiled(int(sys.argv[1]))).decode())
