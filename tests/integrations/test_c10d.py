"""The backend "gradwire" of torch.distributed: what it quantises, and what it leaves to gloo."""

import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import World, Worlds, digest, seeded

import gradwire as gw
from gradwire.integrations import c10d


def group_of(**settings: Any) -> Any:
    c10d.register_model(nn.Module())  # what another test registered
    c10d.quantise(**settings)
    return dist.new_group(backend="gradwire")


def end(group: Any) -> None:
    group.close()
    dist.destroy_process_group(group)


def reduced() -> dict[str, Any]:
    """Relative errors of all-reduces by kind, beside gloo's."""
    group, told = group_of(min_numel=1000), {}
    kinds = {
        "large": torch.randn(5000, generator=seeded(dist.get_rank())),
        "bfloat16": torch.randn(5000, generator=seeded(dist.get_rank())).to(torch.bfloat16),
        "small": torch.randn(999, generator=seeded(dist.get_rank())),
        "integers": torch.arange(5000) * (1 + dist.get_rank()),
        "float64": torch.randn(5000, generator=seeded(dist.get_rank())).double(),
    }
    for name, tensor in kinds.items():
        expected, found, later = tensor.clone(), tensor.clone(), tensor.clone()
        dist.all_reduce(expected)
        dist.all_reduce(found, group=group)
        work = dist.all_reduce(later, group=group, async_op=True)
        work.wait()
        errors = [((each - expected).double().norm() / expected.double().norm()).item() for each in (found, later)]
        told[name] = errors
        gathered = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found, group=group)
        told[f"{name} alike"] = all(torch.equal(each, found) for each in gathered)
    most = torch.tensor([float(dist.get_rank())]).expand(5000).clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    told["max"] = most.unique().tolist()
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    told["objects"] = objects
    told["specs"] = {str(bucket.main_spec) for each in group._exchanges.values() if each for bucket in each.plan.buckets}
    end(group)
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_only_large_sums_of_floats_are_quantised(worlds: Worlds, ranks: int) -> None:
    for told in worlds.run(ranks, reduced):
        for name in ("large", "bfloat16"):
            assert all(0.01 < error < 0.3 for error in told[name]) and told[f"{name} alike"]
        for name in ("small", "integers", "float64"):
            assert told[name] == [0.0, 0.0]
        assert told["specs"] == {"QSGD(bits=4, block=128, blocks='bucket')"}
        assert told["max"] == [ranks - 1.0] and told["objects"] == list(range(ranks))


def of_many_sizes() -> tuple[int, int, bool, bool]:
    """Exchanges after 100 all-reduces of other sizes, and after these again; whether the second ones, and sizes of the beginning,
    are quantised."""
    group = group_of(min_numel=1000)

    def quantises(numel: int) -> bool:
        exact = torch.randn(numel, generator=seeded(dist.get_rank()))
        found = exact.clone()
        dist.all_reduce(exact)
        dist.all_reduce(found, group=group)
        return not torch.equal(exact, found)

    def made() -> int:
        return sum(each is not None for each in group._exchanges.values())

    first = [quantises(1000 + 8 * number) for number in range(300)]
    after_first = made()
    second = [quantises(1000 + 8 * number) for number in range(200, 300)]
    told = after_first, made(), all(second) and first[:32] == [True] * 32 and not any(first[32:]), quantises(3384)
    end(group)
    return told


def test_sizes_that_do_not_return_are_left_to_gloo(worlds: Worlds) -> None:
    assert worlds.run(2, of_many_sizes) == [(0, 100, True, True)] * 2


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5))


