"""HSDP on two nodes of two ranks: error feedback between shards' replicas, and hierarchical schemes among replicas of a node."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from worlds import Worlds, digest, mesh_of, seeded

import gradwire as gw
from gradwire.integrations import fsdp2
from gradwire.integrations.shards import reshard

TWO_BITS = gw.ErrorFeedback(gw.QSGD(bits=2))
FIFTHS = gw.ErrorFeedback(gw.TopK(0.2))


class Hybrid:
    """A model with `replicas` replicas, whose ranks say that two of them share a node; its gradients added up over steps.

    plan: None is FSDP2 alone.
    """

    def __init__(self, plan: Any, replicas: int) -> None:
        ranks = dist.get_world_size()
        mesh = mesh_of(replicas, ranks // replicas)
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 8))
        for module in (self.model[2], self.model):
            fully_shard(module, mesh=mesh if plan is None else mesh["inside"])
        self.exchanges = None if plan is None else fsdp2.replicate(self.model, mesh["between"].get_group(), plan)
        self.sums: dict[str, torch.Tensor] = {}

    def run(self, steps: range, scale: float = 1.0) -> None:
        nodes = {"GROUP_RANK": str(dist.get_rank() // 2), "LOCAL_WORLD_SIZE": "2"}
        with mock.patch.dict(os.environ, nodes):
            for step in steps:
                inputs = torch.randn(8, 24, generator=seeded(step, dist.get_rank()))
                (scale * self.model(inputs)).square().mean().backward()
                for name, parameter in self.model.named_parameters():
                    whole = parameter.grad.full_tensor()
                    self.sums[name] = self.sums.get(name, torch.zeros_like(whole)) + whole
                    parameter.grad = None

    def sent(self) -> tuple[int, int]:
        """Bytes inside and between nodes."""
        found = self.exchanges.stats().values()
        return sum(each.intra_bytes for each in found), sum(each.inter_bytes for each in found)

    def close(self) -> None:
        if self.exchanges is not None:
            self.exchanges.close()


def with_feedback(plan: Any, replicas: int, steps: int) -> tuple[dict[str, float], str, tuple[int, int]]:
    """How far the sum of gradients is from FSDP2's own, by parameter; a digest of the sums; the bytes of a step."""
    native, ours = Hybrid(None, replicas), Hybrid(plan, replicas)
    for each in (native, ours):
        each.run(range(steps))
    apart = {name: ((ours.sums[name] - whole).norm() / whole.norm()).item() for name, whole in native.sums.items()}
    sent = ours.sent()
    ours.close()
    return apart, digest(ours.sums.values()), sent


@pytest.mark.parametrize(
    ("plan", "replicas", "inside"),
    [
        (TWO_BITS, 2, False),
        (TWO_BITS, 4, True),
        (gw.Policy(default=TWO_BITS, scheme="hierarchical"), 4, True),
        (gw.Policy(default=TWO_BITS, scheme="CGX between nodes"), 4, True),
        (gw.Policy(default=TWO_BITS, scheme="flat"), 4, True),
    ],
    ids=repr,
)
def test_feedback_between_nodes_loses_nothing(worlds: Worlds, plan: Any, replicas: int, inside: bool) -> None:
    found = worlds.run(4, with_feedback, plan, replicas, 40)
    assert len({weights for _, weights, _ in found}) == 1, "ranks differ"
    for apart, _, (within, between) in found:
        assert len(apart) == 6 and max(apart.values()) < 0.1
        assert between and bool(within) == inside


def bytes_of(plan: Any) -> tuple[int, int]:
    run = Hybrid(plan, 4)
    run.run(range(2))
    sent = run.sent()
    run.close()
    return sent


def test_replicas_of_a_node_add_up_before_they_send(worlds: Worlds) -> None:
    """Without a scheme the exchange is hierarchical where replicas share nodes; and half as much travels between nodes."""
    named, usual, flat = (
        worlds.run(4, bytes_of, plan)
        for plan in (
            gw.Policy(default=TWO_BITS, scheme="hierarchical"),
            gw.Policy(default=TWO_BITS),
            gw.Policy(default=TWO_BITS, scheme="flat"),
        )
    )
    assert named == usual
    between, between_flat = (sum(each for _, each in sent) for sent in (usual, flat))
    assert 0.4 * between_flat < between < 0.6 * between_flat


