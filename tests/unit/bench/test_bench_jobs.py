"""Jobs are what they promise: the same for every method, other for every rank, of the stated size."""

import pytest
import torch

from gradwire.bench.jobs import digits, make_job
from gradwire.bench.names import JOB_NAMES
from gradwire.errors import FormatError

PARAMETERS = {
    "transformer": 6_087_168,
    "mlp": 5_523_850,
    "resnet": 2_797_034,
    "embeddings": 7_745_920,
    "bert": 25_383_936,
}


@pytest.mark.parametrize("name", JOB_NAMES)
def test_parameters_are_as_many_as_promised(name):
    model = make_job(name).make_model(seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", JOB_NAMES)
def test_model_depends_on_its_seed_alone(name):
    torch.manual_seed(1)
    first = make_job(name).make_model(seed=3).state_dict()
    before = torch.get_rng_state()
    second = make_job(name, seed=5).make_model(seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = make_job(name).make_model(seed=4).state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", JOB_NAMES)
def test_batches_are_deterministic_and_differ_by_rank_step_and_seed(name):
    batch = make_job(name).batch(rank=1, world_size=3, step=7)
    again = make_job(name).batch(rank=1, world_size=3, step=7)
    assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
    others = [
        make_job(name).batch(rank=0, world_size=3, step=7),
        make_job(name).batch(rank=1, world_size=3, step=8),
        make_job(name, seed=1).batch(rank=1, world_size=3, step=7),
    ]
    assert all(not torch.equal(batch[0], other[0]) for other in others)


def test_ranks_own_disjoint_samples():
    job = make_job("mlp")
    images, _ = digits()
    distinct, identity = torch.unique(images, dim=0, return_inverse=True)
    assert len(distinct) == len(images)
    owned = []
    for rank in range(3):
        batches = [job.batch(rank, 3, step)[0] for step in range(3)]
        owned.append({tuple(row.tolist()) for row in torch.cat(batches)})
    assert not owned[0] & owned[1] and not owned[0] & owned[2] and not owned[1] & owned[2]
    assert identity.numel() == 1797


def test_transformer_predicts_the_next_character_of_its_own_part():
    job = make_job("transformer")
    inputs, targets = job.batch(rank=1, world_size=2, step=0)
    assert inputs.shape == targets.shape == (job.batch_size, job.context)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    second_half = "".join(map(chr, job.text[len(job.text) // 2 :].tolist()))
    assert all("".join(map(chr, row.tolist())) in second_half for row in inputs)


@pytest.mark.parametrize("name", JOB_NAMES)
def test_a_few_steps_lower_the_loss(name):
    job = make_job(name)
    model = job.make_model(0)
    optimizer = job.make_optimizer(model)
    batch = job.batch(0, 1, 0)
    losses = []
    for _ in range(4):
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_unknown_job_is_named():
    with pytest.raises(FormatError, match="'vgg'"):
        make_job("vgg")
