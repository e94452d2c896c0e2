"""The sleeping accelerator: one thing at a time, for as long as it is told, with real results; and what stands in for a GPU."""

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

import gradwire as gw
from benchmarks.offload import offload_page, verdict
from benchmarks.sleeping import SleepingAccelerator, SleepingCodec
from benchmarks.sleeping_model import LayerTimes, SleepingModel
from gradwire.compressors import compressor_for
from gradwire.compressors.base import Compressor, Context
from gradwire.errors import StepStateError
from gradwire.exchange.host_codec import OFFLOAD_WORKERS, HostCodec, codec_on
from gradwire.exchange.plans import info_of
from gradwire.kernels.segments import Segment, Segments
from gradwire.profiler.codecs import measure_codecs
from gradwire.sim.rules import Rules
from gradwire.transport.devices import OFFLOAD_LANES, device_name, kind_of, offload_lanes, stand_in

CPU = torch.device("cpu")
TIMES = ((4096, 300.0), (8192, 600.0))


def accelerator() -> SleepingAccelerator:
    return SleepingAccelerator(TIMES, TIMES)


def test_works_follow_one_another():
    device, spans, lock = accelerator(), list[tuple[float, float]](), threading.Lock()

    def work() -> None:
        began = time.perf_counter()
        time.sleep(0.002)
        with lock:
            spans.append((began, time.perf_counter()))

    jobs = [threading.Thread(target=device.code, args=(4000.0, work)) for _ in range(4)]
    jobs += [threading.Thread(target=device.compute, args=(4000.0, work)) for _ in range(2)]
    began = time.perf_counter()
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert time.perf_counter() - began >= 6 * 0.004 - 2 * 0.0005, "the device was twice at work at once"
    spans.sort()
    assert len(spans) == 6 and all(before[1] <= after[0] for before, after in pairwise(spans))
    assert device.works == 6


def test_a_waiting_codec_goes_before_computation():
    device, order, begun, go_on = accelerator(), list[str](), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(20)

    jobs = [threading.Thread(target=device.code, args=(0.0, first))]
    jobs[0].start()
    assert begun.wait(20)
    jobs.append(threading.Thread(target=device.compute, args=(1000.0, lambda: order.append("computation"))))
    jobs[1].start()
    time.sleep(0.05)  # the computation waits first
    jobs.append(threading.Thread(target=device.code, args=(0.0, lambda: order.append("codec"))))
    jobs[2].start()
    until = time.monotonic() + 20
    while not device._codecs_waiting and time.monotonic() < until:
        time.sleep(0.001)
    go_on.set()
    for job in jobs:
        job.join()
    assert order == ["codec", "computation"]


