"""Weighted means against one process that has the samples of all ranks."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from delayed_steps import momentum, tanh_layers
from threads import Threads, here
from torch import nn
from worlds import Given, digest, seeded

import gradwire as gw

STEPS = 5
EXACT = gw.Identity()
Sizes = Callable[[int], Sequence[int]]
"""The samples of each rank in a step."""


def make_model() -> nn.Sequential:
    return tanh_layers(6, 9, 3)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(step, 77)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def parts(step: int, sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The samples of each rank in a step, which together are those of the one process."""
    inputs, targets = samples(step, sum(sizes))
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def alone(sizes: Sizes, make_optimizer: Any, max_norm: float | None = None) -> list[torch.Tensor]:
    """The weights of one process with all samples."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        loss_of(model, *samples(step, sum(sizes(step)))).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def parallel(
    sizes: Sizes,
    make_optimizer: Any,
    plan: Any = EXACT,
    micro: int = 1,
    max_norm: float | None = None,
    scaled: bool = False,
    joins: bool = False,
) -> list[torch.Tensor]:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)

    def train(step: int) -> None:
        inputs, targets = parts(step, sizes(step))[here.rank]
        pieces = list(zip(inputs.chunk(micro), targets.chunk(micro), strict=True))
        for piece in pieces[:-1]:
            handle.weight(len(piece[0]))
            with handle.no_sync():
                scaler.scale(loss_of(model, *piece) / micro).backward()
        handle.weight(len(pieces[-1][0]))
        scaler.scale(loss_of(model, *pieces[-1]) / micro).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            handle.clip_grad_norm_(max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    if joins:
        with handle.join():
            for step in range(STEPS):
                if sizes(step)[here.rank]:
                    train(step)
    else:
        for step in range(STEPS):
            train(step)
    weights = [parameter.detach().clone() for parameter in model.state_dict().values()]
    handle.detach()
    return weights


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], within: float = 1e-6) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=within, rtol=within)


def four_and_twelve(step: int) -> Sequence[int]:
    return 4, 12


def changing(step: int) -> Sequence[int]:
    return [(4, 12), (1, 1), (13, 2), (3, 5), (30, 1)][step]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"micro": 2},
    "clipped": {"max_norm": 0.05},
    "scaled": {"scaled": True, "max_norm": 0.05},
    "accumulated, scaled": {"micro": 4, "scaled": True},
    "averaged in every step": {"plan": gw.Uniform(EXACT, schedule=gw.LocalSteps(every=1))},
}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_learn_as_one_process_with_all_samples(threads: Threads, way: str) -> None:
    make_optimizer = plain_sgd if way == "averaged in every step" else momentum
    expected = alone(four_and_twelve, make_optimizer, WAYS[way].get("max_norm"))
    for found in threads.run(2, partial(parallel, four_and_twelve, make_optimizer, **WAYS[way])):
        assert_close(found, expected)


def one_to_four(step: int) -> Sequence[int]:
    return 1, 2, 3, 4


@pytest.mark.parametrize("schedule", ["backward", gw.LocalSteps(every=1)], ids=repr)
def test_four_ranks_weigh_one_to_four(threads: Threads, schedule: Any) -> None:
    expected = alone(one_to_four, plain_sgd)
    for found in threads.run(4, parallel, one_to_four, plain_sgd, gw.Uniform(EXACT, schedule=schedule)):
        assert_close(found, expected)


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_batches_may_change_in_each_step(threads: Threads, make_optimizer: Any) -> None:
    expected = alone(changing, make_optimizer)
    first, second = threads.run(2, parallel, changing, make_optimizer)
    assert digest(first) == digest(second)
    assert_close(first, expected, 2e-6)


def ends_early(step: int) -> Sequence[int]:
    return (4, 12) if step < 3 else (0, 12)


def test_ranks_without_a_batch_weigh_nothing_in_join(threads: Threads) -> None:
    expected = alone(ends_early, plain_sgd)
    for found in threads.run(2, partial(parallel, ends_early, plain_sgd, joins=True)):
        assert_close(found, expected)


@pytest.mark.parametrize("spec", [gw.QSGD(bits=8), gw.ErrorFeedback(gw.QSGD(bits=8))], ids=repr)
@pytest.mark.parametrize("sizes", [four_and_twelve, changing])
def test_compressed_means_are_weighted_too(threads: Threads, spec: gw.Spec, sizes: Sizes) -> None:
    plan = gw.Policy(default=spec, exempt_vectors=False)
    weighted, plain = alone(sizes, plain_sgd), alone(lambda step: (16, 16), plain_sgd)
    first, second = threads.run(2, parallel, sizes, plain_sgd, plan)
    assert digest(first) == digest(second)
    assert_close(first, weighted, 0.02)
    assert max((a - b).abs().max().item() for a, b in zip(weighted, plain, strict=True)) > 0.04, "the test sees no weights"


def signs_of_a_weighted_vote(weights: Sequence[Sequence[float]]) -> list[float]:
    """The gradient of each step, by signs, where all ranks have the gradient -1 and these weights."""
    model = nn.Linear(4, 1, bias=False)
    plan = gw.Policy(default=gw.SignSGD(), exempt_vectors=False)
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group)
    seen = []
    for each in weights:
        handle.weight(each[here.rank])
        model(-torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is not None
        seen.append(model.weight.grad[0, 0].item())
        model.zero_grad()
    handle.detach()
    return seen


def test_votes_are_not_multiplied_by_weights(threads: Threads) -> None:
    weights = [(32, 32), (32, 32), (48, 80), (32, 32)]
    assert threads.run(2, signs_of_a_weighted_vote, weights) == [[-1.0] * 4] * 2


def without_a_batch(schedule: Any, joins: bool) -> list[str]:
    """The errors where rank 1 has no batch and the plan takes votes, of join() or of a step; the next step counts."""
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    plan = gw.Policy(default=gw.Signum(), exempt_vectors=False, schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    words = []
    for count in (0, 4):
        try:
            if joins:
                with handle.join():
                    raise AssertionError
            handle.weight(count if here.rank else 4)
            loss_of(model, *samples(0, 4)).backward()
            optimizer.step()
        except gw.StepStateError as error:
            words.append(str(error))
            if not joins:
                handle.reset()
        optimizer.zero_grad()
    handle.detach()
    return words


@pytest.mark.parametrize("schedule", ["backward", gw.LocalSteps(every=1)], ids=repr)
def test_a_vote_in_which_a_rank_has_no_batch_is_void_on_all(threads: Threads, schedule: Any) -> None:
    first, second = threads.run(2, without_a_batch, schedule, False)
    assert first == second and len(first) == 1
    assert "rank 1 has no batch" in first[0] and "EFSignSGD" in first[0]


def test_a_plan_with_votes_refuses_join(threads: Threads) -> None:
    for words in threads.run(2, without_a_batch, "backward", True):
        assert len(words) == 2 and words[0].startswith("handle.join() was called, and the plan has Signum()")


def first_mean(spec: gw.Spec, weight: float, schedule: Any) -> list[float]:
    """The mean in the first two steps, of gradients of 0.4; in the local schedule of changes by a learning rate of 1."""
    model = nn.Linear(64, 1, bias=False)
    plan = gw.Policy(default=spec, exempt_vectors=False, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    seen = []
    for _ in range(2):
        before = model.state_dict()["weight"].clone()
        handle.weight(weight)
        model(torch.full((1, 64), 0.4)).sum().backward()
        optimizer.step()
        seen.append((before - model.state_dict()["weight"]).amax().item())
        optimizer.zero_grad()
    handle.detach()
    return seen


@pytest.mark.parametrize("schedule", ["backward", gw.LocalSteps(every=1)], ids=repr)
@pytest.mark.parametrize(
    ("spec", "sent"),
    [
        (gw.Cast("float16"), [0.4, 0.4]),
        (gw.ErrorFeedback(gw.Cast("float16")), [0.4, 0.4]),
        (gw.ErrorFeedback(gw.Threshold(0.5, capacity=1.0)), [0.0, 0.8]),
    ],
    ids=repr,
)
def test_the_first_weighted_step_sends_what_later_ones_send(
    threads: Threads, spec: gw.Spec, sent: list[float], schedule: Any
) -> None:
    for seen in threads.run(2, first_mean, spec, 1e6, schedule):
        assert seen == pytest.approx(sent, rel=1e-3)


# ---- local steps


def averaged(sizes: Sizes, every: int) -> list[torch.Tensor]:
    """Ranks train alone, and the weighted mean of their weights replaces them after every so many steps."""
    ranks = len(sizes(0))
    models = [make_model() for _ in range(ranks)]
    optimizers = [momentum(model.parameters()) for model in models]
    counts = [0] * ranks
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(model, *parts(step, sizes(step))[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts[rank] += sizes(step)[rank]
        if (step + 1) % every == 0:
            columns = list(zip(*(model.parameters() for model in models), strict=True))
            seen = [
                sum(count * own.detach() for count, own in zip(counts, column, strict=True)) / sum(counts) for column in columns
            ]
            for model in models:
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(seen), model.parameters())
            counts = [0] * ranks
    return seen


@pytest.mark.parametrize("sizes", [four_and_twelve, changing])
@pytest.mark.parametrize("every", [2, 3])
def test_local_steps_weigh_the_samples_since_the_last_exchange(threads: Threads, sizes: Sizes, every: int) -> None:
    expected = averaged(sizes, every)
    for found in threads.run(2, parallel, sizes, momentum, gw.Uniform(EXACT, schedule=gw.LocalSteps(every=every))):
        assert_close(found, expected, 2e-6)


def resumed(plan: Any, at: int) -> list[str]:
    """W at the end of a run, and of one that went on from its state after `at` steps."""
    ends, saved = [], {}
    for begin in (0, at):
        model = make_model()
        optimizer = momentum(model.parameters())
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        if begin:
            handle.load_state_dict(saved["handle"])
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(begin, STEPS):
            if step == at and not begin:
                saved = {"handle": handle.state_dict(), "model": deepcopy(model.state_dict())}
                saved["optimizer"] = deepcopy(optimizer.state_dict())
            inputs, targets = parts(step, changing(step))[here.rank]
            handle.weight(len(inputs))
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(digest(model.state_dict().values()))
        handle.detach()
    return ends


@pytest.mark.parametrize("schedule", ["backward", gw.LocalSteps(every=2), gw.LocalSteps(every=4, fragments=2, delay=1)], ids=repr)
@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_run_goes_on_bit_for_bit(threads: Threads, schedule: Any, at: int) -> None:
    plan = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)), exempt_vectors=False, schedule=schedule, bucket_bytes=1)
    for whole, again in threads.run(2, resumed, plan, at):
        assert whole == again


SPARSE = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.25)), scheme="allgather")


def part_sent(weight: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The state after a step that sent a quarter of the mean, and the rest of the mean."""
    model = Given([16], seed=0)
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=SPARSE, process_group=here.group)
    handle.weight(weight)
    gradient = torch.arange(1.0, 17.0)
    model([gradient]).backward()
    assert model.p0.grad is not None
    owed, state = gradient - model.p0.grad, handle.state_dict()
    handle.detach()
    return state, owed


