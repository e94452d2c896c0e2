"""Residuals follow the scale of a GradScaler: what was not sent of a scaled gradient is of the new scale."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import Threads, built, here
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.exchange import followed

BACKOFFS = 4


def first_update(policy: Any, scaled: bool) -> tuple[str, float]:
    """The first steps are not finite and do not count, so the scaler halves its scale as often. Digest of the first update that
    counts, and the scale. Without a scaler the script leaves the same updates out, and says so."""
    torch.manual_seed(0)
    model = Given([(40, 50), (30, 20)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = gw.parallelize(model, optimizer, plan=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
    for step in range(BACKOFFS + 1):
        gradients = model.random_gradients(dist.get_rank(), step)
        if step < BACKOFFS:
            gradients[0].mul_(1000)
            gradients[1][0, 0] = torch.inf
        optimizer.zero_grad()
        scaler.scale(model(gradients)).backward()
        if scaled or step == BACKOFFS:
            scaler.step(optimizer)
            scaler.update()
        else:
            handle.drop_residuals()
    handle.flush()
    longest = max(parameter.detach().abs().max().item() for parameter in model.parameters())
    assert longest < 100, f"{longest}: residuals of steps that were left out are in the update"
    weights = digest(model.parameters())
    handle.detach()
    return weights, scaler.get_scale()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheme": "allgather"},
        {"residual_dtype": "int8"},
        {"residual_dtype": "bfloat16"},
        {"schedule": "pipelined"},
    ],
    ids=str,
)
def test_after_the_scale_fell_updates_are_those_without_a_scale(worlds: Worlds, options: dict[str, str]) -> None:
    policy = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)), **options)
    plain = worlds.run(2, first_update, policy, False)
    scaled = worlds.run(2, first_update, policy, True)
    assert {weights for weights, _ in scaled} == {weights for weights, _ in plain}
    assert {scale for _, scale in scaled} == {2.0**8}


def gone_on(other_scale: float) -> str:
    """Digest of the gradients after a state was loaded. The scale of the step between its save and its load is another one."""
    model = built(0, lambda: Given([(40, 50), (30, 20)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)))
    handle, saved = gw.parallelize(model, optimizer, plan=plan, process_group=here.group), dict[str, torch.Tensor]()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, scale in enumerate((2.0**10, other_scale, 2.0**10)):
        if step:
            scaler.update(scale)
        if step == 2:
            handle.load_state_dict(saved)
        optimizer.zero_grad()
        scaler.scale(model(model.random_gradients(here.rank, step))).backward()
        if step == 0:
            saved = handle.state_dict()
    gradients = digest(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    handle.detach()
    return gradients


def test_residuals_that_were_loaded_are_of_the_next_scale(threads: Threads) -> None:
    assert threads.run(2, gone_on, 2.0**4) == threads.run(2, gone_on, 2.0**10)


def after_a_step_that_was_left_out(spec: gw.Spec, scaled: bool) -> tuple[bool, bool, bool]:
    """Whether momentum stays, times the change of the scale, whether no residual is left, and whether copies follow alike."""
    model = built(0, lambda: Given([(40, 50)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Policy(default=spec), process_group=here.group)
    for step in range(2):
        model.zero_grad()
        model(model.random_gradients(here.rank, step)).backward()
    residuals = handle.session.exchange.residuals
    before = residuals.carried()
    copies = followed(before, 0.5, left_out=True)
    if scaled:
        residuals.follow(0.5, left_out=True)
    else:
        handle.drop_residuals()
    after = residuals.carried()
    handle.detach()
    momentum = before["momentum/p0"]
    kept = bool(momentum.any()) and torch.equal(after["momentum/p0"], momentum * (0.5 if scaled else 1.0))
    dropped = not any(value.any() for key, value in after.items() if key.startswith("residual/"))
    return kept, dropped, list(copies) == ["momentum/p0"] and torch.equal(copies["momentum/p0"], momentum * 0.5)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("spec", [gw.Signum(), gw.DGC(0.1)], ids=repr)
def test_a_step_that_is_left_out_drops_residuals_and_keeps_momentum(threads: Threads, spec: gw.Spec, scaled: bool) -> None:
    assert threads.run(2, after_a_step_that_was_left_out, spec, scaled) == [(True, True, True)] * 2


def refusal(spec: gw.Spec, scale: float) -> tuple[str, float]:
    """The error of a backward of a scaled loss, and the gradient of one without a scaler after it."""
    model = Given([8], seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = gw.parallelize(model, optimizer, plan=gw.Policy(default=spec, exempt_vectors=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    words, gradient = "", [torch.full((8,), 0.75)]
    try:
        scaler.scale(model(gradient)).backward()
    except gw.StepStateError as error:
        words = str(error)
        handle.reset()
        optimizer.zero_grad()
        model(gradient).backward()
    assert model.p0.grad is not None
    mean = model.p0.grad[0].item()
    handle.detach()
    return words, mean


FIXED = {
    gw.SignSGD(): 1.0,
    gw.Signum(): 1.0,
    gw.DGC(1.0, momentum=0.0, clip=1.0): 0.25,
    gw.TwoBit(threshold=0.5): 0.5,
    gw.ErrorFeedback(gw.Threshold(0.5, capacity=1.0)): 0.75,
}


@pytest.mark.parametrize("spec", FIXED, ids=repr)
def test_a_spec_with_a_magnitude_of_its_own_refuses_a_loss_scale(worlds: Worlds, spec: gw.Spec) -> None:
    for words, mean in worlds.run(2, refusal, spec, 2.0**16):
        assert words.startswith("a GradScaler multiplied the loss by 65536") and "bfloat16" in words
        assert mean == FIXED[spec]


def test_a_loss_scale_of_one_is_no_scale(worlds: Worlds) -> None:
    for words, mean in worlds.run(2, refusal, gw.SignSGD(), 1.0):
        assert (words, mean) == ("", 1.0)


def energies_after(counts: tuple[int, int], schedule: str) -> list[torch.Tensor]:
    """The energies after loops of different lengths. The scale changes while a rank is without a batch."""
    model = built(0, lambda: Given([(40, 50), (30, 20)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    spec = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls"), weights=0.9)
    plan = gw.Policy(default=spec, scheme="alltoall", schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with handle.join():
        for step in range(counts[here.rank]):
            if step:
                scaler.update(2.0 ** (10 + step % 3))
            optimizer.zero_grad()
            scaler.scale(model(model.random_gradients(here.rank, step))).backward()
            scaler.step(optimizer)
    handle.flush()
    state = handle.state_dict()
    handle.detach()
    return [state[f"rank{here.rank}/energy/0/p{number}"] for number in range(2)]


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_a_rank_without_a_batch_in_join_takes_up_the_scale(threads: Threads, schedule: str) -> None:
    first, second = threads.run(2, energies_after, (6, 2), schedule)
    assert all(bool(energy.any()) and torch.equal(energy, other) for energy, other in zip(first, second, strict=True))


def steps_with_one_that_raised(raised_on: int) -> tuple[list[str], str]:
    """The words of what raised in the third step of `handle.join()`, where this rank ends before its backward, and the weights
    after a reset and another step."""
    model, words = built(0, lambda: Given([(40, 50), (30, 20)])), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with handle.join():
        for step in range(4):
            optimizer.zero_grad()
            loss = scaler.scale(model(model.random_gradients(here.rank, step)))
            try:
                if step == 2 and here.rank == raised_on:
                    raise ValueError("no batch")
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
            except (ValueError, gw.GradwireError) as error:
                words.append(str(error))
                handle.reset()
    weights = digest(model.parameters())
    handle.detach()
    return words, weights


def test_a_forward_that_raises_in_join_with_a_scaler_is_mended(threads: Threads) -> None:
    (first, weights), (second, other) = threads.run(2, steps_with_one_that_raised, 1)
    assert second == ["no batch"] and weights == other
    assert len(first) == 1 and "rank 1 left it after 0 of 2 gradients" in first[0]
