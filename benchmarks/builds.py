"""Compares two builds of the C++ kernels: is any kernel of the second slower than in the first?

    python -m benchmarks builds OLD.so NEW.so [--levels avx2 baseline] [--pairs 31] [--only qsgd]

Every kernel is timed with both builds in turn, in one process, on 4 MB of float32 (or as many elements of 16 bits). The ratio is
the fastest time of the old build over that of the new: 1.0 is as fast, 0.97 takes 3 % longer.
"""

import argparse
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, write
from benchmarks.levels import kernels_of, set_level
from gradwire.core.payload import index_bytes, kept_of, qsgd_bytes
from gradwire.core.provenance import processor_name
from gradwire.kernels import cpu
from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.segments import Segment, Segments

NUMEL = 2**20
Kernels = dict[str, Callable[..., None]]
Call = Callable[[Kernels], None]


def cases() -> Iterator[tuple[str, Call]]:
    """A name, and what calls a build's kernels."""
    stream = torch.tensor([0, 1, 0, 0])
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(NUMEL, generator=generator) * 1e-3
    total, energy = torch.zeros(NUMEL), exact.square()
    weights = torch.full((NUMEL,), 127, dtype=torch.uint8)
    by = LocalUpdate(1e-3, 0.1, 0.9, 0.999, 0.001, 1e-8)
    for dtype, kept in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        gradient, decoded = exact.to(dtype), torch.zeros(NUMEL, dtype=dtype)
        left = torch.zeros(NUMEL) if kept else None
        tag = f"{str(dtype)[6:]}{', residual' if kept else ''}"
        # 16-bit gradients go through the same batches: a few of their cases tell the rest
        usual = dtype == torch.float32

        def case(name: str, kernel: str, *arguments: Any, tag: str = tag) -> tuple[str, Call]:
            return f"{name} ({tag})", lambda kernels: kernels[kernel](*arguments)

        bits_of = (2, 3, 4, 6, 8) if usual else (4,)
        for bits, block, scale, rounding in [
            *((bits, 128, "max", rounding) for bits in bits_of for rounding in ("stochastic", "nearest")),
            *((4, block, "max", "stochastic") for block in ((32, 64, 1024) if usual else (1024,))),
            *((4, 128, scale, "stochastic") for scale in (("minmax", "l2") if usual else ())),
        ]:
            segments = _whole(bits)
            payload = _bytes(sum(qsgd_bytes([(NUMEL, bits)], block, scale)))
            shown = f"QSGD {bits} bits, block {block}, {scale}, {rounding}"
            yield case(f"{shown}, encode", "qsgd_encode", gradient, left, segments, stream, block, scale, rounding, payload)
            if rounding == "stochastic":
                if kept:
                    yield case(f"{shown}, decode and add", "qsgd_decode", payload, segments, block, scale, True, total)
                else:
                    yield case(f"{shown}, decode", "qsgd_decode", payload, segments, block, scale, False, decoded)
        whole, block = _whole(4), 128
        coded = _bytes(sum(qsgd_bytes([(NUMEL, 8)], block, "max")))
        for format in ("e4m3", "e5m2"):
            yield case(f"FP8 {format}, encode", "fp8_encode", gradient, left, whole, block, format, coded)
            yield case(f"FP8 {format}, decode", "fp8_decode", coded, whole, block, format, False, decoded)
        yield case("Natural, encode", "natural_encode", gradient, left, whole, stream, block, coded)
        yield case("Natural, decode", "natural_decode", coded, whole, block, False, decoded)
        levels = _bytes(sum(qsgd_bytes([(NUMEL, 4)], block, "max")))
        for rounding in ("stochastic", "nearest"):
            name = f"exponential levels, {rounding}, encode"
            yield case(name, "exponential_encode", gradient, left, whole, stream, block, "max", rounding, levels)
        yield case("exponential levels, decode", "exponential_decode", levels, whole, block, False, decoded)
        half = _bytes(2 * NUMEL)
        for wire in (torch.bfloat16, torch.float16):
            yield case(f"cast to {str(wire)[6:]}", "cast_encode", gradient, left, wire, half)
            yield case(f"cast from {str(wire)[6:]}", "cast_decode", half, wire, usual, decoded)
        for bits, levels in ((2, "uniform"), (2, "lloyd"), (3, "lloyd"), (4, "lloyd")) if usual or kept else ():
            segments, sent = _whole(bits), _bytes(sum(qsgd_bytes([(NUMEL, bits)], block, "ls", levels)))
            for weighed in (weights if kept else None,):
                name = f"fitted {levels} {bits} bits{', weighted' if weighed is not None else ''}"
                yield case(f"{name}, encode", "fitted_encode", gradient, left, segments, weighed, block, levels, sent)
                yield case(f"{name}, decode", "fitted_decode", sent, segments, weighed, block, levels, usual and kept, decoded)
        yield case("learn energy", "learn_energy", gradient, whole, 0.98, energy)
        yield case("weigh elements", "weigh_elements", energy, whole, block, 0.1, weights)
        signs = _bytes(NUMEL // 8)
        yield case("signs, encode", "sign_encode", gradient, left, 0.9, whole, signs)
        yield case("signs, decode", "sign_decode", signs, whole, 0, 0, usual and kept, decoded)
        for means, of in itertools.product((1, 2), (128, 1024, 0)):
            payload = _bytes(-(-2 * means * (NUMEL // of if of else 1) // 16) * 16 + NUMEL // 8)
            yield case(f"{means} means, block {of}, encode", "mean_sign_encode", gradient, left, whole, of, means, payload)
            yield case(f"{means} means, block {of}, decode", "sign_decode", payload, whole, of, means, False, decoded)
        ternary = _bytes(2 * (NUMEL // 1024) + NUMEL // 4)
        yield case("TwoBit, encode", "threshold_encode", gradient, left, whole, 1024, 0.0, 1.0, ternary)
        yield case("TwoBit, decode", "threshold_decode", ternary, whole, 1024, 0.0, False, decoded)
        ternary = _bytes(sum(qsgd_bytes([(NUMEL, 2)], 1024, "max")))
        yield case("TernGrad, encode", "terngrad_encode", gradient, left, _whole(2), stream, 1024, 2.5, ternary)
        kept_of_all = kept_of(NUMEL, 0.01)
        values = gradient.element_size() * kept_of_all
        sparse = _bytes(values + index_bytes(kept_of_all, NUMEL))
        yield case("Top-k 1 %, encode", "topk_encode", gradient, left, whole, 0.01, False, 0.0, sparse)
        yield case("Top-k 1 %, decode", "topk_decode", sparse, whole, dtype, 0.01, False, False, decoded)
        momentum = torch.zeros(NUMEL) if kept else None
        yield case("DGC 1 %, encode", "dgc_encode", gradient, left, momentum, whole, 0.01, 0.9, 1.0, sparse)
        blocks = _bytes(NUMEL // 64 * (gradient.element_size() + 1))
        yield case("Block Top-k, encode", "block_topk_encode", gradient, left, whole, 0.01, 64, blocks)
        yield case("Block Top-k, decode", "block_topk_decode", blocks, whole, dtype, 0.01, 64, False, decoded)
        drawn = _bytes(8 + values)
        yield case("Random-k 1 %, encode", "randomk_encode", gradient, left, whole, stream, 0.01, drawn)
        yield case("Random-k 1 %, decode", "randomk_decode", drawn, whole, dtype, 0.01, False, decoded)
        rows, rank = 1024, 4
        matrix = torch.tensor([[0, rows, NUMEL // rows, 0, 0]])
        p, q = torch.randn(rows * rank), torch.randn(NUMEL // rows * rank)
        yield case("PowerSGD, project", "project", gradient, left, matrix, rank, q, p)
        yield case("PowerSGD, back_project", "back_project", gradient, left, matrix, rank, p, q)
        yield case("PowerSGD, reconstruct", "reconstruct", decoded, left, matrix, rank, p, q, q)
        state = exact.abs().to(dtype)
        yield case("local update", "local_update", gradient, gradient, state if kept else None, state, by, state)


def _whole(bits: int) -> Segments:
    return Segments.of([Segment(0, NUMEL, 1, 0, bits)])


def _bytes(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def _seconds(call: Call, kernels: Kernels) -> float:
    start = time.perf_counter()
    call(kernels)
    return time.perf_counter() - start


def run(arguments: list[str]) -> int:
    """Measure and print. The exit status is 1 if a kernel is more than 3 % slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks builds")
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--levels", nargs="*", default=list(reversed(cpu.levels())), choices=cpu.levels())
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--write", action="store_true", help="keep the rows in benchmarks/results/builds.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    libraries = [ctypes.CDLL(path) for path in (options.old, options.new)]
    old, new = (kernels_of(library) for library in libraries)
    rows = []
    table = Table(title=f"{processor_name()}: old time / new time, below 0.97 in bold", title_justify="left")
    for column in ("kernel", "level", "old, us", "new, us", "ratio"):
        table.add_column(column, justify="right" if column not in ("kernel", "level") else "left")
    for level in options.levels:
        for library in libraries:
            set_level(library, cpu.levels().index(level))
        for name, call in cases():
            if options.only not in name:
                continue
            ratio, times = _compare(call, old, new, options.pairs)
            if ratio < 0.98:  # once more, longer: it may have been the machine
                ratio, times = _compare(call, old, new, 3 * options.pairs)
            rows.append({"kernel": name, "level": level, "old_us": times[0], "new_us": times[1], "ratio": ratio})
            style = "bold" if ratio < 0.97 else ""
            table.add_row(name, level, f"{times[0]:.0f}", f"{times[1]:.0f}", f"{ratio:.3f}", style=style)
    Console(width=130).print(table)
    slower = [row for row in rows if row["ratio"] < 0.97]
    print(f"{len(rows)} cases, {len(slower)} more than 3 % slower, smallest ratio {min(row['ratio'] for row in rows):.3f}")
    if options.write:
        write(RESULTS / "builds.json", {"torch": torch.__version__, "rows": rows})
    return 1 if slower else 0


def _compare(call: Call, old: Kernels, new: Kernels, pairs: int) -> tuple[float, list[float]]:
    for kernels in (old, new):
        call(kernels)
    times = [(_seconds(call, old), _seconds(call, new)) for _ in range(pairs)]
    fastest = [1e6 * min(which) for which in zip(*times, strict=True)]
    return fastest[0] / fastest[1], fastest
