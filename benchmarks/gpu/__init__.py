"""What one GPU can show in ten minutes: bits, synchronisation, ranks over NCCL and through the host, speed, the host's time, the
tests marked `gpu`.

    python -m benchmarks gpu [--device cpu] [--minutes 8] [--only SECTION ...] [--megabytes 64 8 1] [--out FOLDER]

Each section runs in a process of its own with a deadline. Each finding is a line of JSON, which is appended to a file in FOLDER
(benchmarks/results/gpu) as soon as the finding is known; the file is named after the device. The sections share the minutes in
proportion to their weights, and a section that ends early leaves its time to the others. A section that is ended at its deadline,
or that fails, gets a line with what it printed last. `--device cpu` runs the sections at small sizes without a GPU. The command
needs torch, numpy, msgspec, and Triton for a GPU; `marked` also needs pytest and hypothesis. docs/reference/gpu.md explains more.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.findings import ABORTED, PRINTED, Job, killed_group, last_printed, mend, rows_of
from benchmarks.gpu.table import summary

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
TO_END = 3.0
"""Seconds of the whole time that are left for ending the last section and for the table."""


class Section(NamedTuple):
    """A part of the run: the module `benchmarks.gpu.NAME`, whose `run(job)` writes findings."""

    name: str
    weight: float
    """The section's share of the time, in seconds of a run of 8 minutes."""
    cpu_weight: float
    """The share of a run without a GPU."""
    about: str


SECTIONS = (
    Section("facts", 20, 20, "versions, the device, and which kernels run"),
    Section("kernels", 60, 40, "bits of every spec, beside the C++ library"),
    Section("engine", 35, 70, "training with one rank, in which a synchronisation inside backward is an error"),
    Section("ranks", 130, 60, "2, 4 and 8 ranks over NCCL on one GPU, beside CPU ranks"),
    Section("staged", 90, 60, "1, 2, 4 and 8 ranks whose payloads travel through the host; a flipped bit, a killed rank"),
    Section("floors", 20, 15, "launches, events, and copies to pinned memory"),
    Section("speed", 55, 25, "encode, decode-and-add of every spec, beside a copy"),
    Section("host", 30, 40, "queueing a backward of BERT-large's size"),
    Section("sample", 20, 40, "stacks of the host's threads during such steps"),
    Section("marked", 110, 90, "the tests that are marked `gpu`"),
)


def environment() -> dict[str, str]:
    """The environment of sections: they import this checkout, whether gradwire is installed or not."""
    there = os.environ.get("PYTHONPATH", "")
    source = [] if importlib.util.find_spec("gradwire") else [str(ROOT / "src")]
    path = os.pathsep.join([*source, str(ROOT), *([there] if there else [])])
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def device_name() -> str | None:
    """The name of the first CUDA device, or None. Another process looks, so that this one keeps no memory on the device."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    if found.returncode:
        print(found.stderr.strip()[-PRINTED:], file=sys.stderr)
    return found.stdout.strip() or None


def file_name(device: str) -> str:
    """The file of a device.

    >>> file_name("NVIDIA H100 80GB HBM3"), file_name("cpu")
    ('h100-80gb-hbm3.jsonl', 'cpu.jsonl')
    """
    words = re.findall(r"[a-z0-9]+", device.lower())
    return "-".join([word for word in words if word != "nvidia"] or ["gpu"]) + ".jsonl"


def run_section(job: Job) -> bool:
    """Run one section until it ends or its deadline has come. False if it did not end well; then a finding says so."""
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.gpu.section", job.to_json()]
    with tempfile.TemporaryFile() as output:
        # a session of its own, so that everything that it starts can be ended at once
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment(), start_new_session=True)
        why = "interrupted"
        try:
            code = process.wait(timeout=max(0.0, job.until - time.time()))
            why = "" if code == 0 else f"ended with exit status {code}"
        except subprocess.TimeoutExpired:
            why = f"ended at its deadline after {time.time() - began:.0f} s"
        finally:
            if why:
                killed_group(process)
                job.write("the section", ABORTED, why=why, printed=last_printed(output))
    return not why


def run_sections(sections: list[Section], job: Job, until: float, say: Callable[[str], None]) -> None:
    """Run sections one after another; the rest of the time is shared by those to come, in proportion to their weights."""
    for at, section in enumerate(sections):
        began = time.time()
        left = max(0.0, until - began)
        weights = [other.cpu_weight if job.small else other.weight for other in sections[at:]]
        share = left * weights[0] / sum(weights)
        own = job._replace(section=section.name, until=began + share)
        ended = run_section(own)
        found = len(rows_of(job.file, job.run, section.name))
        say(f"{section.name}: {found} findings in {time.time() - began:.0f} s{'' if ended else ', aborted'}")


def run(arguments: list[str]) -> int:
    """Run the sections and print the table. 1 if a finding differs or failed, or a section was aborted; 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="the command ends after so many minutes")
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=[section.name for section in SECTIONS])
    parser.add_argument("--megabytes", type=int, nargs="+", help="sizes for `speed`: default 64 8 1, on a CPU 1")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the findings")
    options = parser.parse_args(arguments)
    began = time.time()
    device = "cpu" if options.device == "cpu" else device_name()
    if device is None:
        print("nothing is measured: torch sees no CUDA device. `--device cpu` runs the sections on the processor.")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out.resolve() / file_name(device)
    mend(file)
    megabytes = tuple(options.megabytes or ((1,) if options.device == "cpu" else (64, 8, 1)))
    job = Job("", str(file), datetime.now(UTC).isoformat(timespec="seconds"), options.device, megabytes, 0.0)
    chosen = [section for section in SECTIONS if not options.only or section.name in options.only]
    print(f"{device}: findings go to {file}", flush=True)
    stopped = False
    try:
        run_sections(chosen, job, began + 60 * options.minutes - TO_END, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        stopped = True
    lines, bad = summary(rows_of(job.file, job.run))
    print("\n".join(lines))
    return 130 if stopped else int(bad)
