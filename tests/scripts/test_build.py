"""The library and the wheel: what they hold, what they need, and what an installation without a compiler says."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from gradwire.core import native

ROOT = Path(__file__).parents[2]
GCC = shutil.which("g++")
needs_gcc = pytest.mark.skipif(GCC is None, reason="no g++ here: the library cannot be built")


def setup(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def make_wheel(folder: Path, **environment: str) -> Path:
    """What `make wheel` makes, or with its environment `make wheel-aarch64`. Compiles what no build here has compiled."""
    arguments = ["build", "--build-base", str(folder / "build"), "bdist_wheel", "--dist-dir", str(folder)]
    done = setup(arguments, GRADWIRE_LEVELS="all", **environment)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder / "dist"), str(made)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(repair, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (repaired,) = (folder / "dist").glob("*.whl")
    return repaired


def unpacked(wheel: Path, folder: Path) -> Path:
    """The library of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("gradwire/_native.so", folder))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(wheel, tmp_path_factory.mktemp("unpacked"))


@needs_gcc
@pytest.mark.slow
def test_one_wheel_is_for_every_python_and_for_old_systems(wheel: Path) -> None:
    _, _, python, abi, systems = wheel.stem.split("-", 4)
    assert (python, abi) == ("py3", "none")
    tags = systems.split(".")
    assert all(tag.startswith("manylinux") for tag in tags)
    # torch's own wheels need glibc 2.28
    assert min(int(tag.split("_")[2]) for tag in tags if tag.startswith("manylinux_")) <= 28


@needs_gcc
@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gradwire"}
    kinds, source = (".py", ".typed", ".css"), ROOT / "src"
    packaged = {name for name in names if name.endswith(kinds) and "dist-info" not in name}
    assert packaged == {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in kinds}
    assert [name for name in names if name.endswith(".so")] == ["gradwire/_native.so"]


@needs_gcc
@pytest.mark.slow
def test_the_library_needs_the_c_library_alone_and_no_path(library: Path) -> None:
    with library.open("rb") as file:
        elf = ELFFile(file)
        tags = list(elf.get_section_by_name(".dynamic").iter_tags())
        needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    assert {name.split(".so")[0] for name in needed} <= {"libc", "libm", "libgcc_s", "libstdc++", "ld-linux-x86-64"}
    assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
    undefined = {symbol.name for symbol in symbols if symbol.entry.st_shndx == "SHN_UNDEF"}
    assert not [name for name in undefined if name.startswith(("Py", "_Py")) or "torch" in name or "c10" in name]
    exported = {symbol.name for symbol in symbols if symbol.entry.st_shndx != "SHN_UNDEF"}
    assert all(name.startswith("gw_") for name in exported), exported
    assert {"gw_qsgd_encode", "gw_select", "gw_level_name"} <= exported


@needs_gcc
@pytest.mark.slow
def test_the_wheel_has_every_level_that_runs_here(library: Path) -> None:
    name = ctypes.CDLL(str(library)).gw_level_name
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int64]
    found = [level for level in (name(index) for index in range(3)) if level]
    words = Path("/proc/cpuinfo").read_text().split()
    expected = ["baseline"] + ["avx2"] * ("avx2" in words) + ["avx512"] * ("avx512bw" in words and "avx512cd" in words)
    assert [level.decode() for level in found] == expected


@needs_gcc
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are of x86-64")
@pytest.mark.parametrize("have", [[], ["AVX2"], ["AVX512"], ["AVX2", "AVX512"]], ids="+".join)
def test_any_levels_can_be_built_together(have: list[str]) -> None:
    """A source build has those of its processor alone."""
    flags = [f"-DGRADWIRE_HAVE_{level}" for level in have]
    source = str(ROOT / "csrc" / "api_levels.cpp")
    command = [str(GCC), "-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_nothing_is_installed_and_the_cure_is_said(tmp_path: Path) -> None:
    done = setup(["build", "--build-base", str(tmp_path), "bdist_wheel", "--dist-dir", str(tmp_path)], PATH=str(tmp_path))
    assert done.returncode != 0
    assert "there is no C++ compiler" in done.stderr and "apt install g++" in done.stderr
    assert "GRADWIRE_REFERENCE_ONLY=1" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_whoever_asks_for_the_reference_alone_gets_a_pure_wheel(tmp_path: Path) -> None:
    arguments = ["build", "--build-base", str(tmp_path), "bdist_wheel", "--dist-dir", str(tmp_path)]
    done = setup(arguments, PATH=str(tmp_path), GRADWIRE_REFERENCE_ONLY="1")
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("*.whl")
    assert made.stem.endswith("-py3-none-any")
    assert "300 times slower" in done.stderr
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.parametrize(
    ("name", "value"), [("CXX", "no-such-compiler"), ("GRADWIRE_LEVELS", "avx2"), ("GRADWIRE_REFERENCE_ONLY", "yes")]
)
def test_settings_that_mean_nothing_are_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    done = setup(["build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)], **{name: value})
    assert done.returncode != 0 and f"{name}={value}" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@needs_gcc
def test_a_compiler_that_fails_ends_the_installation(tmp_path: Path) -> None:
    arguments = ["build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    done = setup(arguments, GRADWIRE_CXXFLAGS="-no-such-flag")
    assert done.returncode != 0 and "compiling the kernels failed" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


# ---- another processor


def digests(compiler: str, library: Path, folder: Path, runner: list[str]) -> tuple[list[str], list[str]]:
    """The levels, and the lines of tests/support/cross/digest.cpp, built by this compiler and linked with this library."""
    built = folder / "digest"
    command = [compiler, "-std=c++17", "-Wno-psabi", "-o", str(built), str(ROOT / "tests/support/cross/digest.cpp"), str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([*runner, str(built)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr.split(), ran.stdout.splitlines()


@needs_gcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64-static")),
    reason="no cross compiler for aarch64 or no qemu-user here (apt install g++-aarch64-linux-gnu qemu-user-static)",
)
def test_the_wheel_for_arm_makes_the_same_bytes(library: Path, tmp_path: Path) -> None:
    compiler = "aarch64-linux-gnu-g++"
    wheel = make_wheel(tmp_path, CXX=compiler, _PYTHON_HOST_PLATFORM="linux-aarch64")
    _, _, python, abi, systems = wheel.stem.split("-", 4)
    assert (python, abi) == ("py3", "none")
    assert all(tag.startswith("manylinux") and tag.endswith("_aarch64") for tag in systems.split("."))
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    levels, own = digests(str(GCC), library, here, [])
    assert len(set(own)) == 9 and own == own[:9] * len(levels)
    emulator = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"]
    assert digests(compiler, unpacked(wheel, there), there, emulator) == (["baseline"], own[:9])


def test_the_library_of_this_checkout_is_beside_the_package() -> None:
    assert native.LIBRARY == ROOT / "src" / "gradwire" / "_native.so"
