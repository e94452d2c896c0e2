"""What checksums add to encode and decode of a gradient that is in no cache; one thread.

    python -m benchmarks checksums [--numel 1048576] [--pairs 400] [--bits 4]

With checksums: the encode sums on its way, as before a send; the payload is copied, as the kernel does when it is received; its
checksum is computed, and it is decoded. Without: the same, but for checksums. Both are timed in turn, over so many gradients that
none is in a cache. The copy is not timed. `own pass`: the encode, then a pass over its payload.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common import RESULTS, cpu_name, write
from gradwire.core import native
from gradwire.core.payload import qsgd_bytes
from gradwire.kernels import Segment, Segments, cpu
from gradwire.kernels.checksum import crc32c

BLOCK, POOL_BYTES = 128, 640 * 2**20
WAYS = ("none", "on the way", "own pass")


def run(arguments: list[str]) -> int:
    """Measure, print, and write benchmarks/results/checksums.json."""
    parser = argparse.ArgumentParser(prog="benchmarks checksums", description=__doc__)
    parser.add_argument("--numel", type=int, default=2**20)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--bits", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times = measured(options.numel, options.pairs, options.bits)
    medians = {way: {part: 1e6 * statistics.median(of_part) for part, of_part in times[way].items()} for way in WAYS}
    added = {}
    for way in WAYS[1:]:
        ratios = [sum(one) / sum(none) for one, none in zip(_steps(times[way]), _steps(times["none"]), strict=True)]
        added[way] = statistics.median(ratios) - 1
        print(f"{way}: {100 * added[way]:.1f} % more than without checksums (median of {options.pairs} pairs)")
    for way in WAYS:
        print(way, {part: f"{us:.1f} us" for part, us in medians[way].items()})
    result = {"processor": cpu_name(), "numel": options.numel, "bits": options.bits, "us": medians, "added": added}
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
    payload, received = (
        torch.zeros(sum(qsgd_bytes([(numel, bits)], BLOCK, "max")), dtype=torch.uint8) for _ in range(2)
    )
    times: dict[str, dict[str, list[float]]] = {way: {"encode": [], "receive": [], "decode": []} for way in WAYS}
    for turn in range(3 * pairs + 3):
        way, at = WAYS[turn % 3], turn % pool
        call = cpu.call("qsgd_encode", gradients[at], None, segments, stream, BLOCK, "max", "stochastic", payload)
        encode = encoder(way, call, payload)
        began = time.perf_counter()
        encode()
        encoded = time.perf_counter()
        received.copy_(payload)
        copied = time.perf_counter()
        if way != "none":
            crc32c(received)
        checked = time.perf_counter()
        cpu.qsgd_decode(received, segments, BLOCK, "max", False, decoded[at - pool // 2])
        ended = time.perf_counter()
        if turn >= 3:
            for part, seconds in (
                ("encode", encoded - began),
                ("receive", checked - copied),
                ("decode", ended - checked),
            ):
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
