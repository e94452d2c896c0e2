"""Islands of `fully_shard`: evaluations between exchanges, and meshes that are not inside an island."""

import pytest
import torch
import torch.distributed as dist
from test_islands import EVERY, batch, network, train, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest, mesh_of

import gradwire as gw
from gradwire.integrations.elastic_islands import island_rounds

POLICY = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY))


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose outermost module has all parameters, sharded inside an island."""
    model = network()
    fully_shard(model, mesh=mesh_of(2, 2)["inside"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def outputs(model: nn.Module) -> torch.Tensor:
    """What a forward without a backward gives."""
    with torch.no_grad():
        return model(batch(0)[0]).clone()


def by_its_weights(model: nn.Module) -> torch.Tensor:
    """The same, of a whole model with these weights, after a backward."""
    plain = network()
    whole_ones = whole(model).split([each.numel() for each in plain.parameters()])
    for parameter, values in zip(plain.parameters(), whole_ones, strict=True):
        parameter.data = values.view_as(parameter)
    return outputs(plain)


def evaluated() -> tuple[list[float], bool]:
    """Differences between what evaluations give and what they should, and whether training went on as without them."""
    mesh = mesh_of(2, 2)
    model, optimizer = sharded()
    made = gw.islands(model, optimizer, mesh, POLICY)
    train(model, optimizer, range(EVERY + 3))
    usual = digest([whole(model)])
    made.detach()

    model, optimizer = sharded()
    made = gw.islands(model, optimizer, mesh, POLICY)
    train(model, optimizer, range(EVERY))
    state, of_all = made.state_dict(), by_its_weights(model)
    train(model, optimizer, range(EVERY, EVERY + 2))
    local = by_its_weights(model)
    found = [outputs(model) - local]
    with made.global_weights():
        found.append(outputs(model) - of_all)
    found.append(outputs(model) - local)
    train(model, optimizer, range(EVERY + 2, EVERY + 3))
    is_as_usual = digest([whole(model)]) == usual
    outputs(model)
    made.load_state_dict(state)
    found.append(outputs(model) - of_all)
    made.detach()
    return [each.abs().max().item() for each in found], is_as_usual


def test_evaluations_see_the_weights_that_are_shown(worlds: Worlds) -> None:
    """FSDP2 keeps whole parameters after a forward without a backward: they would hide what is written into the shards."""
    for differences, is_as_usual in worlds.run(4, evaluated):
        assert max(differences) < 1e-6, differences
        assert is_as_usual


def begun_late() -> tuple[bool, bool]:
    """Whether islands that begin after an evaluation average weights, and whether a second beginning after one is refused."""
    model, optimizer = sharded()
    outputs(model)
    mesh = mesh_of(2, 2)
    made = gw.islands(model, optimizer, mesh, POLICY)
    train(model, optimizer, range(EVERY))
    with made.global_weights():
        shown = digest([whole(model)])
    is_averaged = digest([whole(model)]) == shown
    outputs(model)
    try:
        gw.islands(model, optimizer, mesh, POLICY)
    except gw.StepStateError as error:
        made.detach()
        return is_averaged, "trains on islands already" in str(error)
    return is_averaged, False


def test_islands_begin_after_an_evaluation(worlds: Worlds) -> None:
    assert worlds.run(4, begun_late) == [(True, True)] * 4


def on_wrong_meshes() -> list[str]:
    """What is raised for shards over all ranks, between islands and over both dimensions. Weights stay."""
    mesh, said = mesh_of(2, 2), []
    for wrong in (init_device_mesh("cpu", (4,)), mesh["between"], mesh):
        model = network()
        fully_shard(model, mesh=wrong)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [each.to_local().clone() for each in model.parameters()]
        for begin in (
            lambda model=model, optimizer=optimizer: gw.islands(model, optimizer, mesh, POLICY),
            lambda model=model, optimizer=optimizer: island_rounds(model, [optimizer], POLICY.schedule, mesh.get_group(1)),
        ):
            with pytest.raises(gw.PlanError) as error:
                begin()
            said.append(str(error.value))
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
    return said


def test_shards_on_other_ranks_than_an_island_are_refused(worlds: Worlds) -> None:
    """Other parts of the model would be averaged with each other."""
    for rank, (world, _, between, _, both, elastic) in enumerate(worlds.run(4, on_wrong_meshes)):
        island = [0, 1] if rank < 2 else [2, 3]
        assert world.startswith(f"the shards of '0.weight' are on ranks [0, 1, 2, 3], and this rank's island is {island}: ")
        assert f"are on ranks {[rank % 2, rank % 2 + 2]}, " in between
        assert 'fully_shard(model, mesh=mesh["inside"])' in both and "from_group(island" in elastic


def frozen() -> list[str]:
    """Digests of all weights at an exchange, in islands that began with other frozen weights: whole ones, shards and both."""
    mesh, found = mesh_of(2, 2), []
    for kind in ("whole", "shards", "both"):
        model: nn.Module = network()
        model.register_buffer("turned", torch.arange(6.0).view(2, 3).t() * dist.get_rank())  # not contiguous
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        if kind == "whole":
            model = DistributedDataParallel(model, process_group=mesh["inside"].get_group())
        else:
            fully_shard(model, mesh=mesh["inside"], ignored_params={*model[0].parameters()} if kind == "both" else None)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        made = gw.islands(model, optimizer, mesh, POLICY)
        train(model, optimizer, range(EVERY))
        found.append(digest([whole(model), *(model.buffers() if kind == "whole" else ())]))
        made.detach()
    return found


def test_frozen_weights_are_those_of_the_first_island(worlds: Worlds) -> None:
    first, *others = worlds.run(4, frozen)
    assert others == [first] * 3
