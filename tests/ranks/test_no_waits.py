"""No backward under a fixed plan waits for the device: the calls that would wait are counted, on the double of streams."""

import threading
from typing import Any

import pytest
import torch
from stream_double import Device, run_staged_ranks
from test_staging import SCHEDULES, kernels_in_torch
from worlds import Given

import gradwire as gw
from gradwire.exchange import layout

SPECS = {
    "Identity": gw.Identity(),
    "4 bits": gw.QSGD(bits=4),
    "2 bits, feedback": gw.ErrorFeedback(gw.QSGD(bits=2)),
    "TopK, feedback": gw.ErrorFeedback(gw.TopK(0.1)),
    "PowerSGD": gw.PowerSGD(rank=1, start_step=0),
}
STEPS = 5


def waits_in_backward(group: Any, device: Device, policy: gw.Policy, reads: bool) -> tuple[list[str], list[str]]:
    """The calls inside the last two backwards with which the script's thread, and the threads of lanes, wait for the device.
    reads: a hook of the script reads a value."""
    model = Given([300, 20, 50], seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if reads:
        model.p1.register_hook(lambda gradient: gradient.sum().item() * gradient)
    handle = gw.parallelize(model, optimizer, plan=policy, process_group=group)
    own = threading.get_ident()
    found: list[tuple[int, str]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(model.random_gradients(group.rank, step))
        before = len(device.waits)
        loss.backward()
        found += device.waits[before:] if step >= STEPS - 2 else []
        optimizer.step()
    lanes = {lane._thread.ident for lane in handle.session.lanes.data}
    handle.flush()
    handle.detach()
    return [call for thread, call in found if thread == own], [call for thread, call in found if thread in lanes]


def run(policy: gw.Policy, monkeypatch: pytest.MonkeyPatch, reads: bool = False) -> list[tuple[list[str], list[str]]]:
    monkeypatch.setattr(layout, "launches", lambda device: True)
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        return run_staged_ranks(device, 2, waits_in_backward, 60.0, device, policy, reads)


@pytest.mark.parametrize("spec", SPECS)
def test_no_spec_lets_backward_wait_for_the_device(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = gw.Policy(default=SPECS[spec], exempt_vectors=False, bucket_bytes=1000, chunk_bytes=500)
    for of_script, of_lanes in run(policy, monkeypatch):
        assert of_script == []
        assert "synchronize" in of_lanes, "a lane's thread waits for copies to the host"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_lets_backward_wait_for_the_device(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gw.Identity() if schedule == "sharded" else gw.ErrorFeedback(gw.QSGD(bits=4))
    policy = gw.Uniform(spec, schedule=SCHEDULES[schedule], bucket_bytes=1000, chunk_bytes=500)
    for of_script, _ in run(policy, monkeypatch):
        assert of_script == []


def test_a_wait_of_the_script_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for of_script, _ in run(gw.Uniform(gw.Identity()), monkeypatch, reads=True):
        assert of_script == ["aten._local_scalar_dense.default"] * 2