def decided(_: None) -> tuple[str, tuple[int, int]]:
    run = Hybrid("auto", 4)
    run.run(range(2))
    decision, sent = str(run.exchanges.decision), run.sent()
    run.close()
    return decision, sent


def test_auto_among_replicas_that_share_nodes(worlds: Worlds) -> None:
    found = worlds.run(4, decided, None)
    assert len({decision for decision, _ in found}) == 1
    assert all(within and between for _, (within, between) in found)


HIERARCHICAL = gw.Policy(default=FIFTHS, scheme="hierarchical")


def saved(folder: str, plan: Any, replicas: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """The exact gradients of a large step; those that arrived, which left residuals that are saved; a digest of later ones."""
    native, ours = Hybrid(None, replicas), Hybrid(plan, replicas)
    for each in (native, ours):
        each.run(range(1), scale=30.0)
    dcp.save({"gradwire": ours.exchanges}, checkpoint_id=folder)
    first, ours.sums = ours.sums, {}
    ours.run(range(1, 5))
    ours.close()
    return native.sums, first, digest(ours.sums.values())


def resumed(folder: str, plan: Any, replicas: int) -> str:
    run = Hybrid(plan, replicas)
    dcp.load({"gradwire": run.exchanges}, checkpoint_id=folder)
    run.run(range(1, 5))
    run.close()
    return digest(run.sums.values())


def drained(folder: str, plan: Any, replicas: int) -> dict[str, torch.Tensor]:
    """The gradients of later steps on another number of ranks, which have none of their own."""
    run = Hybrid(plan, replicas)
    run.exchanges.load_state_dict(fsdp2.saved_states(folder))
    run.run(range(12), scale=0.0)
    run.close()
    return run.sums


@pytest.mark.parametrize(("plan", "replicas"), [(HIERARCHICAL, 4), (FIFTHS, 2)], ids=["hierarchical", "between shards"])
def test_residuals_are_kept_in_states(worlds: Worlds, tmp_path: Path, plan: Any, replicas: int) -> None:
    """The same ranks go on bit for bit. Two ranks without replicas on one node send what four had not sent."""
    folder = str(tmp_path / "saved")
    (exact, first, _), *_ = ends = worlds.run(4, saved, folder, plan, replicas)
    assert worlds.run(4, resumed, folder, plan, replicas) == [later for _, _, later in ends]
    later = worlds.run(2, drained, folder, FIFTHS, 2)[0]
    missing = {name: (whole - first[name]).norm() / whole.norm() for name, whole in exact.items()}
    left = {name: (whole - first[name] - later[name]).norm() / whole.norm() for name, whole in exact.items()}
    assert max(missing.values()) > 0.1 and max(left.values()) < 1e-5


def misused() -> str:
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(gw.PlanError) as caught:
        fsdp2.compress(model, gw.Policy(default=gw.QSGD(bits=4), scheme="hierarchical"))
    return str(caught.value)


def test_reduce_scatters_have_one_scheme(worlds: Worlds) -> None:
    for told in worlds.run(2, misused):
        assert told.startswith("the policy's scheme is 'hierarchical', and reduce-scatters of FSDP2 travel by 'alltoall'")


def with_compressed_shards() -> float:
    """The largest difference from FSDP2's own gradients where gradwire does the reduce-scatters, too."""
    native, ours = Hybrid(None, 2), Hybrid(gw.Identity(), 2)
    inside = fsdp2.compress(ours.model, gw.Identity())
    for each in (native, ours):
        each.run(range(3))
    for each in (inside, ours):
        each.close()
    return max((ours.sums[name] - whole).abs().max().item() for name, whole in native.sums.items())


def test_replicas_average_shards_that_gradwire_reduced(worlds: Worlds) -> None:
    assert max(worlds.run(4, with_compressed_shards)) < 1e-5


def shared_after_a_forward() -> str:
    """A digest of all parameters, of which nodes had their own before."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Sequential(nn.Linear(24, 9), nn.Tanh(), nn.Linear(9, 4))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["inside"])
    with torch.no_grad():
        model(torch.ones(1, 24))
    exchanges = fsdp2.replicate(model, mesh["between"].get_group(), gw.Identity())
    reshard(model)  # as the end of a backward does
    found = digest(each.full_tensor() for each in model.parameters())
    exchanges.close()
    return found


def test_replicas_begin_alike_after_a_forward(worlds: Worlds) -> None:
    """The outermost module keeps whole parameters after a forward."""
    assert len({*worlds.run(4, shared_after_a_forward)}) == 1
