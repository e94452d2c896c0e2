"""Models of every kind end with plain DDP's numbers, bit for bit on two ranks, or are refused in words."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import (
    Ends,
    Library,
    Training,
    assert_as,
    batch,
    everything,
    name_of,
    normalised,
    ordinary,
    plain,
    sgd,
    step_once,
)
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from worlds import Worlds

import gradwire as gw

# ---- parameters and buffers


class Lists(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(6, 6), torch.randn(6)])
        self.dict = nn.ParameterDict({"head": torch.randn(6, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.list[0] + self.list[1]).tanh() @ self.dict["head"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(6, 5, num_layers=2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0])


def parametrized() -> nn.Module:
    first, last = nn.Linear(6, 10), nn.Linear(10, 3)
    return nn.Sequential(parametrizations.spectral_norm(first), nn.Tanh(), parametrizations.weight_norm(last))


def parametrized_root() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(6, 10))


def pruned() -> nn.Module:
    model = plain()
    prune.random_unstructured(model[0], "weight", amount=0.5)
    return model


def frozen_integers() -> nn.Module:
    """Rank 0's reach everybody; they are not trained."""
    model = plain()
    model.register_parameter("steps", nn.Parameter(torch.full((2,), dist.get_rank()), requires_grad=False))
    return model


def frozen_layer() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def batch_norm_in_eval_mode() -> nn.Module:
    model = normalised()
    model[1].eval()
    return model


class Counting(nn.Module):
    """Buffers of integers and booleans, which differ from rank to rank unless rank 0's are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += dist.get_rank() + 1
        self.odd ^= bool(dist.get_rank())
        return self.layer(x)


@pytest.mark.parametrize(
    "make",
    [
        Lists,
        Recurrent,
        parametrized,
        parametrized_root,
        pruned,
        frozen_integers,
        frozen_layer,
        normalised,
        batch_norm_in_eval_mode,
        Counting,
    ],
    ids=name_of,
)
def test_models_as_under_ddp(worlds: Worlds, make: Callable[[], nn.Module]) -> None:
    assert_as(worlds, "ddp", partial(trained, make))


def trained(make: Callable[[], nn.Module], library: Library) -> Ends:
    model = make()
    yield from ordinary(library, model, library.parallelize(model))
    yield from (parameter for parameter in model.parameters())


def frozen_for_a_while(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model, find_unused_parameters=True), sgd(model)
    for step in range(6):
        model[0].requires_grad_(step not in (2, 3))
        step_once(run, optimizer, step)
    return everything(model)


def frozen_with_zeros(library: Library) -> Ends:
    """The gradients of before stay, as zeros: weight decay goes on."""
    model = plain()
    run, optimizer = library.parallelize(model, find_unused_parameters=True), sgd(model)
    for step in range(4):
        model[0].requires_grad_(step < 2)
        optimizer.zero_grad(set_to_none=False)
        run(batch(step)).square().mean().backward()
        optimizer.step()
    return everything(model)


def moving_average(library: Library) -> Ends:
    model = normalised()
    run, optimizer = library.parallelize(model), sgd(model)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
    for step in range(3):
        step_once(run, optimizer, step)
        average.update_parameters(model)
    yield from everything(model)
    yield from average.state_dict().values()


def other_values(library: Library) -> Ends:
    """vector_to_parameters makes all parameters views of one vector."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        step_once(run, optimizer, step)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(0.9 * vector, model.parameters())
    return everything(model)


def called_with_its_own_parameters(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        outputs = torch.func.functional_call(run, dict(run.named_parameters()), (batch(step),))
        outputs.square().mean().backward()
        optimizer.step()
    return everything(model)


def called_with_moved_parameters(library: Library) -> Ends:
    """As in meta-learning: a step of this rank's own, through which the gradient flows back."""
    model = plain()
    library.parallelize(model)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        own = dict(model.named_parameters())
        slopes = torch.autograd.grad(model(batch(50 + step)).square().mean(), list(own.values()))
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(own.items(), slopes, strict=True)}
        torch.func.functional_call(model, moved, (batch(step),)).square().mean().backward()
        library.averaged(model)
        optimizer.step()
    return everything(model)


def called_with_leaves_of_its_own(library: Library) -> Ends:
    """Each rank's are different, and stay so."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        step_once(run, optimizer, step)
        own = {name: (p.detach() + dist.get_rank()).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, own, (batch(step),)).square().mean().backward()
        yield from own.values()
        yield from (tensor.grad for tensor in own.values())
    yield from everything(model)


def gradients_of_each_sample(library: Library) -> Ends:
    """Pure functions of detached parameters, which have nothing to synchronise."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    detached = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (sample[None],)).square().mean()

    for step in range(3):
        step_once(run, optimizer, step)
        yield from torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, batch(step)).values()
    yield from everything(model)