def rest_received(state: dict[str, torch.Tensor], weight: float) -> torch.Tensor:
    """The sum of the means of four steps without gradients, which go on from a state."""
    model = Given([16], seed=0)
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=SPARSE, process_group=here.group)
    handle.load_state_dict(state)
    total = torch.zeros(16)
    for _ in range(4):
        handle.weight(weight)
        model([torch.zeros(16)]).backward()
        assert model.p0.grad is not None
        total += model.p0.grad
        model.zero_grad()
    handle.detach()
    return total


@pytest.mark.parametrize(("ranks", "weight"), [(2, 16.0), (3, 32.0 / 3), (6, 32.0 / 6)])
def test_on_other_ranks_what_is_owed_keeps_its_size(threads: Threads, ranks: int, weight: float) -> None:
    saved = threads.run(4, part_sent, 8.0)
    state = {key: value for own, _ in saved for key, value in own.items()}
    for received in threads.run(ranks, rest_received, state, weight):
        torch.testing.assert_close(received, saved[0][1])


def unequal_then_short(step: int) -> Sequence[int]:
    return ((64, 32), (64, 96), (2, 2), (64, 64), (1, 5), (64, 0))[step]


def kept_and_given(spec: gw.Spec) -> tuple[list[float], list[float]]:
    """The sum of all means that were sent, and of all that there are, and the longest of those sent."""
    plan = gw.Policy(default=spec, exempt_vectors=False)
    model = Given([512], seed=0)
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group)
    sent, given, longest = torch.zeros(512), torch.zeros(512), 0.0
    for step in range(50):
        sizes = unequal_then_short(step) if step < 6 else (64, 64)
        gradients = [torch.randn(512, generator=seeded(step, rank)) * (step < 6) for rank in range(2)]
        handle.weight(sizes[here.rank])
        model([gradients[here.rank]]).backward()
        assert model.p0.grad is not None
        sent += model.p0.grad
        longest = max(longest, float(model.p0.grad.norm()))
        given += sum(size * gradient for size, gradient in zip(sizes, gradients, strict=True)) / sum(sizes)
        model.zero_grad()
    handle.detach()
    return [float((sent - given).norm() / given.norm())], [longest / float(given.norm())]


