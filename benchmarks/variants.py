"""Compiles the Triton kernels that trainings launch, for GPUs that need not be there, by one or several versions of Triton.

    python -m benchmarks variants [--all] [--arch 80 90] [--triton VERSION ...]

Each spec makes a step of one rank, with small tensors of a CPU. Launches of Triton's kernels are noted and not made. So this
finds every variant of a kernel that such steps launch: its types, its constants, and the sizes and addresses that Triton compiles
for. Triton's own compiler then compiles variants for the GPUs. With `--all` it compiles each variant for each GPU, otherwise a
small set: every kernel for each GPU, and every value of every constant for one of them. Code that rounds in another way than the
reference is an error too. `--triton` installs versions into a folder that is removed later, by pip and without their
dependencies, and writes benchmarks/results/variants.json. Without it the installed version compiles. The exit status is 1 if
there is an error. docs/reference/gpu.md has the result.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch

import gradwire as gw
from benchmarks.catalogue import ENTRIES
from benchmarks.common import RESULTS, write
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
INEXACT = re.compile(r"fma\.rn\.f(?:32|64)|div\.(?:full|approx)\S*|sqrt\.approx\S*|\S+\.ftz\S*")
"""PTX that does not round as the reference does."""
INEXACT_PRODUCTS = re.compile("tf32")
"""The same for products of matrices: their elements may be added in another order, but in 32 bits."""
MESSAGE = 300
"""So many characters of an error are printed."""


class Compiled(msgspec.Struct, frozen=True):
    """The result of one version of Triton for one GPU."""

    triton: str
    arch: int
    kernels: int
    variants: int
    """Variants that were compiled."""
    launched: int
    """Variants that steps launch."""
    errors: list[str]
    seconds: float


class Variant(NamedTuple):
    """A launch of a kernel."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """Arguments by name, and options of the compiler."""

    @property
    def key(self) -> Hashable:
        """Equal for launches that Triton compiles once."""
        return self.kernel.__name__, tuple(map(_kind, self.arguments)), *sorted(self.constants.items())

    @property
    def values(self) -> set[Hashable]:
        """The value of each constant."""
        return {(self.kernel.__name__, *each) for each in self.constants.items()}


def _kind(argument: Any) -> Hashable:
    """The properties of an argument for which Triton compiles."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() // 32
    return type(argument)


def covering(variants: Sequence[Variant], arches: Sequence[int]) -> dict[int, list[Variant]]:
    """A small set of variants for each GPU: every GPU gets every kernel, and some GPU gets every value of every constant. Each
    choice is the one that adds most; of equal ones it is for the GPU that has fewest so far."""
    adds = {
        (arch, at): variant.values | {(variant.kernel.__name__, arch)} for at, variant in enumerate(variants) for arch in arches
    }
    chosen: dict[int, list[Variant]] = {arch: [] for arch in arches}
    missing = set[Hashable]().union(*adds.values())
    while missing:
        arch, at = max(adds, key=lambda each: (len(adds[each] & missing), -len(chosen[each[0]])))
        chosen[arch].append(variants[at])
        missing -= adds[arch, at]
    return chosen


class FakeDriver:
    """The part of a driver of Triton's that compiling uses."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        """The GPU for which kernels are compiled."""
        return self._target

    def get_current_device(self) -> int:
        """The number of the GPU: another one for each target, since a kernel keeps a compiler for each device."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        """The stream of a launch."""
        return 0


class Noted:
    """Notes launches, in place of making them."""

    def __init__(self) -> None:
        self._variants: dict[Hashable, Variant] = {}
        self.errors: list[str] = []
        """Of steps that failed."""

    def launch(self, kernel: Any, grid: int | tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Stand in for `gradwire.kernels.triton.launch.launch`."""
        if grid:
            variant = Variant(kernel, tuple(arguments[0] if each is None else each for each in arguments), constants)
            self._variants.setdefault(variant.key, variant)

    @property
    def variants(self) -> list[Variant]:
        """One launch of each variant."""
        return [*self._variants.values()]