@pytest.mark.parametrize(
    ("reference", "training"),
    [
        ("ddp", frozen_for_a_while),
        ("ddp", frozen_with_zeros),
        ("ddp", moving_average),
        ("ddp", other_values),
        ("ddp", called_with_its_own_parameters),
        ("by hand", called_with_moved_parameters),
        ("ddp", called_with_leaves_of_its_own),
        ("ddp", gradients_of_each_sample),
    ],
    ids=name_of,
)
def test_what_is_done_with_models(worlds: Worlds, reference: Any, training: Training) -> None:
    assert_as(worlds, reference, training)


# ---- refused


def of_one_layer(layer: Callable[[], nn.Module]) -> tuple[str, float]:
    """The first error of a script that trains such a layer, and what became of a second model afterwards."""
    model = nn.Sequential(layer())
    try:
        gw.parallelize(model, plan=gw.Identity())
        model(batch(0)).abs().sum().backward()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    del model
    other = plain()
    gw.parallelize(other, plan=gw.Identity())
    other(batch(0)).sum().backward()
    return told, other[0].weight.grad.sum().item()


def complex_layer() -> nn.Module:
    return nn.Linear(6, 3, dtype=torch.complex64)


def lazy_layer() -> nn.Module:
    return nn.LazyLinear(3)


def layer_without_memory() -> nn.Module:
    return nn.Linear(6, 3, device="meta")


def partly_without_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3, device="meta"))
    model[1].requires_grad_(False)
    return model


def quantised_buffer() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.register_buffer("table", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8))
    return layer


class Packed(torch.Tensor):
    """A weight that is no plain tensor, like the quantised bases under LoRA."""


def frozen_subclass() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Packed), requires_grad=False)
    return model


def gradients_of_another_dtype() -> nn.Module:
    layer = nn.Linear(6, 3, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    return layer


def synchronised_batch_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))


@dataclass
class Answer:
    logits: torch.Tensor


class InAnObject(nn.Module):
    """Returns an object that torch does not look into, of a reentrant checkpoint that ends the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return Answer(checkpoint(self.last, self.first(x), use_reentrant=True))


def checkpoint_in_an_object(library: Library) -> Ends:
    torch.manual_seed(0)
    model = InAnObject()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        run(batch(step)).logits.square().sum().backward()
        library.averaged(model)
        optimizer.step()
    return everything(model)


def test_a_reentrant_checkpoint_in_an_object(worlds: Worlds) -> None:
    assert_as(worlds, "by hand", checkpoint_in_an_object)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (complex_layer, ["PlanError", "'0.weight'", "complex64"]),
        (lazy_layer, ["PlanError", "'0.weight' has no memory yet", "Run a batch"]),
        (layer_without_memory, ["PlanError", "meta"]),
        (partly_without_memory, ["PlanError", "meta"]),
        (quantised_buffer, ["PlanError", "table"]),
        (
            frozen_subclass,
            ["PlanError", "the frozen parameter '0.0.weight' is a Packed", "params_and_buffers_to_ignore"],
        ),
        (
            gradients_of_another_dtype,
            ["PlanError", "'0.weight' is kept as torch.float32 (grad_dtype), and the parameter is torch.bfloat16"],
        ),
        (synchronised_batch_norm, ["ValueError: SyncBatchNorm expected input tensor to be on GPU"]),
    ],
    ids=name_of,
)
def test_models_that_are_refused(worlds: Worlds, layer: Callable[[], nn.Module], words: list[str]) -> None:
    (told, first), (other, second) = worlds.run(2, of_one_layer, layer)
    for word in words:
        assert word in told
        assert word in other
    assert first == second, "the next model is not synchronised"


def scripted() -> tuple[str, bool]:
    """What is said of a TorchScript model, and whether its weights are as they were."""
    torch.manual_seed(dist.get_rank())
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 3)))
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(gw.PlanError) as caught:
        gw.parallelize(model, plan=gw.Identity())
    return str(caught.value), all(map(torch.equal, before, model.parameters()))


def test_a_torchscript_model_is_refused_before_weights_travel(worlds: Worlds) -> None:
    for told, unchanged in worlds.run(2, scripted):
        assert "model is a TorchScript model" in told and unchanged


def copied_root() -> bool:
    """The class of a parametrized module has a copier of its own."""
    model = parametrized_root()
    handle = gw.parallelize(model, plan=gw.Identity())
    twin = copy.deepcopy(model)
    twin(batch(0)).sum().backward()
    own = twin.parametrizations.weight.original.grad
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    handle.detach()
    return not torch.equal(*gathered)


def test_a_copy_of_a_parametrized_model_is_an_ordinary_one(worlds: Worlds) -> None:
    assert worlds.run(2, copied_root) == [True, True]


def thrown_away() -> None:
    """The harness checks that no thread is left."""
    gw.parallelize(parametrized_root(), plan=gw.Identity())


def test_a_parametrized_model_that_is_thrown_away_leaves_nothing(worlds: Worlds) -> None:
    worlds.run(2, thrown_away)
