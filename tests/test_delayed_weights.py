"""Local updates."""

import pytest
import torch

from gradwire.engine import weights
from gradwire.engine.weights import Move, local_move


def moved(move: Move | None, weight: torch.Tensor) -> torch.Tensor:
    """By how much, for a rate of 1."""
    assert move is not None
    after, before = weight.clone(), torch.empty_like(weight)
    move.apply(after, before)
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


def test_moves_are_the_same_in_pieces_and_in_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient, squares, mean = (torch.rand(7, 6, generator=generator) for _ in range(4))
    moments = {"squares": squares, "mean": mean, "decay": (0.9, 0.1), "momentum": 0.5, "corrections": (0.5, 0.1)}
    whole = moved(Move(gradient, 0.5, **moments, eps=1e-8), weight)
    monkeypatch.setattr(weights, "_PIECE", 5)
    assert torch.equal(moved(Move(gradient, 0.5, **moments, eps=1e-8), weight), whole)
    assert torch.equal(moved(Move(gradient.t().clone().t(), 0.5, **moments, eps=1e-8), weight), whole)
