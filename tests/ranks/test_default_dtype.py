"""Scripts that set another default dtype, as many do for large models, or have denormal numbers taken for zero."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import Worlds, seeded

import gradwire as gw
from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.core.specs import ElementRun
from gradwire.kernels.segments import Segment, Segments

SPECS = [gw.PowerSGD(rank=2), gw.ErrorFeedback(gw.QSGD(bits=4)), gw.TernGrad(), gw.Identity()]


def trained(dtype: torch.dtype, plan: object, steps: int) -> tuple[float, bool]:
    """The first and the last loss's ratio, and whether auto decided."""
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = gw.parallelize(model, optimizer, plan=plan)
        losses = []
        for number in range(steps):
            if plan == "auto" and handle.decision is not None:
                break
            inputs = torch.randn(16, 64, generator=seeded(dist.get_rank(), number), dtype=torch.float32).to(dtype)
            loss = (model(inputs) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        decided = handle.decision is not None
        handle.detach()
        return losses[-1] / losses[0], decided
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [*((spec, torch.bfloat16) for spec in SPECS), (gw.Identity(), torch.float64)],  # kernels take no float64
    ids=str,
)
def test_models_of_another_default_dtype_learn(worlds: Worlds, spec: gw.Spec, dtype: torch.dtype) -> None:
    for ratio, _ in worlds.run(2, trained, dtype, gw.Policy(default=spec), 20):
        assert ratio < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_auto_decides_under_another_default_dtype(worlds: Worlds, dtype: torch.dtype) -> None:
    for ratio, decided in worlds.run(2, trained, dtype, "auto", 400):
        assert ratio < 1.0 and decided


def profiled(folder: str) -> list[str]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = gw.parallelize(model, optimizer, plan=gw.Policy(default=gw.QSGD(bits=4)))
        with handle.profile(folder, steps=2, specs=SPECS[:3]) as found:
            for _ in range(7):
                model(torch.randn(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        handle.detach()
        return [repr(codec.spec) for codec in found.costs.codecs]
    finally:
        torch.set_default_dtype(torch.float32)


def test_codecs_are_timed_under_another_default_dtype(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, profiled, str(tmp_path)) == 2 * [[repr(gw.QSGD(bits=4)), *map(repr, SPECS[:3])]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("spec", [gw.Cast("float16"), gw.FP8("e4m3"), gw.FP8("e5m2"), gw.QSGD(bits=8)], ids=repr)
def test_flushed_denormals_change_nothing(spec: gw.Spec, dtype: torch.dtype) -> None:
    """Numbers below float16's smallest normal one, 6.1e-5, go the same way when the processor takes float32's for zero."""
    gradient = torch.linspace(-6e-5, 6e-5, 1024).to(dtype)
    gradient[1::2] *= 1e-2
    found = []
    for flush in (False, True):
        assert torch.set_flush_denormal(flush)
        try:
            codec = compressor_for(spec)
            segments = Segments((Segment(0, 1024, 1, 0, spec.element_bits),), gradient.device, ("w",), ((1024,),))
            size = spec.payload_bytes([ElementRun(1024, spec.element_bits, (1024,))], gradient.element_size())
            payload, decoded = torch.zeros(size, dtype=torch.uint8), torch.zeros(1024)
            context = Context(torch.tensor([0, 1, 0, 0]))
            codec.encode(gradient, (), segments, context, payload)
            codec.decode(payload, segments, dtype, False, decoded, context)
        finally:
            torch.set_flush_denormal(False)
        found.append(decoded)
    assert found[0].count_nonzero() > 500
    assert torch.equal(*found)
