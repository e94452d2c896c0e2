"""Builds the C++ kernels; everything else about the package is in pyproject.toml.

The kernels are one shared object. `csrc/kernels.cpp` is compiled once per SIMD level, each time into a namespace of its
own; `csrc/ops.cpp` chooses among the levels at run time; the files csrc/ops*.cpp register the torch ops through libtorch's
stable ABI.
-ffp-contract=off and the absence of -ffast-math are part of the meaning: every level gives the same bytes.
"""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()
CSRC = HERE / "csrc"
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


class BuildKernels(build_ext):
    """Compiles csrc/ with g++. Without compiler or torch it still installs, and runs on its reference."""

    def build_extension(self, ext: Extension) -> None:
        try:
            import torch
        except ImportError:
            self.warn("torch is not installed here: the C++ kernels are not built. See CONTRIBUTING.md")
            return
        compiler = shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            self.warn("no g++ found: the C++ kernels are not built, gradwire will run on its slow reference")
            return
        target = self.built()
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        root = Path(torch.__file__).parent
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]

        levels = {level: flags for level, flags in LEVELS.items() if self.takes(compiler, flags)}
        jobs = {
            temp / f"kernels-{level}.o": [*flags, f"-DGRADWIRE_LEVEL={level}", str(CSRC / "kernels.cpp")]
            for level, flags in levels.items()
        }
        defines = [f"-DGRADWIRE_HAVE_{level.upper()}" for level in levels]
        for ops in sorted(CSRC.glob("ops*.cpp")):
            stable = "-DTORCH_TARGET_VERSION=0x020a000000000000"
            jobs[temp / f"{ops.stem}.o"] = [*defines, *includes, stable, str(ops)]
        with ThreadPoolExecutor() as pool:
            list(
                pool.map(lambda job: self.compile([compiler, *COMMON, *job[1], "-c", "-o", str(job[0])]), jobs.items())
            )
        libs = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        self.compile([compiler, *COMMON, "-shared", "-o", str(target), *map(str, jobs), *libs])

    @staticmethod
    def compile(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        sys.stderr.write(done.stderr)
        if done.returncode:
            raise RuntimeError(f"compiling the kernels failed ({' '.join(command)})")

    def takes(self, compiler: str, flags: list[str]) -> bool:
        """Whether the compiler knows these flags: those of the newer levels came with g++ 11."""
        empty = [compiler, *flags, "-E", "-x", "c++", "-o", os.devnull, os.devnull]
        if subprocess.run(empty, capture_output=True).returncode == 0:
            return True
        self.warn(f"{compiler} does not know {' '.join(flags)}: the kernels for it are left out, others are slower")
        return False

    def built(self) -> Path:
        return Path(self.build_lib) / "gradwire" / "kernels" / "_kernels.so"

    def get_outputs(self) -> list[str]:
        return [str(self.built())]

    def copy_extensions_to_source(self) -> None:
        """For an editable install: setuptools would look for a Python extension's file name."""
        if self.built().exists():
            # a new file beside it and a rename: a process that runs the old kernels keeps them
            target = HERE / "src" / "gradwire" / "kernels" / "_kernels.so"
            shutil.copy2(self.built(), target.with_suffix(".new"))
            target.with_suffix(".new").replace(target)


setup(
    ext_modules=[Extension("gradwire.kernels._kernels", sources=[], optional=False)],
    cmdclass={"build_ext": BuildKernels},
)
