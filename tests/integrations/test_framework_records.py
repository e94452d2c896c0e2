"""`record` of DDP's hook and of FSDP2's exchanges, and the page that `gradwire report` makes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest, mesh_of, seeded

import gradwire as gw
from gradwire.integrations import fsdp2
from gradwire.record.run import Run
from gradwire.report.modules import module_rows
from gradwire.report.page import write_report
from gradwire.report.steps import predicted

STEPS = 6


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))


def train(model: nn.Module, steps: int, recording: Any = None) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        loss = model(torch.randn(8, 40, generator=seeded(dist.get_rank(), step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recording is not None:
            recording.log(loss=loss)
    shards = (each.to_local() if isinstance(each, dist.tensor.DTensor) else each for each in model.parameters())
    return digest(shards)


def in_ddp(folder: str | None, plan: Any, steps: int) -> str:
    model = DistributedDataParallel(network(), bucket_cap_mb=1)
    state = gw.DDPState(plan)
    model.register_comm_hook(state, gw.ddp_hook)
    if folder is None:
        return train(model, steps)
    with state.record(folder, error_steps=2) as recording:
        return train(model, steps, recording)


def test_a_record_of_ddps_hook_is_what_happened(worlds: Worlds, tmp_path: Path) -> None:
    plan = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=4)))
    assert worlds.run(2, in_ddp, str(tmp_path), plan, STEPS) == worlds.run(2, in_ddp, None, plan, STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    run = Run.read(tmp_path)
    assert (run.model, run.world_size, len(run.steps)) == ("Sequential", 2, STEPS)
    assert run.decision.by.startswith("a policy with ErrorFeedback(QSGD(bits=4")
    assert all(step.loss is not None and step.step_us > 0 for step in run.steps)
    assert 0 < run.wire_bytes < run.gradient_bytes / 4
    assert all(bucket.exchange_us is not None and bucket.exchange_us > 0 for bucket in run.buckets)
    weight = next(tensor for tensor in run.tensors if tensor.name == "2.weight")
    assert weight.error and all(0.05 < error < 0.4 for _, error in weight.error)
    assert run.timeline is not None and {event.tensor for event in run.timeline.events if event.tensor} == set(run.plan.tensors)
    rows = {row.name: row for row in module_rows(run, None)}
    assert rows.keys() == {"0", "2", "4"} and rows["2"].error is not None
    assert sum(row.wire_bytes for row in rows.values()) == pytest.approx(run.wire_bytes)
    assert sum(row.gradient_bytes for row in rows.values()) == pytest.approx(run.gradient_bytes)
    assert "A step takes" in write_report(tmp_path)


def test_under_auto_the_report_predicts_the_step(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, in_ddp, str(tmp_path), "auto", 25)
    run = Run.read(tmp_path)
    assert run.decision.by.startswith("plan='auto', in step ") and run.decision.alternatives
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json" for name in ("run", "profile", "cluster", "costs")}
    timeline = predicted(run, tmp_path).timeline
    assert timeline is not None and timeline.step_us > 0
    assert all(row.predicted_us and row.measured_us for row in module_rows(run, timeline))


def sharded(**options: Any) -> nn.Sequential:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def in_fsdp2(folder: str | None, plan: Any, replicas: bool) -> str:
    if replicas:
        mesh = mesh_of(2, 2)
        model = sharded(mesh=mesh["inside"])
        exchanges = fsdp2.replicate(model, mesh["between"].get_group(), plan)
    else:
        model = sharded()
        exchanges = fsdp2.compress(model, plan)
    if folder is None:
        ended = train(model, STEPS)
    else:
        with exchanges.record(folder, error_steps=2) as recording:
            ended = train(model, STEPS, recording)
    exchanges.close()
    return ended


@pytest.mark.parametrize("replicas", [False, True])
def test_a_record_of_fsdp2_has_a_row_for_each_module(worlds: Worlds, tmp_path: Path, replicas: bool) -> None:
    plan, ranks = gw.ErrorFeedback(gw.QSGD(bits=4)), 4 if replicas else 2
    assert worlds.run(ranks, in_fsdp2, str(tmp_path), plan, replicas) == worlds.run(ranks, in_fsdp2, None, plan, replicas)
    run = Run.read(tmp_path)
    assert (run.model, run.world_size, len(run.steps)) == ("Sequential", 2, STEPS)
    rows = {row.name: row for row in module_rows(run, None)}
    assert rows.keys() == {"0", "2", "model"}
    for row in rows.values():
        assert row.measured_us is not None and row.measured_us > 0 and row.error is not None and 0.05 < row.error < 0.4
    # one of two phases, to one of two ranks, or half of the model in both phases
    assert 0.055 < run.wire_bytes / (4 * sum(each.numel() for each in network().parameters())) < 0.075
    assert run.timeline is not None and {event.bucket for event in run.timeline.events} == {-1, 0, 1, 2}
    assert "A step takes" in write_report(tmp_path)


def test_auto_of_fsdp2_predicts_each_module(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, in_fsdp2, str(tmp_path), "auto", False)
    run = Run.read(tmp_path)
    assert run.decision.words and "plan='auto' sends" in run.decision.words[0]
    assert all(row.predicted_us for row in module_rows(run, None))
