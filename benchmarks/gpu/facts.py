"""The machine and what is installed on it. Runs where nothing but Python is installed, too."""

import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import MEASURED, Job

PACKAGES = ("torch", "triton", "numpy", "msgspec", "pytest", "xdist", "hypothesis")


def version_of(package: str) -> str:
    """The version of a package, or why it cannot be imported."""
    try:
        return str(getattr(importlib.import_module(package), "__version__", "no version"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def printed(*command: str) -> str:
    """What a command prints, or why it prints nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def of_the_device(job: Job) -> dict[str, Any]:
    """The GPU, its driver, and NCCL."""
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    if job.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        found |= {"device": properties.name, "capability": capability, "gb": round(properties.total_memory / 1e9, 1)}
        found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "driver": printed("nvidia-smi", "-L")}
    return found


def of_gradwire(job: Job) -> dict[str, Any]:
    """gradwire's version, and the kernels that it chooses."""
    import gradwire
    from gradwire.kernels import cpu, kernels_for

    levels = cpu.available() or " ".join(cpu.levels())
    return {"gradwire": gradwire.__version__, "cpu_kernels": levels, "kernels": kernels_for(job.device).__name__}


def run(job: Job) -> None:
    versions = {package: version_of(package) for package in PACKAGES}
    commit = printed("git", "-C", str(Path(__file__).parents[2]), "rev-parse", "--short", "HEAD")
    job.write("versions", MEASURED, python=sys.version.split()[0], commit=commit, **versions)
    cores = len(os.sched_getaffinity(0))
    job.write("machine", MEASURED, system=platform.platform(), cores=cores)
    for what, facts_of in (("device", of_the_device), ("gradwire", of_gradwire)):
        with job.failures(what):
            job.write(what, MEASURED, **facts_of(job))