@pytest.mark.parametrize("spec", [gw.ErrorFeedback(gw.QSGD(bits=2)), gw.ErrorFeedback(gw.TopK(0.1))], ids=repr)
def test_a_short_batch_makes_no_long_step_of_what_is_owed(threads: Threads, spec: gw.Spec) -> None:
    """What was not sent yet is part of earlier means, and weighs as they did."""
    for (lost,), (longest,) in threads.run(2, kept_and_given, spec):
        assert lost < 1e-3
        assert longest < 1.5


# ---- ranks that disagree, and batches that do not count


def spoiled(plan: Any, weight: float, bad: float) -> list[torch.Tensor]:
    """Rank 1 has gradients of `bad`, and this weight; rank 0 has ones."""
    model = nn.Linear(3, 2)
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group)
    handle.weight(weight if here.rank else 5)
    (model(torch.ones(1, 3)).sum() * (bad if here.rank else 1.0)).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    handle.detach()
    return grads


@pytest.mark.parametrize("plan", [EXACT, gw.Policy(default=gw.QSGD(bits=4), exempt_vectors=False)], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, 1e9])
def test_a_rank_that_weighs_nothing_changes_nothing(threads: Threads, plan: Any, bad: float) -> None:
    for grads in threads.run(2, spoiled, plan, 0, bad):
        for grad in grads:
            torch.testing.assert_close(grad, torch.ones_like(grad))


