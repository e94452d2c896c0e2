"""The local schedule under scripts that do more than a plain loop."""

import threading
import warnings
from typing import Any

import pytest
import torch
from delayed_steps import momentum
from test_delayed import adam, make_model
from test_delayed_scripts import Odd
from test_local import EXACT, TWO_BITS, own_weights, step_on, training
from threads import Threads, built, here
from worlds import Given, Worlds, digest, seeded

import gradwire as gw


def uneven(schedule: gw.LocalSteps) -> tuple[str, str, int]:
    model, optimizer, handle = training(EXACT, schedule)
    for _ in range(2):
        with handle.join():
            for step in range(9 if here.rank else 5):
                step_on(model, optimizer, step)
    parts = digest(model.state_dict().values()), own_weights(model), handle.stats().steps
    handle.detach()
    return parts


@pytest.mark.parametrize("schedule", [gw.LocalSteps(every=4), gw.LocalSteps(every=4, delay=2, mixing=0.5)], ids=repr)
def test_ranks_may_have_different_numbers_of_batches(threads: Threads, schedule: gw.LocalSteps) -> None:
    ends = threads.run(3, uneven, schedule)
    assert len({weights for weights, *_ in ends}) == 1
    assert {steps for *_, steps in ends} == {6}  # two of rank 1's and 2's steps, and one of what all have left, twice


def resumed_after_join(schedule: gw.LocalSteps) -> tuple[str, str]:
    """A run with loops of different length before steps that all make, and one that takes up its state between them."""
    runs = [training(TWO_BITS, schedule, sgd) for _ in range(2)]
    (model, optimizer, handle), (again, _, other) = runs
    with handle.join():
        for step in range(9 if here.rank else 5):
            step_on(model, optimizer, step)
    state = handle.state_dict()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    ends = []
    for trained, stepping, own in runs:
        for step in range(9, 15):
            step_on(trained, stepping, step)
        ends.append(digest(trained.state_dict().values()) + own_weights(trained))
        own.detach()
    return ends[0], ends[1]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("schedule", [gw.LocalSteps(every=4, delay=2), gw.LocalSteps(every=4, delay=1, mixing=0.5)], ids=repr)
def test_a_run_resumed_after_join_goes_on_bit_for_bit(threads: Threads, schedule: gw.LocalSteps) -> None:
    """The last exchange inside join() lands at once, so L does not take it up again."""
    for went_on, resumed in threads.run(2, resumed_after_join, schedule):
        assert went_on == resumed


def memory_told() -> tuple[int, int, int]:
    """Bytes of the model, and what a handle tells before and after the first exchange while L is in use."""
    model, optimizer, handle = training(EXACT, gw.LocalSteps.diloco(every=3))
    step_on(model, optimizer, 0)
    before = handle.stats().memory.weight_bytes
    for step in range(1, 4):
        step_on(model, optimizer, step)
    nbytes, after = (
        sum(p.nbytes for p in (model[0].weight, model[0].bias, model[2].weight, model[2].bias)),
        handle.stats(),
    )
    handle.detach()
    return nbytes, before, after.memory.weight_bytes


def test_the_second_set_of_weights_and_the_outer_momentum_are_told(threads: Threads) -> None:
    for nbytes, before, after in threads.run(2, memory_told):
        assert (before, after) == (nbytes, 2 * nbytes)


def parts() -> tuple[list[str], bool, list[str]]:
    model, rank = Odd(), here.rank
    optimizers = [torch.optim.AdamW(model.first.parameters(), lr=0.01), torch.optim.SGD(
        [p for p in model.parameters() if p is not model.first.weight and p is not model.first.bias], lr=0.1)]  # fmt: skip
    before = model.none.weight.detach().clone()
    plan = gw.Policy(default=TWO_BITS, schedule=gw.LocalSteps(every=12))
    handle = gw.parallelize(model, optimizers, plan=plan, process_group=here.group)
    shown = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(24):
            for part in range(2):  # gradients of two batches are added up
                model(torch.randn(8, 6, generator=seeded(step, part, rank)), branch=rank == 0).square().mean().backward()
            assert handle.clip_grad_norm_(1e9) > 0
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % 12 == 11:
                shown.append(digest(model.state_dict().values()))
    same = torch.equal(before, model.none.weight)
    handle.detach()
    return shown, same, [str(warning.message) for warning in caught]


def test_several_optimizers_unused_parameters_and_statistics(worlds: Worlds) -> None:
    (shown, same, told), (other, *_) = worlds.run(2, parts)
    assert shown == other and len(set(shown)) == 2
    assert same and told == []


