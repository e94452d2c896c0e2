"""Local updates."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from gradwire.core import Delayed
from gradwire.engine.schedules.weights import LocalMove, TwoWeights, local_move, local_moves
from gradwire.kernels.reference.local_update import LocalUpdate


def moved(move: LocalMove | None, weight: torch.Tensor) -> torch.Tensor:
    """By how much, for a rate of 1."""
    assert move is not None
    before, after = weight.clone(), torch.empty_like(weight)
    move.apply(weight, after)
    assert torch.equal(before, weight)
    return after - before


KINDS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "dampened": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.4),
    "nesterov": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1, betas=(0.8, 0.95)),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1, alpha=0.9),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_local_steps_are_the_optimizers_next_step(kind: str) -> None:
    """Also of an element without a gradient so far, whose estimate is 0."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = KINDS[kind]([parameter])
    gradient = torch.tensor([1.0, 1.0, -1e-3])
    group = optimizer.param_groups[0]
    first = local_move(optimizer, group, parameter, gradient, 0.1)
    if isinstance(optimizer, torch.optim.SGD):
        assert torch.equal(moved(first, parameter.detach()), -0.1 * gradient)
    elif kind != "adagrad":
        assert first is None
    parameter.grad = torch.tensor([2.0, 0.0, 0.0])
    optimizer.step()
    change = moved(local_move(optimizer, group, parameter, gradient, 0.1), parameter.detach())
    before = parameter.detach().clone()
    parameter.grad = gradient
    optimizer.step()
    assert torch.allclose(change, parameter.detach() - before, rtol=1e-4)


def test_local_steps_have_no_weight_decay_and_go_uphill_where_the_optimizer_does() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=0.5, maximize=True)
    parameter.grad = torch.ones(2)
    optimizer.step()
    gradient = torch.tensor([3.0, -4.0])
    change = moved(local_move(optimizer, optimizer.param_groups[0], parameter, gradient, 1.0), torch.ones(2))
    assert change.tolist() == [3.0, -4.0]


class OnDevice(torch.Tensor):
    """A tensor of a device: reading its values is a wait."""

    is_cpu = False  # type: ignore[assignment]
    waits = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__float__, torch.Tensor.tolist, torch.Tensor.item):
            OnDevice.waits += 1
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_steps_and_rates_on_a_device_are_read_once_for_all(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fused or capturable optimizer has them."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    optimizer = kind(weights, lr=0.1)  # type: ignore[call-arg]
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    expected = list(local_moves(optimizer, weights, Delayed()))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1).as_subclass(OnDevice)
    for state in optimizer.state.values():
        state["step"] = state["step"].as_subclass(OnDevice)
    monkeypatch.setattr(OnDevice, "waits", 0)
    found = list(local_moves(optimizer, weights, Delayed()))
    assert OnDevice.waits == 1
    for move, other in zip(found, expected, strict=True):
        assert move is not None and other is not None
        assert move.by == pytest.approx(other.by)  # the rate is float32 now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_moves_are_the_same_in_any_memory(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(7, 6, 3, 2, generator=generator).to(dtype) for _ in range(4)]
    by = LocalUpdate(0.5, 0.5, 0.5, 0.9, 0.1, 1e-8)
    outs = []
    for lay in (
        lambda each: each,
        lambda each: each.to(memory_format=torch.channels_last),
        lambda each: torch.stack([each, each], dim=-1)[..., 0],  # with holes
        lambda each: each.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        weight, gradient, squares, mean = (lay(each) for each in tensors)
        out = torch.zeros_like(weight)
        LocalMove(gradient, by, squares, mean).apply(weight, out)
        LocalMove(lay(tensors[1]), by, tensors[2], mean).apply(weight, out)  # lying otherwise than the others
        outs.append(out)
    assert all(torch.equal(out, outs[0]) and not torch.equal(out, tensors[0]) for out in outs)


def test_a_moment_of_another_dtype_is_taken_as_it_is() -> None:
    weight, gradient, squares = torch.ones(4).bfloat16(), torch.ones(4).bfloat16(), torch.full((4,), 4.001)
    assert moved(LocalMove(gradient, LocalUpdate(1.0, kept=1.0), squares), weight).tolist() == [-0.5] * 4


def two_weights() -> tuple[TwoWeights, list[torch.nn.Parameter]]:
    parameters = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2, 2))}
    return TwoWeights(parameters), list(parameters.values())


@pytest.mark.parametrize("lend", [True, False])
def test_weights_may_be_lent_memory_for_a_step_and_get_their_own_back(lend: bool) -> None:
    both, (a, b) = two_weights()
    own = [a.data_ptr(), b.data_ptr()]
    for number in (1.0, 2.0):
        with both.shown(lend):
            assert (a.data_ptr() == own[0]) == (number == 1 or not lend)
            assert a.tolist() == [number] * 3
            with torch.no_grad():
                a += 1  # an optimizer's step
            both.local_update([LocalMove(torch.ones(3), LocalUpdate(0.5)), None])
        assert [a.data_ptr(), b.data_ptr()] == own
        assert a.tolist() == [number + 0.5] * 3
        assert both.global_weights[0].tolist() == [number + 1] * 3
        assert b.tolist() == [[1, 1], [1, 1]]
    both.show_global()
    assert a.tolist() == [3] * 3
    both.show_local()
    assert a.tolist() == [2.5] * 3


@pytest.mark.parametrize("error", [None, RuntimeError("an optimizer's")])
def test_weights_that_are_not_updated_locally_are_the_global_ones(error: Exception | None) -> None:
    both, (a, b) = two_weights()
    own = [a.data_ptr(), b.data_ptr()]
    with both.shown(lend=True):
        both.local_update([LocalMove(torch.ones(3), LocalUpdate(0.5)), None])
    with pytest.raises(RuntimeError) if error else nullcontext(), both.shown(lend=True):
        with torch.no_grad():
            a += 1
        if error:
            raise error
    assert [a.data_ptr(), b.data_ptr()] == own
    assert a.tolist() == [2] * 3
    assert both.local_weights[0].tolist() == [2] * 3
    both.show_local()
    assert a.tolist() == [2] * 3


def test_autograd_tells_of_a_graph_whose_weights_were_moved() -> None:
    both, (a, _) = two_weights()
    loss = (a * a).sum()
    with both.shown(lend=True):
        both.local_update([LocalMove(torch.ones(3), LocalUpdate(0.5)), None])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
