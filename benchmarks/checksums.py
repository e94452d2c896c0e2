"""Measures the cost of checksums in encode and decode of a gradient that is in no cache; one thread.

    python -m benchmarks checksums [--numel 1048576] [--pairs 400] [--codes 2 4 8 16]

With checksums: the encode sums on its way, as before a send; the payload is copied piece by piece, as the kernel does when it is
received, and each piece is summed when it is there, as the wire does; then it is decoded. Without: the same, but no bytes are
summed; the calls from Python, which the wire does not make, are in both. Both are timed in turn, over so many gradients that none
is in a cache. Copies are not timed. `own pass`: the encode, then a pass over its payload.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common import RESULTS, write
from gradwire.core import native
from gradwire.core.payload import qsgd_bytes
from gradwire.core.provenance import processor_name
from gradwire.kernels import cpu
from gradwire.kernels.checksum import crc32c
from gradwire.kernels.segments import Segment, Segments

BLOCK, POOL_BYTES = 128, 640 * 2**20
PIECE_BYTES = 2**18
"""So much of a message comes before the wire's thread wakes (kWakeBytes in csrc/api_exchange.cpp)."""
WAYS = ("none", "on the way", "own pass")


def run(arguments: list[str]) -> int:
    """Measure, print, and write benchmarks/results/checksums.json."""
    parser = argparse.ArgumentParser(prog="benchmarks checksums", description=__doc__)
    parser.add_argument("--numel", type=int, default=2**20)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--codes", type=int, nargs="+", default=[2, 4, 8, 16], help="bits; 16 is a cast to float16")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    by_bits = {}
    for bits in options.codes:
        times = measured(options.numel, options.pairs, bits)
        none = [sum(step) for step in _steps(times["none"])]
        added = {
            way: statistics.median(sum(one) / of_none for one, of_none in zip(_steps(times[way]), none, strict=True)) - 1
            for way in WAYS[1:]
        }
        us = {way: {part: 1e6 * statistics.median(each) for part, each in times[way].items()} for way in WAYS}
        by_bits[str(bits)] = {"added": added, "us": us}
        for way in WAYS:
            print(f"{bits} bits, {way}: {100 * added.get(way, 0):.1f} % more;", {k: round(v, 1) for k, v in us[way].items()})
    result = {"processor": processor_name(), "numel": options.numel, "pairs": options.pairs, "by_bits": by_bits}
    write(RESULTS / "checksums.json", result)
    return 0


def _steps(of_way: dict[str, list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*of_way.values(), strict=True))


def measured(numel: int, pairs: int, bits: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each part of each way."""
    pool = max(2, POOL_BYTES // (8 * numel))
    gradients = [torch.randn(numel) for _ in range(pool)]
    decoded = [torch.zeros(numel) for _ in range(pool)]
    segments, stream = Segments.of([Segment(0, numel, 1, 0, bits)]), torch.tensor([0, 1, 0, 0])
    payload_bytes = 2 * numel if bits == 16 else sum(qsgd_bytes([(numel, bits)], BLOCK, "max"))
    payload, received = (torch.zeros(payload_bytes, dtype=torch.uint8) for _ in range(2))
    nothing = received[:0]
    pieces = list(zip(payload.split(PIECE_BYTES), received.split(PIECE_BYTES), strict=True))
    times: dict[str, dict[str, list[float]]] = {way: {"encode": [], "receive": [], "decode": []} for way in WAYS}
    for turn in range(3 * pairs + 3):
        way, at = WAYS[turn % 3], turn % pool
        into = decoded[at - pool // 2]
        if bits == 16:
            call = cpu.call("cast_encode", gradients[at], None, torch.float16, payload)
            decode = partial(cpu.cast_decode, received, torch.float16, False, into)
        else:
            call = cpu.call("qsgd_encode", gradients[at], None, segments, stream, BLOCK, "max", "stochastic", payload)
            decode = partial(cpu.qsgd_decode, received, segments, BLOCK, "max", False, into)
        encode = encoder(way, call, payload)
        began = time.perf_counter()
        encode()
        encoded = time.perf_counter()
        summed_s = 0.0
        for sent, piece in pieces:
            piece.copy_(sent)
            copied = time.perf_counter()
            crc32c(nothing if way == "none" else piece)
            summed_s += time.perf_counter() - copied
        received_all = time.perf_counter()
        decode()
        ended = time.perf_counter()
        if turn >= 3:
            for part, seconds in (("encode", encoded - began), ("receive", summed_s), ("decode", ended - received_all)):
                times[way][part].append(seconds)
    return times


def encoder(way: str, call: cpu.Call, payload: torch.Tensor) -> Callable[[], object]:
    """Runs the call in this way."""
    words = (ctypes.c_int64 * len(call.words))(*call.words)
    plain = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(call.function)
    summing = native.library()["gw_sum_encode"]
    summing.argtypes, summing.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int64
    ways: dict[str, Callable[[], object]] = {
        "none": lambda: plain(ctypes.addressof(words)),
        "on the way": lambda: summing(call.function, ctypes.addressof(words)),
        "own pass": lambda: (plain(ctypes.addressof(words)), crc32c(payload)),
    }
    return ways[way]