@contextmanager
def noting() -> Iterator[Noted]:
    """Calls of kernels on tensors of a CPU note the launches of Triton's kernels inside."""
    from gradwire.exchange import layout
    from gradwire.kernels import triton as kernels

    noted = Noted()
    with mock.patch.object(layout, "launches", lambda device: True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patches = [
            mock.patch.object(module, attribute, value)
            for name, module in list(sys.modules.items())
            for attribute, value, package in (
                ("kernels_for", lambda device: kernels, "gradwire."),
                ("launch", noted.launch, "gradwire.kernels.triton."),
            )
            if name.startswith(package) and callable(getattr(module, attribute, None))
        ]
        for patch in patches:
            patch.start()
        try:
            yield noted
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


def all_launches() -> Noted:
    """All variants that steps launch. Compiles none."""
    specs = [*dict.fromkeys([*(entry.spec for entry in ENTRIES), *example_specs()])]
    with noting() as noted:
        for spec in specs:
            usable = gw.Truncate(4.0, unsafe=True) if isinstance(spec, gw.Truncate) else spec
            for dtype, size, rank in CASES:
                try:
                    step_of(usable, dtype, size, rank)
                except Exception as error:
                    words = f"a step of {usable!r} in {dtype} on {size} ranks: {type(error).__name__}: {error}"
                    noted.errors.append(words[:MESSAGE])
        local_updates()
    return noted


def compiled(arch: int, noted: Noted, chosen: Sequence[Variant]) -> Compiled:
    """Compile the chosen variants for one GPU."""
    import triton
    from triton.runtime import driver

    from gradwire.kernels.triton.launch import OPTIONS

    began, errors, made = time.perf_counter(), [*noted.errors], {}
    driver.set_active(FakeDriver(arch))
    for kernel, arguments, constants in chosen:
        try:
            binary = kernel.warmup(*arguments, grid=(1,), **constants, **OPTIONS)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[-MESSAGE:]
            errors.append(f"{kernel.__name__} with {constants}: {words}")
        else:
            made[binary.hash] = kernel.__name__
            inexact = INEXACT_PRODUCTS if kernel.fn.__module__.endswith(".low_rank") else INEXACT
            if found := sorted(set(inexact.findall(binary.asm["ptx"]))):
                errors.append(f"{kernel.__name__} with {constants} does not round as the reference does: {', '.join(found)}")
    seconds = round(time.perf_counter() - began, 1)
    return Compiled(triton.__version__, arch, len({*made.values()}), len(made), len(noted.variants), errors, seconds)


def in_a_process(arches: Sequence[int], whole: bool, site: str = "") -> list[Compiled]:
    """Compile for each GPU in a process of its own, with an empty cache. site: a folder with a version of Triton."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
        command = [sys.executable, "-m", "benchmarks.variants", "all" if whole else "covering", *map(str, arches)]
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        version = site.rpartition("/")[2] or "the installed one"
        return [Compiled(version, arch, 0, 0, 0, [done.stderr.strip()[-MESSAGE:]], 0.0) for arch in arches]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Compiled])


def installed(version: str, folder: str) -> str:
    """Install a version of Triton, without what it depends on. Returns its folder."""
    site = os.path.join(folder, version)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, f"triton=={version}"]
    subprocess.run(command, check=True)
    return site


def table(found: list[Compiled]) -> Iterator[str]:
    """The lines to print."""
    yield "| Triton | compute capability | kernels | variants compiled | of | errors | seconds |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for each in found:
        arch = f"{each.arch // 10}.{each.arch % 10}"
        counts = f"{each.kernels} | {each.variants} | {each.launched} | {len(each.errors)}"
        yield f"| {each.triton} | {arch} | {counts} | {each.seconds:.0f} |"
    for each in found:
        yield from (f"{each.triton}, {each.arch}: {error}" for error in each.errors[:SHOWN])


def run(arguments: list[str]) -> int:
    """Compile with each version for each GPU, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks variants")
    parser.add_argument("--all", action="store_true", help="every variant for each GPU, not only a small set")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHES), help="compute capabilities times ten")
    parser.add_argument("--triton", nargs="+", default=[], metavar="VERSION", help="versions that pip installs for a while")
    options = parser.parse_args(arguments)
    found: list[Compiled] = []
    for version in options.triton or [""]:
        with tempfile.TemporaryDirectory() as folder:
            site = installed(version, folder) if version else ""
            found += in_a_process(options.arch, options.all, site)
        if version:
            keep(found)
    print("\n".join(table(found)))
    return int(any(each.errors for each in found))


def keep(found: list[Compiled]) -> None:
    """Write the results. Those of other versions stay in the file."""
    path = RESULTS / "variants.json"
    rows = msgspec.json.decode(path.read_bytes())["rows"] if path.exists() else []
    others = [row for row in rows if row["triton"] not in {each.triton for each in found}]
    write(path, {"rows": others + msgspec.to_builtins(found)}, quiet=True)


def main(which: str, *names: str) -> None:
    """Print the results of this process's version of Triton as a line of JSON. which: "all" or "covering"."""
    noted, arches = all_launches(), [int(name) for name in names]
    chosen = dict.fromkeys(arches, noted.variants) if which == "all" else covering(noted.variants, arches)
    print(msgspec.json.encode([compiled(arch, noted, chosen[arch]) for arch in arches]).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
