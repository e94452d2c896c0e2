"""Ranks whose kernels, SIMD levels, versions or plans differ: refused before the first exchange, or bit for bit the same."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Given, Worlds, digest

import gradwire as gw
from benchmarks.catalogue import ENTRIES
from benchmarks.levels import use_level
from gradwire.core import Spec, native
from gradwire.kernels import cpu, kernels_for

SPECS = [entry.spec for entry in ENTRIES]
SPECS += [gw.PowerSGD(rank=2), gw.QSGD(bits=3, scale="minmax"), gw.QSGD(scale="l2"), gw.FP8("e5m2", block=1024)]
SPECS += [gw.ErrorFeedback(gw.TopK(0.05, selection="sampled")), gw.TernGrad(clip=2.5), gw.Cast("bfloat16")]
SPECS += [gw.QSGD(bits=bits) for bits in (5, 7)]
SPECS += [gw.ErrorFeedback(gw.QSGD(bits=bits, rounding="nearest")) for bits in range(3, 9)]
SPECS += [gw.ErrorFeedback(gw.TopK(ratio)) for ratio in (0.02, 0.3)] + [gw.PowerSGD(rank=rank) for rank in (1, 3)]
SPECS += [gw.QSGD(bits=bits, levels="exponential", rounding="nearest") for bits in (3, 5)]
SPECS += [gw.QSGD(bits=bits, block=256) for bits in (2, 3, 4, 6)]
SPECS += [gw.QSGD(bits=bits, scale="minmax") for bits in (2, 4, 5, 6, 8)]
SPECS = [*dict.fromkeys(SPECS)]
WAYS = ["kernels", "level", "version", "plan"]


class Matrices(Given):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        for index, shape in enumerate([(40, 60), (30, 30), (17,)]):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.randn(shape)))


@contextmanager
def without_library() -> Iterator[None]:
    """As on a node on which the C++ library was not built."""
    caches = [native.library, cpu.available, kernels_for]

    def point_to(path: Path) -> None:
        native.LIBRARY = path
        for cache in caches:
            cache.cache_clear()

    before = native.LIBRARY
    point_to(Path("/nowhere/_native.so"))
    try:
        yield
    finally:
        point_to(before)


@contextmanager
def unlike(how: str, spec: Spec) -> Iterator[Spec]:
    """This rank differs in one thing."""
    if how == "kernels":
        with without_library():
            yield spec
    elif how == "level":
        with use_level("baseline"):
            yield spec
    elif how == "version":
        module = sys.modules["gradwire.engine.prepare"]
        before, module.__version__ = module.__version__, "9.9.9"  # type: ignore[attr-defined]
        try:
            yield spec
        finally:
            module.__version__ = before  # type: ignore[attr-defined]
    else:
        yield gw.QSGD(bits=2, seed=1)


def train(how: str, spec: Spec) -> tuple[str, str]:
    """A few steps, where rank 1 differs: what refused them, or the bits of the weights."""
    torch.manual_seed(0)
    if dist.get_rank() == 1:
        with unlike(how, spec) as own:
            return _train(own)
    return _train(spec)


def _train(spec: Spec) -> tuple[str, str]:
    model: Any = Matrices()
    try:
        handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=spec)
    except gw.DisagreementError as error:
        return "refused", str(error)
    for step in range(3):
        model.zero_grad()
        model(model.random_gradients(dist.get_rank(), step)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    handle.detach()
    return "ran", digest(model.parameters())


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_ranks_are_refused_or_the_same(worlds: Worlds, spec: Spec, how: str) -> None:
    (first, told), (second, others) = worlds.run(2, train, how, spec)
    assert (first, told) == (second, others)
    if how in ("version", "plan"):
        assert first == "refused" and "rank 0" in told and "rank 1" in told


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
def test_powersgd_by_other_kernels_is_refused(worlds: Worlds) -> None:
    """QR of the reference and Gram-Schmidt of the C++ kernels give factors of different signs."""
    for kind, told in worlds.run(2, train, "kernels", gw.PowerSGD(rank=2)):
        assert kind == "refused"
        assert "rank 0 has ['PowerSGD(rank=2" in told and "rank 1 has ['PowerSGD(rank=2" in told
        assert "Install the same build of gradwire, with its C++ library" in told


def other_bytes() -> str:
    """Rank 1's kernel makes other bytes under one of two specs, of the same build."""
    encode = cpu.qsgd_encode
    if dist.get_rank() == 1:
        cpu.qsgd_encode = lambda *arguments: (encode(*arguments), arguments[-1][40:41].add_(1))  # type: ignore[attr-defined]
    try:
        gw.Exchange({"w": torch.zeros(300)}, plan=gw.QSGD(bits=4))
    except gw.DisagreementError as error:
        return str(error)
    finally:
        cpu.qsgd_encode = encode  # type: ignore[attr-defined]
    return ""


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
def test_one_kernel_that_makes_other_bytes_is_found(worlds: Worlds) -> None:
    for told in worlds.run(2, other_bytes):
        assert "bytes that kernels make of the same gradient: rank 0 has ['QSGD(bits=4, block=128) of float32" in told


def test_there_are_200_pairs() -> None:
    assert len(SPECS) * len(WAYS) >= 200
