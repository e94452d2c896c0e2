"""Codecs on a sleeping accelerator, on CPUs and on both, on real ranks: sums, who worked, and that nothing blocks launches."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from worlds import Worlds, digest

import gradwire as gw
from benchmarks.sleeping import SleepingAccelerator, SleepingCodec
from benchmarks.sleeping_model import LayerTimes, SleepingModel
from gradwire.errors import GradwireError
from gradwire.exchange.host_codec import HostCodec
from gradwire.exchange.plans import info_of
from gradwire.planner.offload import on_cpu
from gradwire.transport.devices import stand_in

LAYERS = tuple(LayerTimes(numel, 50.0, 100.0) for numel in (3000, 1003, 5000, 640))
TIMES = ((4096, 100.0), (8192, 200.0))
STEPS = 2
GPU_ONLY, CPU_ONLY, MIXED = ("gpu",) * 4, ("cpu",) * 4, ("cpu", "gpu", "cpu", "gpu")
QUIET_S = 20.0


def plan_on(model: SleepingModel, devices: Sequence[str], scheme: str) -> gw.Plan:
    """Every tensor alone, in gradient-ready order, with its codecs on these devices."""
    infos = [info_of(*item) for item in model.named_parameters()][::-1]
    policy = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=8)), scheme=scheme, bucket_bytes=1, edge_bytes=1)
    plan = policy.plan(infos, dist.get_world_size())
    assert len(plan.buckets) == len(devices) and all("comp:gpu" in bucket.option for bucket in plan.buckets)
    buckets = [
        msgspec.structs.replace(bucket, option=on_cpu(bucket.option)) if device == "cpu" else bucket
        for bucket, device in zip(plan.buckets, devices, strict=True)
    ]
    return msgspec.structs.replace(plan, buckets=tuple(buckets))


def trained(devices: Sequence[str], scheme: str, wraps: dict[type, Any]) -> dict[str, Any]:
    """Two steps: the error of the mean, what ranks hold, and the calls of each kind of codec by size."""
    accelerator = SleepingAccelerator(TIMES, TIMES)
    with stand_in(accelerator), ExitStack() as stack:
        model = SleepingModel(accelerator, LAYERS)
        handle = gw.parallelize(model, plan=plan_on(model, devices, scheme), drift_check_steps=0)
        for kind, encode in wraps.items():
            stack.enter_context(mock.patch.object(kind, "encode", encode))
        value = 1.0 + dist.get_rank()
        for _ in range(STEPS):
            for weight in model.weights:
                weight.grad = None
            model(torch.tensor([value])).backward()
        world_size = dist.get_world_size()
        mean = sum(1.0 + rank for rank in range(world_size)) / world_size
        gradients = [weight.grad for weight in model.weights if weight.grad is not None]
        off = max(
            float((gradient + mean * target).norm() / (mean * target).norm())
            for gradient, target in zip(gradients, model.targets, strict=True)
        )
        handle.detach()
        return {"off": off, "digest": digest(gradients), "works": accelerator.works}


def with_counts(devices: Sequence[str], scheme: str) -> dict[str, Any]:
    counts, lock = {HostCodec: 0, SleepingCodec: 0}, threading.Lock()

    def counting(kind: type) -> Any:
        original: Any = kind.encode  # type: ignore[attr-defined]

        def encode(self: Any, *arguments: Any) -> None:
            with lock:
                counts[kind] += 1
            original(self, *arguments)

        return encode

    found = trained(devices, scheme, {kind: counting(kind) for kind in counts})
    return found | {"on_cpu": counts[HostCodec], "on_gpu": counts[SleepingCodec]}


@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
@pytest.mark.parametrize("devices", [GPU_ONLY, CPU_ONLY, MIXED], ids=["gpu", "cpu", "mixed"])
def test_sums_are_right_wherever_codecs_run(worlds: Worlds, devices: Sequence[str], scheme: str) -> None:
    first, second = worlds.run(2, with_counts, devices, scheme)
    for rank in (first, second):
        assert rank["off"] < 0.05
        assert bool(rank["on_cpu"]) == ("cpu" in devices) and bool(rank["on_gpu"]) == ("gpu" in devices)
        encodes = {"alltoall": 2, "allgather": 1}[scheme]  # of a bucket, on 2 ranks
        assert rank["on_cpu"] == STEPS * encodes * devices.count("cpu")
        assert rank["on_gpu"] == STEPS * encodes * devices.count("gpu")
        # the device computes each layer twice; each encode there has its decodes
        assert rank["works"] >= STEPS * (2 * len(LAYERS) + rank["on_gpu"] // STEPS)
    assert first["digest"] == second["digest"], "ranks have other bits"


def results_by_devices() -> list[str]:
    return [trained(devices, "alltoall", {})["digest"] for devices in (GPU_ONLY, CPU_ONLY, MIXED)]


def test_results_do_not_depend_on_the_device(worlds: Worlds) -> None:
    for found in worlds.run(2, results_by_devices):
        assert len(set(found)) == 1


def patiently() -> dict[str, Any]:
    """Codecs on CPUs wait until the bucket behind three of them has been encoded on the accelerator."""
    launched = threading.Event()
    on_host, asleep = HostCodec.encode, SleepingCodec.encode

    def wait(self: HostCodec, *arguments: Any) -> None:
        assert launched.wait(QUIET_S), "codecs on CPUs kept a bucket of the accelerator from being launched"
        on_host(self, *arguments)

    def tell(self: SleepingCodec, *arguments: Any) -> None:
        asleep(self, *arguments)
        launched.set()

    return trained(("cpu", "cpu", "cpu", "gpu"), "allgather", {HostCodec: wait, SleepingCodec: tell})


def test_codecs_on_cpus_block_no_launches(worlds: Worlds) -> None:
    for found in worlds.run(2, patiently):
        assert found["off"] < 0.05


def refused() -> str:
    accelerator = SleepingAccelerator(TIMES, TIMES)
    model = SleepingModel(accelerator, LAYERS)
    with stand_in(accelerator):
        plan = plan_on(model, MIXED, "alltoall")
    try:
        gw.parallelize(model, plan=plan)
    except GradwireError as error:
        return str(error)
    return ""


def test_without_an_accelerator_such_plans_are_refused(worlds: Worlds) -> None:
    for said in worlds.run(2, refused):
        assert "compresses on the gpu, but tensor" in said