def without_samples_at_first(bad: float | None) -> list[torch.Tensor]:
    """The weights after two local steps. In the first one rank 1 has no samples, and gradients of `bad`; None: no gradient."""
    model = make_model()
    optimizer = momentum(model.parameters())
    plan = gw.Uniform(EXACT, schedule=gw.LocalSteps(every=2))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(2):
        empty = here.rank == 1 and step == 0
        handle.weight(0 if empty else 4)
        loss = loss_of(model, *samples(10 * here.rank + step, 4))
        if not empty:
            loss.backward()
        elif bad is not None:
            (loss * bad).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    handle.detach()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("bad", [math.nan, 1e9])
def test_a_local_step_without_samples_changes_nothing(threads: Threads, bad: float) -> None:
    assert digest(threads.run(2, without_samples_at_first, bad)[0]) == digest(threads.run(2, without_samples_at_first, None)[0])


def test_a_step_in_which_no_rank_has_a_sample_has_zeros(threads: Threads) -> None:
    def nobody() -> list[torch.Tensor]:
        model = nn.Linear(3, 2)
        handle = gw.parallelize(model, plan=EXACT, process_group=here.group)
        handle.weight(0)
        model(torch.ones(1, 3)).sum().backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        handle.detach()
        return grads

    for grads in threads.run(2, nobody):
        assert all(not grad.any() for grad in grads)