def test_a_work_that_fails_frees_the_device():
    device = accelerator()
    with pytest.raises(ZeroDivisionError):
        device.compute(10.0, lambda: 1 // 0)
    assert device.compute(10.0, lambda: 7) == 7


def test_codecs_have_the_bytes_and_sums_of_the_host():
    codec, device = compressor_for(gw.QSGD(bits=4)), accelerator()
    asleep = SleepingCodec(codec, device)
    numel = 2000
    segments, context = Segments((Segment(0, numel, 1, 0, 4),), CPU), Context(torch.tensor([0, 1, 0, 0]))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    payloads, sums = [], []
    for each in (codec, asleep):
        payload = torch.zeros(each.payload_bytes(segments, torch.float32), dtype=torch.uint8)
        total = torch.ones(numel)
        each.encode(gradient, [], segments, context, payload)
        began = time.perf_counter()
        each.decode(payload, segments, torch.float32, True, total, context)
        took_s = time.perf_counter() - began
        payloads.append(payload)
        sums.append(total)
    assert torch.equal(*payloads) and torch.equal(*sums)
    assert took_s >= 580e-6, "8000 bytes take 586 us on this device"
    assert device.works == 2


def test_gradients_are_real():
    model = SleepingModel(accelerator(), [LayerTimes(7, 10.0, 20.0), LayerTimes(3, 10.0, 20.0)])
    with torch.no_grad():
        for weight in model.weights:
            weight.fill_(0.5)
    model(torch.tensor([2.0])).backward()
    for weight, target in zip(model.weights, model.targets, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 0.5 - 2.0 * target)
    assert model.accelerator.works == 4


def test_tensors_count_as_the_accelerators_while_it_stands_in():
    codec, device = compressor_for(gw.QSGD(bits=4)), accelerator()
    assert codec_on("cpu", codec, "cpu") is codec
    with stand_in(device):
        assert (kind_of(CPU), device_name(CPU), offload_lanes(CPU)) == ("gpu", device.name, OFFLOAD_LANES)
        assert info_of("w", torch.zeros(3)).device == "gpu"
        assert isinstance(codec_on("gpu", codec, "gpu"), SleepingCodec)
        assert isinstance(codec_on("cpu", codec, "gpu"), HostCodec)
        exact = compressor_for(gw.Identity())
        assert codec_on("gpu", exact, "gpu") is exact
        with pytest.raises(StepStateError, match="stands in for a GPU already"), stand_in(accelerator()):
            pass
    assert (kind_of(CPU), device_name(CPU), offload_lanes(CPU)) == ("cpu", "cpu", 0)


def test_codecs_of_both_devices_are_measured():
    def measured(**how: Any) -> dict[str, float]:
        found = measure_codecs([gw.QSGD(bits=4)], CPU, [4096, 8192, 16384], 1e-4, **how)
        return {codec.device: codec.encode[-1][1] for codec in found.codecs}

    assert measured(offload=True).keys() == {"cpu"}
    with stand_in(accelerator()):
        assert measured().keys() == {"gpu"}
        both = measured(offload=True)
        assert both.keys() == {"gpu", "cpu"}
        assert both["gpu"] >= 1000.0, "16384 bytes take 1200 us on this device"


def test_few_codecs_work_on_the_host_at_once():
    active, most, lock = 0, 0, threading.Lock()

    class Counting(Compressor):
        def encode(self, *arguments: Any) -> None:
            raise NotImplementedError

        def decode(self, *arguments: Any) -> None:
            nonlocal active, most
            with lock:
                active += 1
                most = max(most, active)
            time.sleep(0.02)
            with lock:
                active -= 1

    segments, context = Segments((Segment(0, 8, 1, 0, 4),), CPU), Context(torch.tensor([0, 1, 0, 0]))
    codecs = [HostCodec(Counting(gw.QSGD(bits=4))) for _ in range(4)]
    given = torch.zeros(8, dtype=torch.uint8), segments, torch.float32, False, torch.zeros(8), context
    jobs = [threading.Thread(target=codec.decode, args=given) for codec in codecs]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert most == OFFLOAD_WORKERS == Rules().cpu_workers


# ---- the benchmark's page


def made_up(both_ms: float, predicted_ms: float = 100.0, late: int = 0) -> dict[str, Any]:
    def plan(ms: float, predicted: float, *counts: int) -> dict[str, Any]:
        names = ("on_gpu", "on_cpu", "plain")
        return {
            "predicted_us": 1e3 * predicted,
            "turns_us": [1e3 * ms * (1 + 0.001 * turn) for turn in range(6)],
            **dict(zip(names, counts, strict=True)),
        }

    plans = {
        "gpu": plan(100.0, predicted_ms, 8, 0, 0),
        "cpu": plan(120.0, 119.0, 0, 8, 0),
        "both": plan(both_ms, both_ms, 5, 3, 0),
    }
    made = {"date": "2026-11-25", "cpu": "a processor"}
    return {"made": made, "nodes": 2, "links": {"1gbit": {"plans": plans, "late": late, "works": 1000}}}


def test_the_page_of_a_run_that_kept_its_promises():
    result = made_up(90.0)
    assert verdict(result["links"]) == []
    page = offload_page(result)
    assert "All as promised." in page
    assert "| 1gbit, both | 5 / 3 / 0 | 90.0 | 90.2 | -0 % | 1.000 |" in page


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (made_up(110.0), "takes 1.100 of that with gpu alone"),
        (made_up(90.0, predicted_ms=115.0), "gpu: the prediction is off by +15 %"),
        (made_up(90.0, late=30), "30 of 1000 works took longer"),
    ],
)
def test_what_is_not_as_promised_is_said(result, said):
    (found,) = verdict(result["links"])
    assert said in found and found in offload_page(result)
