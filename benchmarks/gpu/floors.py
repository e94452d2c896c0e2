"""What the machine itself takes: small calls, events, copies between the device and pinned memory, an encode beside products."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import gradwire as gw
from benchmarks.codec_calls import codec_calls
from benchmarks.gpu.findings import MEASURED, SKIPPED, Job

KILOBYTES = (4, 64, 256, 1024, 4096, 16384, 65536)


def host_us(call: Callable[[], object], tries: int = 200) -> float:
    """The host's time of a call, in microseconds."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return round(1e6 * statistics.median(times), 2)


def done_us(call: Callable[[], object], tries: int = 15) -> float:
    """The time of a call until the device is done, in microseconds."""

    def whole() -> None:
        call()
        torch.cuda.synchronize()

    return host_us(whole, tries)


def small_calls(job: Job) -> None:
    """The host's time of calls on a few numbers."""
    a, b = torch.randn(1024, device="cuda"), torch.zeros(1024, device="cuda")
    pinned = torch.zeros(1024, pin_memory=True)
    event, stream = torch.cuda.Event(), torch.cuda.Stream()

    def to_host_and_wait() -> None:
        pinned.copy_(a, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    calls: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(a, 1, out=b),
        "copy": lambda: b.copy_(a),
        "empty": lambda: torch.empty(1024, device="cuda"),
        "record an event": event.record,
        "query an event": event.query,
        "wait for an event": lambda: stream.wait_event(event),
        "copy to the host": lambda: pinned.copy_(a, non_blocking=True),
        "copy to the host, and wait": to_host_and_wait,
    }
    job.write("host time of small calls", MEASURED, us={name: host_us(call) for name, call in calls.items()})


def on_streams(calls: list[tuple[torch.cuda.Stream, Callable[[], object]]]) -> None:
    """Queue each call on its stream."""
    for stream, call in calls:
        with torch.cuda.stream(stream):
            call()


def copies(job: Job) -> None:
    """Copies of several sizes, one way and both ways at once."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for kilobytes in KILOBYTES:
        numel = kilobytes * 1024
        a, b = (torch.zeros(numel, dtype=torch.uint8, device="cuda") for _ in range(2))
        out, back = (torch.zeros(numel, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        pageable = torch.zeros(numel, dtype=torch.uint8)

        to_host = partial(out.copy_, a, non_blocking=True)
        to_device = partial(b.copy_, back, non_blocking=True)
        us = {
            "to the host": done_us(to_host),
            "to the device": done_us(to_device),
            "both at once": done_us(partial(on_streams, [(first, to_host), (second, to_device)])),
            "to pageable memory": done_us(partial(pageable.copy_, a)),
        }
        job.write("copies of host memory", MEASURED, kb=kilobytes, us=us)


def beside_products(job: Job) -> None:
    """An encode of 64 MB by itself, and queued while matrix products run, on streams of two priorities."""
    big, out = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    encode = codec_calls(gw.QSGD(bits=4), 2**24, "cuda").encode
    for priority in (0, -1):
        side = torch.cuda.Stream(priority=priority)
        times: dict[int, list[float]] = {0: [], 6: []}
        for _ in range(12):
            for products, into in times.items():
                torch.cuda.synchronize()
                for _ in range(products):
                    torch.matmul(big, big, out=out)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                with torch.cuda.stream(side):
                    start.record()
                    encode()
                    end.record()
                torch.cuda.synchronize()
                into.append(1e3 * start.elapsed_time(end))
        alone, beside = (round(statistics.median(each), 1) for each in times.values())
        job.write("encode of 64 MB beside products", MEASURED, priority=priority, alone_us=alone, beside_us=beside)


def run(job: Job) -> None:
    if job.device == "cpu":
        job.write("floors", SKIPPED, why="a CPU has no launches, no events, and no pinned memory to copy to")
        return
    for part in (small_calls, copies, beside_products):
        with job.failures(part.__name__):
            part(job)
