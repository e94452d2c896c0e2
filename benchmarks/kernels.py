"""Measures GB/s of every kernel, compared with `copy_` between two warm float32 tensors of the same size; one thread.

    python -m benchmarks kernels [--megabytes 4 64] [--pairs 15] [--slow-pairs 3] [--levels avx2 avx512]

A kernel and the copy are timed in turn, A B A B; the ratio is the median over the pairs of copy time / kernel time, so
1.0 is as fast as the copy. GB/s count the float32 elements at 4 bytes each, whichever way they go.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, write
from benchmarks.levels import use_level
from gradwire.core.payload import qsgd_bytes
from gradwire.core.provenance import processor_name
from gradwire.kernels import cpu, reference
from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.segments import Segment, Segments

BLOCK = 128
WANTED = {"encode 4 bits": 0.8, "decode and add 4 bits": 1.0, "encode 4 bits with feedback": 0.6 * 0.8}
"""The ratios that this release promises at the best SIMD level."""


class Row(NamedTuple):
    """One kernel, timed."""

    megabytes: int
    kernel: str
    implementation: str
    gbps: float
    ratio: float
    copy_gbps: float
    pairs: int


def kernels_of(module: ModuleType, numel: int, device: str = "cpu") -> dict[str, Callable[[], None]]:
    """The kernels to time by name, each with warm buffers of its own size."""
    gradient = (torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
    total, residual = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    squares = gradient * gradient
    stream = torch.tensor([0, 1, 0, 0], device=device)
    calls: dict[str, Callable[[], None]] = {}
    for bits in (4, 2, 8):
        segments = Segments.of([Segment(0, numel, 1, 0, bits)], device)
        payload = torch.zeros(sum(qsgd_bytes([(numel, bits)], BLOCK, "max")), dtype=torch.uint8, device=device)

        def encode(
            kept: torch.Tensor | None, segments: Segments = segments, payload: torch.Tensor = payload
        ) -> Callable[[], None]:
            return lambda: module.qsgd_encode(gradient, kept, segments, stream, BLOCK, "max", "stochastic", payload)

        def decode(add: bool, segments: Segments = segments, payload: torch.Tensor = payload) -> Callable[[], None]:
            return lambda: module.qsgd_decode(payload, segments, BLOCK, "max", add, total)

        calls[f"encode {bits} bits"] = encode(None)
        if bits == 4:
            calls["encode 4 bits with feedback"] = encode(residual)
            calls["decode 4 bits"] = decode(False)
        calls[f"decode and add {bits} bits"] = decode(True)
    half = torch.zeros(2 * numel, dtype=torch.uint8, device=device)
    for wire, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        calls[f"cast to {name}"] = lambda wire=wire: module.cast_encode(gradient, None, wire, half)
        calls[f"cast from {name} and add"] = lambda wire=wire: module.cast_decode(half, wire, True, total)
    by = LocalUpdate(1e-3, 0.1, 0.9, 0.999, 0.001, 1e-8)
    calls["local update, SGD"] = lambda: module.local_update(gradient, gradient, None, residual, by, total)
    calls["local update, Adam"] = lambda: module.local_update(gradient, gradient, squares, residual, by, total)
    return calls


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(megabytes: int, implementation: str, pairs: int) -> list[Row]:
    """Every kernel of one implementation at one size, each against the copy, in turn."""
    numel = megabytes * 2**20 // 4
    module = reference if implementation == "reference" else cpu
    source, target = torch.randn(numel), torch.zeros(numel)
    rows = []
    with nullcontext() if module is reference else use_level(implementation):
        for kernel, call in kernels_of(module, numel).items():
            copy = lambda: target.copy_(source)  # noqa: E731
            for warm_up in (copy, call, copy, call)[: 4 if module is cpu else 2]:
                warm_up()
            times = [(seconds(copy), seconds(call)) for _ in range(pairs)]
            gbps = [numel * 4e-9 / statistics.median(which) for which in zip(*times, strict=True)]
            ratio = statistics.median(copy_s / kernel_s for copy_s, kernel_s in times)
            rows.append(Row(megabytes, kernel, implementation, gbps[1], ratio, gbps[0], pairs))
    return rows


def table_of(rows: list[Row], megabytes: int, implementations: list[str], best: str | None) -> Table:
    """One size: a line for each kernel, GB/s and ratio for each implementation."""
    of_size = {(row.kernel, row.implementation): row for row in rows if row.megabytes == megabytes}
    copy = statistics.median(row.copy_gbps for row in of_size.values())
    table = Table(title=f"{megabytes} MB of float32, one thread: GB/s (ratio to copy_ at {copy:.1f} GB/s)", title_justify="left")
    table.add_column("kernel")
    for implementation in implementations:
        table.add_column(implementation, justify="right", style="bold" if implementation == best else "")
    table.add_column("wanted", justify="right")
    for kernel in dict.fromkeys(kernel for kernel, _ in of_size):
        cells = [of_size[kernel, implementation] for implementation in implementations]
        wanted = f"{WANTED[kernel]:.2f}" if kernel in WANTED else ""
        table.add_row(kernel, *(f"{row.gbps:.2f} ({row.ratio:.2f})" for row in cells), wanted)
    return table


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/kernels.json."""
    problem = cpu.available()
    levels = cpu.levels() if problem is None else ()
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--slow-pairs", type=int, default=3, help="pairs for the plain-torch reference")
    parser.add_argument("--levels", nargs="*", default=list(levels), choices=levels)
    options = parser.parse_args(arguments)
    if problem is not None:
        print(f"only the reference is measured: {problem}")
    torch.set_num_threads(1)
    implementations = [*options.levels, "reference"]
    rows: list[Row] = []
    console = Console()
    for megabytes in options.megabytes:
        for implementation in implementations:
            pairs = options.slow_pairs if implementation == "reference" else options.pairs
            rows += measure(megabytes, implementation, pairs)
        console.print(table_of(rows, megabytes, implementations, levels[-1] if levels else None))
    console.print(f"{processor_name()}, torch {torch.__version__}. Ratio 1.00: as fast as the copy.", style="dim")
    facts = {"torch": torch.__version__, "levels": list(levels), "block": BLOCK, "scale": "max", "wanted_ratio": WANTED}
    write(RESULTS / "kernels.json", facts | {"rows": [row._asdict() for row in rows]})
    return 0
