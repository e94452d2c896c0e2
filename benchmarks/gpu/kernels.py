"""Bits of every spec of the catalogue: payload, decoded sum and state of the GPU kernels, beside those of the C++ library.

Several processes compile at the same time. On a CPU the C++ library is compared with the plain-torch reference.
"""

import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

from benchmarks.catalogue import ENTRIES
from benchmarks.codec_calls import codec_calls
from benchmarks.gpu.findings import DIFFERS, FAILED, NEAR, PASSED, PRINTED, Job, die_with_parent
from gradwire.core import Spec
from gradwire.kernels import cpu, kernels_for

RELATIVE = 1e-4
"""A number that was added up in another order may differ by so much of the largest."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ."""
    words = WORDS[a.element_size()]
    return int((a.contiguous().view(words) != b.contiguous().view(words)).sum())


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) if a.numel() else 0.0


def outcome_of(differ: dict[str, int], relative: dict[str, float], sums: bool) -> str:
    """sums: whether the numbers may be added up in another order. Then payloads may be another basis of the same space."""
    if not any(differ.values()):
        return PASSED
    near = all(each <= RELATIVE for name, each in relative.items() if not name.startswith("payload"))
    return NEAR if sums and near else DIFFERS


def written_by(spec: Spec, numel: int, device: str) -> dict[str, torch.Tensor]:
    """The tensors that one encode and one decode write. Device "reference": those of the plain-torch reference."""
    if device == "reference":
        with mock.patch.object(cpu, "available", lambda: "the reference is compared"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernels_for.cache_clear()
            try:
                return written_by(spec, numel, "cpu")
            finally:
                kernels_for.cache_clear()
    calls = codec_calls(spec, numel, device)
    calls.encode()
    calls.decode()
    return {name: tensor.detach().cpu() for name, tensor in calls.written.items()}


def compare(job: Job, at: int) -> None:
    """Compare one spec at two sizes, and write what was found."""
    spec = ENTRIES[at].spec
    with job.failures(repr(spec)):
        if (why := cpu.available()) is not None:
            raise RuntimeError(f"there is nothing to compare with: {why}")
        for numel in (2**12 + 77,) if job.small else (2**18, 2**20 + 77):
            began = time.perf_counter()
            own = written_by(spec, numel, job.device)
            took = time.perf_counter() - began
            other = written_by(spec, numel, "reference" if job.small else "cpu")
            differ = {name: differing(tensor, other[name]) for name, tensor in own.items()}
            relative = {name: largest_difference(tensor, other[name]) for name, tensor in own.items() if differ[name]}
            outcome = outcome_of(differ, relative, spec.rounds > 0)
            job.write(repr(spec), outcome, numel=numel, s=round(took, 2), differ=differ, relative=relative)


def compare_some(job: Job, first: int, step: int) -> None:
    """Compare every `step`-th spec, in a process of its own. If the process ends in the middle, say so."""
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", job.to_json(), str(first), str(step)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        what = ", ".join(repr(entry.spec) for entry in ENTRIES[first::step])
        job.write(what, FAILED, error=f"exit status {done.returncode}", printed=done.stdout[-PRINTED:])


def run(job: Job) -> None:
    workers = max(2, min(14, len(os.sched_getaffinity(0)) - 2))
    # after an error the CUDA context of a process is lost: on a GPU a process for each spec
    processes = workers if job.small else len(ENTRIES)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compare_some, [job] * processes, range(processes), [processes] * processes))


def main() -> None:
    """The process that compares some specs."""
    die_with_parent()
    torch.set_num_threads(1)
    job, (first, step) = Job.from_json(sys.argv[1]), map(int, sys.argv[2:])
    for at in range(first, len(ENTRIES), step):
        compare(job, at)


if __name__ == "__main__":
    main()
