"""The host-staged lane on the double of streams: ranks have the bits of CPU ranks, and nothing is touched too early."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from stream_double import Device, run_staged_ranks

import gradwire as gw
from gradwire.core import example_specs, innermost
from gradwire.kernels import cpu, kernels_for
from gradwire.transport.in_process import run_ranks

SHAPES = ((17, 19), (130,), (1,), (13, 11))


SPECS = tuple(gw.Truncate(4.0, unsafe=True) if isinstance(spec, gw.Truncate) else spec for spec in example_specs())


@contextmanager
def kernels_in_torch() -> Iterator[None]:
    """The double sees operations of torch alone."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(cpu, "available", lambda: "the double sees none of them")
        kernels_for.cache_clear()
        yield
    kernels_for.cache_clear()


def means(group: Any, plan: Any, steps: int = 2) -> list[list[torch.Tensor]]:
    """The means of some exchanges."""
    random = torch.Generator().manual_seed(group.rank)
    tensors = {f"t{number}": torch.zeros(shape) for number, shape in enumerate(SHAPES)}
    exchange = gw.Exchange(tensors, plan=plan, process_group=group)
    found = []
    for _ in range(steps):
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        exchange.average_()
        found.append([tensor.clone() for tensor in tensors.values()])
    assert exchange.lanes.staged == (type(group).__name__ == "StagedGroup")
    exchange.close()
    return found


def same_bits(plan: Any, size: int, monkeypatch: pytest.MonkeyPatch, in_torch: bool = False) -> None:
    with kernels_in_torch() if in_torch else warnings.catch_warnings():
        expected = run_ranks(size, means, plan)
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        found = run_staged_ranks(device, size, means, 60.0, plan)
    for ours, theirs in zip(found, expected, strict=True):
        for step, other in zip(ours, theirs, strict=True):
            for mine, value in zip(step, other, strict=True):
                torch.testing.assert_close(mine, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_every_spec_has_the_bits_of_cpu_ranks(spec: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = gw.Policy(default=spec, exempt_vectors=False, bucket_bytes=1500, chunk_bytes=1000)
    same_bits(policy, size, monkeypatch, in_torch=isinstance(innermost(spec), gw.PowerSGD))