def scaled() -> tuple[str, int, float]:
    """Gradients of rank 1 overflow in one step, which its scaler skips."""
    model, optimizer, handle = training(EXACT, gw.LocalSteps(every=3), adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with handle.join():
        for step in range(9):
            generator = seeded(step, here.rank)
            inputs = torch.randn(5, 6, generator=generator)
            if step == 4 and here.rank == 1:
                inputs *= torch.inf
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    end = digest(model.state_dict().values()), handle.stats().steps, scaler.get_scale()
    handle.detach()
    return end


def test_a_scaler_may_skip_steps_of_one_rank(threads: Threads) -> None:
    (weights, steps, first), (other, _, second) = threads.run(2, scaled)
    assert weights == other and steps == 4
    assert first == 2 * second


def with_a_closure() -> str:
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    plan = gw.Uniform(EXACT, schedule=gw.LocalSteps(every=2))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(5, 6, generator=seeded(step, here.rank))).square().mean()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        optimizer.step(closure)  # type: ignore[arg-type]
    assert handle.stats().steps == 2
    end = digest(model.state_dict().values())
    handle.detach()
    return end


def test_the_optimizer_may_take_a_closure(threads: Threads) -> None:
    first, second = threads.run(2, with_a_closure)
    assert first == second


def left_out() -> tuple[str, int]:
    """Rank 1 leaves a backward in which others make a local step, and goes on."""
    model, optimizer, handle = training(EXACT, gw.LocalSteps(every=3))
    for step in range(6):
        try:
            loss = model(torch.randn(5, 6, generator=seeded(step, here.rank))).square().mean()
            if step in (1, 5) and here.rank == 1:
                raise RuntimeError("as ordered")
            loss.backward()
        except RuntimeError:
            handle.reset()
            continue
        optimizer.step()
        optimizer.zero_grad()
    end = digest(model.state_dict().values()), handle.stats().steps
    handle.detach()
    return end


def test_a_local_step_that_was_left_counts(threads: Threads) -> None:
    first, second = threads.run(2, left_out)
    assert first == second and first[1] == 2


def evaluating_with_gradients() -> list[str]:
    model, optimizer, handle = training(EXACT, gw.LocalSteps(every=5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            model.eval()  # and never train(): gradients are of the global weights
            step_on(model, optimizer, step)
    handle.detach()
    return [str(warning.message) for warning in caught]


def test_gradients_of_the_global_weights_are_told_once(worlds: Worlds) -> None:
    for told in worlds.run(2, evaluating_with_gradients):
        assert len(told) == 1 and "Call model.train()" in told[0]


def warned_of(make: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(warning.message) for warning in caught]


def changed_model() -> tuple[str, int, int]:
    """A layer is thawed in the middle of a period."""
    model: Any = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = momentum(model.parameters())
    plan = gw.Uniform(EXACT, schedule=gw.LocalSteps.diloco(every=3))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(9):
        if step == 4:
            model[0].weight.requires_grad_(True)
        step_on(model, optimizer, step)
        if step == 4:
            kept = sum("/outer/" in key for key in handle.state_dict())
    momenta = sum("/outer/" in key for key in handle.state_dict())
    end = digest(model.state_dict().values()), kept, momenta
    handle.detach()
    return end


def test_a_model_may_change(threads: Threads) -> None:
    first, second = threads.run(2, changed_model)
    assert first == second and first[1:] == (3, 4)


def with_growing_buffer(schedule: gw.LocalSteps, grows: bool) -> tuple[str, str, int]:
    """W and L at the end, and the exchanges, of a run in which a buffer grows before each step, or of one without."""
    model, optimizer, handle = training(EXACT, schedule)
    for step in range(11):
        if grows:
            model.register_buffer("seen", torch.zeros(step + 1), persistent=False)
        step_on(model, optimizer, step)
    own = own_weights(model)
    end = digest(model.parameters()), own, handle.stats().steps
    handle.detach()
    return end


@pytest.mark.parametrize(
    "schedule",
    [
        gw.LocalSteps.diloco(every=4),
        gw.LocalSteps(every=4, delay=2, mixing=0.5),
        gw.LocalSteps(every=6, fragments=2, delay=2),
    ],
    ids=repr,
)
def test_what_ranks_learned_outlasts_a_change_of_the_model(threads: Threads, schedule: gw.LocalSteps) -> None:
    """A mask or a cache that grows is a change, and ranks would lose all steps since their last exchange."""
    plain = threads.run(2, with_growing_buffer, schedule, False)
    assert threads.run(2, with_growing_buffer, schedule, True) == plain
    assert plain[0][1] != plain[1][1], "the last steps were exchanged"


def new_layer(model: Any) -> None:
    model.append(built(here.rank, lambda: torch.nn.Linear(3, 3)))


def widened(model: Any) -> None:
    model.double()


def own_weights_after(change: Any) -> tuple[bool, str]:
    """Whether the next forward computes on the same L after a change, and what L is."""
    model, optimizer, handle = training(EXACT, gw.LocalSteps(every=10))
    for step in range(3):
        step_on(model, optimizer, step)
    layers = model[0], model[2]
    before = [layer.weight.detach().clone() for layer in layers]
    change(model)
    model(torch.ones(1, 6, dtype=layers[0].weight.dtype))
    same = all(torch.equal(kept.to(layer.weight.dtype), layer.weight) for kept, layer in zip(before, layers, strict=True))
    handle.detach()
    return same, digest(before)


@pytest.mark.parametrize("change", [new_layer, widened])
def test_parameters_that_stay_keep_their_own_weights(threads: Threads, change: Any) -> None:
    """Also where ranks get rank 0's values of a new layer."""
    (first, own), (second, other) = threads.run(2, own_weights_after, change)
    assert first and second and own != other


@pytest.mark.parametrize("make", [changed_model, with_a_closure])
def test_gradients_of_own_weights_are_not_taken_for_those_of_the_global_ones(worlds: Worlds, make: Any) -> None:
    assert worlds.run(2, warned_of, make) == [[], []]


def void() -> tuple[str, list[float], str]:
    """Rank 1 thaws a layer before an exchange that rank 0 does not; both go on."""
    model: Any = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    plan = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=8)), schedule=gw.LocalSteps(every=3))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    words, far = "", []
    begun = model[2].weight.detach().clone()
    for step in range(9):
        if step == 5 and here.rank == 1:
            model[0].weight.requires_grad_(True)
        try:
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
        except gw.StepStateError as error:
            words = str(error)
            handle.reset()
            model[0].weight.requires_grad_(here.rank == 1)
            model[0].weight.requires_grad_(False)
        optimizer.zero_grad()
        far.append((model.state_dict()["2.weight"] - begun).norm().item())
    end = digest(model.state_dict().values())
    handle.detach()
    return end, far, words


