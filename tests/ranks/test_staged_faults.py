"""Flipped bits and killed ranks on the host-staged lane are reported as on CPUs. Processes whose tensors are on the double."""

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flips import FlippingBackend, FlippingWire
from stream_double import Device
from worlds import Given, World, Worlds, digest

import gradwire as gw
from gradwire.core import SHARED_MEMORY
from gradwire.kernels import cpu, kernels_for
from gradwire.transport import Group, rendezvous

COMPRESSED, PLAIN = gw.QSGD(bits=4), gw.Uniform(gw.Identity())
STEP = 2


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@contextmanager
def tensors_on_the_double(wired: bool, shared: bool) -> Iterator[None]:
    """Tensors of this process are on the double. Lanes have wires, which share memory, or the backend alone."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(cpu, "available", lambda: "the double sees none of them")
        patch.setattr(Group, "stages", lambda self, device: True)
        if not wired:
            patch.setattr(rendezvous, "why_no_wires", lambda: "the test wants none")
        if not shared:
            patch.setenv(SHARED_MEMORY, "off")
        kernels_for.cache_clear()
        with Device().used(patch):
            yield
    kernels_for.cache_clear()


def steps_until_told(plan: Any, wired: bool, shared: bool, fault: str) -> tuple[str, list[int], int | None, bool]:
    """Train until the fault of step 2 is reported: the error, its ranks and bucket, whether weights are from before the step."""
    rank = dist.get_rank()
    with tensors_on_the_double(wired, shared):
        model = Given([3000, 20, 500], seed=0)
        handle = gw.parallelize(model, plan=plan)
        link = handle.session.lanes.data[0].link
        assert handle.session.lanes.staged and (link.wire is not None) == wired
        assert not wired or bool(link.wire.shared_with) == shared
        flips: Any = None
        if fault == "flip" and rank == 0:
            flips = FlippingWire(link.wire, 1) if wired else FlippingBackend(link.backend)
            link.backend = link.backend if wired else flips
        for step in range(4):
            before = digest(model.parameters())
            if step == STEP and fault == "kill" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEP and flips is not None:
                flips.flip_at = 16 + 5
                flips.at_part = 0
            try:
                model.zero_grad()
                model(model.random_gradients(rank, step)).backward()
            except gw.CommunicationError as error:
                handle.detach()
                assert error.step == step == STEP
                return str(error), list(error.ranks), error.bucket, before == digest(model.parameters())
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("wired", [True, False], ids=["wire", "Python"])
def test_a_flipped_bit_ends_the_step_on_all_ranks(worlds: Worlds, wired: bool) -> None:
    first, second = worlds.run(2, steps_until_told, COMPRESSED, wired, False, "flip")
    assert first[1:] == ([1], 0, True) and second[1:] == ([0], 0, True)
    assert f"step {STEP}: bytes of bucket 0 (p" in second[0] and "changed on their way from rank 0 to rank 1" in second[0]
    assert "rank 1 says" in first[0]


@pytest.mark.parametrize("plan", [COMPRESSED, PLAIN], ids=["compressed", "all-reduce"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "TCP"])
def test_a_killed_rank_is_named(plan: Any, shared: bool) -> None:
    world = World(2)
    try:
        world.start(steps_until_told, plan, True, shared, "kill")
        outcome = world.collect(40.0, needed={0})[0]
    finally:
        world.close()
    assert outcome.kind == "returned", outcome.value
    words, ranks, bucket, unchanged = outcome.value
    assert (ranks, bucket, unchanged) == ([1], 0, True)
    assert f"step {STEP}: rank 0 waited for bucket 0" in words and "rank 1 did not answer" in words
