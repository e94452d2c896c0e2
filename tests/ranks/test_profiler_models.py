"""Profiles of models that are not a chain of modules called once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_profiler import Slow
from torch import nn
from worlds import Worlds, seeded

import gradwire as gw
from gradwire.core import Profile
from gradwire.errors import StepStateError
from gradwire.profiler.model import model_times

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Chain(nn.Module):
    """6 ms of forward, 12 of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(Slow.apply(self.first(inputs), 6.0))


class Compiled(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first.compile(backend="eager")


class Tied(nn.Module):
    """Embedding, middle and head: 1, 2 and 8 ms of forward; the head has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Linear(16, 16, False), nn.Linear(16, 16), nn.Linear(16, 16, False)
        self.head.weight = self.embedding.weight
        # what a module takes lasts until the next one begins
        self.embedding.register_forward_hook(lambda module, inputs, output: Slow.apply(output, 1.0))
        self.middle.register_forward_hook(lambda module, inputs, output: Slow.apply(output, 2.0))
        self.head.register_forward_hook(lambda module, inputs, output: Slow.apply(output, 8.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(inputs)))


class Loose(nn.Module):
    """Parameters that no module of their own uses: 6 ms of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            inputs = Slow.apply(F.linear(inputs, weight), 2.0)
        return inputs


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "called twice": (Chain, lambda model, batch: (model(batch) - model(2 * batch)).square().mean()),
    "tied": (Tied, lambda model, batch: model(batch).square().mean()),
    "loose": (Loose, lambda model, batch: model(batch).square().mean()),
    "named inputs": (Chain, lambda model, batch: model(inputs=batch).square().mean()),
    "compiled in part": (Compiled, lambda model, batch: model(batch).square().mean()),
}


def profile(folder: str, which: str) -> Profile:
    make_model, loss = MODELS[which]
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity()))
    rank = torch.distributed.get_rank()
    with handle.profile(folder, steps=3) as found:
        for number in range(9):
            loss(model, torch.randn(8, 16, generator=seeded(rank, number))).backward()
            optimizer.step()
            optimizer.zero_grad()
    handle.detach()
    return found.profile


@pytest.mark.parametrize("which", MODELS)
def test_forward_and_backward_are_told_apart(which: str, worlds: Worlds, tmp_path: Path) -> None:
    found, _ = worlds.run(2, profile, str(tmp_path), which)
    forward = {tensor.name: (tensor.forward_us or 0.0) / 1e3 for tensor in found.tensors}
    backward_ms = sum(tensor.backward_us for tensor in found.tensors) / 1e3
    # a forward of 6 ms has a backward of 12, whatever else a busy machine does
    times = 2 if which == "called twice" else 1
    forward_ms = sum(forward.values())
    assert forward_ms > times * 5.5 and backward_ms > times * 11.5, "the second forward is no backward"
    assert found.batch == 8
    if which == "tied":
        assert forward["middle.weight"] + forward["middle.bias"] > 9.5, "the head's turn comes after the middle"
        assert forward["embedding.weight"] < forward_ms / 2
    if which in ("loose", "compiled in part"):
        assert found.tensors[-1].forward_us == pytest.approx(1e3 * forward_ms), "the whole of it, first in forward"


def test_tensors_of_earlier_modules_do_not_count_again() -> None:
    """Numbers 0 and 1 are an embedding's and a middle's; the head has the embedding's, and a last module both."""
    infos = [gw.TensorInfo(name, (2, 2), "float32") for name in ("embedding", "middle")]
    modules = [[0], [1], [0], [0, 1]]
    # modules, backward begins, moments ready, optimizer, and for how long the model needed a processor
    row = [1.0, 2.0, 8.0, 4.0, 15.0, 25.0, 20.0, 3.0, 0.0]
    rows = torch.tensor([row, row], dtype=torch.float64)
    found = model_times(infos, modules, rows, rows)
    assert [(tensor.name, tensor.forward_us) for tensor in found.tensors] == [("middle", 14.0), ("embedding", 1.0)]
    registered_first = [[0], [0], [1], [0, 1]]  # the head, of 1 us here, then embedding, middle and the last module
    found = model_times(infos, registered_first, rows, rows, entered=[1, 2, 0, 3])
    assert [(tensor.name, tensor.forward_us) for tensor in found.tensors] == [("middle", 13.0), ("embedding", 2.0)]


def parts_alone(folder: str) -> str:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity()))
    try:
        with handle.profile(folder, steps=2):
            for _ in range(7):
                model.second(model.first(torch.randn(8, 16))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    except StepStateError as error:
        handle.detach()
        return str(error)
    return ""


def test_a_loop_that_never_calls_the_model_is_told_so(worlds: Worlds, tmp_path: Path) -> None:
    for words in worlds.run(2, parts_alone, str(tmp_path)):
        assert "no step inside profile(steps=2)" in words and "Call the model" in words