def disagreeing(schedule: Any) -> tuple[list[str], str]:
    """The errors of ranks where rank 0 alone gives a weight in one step, and W after both go on without."""
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(EXACT, schedule=schedule), process_group=here.group)
    words = []
    for step in range(4):
        if step == 1 and here.rank == 0:
            handle.weight(4)
        try:
            loss_of(model, *parts(step, (8, 8))[here.rank]).backward()
            optimizer.step()
        except gw.StepStateError as error:
            words.append(str(error))
            handle.reset()
        optimizer.zero_grad()
    end = digest(model.state_dict().values())
    handle.detach()
    return words, end


@pytest.mark.parametrize("schedule", ["backward", gw.LocalSteps(every=1)], ids=repr)
def test_a_step_that_some_ranks_weigh_is_void_on_all(threads: Threads, schedule: Any) -> None:
    (first, end), (second, other) = threads.run(2, disagreeing, schedule)
    assert first == second and len(first) == 1
    assert "rank 0 gave its batch the weight 4" in first[0] and "rank 1 gave none" in first[0]
    assert end == other


def left(schedule: Any, at: int) -> list[torch.Tensor]:
    """Rank 0 has an exception in this step, after it gave its batch a weight."""
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(EXACT, schedule=schedule), process_group=here.group)
    for step in range(STEPS):
        inputs, targets = parts(step, four_and_twelve(step))[here.rank]
        handle.weight(len(inputs))
        try:
            loss = loss_of(model, inputs, targets)
            if step == at and here.rank == 0:
                raise RuntimeError
            loss.backward()
            optimizer.step()
        except (RuntimeError, gw.StepStateError):
            handle.reset()
        optimizer.zero_grad()
    weights = [parameter.clone() for parameter in model.state_dict().values()]
    handle.detach()
    return weights


@pytest.mark.parametrize("at", [0, 1])
def test_a_batch_that_was_left_does_not_count(threads: Threads, at: int) -> None:
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    for step in (each for each in range(STEPS) if each != at):
        loss_of(model, *samples(step, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in threads.run(2, left, "backward", at):
        assert_close(found, list(model.state_dict().values()))
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    for step in range(STEPS):
        inputs, targets = parts(step, (4, 12))[1] if step == at else samples(step, 16)
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in threads.run(2, left, gw.LocalSteps(every=1), at):
        assert_close(found, list(model.state_dict().values()))


def refused(schedule: Any, samples: Any) -> str:
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(EXACT, schedule=schedule), process_group=here.group)
    with pytest.raises(gw.StepStateError) as caught:
        handle.weight(samples)
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("samples", [-3, math.nan, math.inf, "4", None, True, torch.ones(2)], ids=repr)
def test_impossible_weights_are_refused_by_name(threads: Threads, samples: Any) -> None:
    (words,) = threads.run(1, refused, "backward", samples)
    assert words.startswith(f"handle.weight({samples!r}): ") and "at least 0" in words


@pytest.mark.parametrize("schedule", ["pipelined", gw.Pipelined(shard_optimizer=True), gw.Delayed()], ids=repr)
def test_schedules_whose_means_are_not_weighted_refuse(threads: Threads, schedule: Any) -> None:
    for words in threads.run(2, refused, schedule, 4):
        assert "whose means are not weighted" in words


def other_schedules() -> list[str]:
    """Why other schedules cannot run, before and after the script gives a weight."""
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=EXACT, process_group=here.group)
    session, words = handle.session, []
    for _ in range(2):
        for schedule in (gw.Pipelined(), gw.LocalSteps(every=2)):
            words.append(session.why_not(gw.Uniform(EXACT, schedule=schedule).plan(session.tensors, 2)))
        handle.weight(4)
    handle.detach()
    return words


def test_auto_leaves_out_schedules_whose_means_are_not_weighted(threads: Threads) -> None:
    for before, _, pipelined, local in threads.run(2, other_schedules):
        assert before == local == "" and "pipelined schedule does not weigh batches" in pipelined
