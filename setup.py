"""Builds gradwire/_native.so, the kernels and the planner's inner loops; the rest of the package is in pyproject.toml.

The library has a plain C interface (csrc/api.hpp): it needs neither torch nor Python to build or to load. `csrc/kernels.cpp` is
compiled once for each SIMD level, each time into a namespace of its own, and `csrc/api_levels.cpp` chooses among the levels at
run time. -ffp-contract=off and the absence of -ffast-math are part of the meaning: every level gives the same bytes.

Environment:
    GRADWIRE_LEVELS=all         compile every SIMD level, as wheels need (`make wheel`); else only the best one for this processor
                                and, with little optimisation, the baseline that runs on every processor
    GRADWIRE_LEVELS=here        compile every level that runs on this processor, as tests need
    GRADWIRE_REFERENCE_ONLY=1   install without a compiler, on the plain-torch reference: about 300 times slower
    GRADWIRE_CXXFLAGS, CXX      more flags, and another compiler (a cross compiler, say)
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()
CSRC = HERE / "csrc"
OBJECTS = HERE / "build" / "objects"
LIBRARY = Path("gradwire/_native.so")
MORE_FLAGS = os.environ.get("GRADWIRE_CXXFLAGS", "").split()
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-falign-functions=64",  # speeds depend on where loops begin, which every change moves
    "-falign-loops=32",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # 64-byte vectors are only ever passed to functions that are inlined
    *MORE_FLAGS,
]
LEVELS = {
    "baseline": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
NEEDS = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "bmi1", "bmi2", "abm"},
    "avx512": {"avx2", "fma", "bmi1", "bmi2", "abm", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
}
"""What /proc/cpuinfo says of a processor that runs a level."""
WANTED = os.environ.get("GRADWIRE_LEVELS", "")
if WANTED not in ("", "all", "here"):
    raise SystemExit(f"GRADWIRE_LEVELS={WANTED} is not known. Set it to `all` or `here`, or not at all.")
LINK = ["-shared", "-Wl,--as-needed", f"-Wl,--version-script={CSRC / 'exports.map'}"]
if not MORE_FLAGS:  # which are there to look for a fault
    LINK.append("-s")
UNUSED_DAYS = 3
"""So long objects that no build used are kept."""
REFERENCE_WANTED = os.environ.get("GRADWIRE_REFERENCE_ONLY", "")
if REFERENCE_WANTED not in ("", "0", "1", "on", "off"):
    raise SystemExit(f"GRADWIRE_REFERENCE_ONLY={REFERENCE_WANTED} is neither on nor off. Set it to 1 or 0, or not at all.")
REFERENCE_ONLY = REFERENCE_WANTED in ("1", "on")
NO_COMPILER = """
gradwire's C++ kernels cannot be built: there is no C++ compiler (g++ or c++) on the PATH. Do one of these:

    install the compiler                  apt install g++   (or: dnf install gcc-c++)
    install a wheel                       pip install gradwire-...-manylinux_....whl   (`make wheel` makes it)
    do without the kernels                GRADWIRE_REFERENCE_ONLY=1 pip install ...

Without the kernels compression is about 300 times slower, so it may cost more time than it saves.
"""


def compiler() -> str:
    """The C++ compiler to use. Ends the installation with the cure where there is none."""
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")
    if found is None and named:
        raise SystemExit(f"CXX={named} is no program on the PATH. Name one compiler; GRADWIRE_CXXFLAGS is for options.")
    if found is None:
        raise SystemExit(NO_COMPILER)
    return found


def run(command: list[str]) -> None:
    """Run a compiler or linker."""
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"compiling the kernels failed: {' '.join(command)}")


def knows(cxx: str, flags: list[str]) -> bool:
    """Whether the compiler knows these flags: those of the newer levels came with g++ 11."""
    empty = [cxx, *flags, "-E", "-x", "c++", "-o", os.devnull, os.devnull]
    known = subprocess.run(empty, capture_output=True).returncode == 0
    if not known:
        print(
            f"{cxx} does not know {' '.join(flags)}: no kernels for newer processors, others are slower",
            file=sys.stderr,
        )
    return known


def levels(cxx: str) -> dict[str, list[str]]:
    """The flags of each SIMD level to compile: all, those that run here, or the best one here and a baseline for other
    processors. Where it is not the best one, the baseline is a fallback."""
    target = subprocess.run([cxx, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    if not target.startswith("x86_64"):
        return {"baseline": []}
    known = {level: flags for level, flags in LEVELS.items() if knows(cxx, flags)}
    if WANTED == "all" or platform.machine() != "x86_64":
        return known
    words = set(Path("/proc/cpuinfo").read_text().split())
    runs = [level for level in known if NEEDS[level] <= words]
    chosen = runs if WANTED == "here" else ["baseline", runs[-1]]
    return {level: ["-O1"] if level == "baseline" != runs[-1] else LEVELS[level] for level in chosen}


def build_object(command: list[str], source: Path) -> Path:
    """Compile a file, or take the object of an earlier build from the same sources by the same command."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    headers = sorted(CSRC.glob("planner_*.hpp" if source.stem == "planner" else "*.hpp"))
    contents = [path.read_bytes() for path in (source, *headers)]
    digest = hashlib.sha256(b"\0".join([repr(command).encode(), version, *contents])).hexdigest()[:16]
    made = OBJECTS / f"{source.stem}-{digest}.o"
    if not made.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}.new")
        run([*command, "-c", str(source), "-o", str(new)])
        new.replace(made)
    made.touch()
    return made


def build_library(target: Path) -> None:
    """Compile and link the library."""
    cxx = compiler()
    chosen = levels(cxx)
    have = [f"-DGRADWIRE_HAVE_{level.upper()}" for level in chosen]
    jobs = [
        ([cxx, *FLAGS, *flags, f"-DGRADWIRE_LEVEL={level}"], source)
        for source in sorted(CSRC.glob("kernels*.cpp"))
        for level, flags in chosen.items()
    ]
    jobs += [([cxx, *FLAGS, *have], source) for source in (CSRC / "planner.cpp", *sorted(CSRC.glob("api_*.cpp")))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: build_object(*job), jobs))
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_suffix(".new")  # and a rename: a process that runs the old library keeps it
    run([cxx, *FLAGS, *LINK, "-o", str(new), *map(str, objects)])
    new.replace(target)
    for older in OBJECTS.glob("*.o"):
        if time.time() - older.stat().st_mtime > 86400 * UNUSED_DAYS:
            older.unlink()


class BuildNative(build_ext):
    """Puts the library where setuptools expects an extension."""

    def run(self) -> None:
        if REFERENCE_ONLY:
            return
        built = Path(self.build_lib) / LIBRARY
        build_library(built)
        if self.inplace:
            beside = HERE / "src" / LIBRARY
            shutil.copy2(built, beside.with_suffix(".new"))
            beside.with_suffix(".new").replace(beside)

    def get_outputs(self) -> list[str]:
        return [] if REFERENCE_ONLY else [str(Path(self.build_lib) / LIBRARY)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPython(bdist_wheel):
    """A wheel for every Python 3: the library has no symbol of CPython."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class HasLibrary(Distribution):
    """Of one platform, unless it is the reference alone."""

    def has_ext_modules(self) -> bool:
        return not REFERENCE_ONLY


if REFERENCE_ONLY:
    print("GRADWIRE_REFERENCE_ONLY=1: no C++ kernels, compression is about 300 times slower", file=sys.stderr)
setup(
    ext_modules=[] if REFERENCE_ONLY else [Extension("gradwire._native", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
    distclass=HasLibrary,
)
