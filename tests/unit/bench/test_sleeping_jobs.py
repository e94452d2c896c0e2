"""Jobs on a sleeping accelerator: the same parameters, real gradients in backward order, and time that passes asleep."""

import time

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from gradwire.bench import sleeping_jobs
from gradwire.bench.jobs import make_job
from gradwire.bench.runner import BenchRequest
from gradwire.bench.sleeping_jobs import SleepingJob
from gradwire.engine.torch_hooks.splitting import why_at_once
from gradwire.errors import FormatError


def test_parameters_are_those_of_the_job() -> None:
    real, asleep = (job.make_model(seed=3) for job in (make_job("resnet"), SleepingJob(make_job("resnet"))))
    expected = dict(real.named_parameters())
    found = dict(asleep.named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_are_real_and_come_in_the_order_of_backward() -> None:
    job = SleepingJob(make_job("resnet"))
    model = job.make_model(seed=0)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name.rpartition(".")[0]))
    before = parameters_to_vector(model.parameters()).clone()
    batch = job.batch(rank=1, world_size=2, step=5)
    assert torch.equal(batch[0], job.batch(rank=1, world_size=2, step=5)[0])
    assert not torch.equal(batch[0], job.batch(rank=0, world_size=2, step=5)[0])
    job.loss(model, batch).backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, parameter.detach() * batch[0])
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    assert list(dict.fromkeys(order)) == modules[::-1]
    optimizer = job.make_optimizer(model)
    optimizer.step()
    stepped = parameters_to_vector(model.parameters()) != before
    assert 0 < int(stepped.sum()) <= len(modules) * 2, "one element of each parameter, whose gradient may be 0"
    assert why_at_once(optimizer) == "", "its step can be made layer by layer, as those of torch"


def test_a_step_takes_the_devices_time_and_little_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping_jobs, "GFLOPS", 4.0)
    job = SleepingJob(make_job("resnet"))
    model = job.make_model(seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    batch = job.batch(0, 1, 0)
    wall, cpu = time.perf_counter(), time.process_time()
    loss = job.loss(model, batch)
    forward_s = time.perf_counter() - wall
    loss.backward()
    step_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    expected_s = 6 * numel * job.batch_size / 4e9
    assert forward_s >= 0.9 * expected_s / 3 and step_s >= 0.9 * expected_s
    assert cpu_s < 0.5 * step_s


def test_only_the_benchs_own_jobs_sleep() -> None:
    given = {"links": ["unlimited"], "methods": ["floor"]}
    with pytest.raises(FormatError, match=r"no device 'gpu'\. The devices are cpu, sleeping"):
        BenchRequest(jobs=["mlp"], device="gpu", **given)
    BenchRequest(jobs=["mlp"], device="sleeping", **given)