def trained(backend: str | None, settings: dict[str, Any], steps: int = 100, view: bool = True) -> tuple[float, str]:
    """The loss at the end on all ranks' data; `layers` are the layers with bits of their own, 0 for excluded ones."""
    layers = settings.pop("layers", None)
    group = group_of(**settings) if backend == "gradwire" else None
    model = network()
    if layers is not None:
        c10d.register_model(model)
        for name, bits in layers.items():
            c10d.set_layer_bits(name, bits) if bits else c10d.exclude_layer(name)
    run = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data, noise = torch.randn(2048, 20, generator=seeded(1)), torch.randn(2048, 5, generator=seeded(4))
    labels = (data @ torch.randn(20, 5, generator=seeded(2)) + 3 * noise).argmax(1)
    for step in range(steps):
        chosen = torch.randint(len(data), (32,), generator=seeded(3, step, dist.get_rank()))
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(data[chosen]), labels[chosen]).backward()
        optimizer.step()
    loss = nn.functional.cross_entropy(model(data), labels).item()
    del run
    if group is not None:
        end(group)
    return loss, digest(model.parameters())


@pytest.mark.parametrize("layers", [None, {}], ids=["whole buffers", "layers"])
def test_ddp_learns_as_with_gloo(worlds: Worlds, layers: dict[str, int] | None) -> None:
    gloo = worlds.run(2, trained, None, {})
    ours = worlds.run(2, trained, "gradwire", {"min_numel": 1000} | ({} if layers is None else {"layers": layers}))
    assert ours[0][1] == ours[1][1] != gloo[0][1]
    assert ours[0][0] == pytest.approx(gloo[0][0], rel=0.01)


def second_model_excluded(features: int) -> float:
    """The error of an all-reduce for an excluded layer of a second model, whose names are those of the first."""
    group = group_of(min_numel=1000)
    for model, excluded in ((nn.Linear(100, 50), False), (nn.Linear(features, 50), True)):
        c10d.register_model(model)
        if excluded:
            c10d.exclude_layer("weight")
        model.weight.grad = torch.randn(model.weight.shape, generator=seeded(dist.get_rank()))
        exact = model.weight.grad.clone()
        dist.all_reduce(exact)
        dist.all_reduce(model.weight.grad, group=group)
    end(group)
    return (model.weight.grad - exact).abs().max().item()


@pytest.mark.parametrize("features", [100, 120])
def test_a_second_model_has_the_settings_and_shapes_of_its_own(worlds: Worlds, features: int) -> None:
    assert worlds.run(2, second_model_excluded, features) == [0.0, 0.0]


class Branches(nn.Module):
    """Rank 0 uses all layers, and rank 1 leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.left_out, self.last = nn.Linear(20, 100), nn.Linear(100, 50), nn.Linear(100, 50)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = self.first(inputs)
        return self.last(inner) if dist.get_rank() else self.last(inner) + self.left_out(inner)


def of_branches(backend: str | None) -> tuple[list[torch.Tensor], int]:
    """Gradients of the last of some steps, and how many all-reduces stayed uncompressed."""
    group = group_of(min_numel=1000) if backend else None
    model = Branches()
    if backend:
        c10d.register_model(model)
    run = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, find_unused_parameters=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            run.zero_grad(set_to_none=True)
            run(torch.randn(8, 20, generator=seeded(step, dist.get_rank()))).square().mean().backward()
    gradients = [torch.empty(0) if each.grad is None else each.grad.clone() for each in model.parameters()]
    del run
    if group is not None:
        end(group)
    return gradients, sum("stays uncompressed" in str(each.message) for each in warned)


def test_ranks_that_use_other_layers_all_reduce_alike() -> None:
    """A rank without a gradient of a layer finds no layers in the buffer. Then all ranks send the buffer uncompressed."""
    with World(2, group_timeout_s=15.0) as world:
        plain = world.run(of_branches, None)
        ours = world.run(of_branches, "gradwire")
    for (expected, _), (found, told) in zip(plain, ours, strict=True):
        assert told > 0 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def logged() -> str:
    group = group_of()
    name: str = DistributedDataParallel(network(), process_group=group)._get_ddp_logging_data()["backend_name"]
    end(group)
    return name


def test_ddp_logs_the_backends_own_name(worlds: Worlds) -> None:
    assert worlds.run(2, logged) == ["gradwire"] * 2


def test_what_torch_would_run_under_the_interpreters_lock_is_gloos() -> None:
    """A thread of gloo's could wait for that lock for ever."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    names = set(re.findall(r"WORK_OVERRIDE\(\s*(?://[^\n]*\s*)?ProcessGroup,[^\n]*\s*(\w+),", header.read_text()))
    assert "broadcast" in names and names <= vars(c10d.QuantisingGroup).keys()


