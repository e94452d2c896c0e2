"""Builds the C++ kernels and the planner's inner loops; everything else about the package is in pyproject.toml.

The kernels are one shared object. `csrc/kernels.cpp` is compiled once per SIMD level, each time into a namespace of its
own; `csrc/ops.cpp` chooses among the levels at run time; the files csrc/ops*.cpp register the torch ops through libtorch's
stable ABI. `csrc/planner.cpp` is another one, with a plain C ABI, and needs no torch. Nor do the levels, which take a minute:
`python setup.py build_levels` compiles them while torch is still on its way, and they are kept in build/levels.
-ffp-contract=off and the absence of -ffast-math are part of the meaning: every level gives the same bytes.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()
CSRC = HERE / "csrc"
MADE = HERE / "build" / "levels"
BUILT = (Path("gradwire/kernels/_kernels.so"), Path("gradwire/kernels/_planner.so"))
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]
# -Wno-psabi: 64-byte vectors are only ever passed to functions that are inlined
COMMON += ["-Wno-psabi"]
COMMON += os.environ.get("GRADWIRE_CXXFLAGS", "").split()
LEVELS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS |= {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}


def compile_with(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"compiling the kernels failed ({' '.join(command)})")


def levels_of(command: Command, compiler: str) -> dict[str, list[str]]:
    """Flags of the SIMD levels that the compiler knows: those of the newer ones came with g++ 11."""
    known = {}
    for level, flags in LEVELS.items():
        empty = [compiler, *flags, "-E", "-x", "c++", "-o", os.devnull, os.devnull]
        if subprocess.run(empty, capture_output=True).returncode == 0:
            known[level] = flags
        else:
            command.warn(f"{compiler} does not know {' '.join(flags)}: no kernels for it, others are slower")
    return known


def build_level(compiler: str, level: str, flags: list[str]) -> Path:
    """The object of a level; one that was made of the same sources by the same command is taken as it is."""
    command = [compiler, *COMMON, *flags, f"-DGRADWIRE_LEVEL={level}", "-c", str(CSRC / "kernels.cpp")]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in (CSRC / "kernels.cpp", *sorted(CSRC.glob("*.hpp")))]
    made_of = hashlib.sha256(b"\0".join([repr(command).encode(), version, *sources])).hexdigest()[:16]
    made = MADE / f"{level}-{made_of}.o"
    if not made.exists():
        MADE.mkdir(parents=True, exist_ok=True)
        for older in MADE.glob(f"{level}-*.o"):
            older.unlink()
        compile_with([*command, "-o", str(made.with_suffix(".new"))])
        made.with_suffix(".new").replace(made)
    return made


class BuildLevels(Command):
    """Compiles what of the kernels needs no torch, for a build that comes later."""

    user_options: ClassVar[list[str]] = []

    def initialize_options(self) -> None:
        """There are none."""

    def finalize_options(self) -> None:
        """There are none."""

    def run(self) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            return  # the build will say so
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: build_level(compiler, *each), levels_of(self, compiler).items()))


class BuildKernels(build_ext):
    """Compiles csrc/ with g++. Without compiler or torch it still installs, and runs on its reference."""

    def build_extension(self, ext: Extension) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            self.warn("no g++ found: nothing of csrc/ is built, gradwire will run on its slow reference")
            return
        for built in self.built():
            built.parent.mkdir(parents=True, exist_ok=True)
        kernels, planner = self.built()
        compile_with([compiler, *COMMON, "-shared", "-o", str(planner), str(CSRC / "planner.cpp")])
        try:
            import torch
        except ImportError:
            self.warn("torch is not installed here: the C++ kernels are not built. See CONTRIBUTING.md")
            return
        temp = Path(self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        root = Path(torch.__file__).parent
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]

        levels = levels_of(self, compiler)
        defines = [f"-DGRADWIRE_HAVE_{level.upper()}" for level in levels]
        stable = "-DTORCH_TARGET_VERSION=0x020a000000000000"

        def build_ops(source: Path) -> Path:
            made = temp / f"{source.stem}.o"
            compile_with([compiler, *COMMON, *defines, *includes, stable, "-c", "-o", str(made), str(source)])
            return made

        with ThreadPoolExecutor() as pool:
            of_levels = pool.map(lambda each: build_level(compiler, *each), levels.items())
            of_ops = pool.map(build_ops, sorted(CSRC.glob("ops*.cpp")))
            objects = [*of_levels, *of_ops]
        libs = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        compile_with([compiler, *COMMON, "-shared", "-o", str(kernels), *map(str, objects), *libs])

    def built(self) -> list[Path]:
        return [Path(self.build_lib) / path for path in BUILT]

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built()]

    def copy_extensions_to_source(self) -> None:
        """For an editable install: setuptools would look for a Python extension's file name."""
        for built, path in zip(self.built(), BUILT, strict=True):
            if built.exists():
                # a new file beside it and a rename: a process that runs the old one keeps it
                target = HERE / "src" / path
                shutil.copy2(built, target.with_suffix(".new"))
                target.with_suffix(".new").replace(target)


setup(
    ext_modules=[Extension("gradwire.kernels._kernels", sources=[], optional=False)],
    cmdclass={"build_ext": BuildKernels, "build_levels": BuildLevels},
)
