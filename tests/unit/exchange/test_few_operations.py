"""Operations of torch that a step takes beside its kernels: as many for many tensors as for few."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradwire as gw
from gradwire.compressors import Context, compressor_for
from gradwire.core import PowerSGD
from gradwire.engine.torch_hooks import loss_scale
from gradwire.exchange import exchange as exchanges
from gradwire.kernels import Segment, Segments
from gradwire.transport.in_process import run_ranks

VIEWS = ("view", "slice", "split", "detach", "alias", "select", "as_strided", "unbind")


class Counting(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(word in str(func) for word in VIEWS)
        return func(*args, **(kwargs or {}))


def ready_together(group: Any, tensors: int, together: bool) -> tuple[int, list[torch.Tensor]]:
    """The operations that one rank's thread does in a step, and the means."""
    values = {f"t{n}": torch.full((n + 1, 3), float(n + group.rank), dtype=torch.bfloat16) for n in range(tensors)}
    exchange = gw.Exchange(values, plan=gw.Identity(), process_group=group)
    with Counting() as counting:
        exchange.begin()
        if together:
            exchange.ready_all(values)
        else:
            for name, value in values.items():
                exchange.ready(name, value)
        exchange.wait()
    exchange.close()
    return counting.count, list(values.values())


def test_tensors_that_become_ready_together_take_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run_ranks(2, ready_together, 40, False)
    monkeypatch.setattr(exchanges, "launches", lambda device: True)
    for (count, means), (_, expected) in zip(run_ranks(2, ready_together, 40, True), alone, strict=True):
        assert count <= 10
        torch.testing.assert_close(means, expected, rtol=0, atol=0)


def test_a_tensor_is_ready_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "launches", lambda device: True)

    def twice(group: Any) -> None:
        exchange = gw.Exchange({"t": torch.ones(3), "u": torch.ones(3)}, plan=gw.Identity(), process_group=group)
        exchange.begin()
        exchange.ready_all({"t": torch.ones(3)})
        with pytest.raises(gw.StepStateError, match="twice"):
            exchange.ready_all({"t": torch.ones(3)})
        with pytest.raises(gw.StepStateError, match="no tensor"):
            exchange.ready_all({"v": torch.ones(3)})
        exchange.close()

    run_ranks(1, twice)


def power_step(matrices: int, vectors: int) -> int:
    """The operations of one step of PowerSGD, without its kernels on CPUs."""
    shapes = [(16, 8)] * matrices + [(5,)] * vectors
    at, rows = 0, []
    for key, shape in enumerate(shapes):
        rows.append(Segment(at, torch.Size(shape).numel(), key, 0, 0))
        at += rows[-1].numel
    names = tuple(f"t{n}" for n in range(len(shapes)))
    segments = Segments(tuple(rows), torch.device("cpu"), names, tuple(shapes))
    residual = torch.zeros(at)
    program = compressor_for(PowerSGD(rank=2, start_step=0)).program(torch.randn(at), [residual], segments)
    context = Context(torch.zeros(4, dtype=torch.int64))
    with Counting() as counting:
        for number in range(2):
            program.fill(number, context)
        program.finish(context)
    return counting.count


def test_powersgd_takes_as_many_operations_for_many_tensors_as_for_few() -> None:
    assert power_step(20, 30) == power_step(2, 3) <= 30


def test_the_scale_of_a_gradient_scaler_is_not_asked_of_the_device_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_scale.watch_scalers()
    scaler, asked = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), []
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    plain = torch.amp.GradScaler.get_scale
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: asked.append(1) or plain(self))  # type: ignore[func-returns-value]
    scales: list[tuple[float, int] | None] = []
    weight.register_hook(lambda gradient: scales.append(loss_scale.scale_of_this_backward()))

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(weight * 1.0).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    asked.clear()
    step()
    step()
    assert not asked and scales == [(4.0, 0), (8.0, 0), (16.0, 0)]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
    step()
    assert scales[-1] == (2.0, 0), "another script changed the scale"