def test_what_a_void_exchange_sent_is_sent_once(threads: Threads) -> None:
    (first, far, words), (second, _, _) = threads.run(2, void)
    assert first == second and "void on all ranks" in words
    assert far[2] == far[5] > 0, "the second exchange did not count"
    assert far[8] / far[2] == pytest.approx(8.5 / 3, rel=0.05), "rank 1 has left one of nine steps of nearly equal gradients"


def learned_and_sent(changes: list[int]) -> tuple[float, float]:
    """Error feedback at 2 bits, and a buffer that is new in step 5 on these ranks: on all of them a change of the model, else a
    void exchange. How far what ranks learned is from what W took up and residuals hold, and the length of the residuals."""
    model = Given([700], seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begun, learned = model.p0.detach().double(), torch.zeros(700, dtype=torch.float64)
    plan = gw.Uniform(TWO_BITS, schedule=gw.LocalSteps(every=2))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(8):
        gradients = model.random_gradients(step, here.rank)
        if step == 5 and here.rank in changes:
            model.register_buffer("seen", torch.zeros(1))
        try:
            model(gradients).backward()
            learned += gradients[0].double() / here.world_size
            optimizer.step()
        except gw.StepStateError:
            handle.reset()
            if here.rank in changes:
                del model.seen
        optimizer.zero_grad()
    handle.flush()
    left = sum(value.double() for key, value in handle.state_dict().items() if "/residual/" in key)
    here.add_up(learned)
    here.add_up(left)
    off = begun - model.p0.detach().double() - (learned - left)
    handle.detach()
    return float(off.norm()), float(left.norm())


@pytest.mark.parametrize("changes", [[0, 1], [1]], ids=["a change", "a void exchange"])
def test_nothing_is_lost_or_sent_twice_with_error_feedback(threads: Threads, changes: list[int]) -> None:
    for off, left in threads.run(2, learned_and_sent, changes):
        assert left > 1 and off < 1e-3


def detached() -> tuple[bool, bool]:
    model, optimizer, handle = training(EXACT, gw.LocalSteps(every=2, delay=1))
    bare, other = make_model(), momentum(make_model().parameters())
    for step in range(5):
        step_on(model, optimizer, step)
    handle.flush()
    shown = own_weights(model)
    handle.detach()
    hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    plain = all(len(vars(optimizer)[name]) == len(vars(other)[name]) for name in hooks)
    return plain and [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in bare.modules()], (
        shown == own_weights(model)
    )


def test_detach_leaves_an_ordinary_model_with_the_global_weights(threads: Threads) -> None:
    assert threads.run(2, detached) == [(True, True)] * 2


def wrapped() -> str:
    class Around:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.param_groups = optimizer.param_groups

    model = make_model()
    with pytest.raises(gw.PlanError) as caught:
        plan = gw.Uniform(EXACT, schedule="local")
        gw.parallelize(model, Around(momentum(model.parameters())), plan=plan, process_group=here.group)  # type: ignore
    return str(caught.value)


def test_what_has_no_step_hooks_is_refused(threads: Threads) -> None:
    assert all("Around has no step hooks" in told for told in threads.run(2, wrapped))


def of_another_optimizer(schedule: Any, kept: bool) -> tuple[int, str]:
    """The steps that an optimizer makes which the handle was not given, and the error. `kept`: the one that was lives."""
    model, optimizer, handle = training(EXACT, schedule)
    step_on(model, optimizer, 0)
    others = [sgd(model.parameters()), optimizer if kept else None]
    optimizer, steps = others[0], 0
    try:
        for step in range(1, 40):
            step_on(model, optimizer, step)
            steps = step
    except gw.StepStateError as error:
        handle.detach()
        return steps, str(error)
    handle.detach()
    return steps, ""


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("schedule", [gw.LocalSteps(every=4), gw.Delayed()], ids=repr)
def test_steps_of_an_optimizer_that_was_not_passed_are_refused(threads: Threads, schedule: Any, kept: bool) -> None:
    """Nobody counts them, so ranks would train apart without a word, and save weights that have none of it."""
    for steps, words in threads.run(2, of_another_optimizer, schedule, kept):
        assert steps == (9 if kept or schedule.word == "delayed" else 0)  # a step under way keeps the optimizer that makes it
        assert words.startswith("SGD steps '0.weight', and no optimizer steps that was passed: the ")
        assert "handle.detach()" in words


def with_one_of_two() -> int:
    model: Any = make_model()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    plan = gw.Uniform(EXACT, schedule=gw.LocalSteps(every=4))
    handle = gw.parallelize(model, second, plan=plan, process_group=here.group)
    for step in range(24):
        model(torch.randn(5, 6, generator=seeded(step, here.rank))).square().mean().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    steps = handle.stats().steps
    handle.detach()
    return steps


def test_an_optimizer_that_was_not_passed_may_step_beside_one_that_was(threads: Threads) -> None:
    assert threads.run(2, with_one_of_two) == [6, 6]


def with_a_critic(schedule: Any, frozen: bool) -> tuple[int, bool]:
    """The exchanges of a run in which an optimizer that was not passed makes 12 steps for each of the one that was. It has
    parameters of the model too, which get no gradient for its steps; whether they stayed."""
    model: Any = make_model()
    critic, optimizer = torch.nn.Linear(6, 1), sgd(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(EXACT, schedule=schedule), process_group=here.group)
    model[0].requires_grad_(not frozen)
    before = model[0].weight.detach().clone()
    other = sgd([*critic.parameters(), *model[0].parameters()])
    for step in range(8):
        for _ in range(12):
            critic(torch.ones(1, 6)).sum().backward()
            other.step()
            other.zero_grad()
        step_on(model, optimizer, step)
    steps = handle.stats().steps
    handle.detach()
    return steps, torch.equal(model[0].weight, before)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("schedule", "steps"), [(gw.LocalSteps(every=4), 2), (gw.Delayed(), 7)], ids=["local", "delayed"])