def test_what_is_excluded_or_small_is_as_with_gloo(worlds: Worlds) -> None:
    gloo = worlds.run(2, trained, None, {}, 5)
    assert worlds.run(2, trained, "gradwire", {"min_numel": 10**6}, 5) == gloo
    assert worlds.run(2, trained, "gradwire", {"min_numel": 1000, "layers": {"": 0}}, 5) == gloo
    some = worlds.run(2, trained, "gradwire", {"min_numel": 1000, "layers": {"0.": 0, "2.": 8}}, 5)
    assert some[0] == some[1] != gloo[0]


def test_layers_that_cannot_be_found_are_told(worlds: Worlds) -> None:
    gloo = worlds.run(2, trained, None, {}, 5)
    assert worlds.run(2, without_views) == [(gloo[0], True)] * 2


def without_views() -> tuple[tuple[float, str], bool]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ended = trained("gradwire", {"min_numel": 1000, "layers": {}}, 5, view=False)
    return ended, any("gradient_as_bucket_view=True" in str(each.message) for each in told)


def left_alone(by_ddp: bool) -> str:
    group = group_of(min_numel=1000)
    run = DistributedDataParallel(network(), process_group=group)
    for _ in range(3):
        run(torch.ones(1, 20)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(0.5)
    try:
        run(torch.ones(1, 20)).sum().backward() if by_ddp else dist.all_reduce(torch.ones(5000), group=group)
    except (gw.GradwireError, RuntimeError) as error:
        return str(error)
    finally:
        group.close()
    return "nothing was raised"


@pytest.mark.parametrize("by_ddp", [False, True], ids=["", "ddp"])
def test_a_rank_that_died_is_told(by_ddp: bool) -> None:
    with World(2, group_timeout_s=8.0) as world:
        world.start(left_alone, by_ddp)
        first, second = world.collect(60.0)
    assert second.kind == "died"
    assert first.kind == "returned" and "rank 1" in first.value


def disagreeing(what: str) -> tuple[str, float]:
    rank, began = dist.get_rank(), time.monotonic()
    settings = {"bits": {"bits": 4 + rank}, "min_numel": {"min_numel": 1000 + 9000 * rank}}.get(what, {})
    group = group_of(**{"min_numel": 1000, **settings})
    if what == "number of parameters" and rank == 0:
        c10d.register_model(network())
    if what == "names or bits":
        c10d.register_model(network())
        c10d.set_layer_bits("0.weight", 4 + rank)
    try:
        dist.all_reduce(torch.ones(5000), group=group)
    except gw.DisagreementError as error:
        return str(error), time.monotonic() - began
    finally:
        c10d.register_model(nn.Module())
        end(group)
    return "", 0.0


@pytest.mark.parametrize("what", ["bits", "min_numel", "number of parameters", "names or bits"])
def test_ranks_with_other_settings_are_told_so_at_once(worlds: Worlds, what: str) -> None:
    """With other settings one rank would quantise what the other leaves to gloo, and both would wait for the timeout."""
    for told, took_s in worlds.run(2, disagreeing, what):
        assert told.startswith(f"ranks disagree on the {what}")
        assert took_s < 30.0


def test_wrong_names_and_bits_are_refused() -> None:
    c10d.register_model(network())
    for act in (lambda: c10d.exclude_layer("bn"), lambda: c10d.set_layer_bits("conv", 4)):
        with pytest.raises(gw.PlanError, match="no layer is named"):
            act()
    with pytest.raises(gw.SpecError, match="bits"):
        c10d.set_layer_bits("0.weight", 99)
    c10d.register_model(nn.Module())
