"""Runs a program again with the kernels built under a sanitizer of the compiler."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSIDE = "GRADWIRE_FUZZ_LIBRARY"


def use_library() -> bool:
    """Return whether this is the second run, which uses the library with the sanitizer from here on."""
    if (library := os.environ.get(INSIDE)) is None:
        return False
    from gradwire.core import native
    from gradwire.kernels import cpu

    native.LIBRARY = Path(library)
    if problem := cpu.available():
        raise SystemExit(problem)
    return True


def run_again(flags: str, preloaded: Sequence[str], options: Mapping[str, str]) -> int:
    """Build the kernels with these flags, and run this program again with these libraries loaded first. The exit code."""
    with tempfile.TemporaryDirectory() as folder:
        places = ["--build-lib", folder, "--build-temp", f"{folder}/temp"]
        flags = os.environ | {"GRADWIRE_CXXFLAGS": f"{flags} -fno-omit-frame-pointer -g1"}
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", *places],
            cwd=ROOT, env=flags, check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        libraries = [  # the sanitizer looks for the thrower of exceptions when it starts
            subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
            for name in (*preloaded, "libstdc++.so")
        ]
        inside = {INSIDE: f"{folder}/gradwire/_native.so", "LD_PRELOAD": " ".join(libraries)}
        return subprocess.run([sys.executable, *sys.argv], env=os.environ | inside | options).returncode