def test_an_optimizer_of_other_parameters_may_step_often(threads: Threads, schedule: Any, steps: int, frozen: bool) -> None:
    assert threads.run(2, with_a_critic, schedule, frozen) == [(steps, frozen)] * 2


_FORWARD_AD = threading.Lock()
"""torch has one level of forward differentiation for all threads of a process."""


def with_transforms(schedule: Any, transforms: bool) -> tuple[str, bool]:
    """The weights at the end, and whether gradients that torch.func made between steps were those of the model."""
    model = make_model()
    optimizer = momentum(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(EXACT, schedule=schedule), process_group=here.group)
    inputs, alike = torch.ones(4, 6), True

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = torch.func.functional_call(model, values, (inputs,))
        return outputs.square().mean()

    for step in range(7):
        step_on(model, optimizer, step)
        if transforms:
            values = dict(model.named_parameters())
            found = torch.func.grad(loss)(values)
            with _FORWARD_AD:
                _, along = torch.func.jvp(loss, (values,), ({name: torch.ones_like(each) for name, each in values.items()},))
            slopes = torch.autograd.grad(model(inputs).square().mean(), list(values.values()))
            alike &= all(torch.allclose(one, other) for one, other in zip(found.values(), slopes, strict=True))
            alike &= torch.allclose(along, torch.stack([each.sum() for each in slopes]).sum(), rtol=1e-4)
    weights = digest(model.state_dict().values())
    handle.detach()
    return weights, alike


@pytest.mark.parametrize("schedule", [gw.LocalSteps(every=3), gw.Delayed(k=2)], ids=["local", "delayed"])
def test_transforms_of_functional_calls_see_the_models_gradients_and_change_nothing(threads: Threads, schedule: Any) -> None:
    plain = threads.run(2, with_transforms, schedule, False)
    assert threads.run(2, with_transforms, schedule, True) == plain
    assert all(alike for _, alike in plain)
