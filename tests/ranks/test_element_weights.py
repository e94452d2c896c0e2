"""Error feedback with weights of elements: an exchange against the method written by hand, states, changes of plan."""

from itertools import pairwise

import pytest
import torch
from threads import Threads, built, here
from worlds import seeded

import gradwire as gw
from gradwire.core.schedules import Schedule
from gradwire.kernels import Segment, Segments, reference

FOUR = gw.QSGD(bits=2, scale="ls", levels="lloyd")
SPEC = gw.ErrorFeedback(FOUR, weights=0.98)
NUMELS = {"a": 1000, "b": 7, "c": 4096}
STEPS = 4


def gradients(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Elements of many sizes, the same sizes in every step."""
    sizes, values = seeded(0), seeded(step + 1, rank)
    return {
        name: torch.randn(numel, generator=values) * torch.randn(numel, generator=sizes).mul(2).exp()
        for name, numel in NUMELS.items()
    }


def averaged(spec: gw.Spec, scheme: str, chunk_bytes: int = 0) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The means of each step on one rank, and its state in the end."""
    policy = gw.Uniform(spec, scheme=scheme, bucket_bytes=2**30, edge_bytes=2**30, chunk_bytes=chunk_bytes)
    exchange = gw.Exchange(gradients(0, 0), policy, here.group)
    means = []
    for step in range(STEPS):
        given = gradients(step, here.rank)
        exchange.average_(given)
        means.append(given)
    state = exchange.state_dict()
    exchange.close()
    return means, state


class ByHand:
    """One tensor on all ranks that gather payloads: unweighted encodes of what is divided by the weights."""

    def __init__(self, numel: int, ranks: int, inner: gw.QSGD) -> None:
        self.segments = Segments.of([Segment(0, numel, 1, 0, inner.bits)])
        self.size = inner.payload_bytes([gw.core.ElementRun(numel, inner.bits)], 4)
        self.inner, self.energy, self.residuals = inner, torch.zeros(numel), [torch.zeros(numel) for _ in range(ranks)]

    def weights(self) -> torch.Tensor:
        found = torch.ones_like(self.energy)
        for first, end in pairwise([*range(0, len(found), 128), len(found)]):
            block = self.energy[first:end].double()
            if block.any():
                ratio = (block + 0.01 * block.mean()).sqrt().log2() - (1.01 * block.mean()).sqrt().log2()
                near = (block + 0.01 * block.mean()).sqrt().log2().round() - (1.01 * block.mean()).sqrt().log2().round()
                assert bool(((near - ratio).abs() <= 1).all())
                found[first:end] = torch.exp2(near).float()
        return found

    def step(self, given: list[torch.Tensor]) -> torch.Tensor:
        weights, total = self.weights(), torch.zeros_like(self.energy)
        for gradient, residual in zip(given, self.residuals, strict=True):
            v = (gradient / len(given) + residual) / weights
            payload, rest, sent = torch.zeros(self.size, dtype=torch.uint8), torch.zeros_like(v), torch.zeros_like(v)
            reference.fitted_encode(v, rest, self.segments, None, 128, self.inner.levels, payload)
            reference.fitted_decode(payload, self.segments, None, 128, self.inner.levels, False, sent)
            residual.copy_(rest * weights)
            total += sent * weights
        self.energy = 0.98 * self.energy + torch.tensor(0.02) * total.square()
        return total


@pytest.mark.parametrize("levels", ["lloyd", "uniform"])
def test_an_exchange_does_what_the_method_says(threads: Threads, levels: str) -> None:
    inner = gw.QSGD(bits=2, scale="ls", levels=levels)
    found = threads.run(2, averaged, gw.ErrorFeedback(inner, weights=0.98), "allgather")
    for name, numel in NUMELS.items():
        by_hand = ByHand(numel, 2, inner)
        for step in range(STEPS):
            expected = by_hand.step([gradients(step, rank)[name] for rank in range(2)])
            for means, _ in found:
                assert torch.equal(means[step][name], expected), (name, step)
        for rank, (_, state) in enumerate(found):
            assert torch.allclose(state[f"rank{rank}/energy/0/{name}"], by_hand.energy, rtol=1e-6)
            assert torch.equal(state[f"rank{rank}/residual/0/{name}"], by_hand.residuals[rank])


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [(ranks, scheme) for scheme in ("alltoall", "allgather", "ring", "tree", "grid") for ranks in (1, 2, 3, 4)]
    + [(8, "grid"), (11, "grid")],
)
def test_all_ranks_have_the_same_means_and_energies(threads: Threads, ranks: int, scheme: str) -> None:
    for chunk_bytes in (0, 4096):
        found = threads.run(ranks, averaged, SPEC, scheme, chunk_bytes)
        for rank, (means, state) in enumerate(found):
            for step, name in ((step, name) for step in range(STEPS) for name in NUMELS):
                assert torch.equal(means[step][name], found[0][0][step][name]), (rank, step, name)
            for name in NUMELS:
                energy = state[f"rank{rank}/energy/0/{name}"]
                assert torch.equal(energy, found[0][1][f"rank0/energy/0/{name}"])
                squares = torch.stack([mean[name].square() for mean in means])
                expected = sum(0.02 * 0.98 ** (STEPS - 1 - step) * squares[step] for step in range(STEPS))
                assert torch.allclose(energy, expected, rtol=1e-5)


def error_of_small_ones(spec: gw.Spec) -> float:
    """The squared error of means over their squares, in the last steps, of elements a tenth as large as their neighbours."""
    exchange = gw.Exchange({"a": torch.zeros(1280)}, gw.Uniform(spec, scheme="alltoall"), here.group)
    small, error, square = torch.arange(1280) % 8 > 0, 0.0, 0.0
    for step in range(40):
        given = [torch.randn(1280, generator=seeded(step, rank)) * torch.where(small, 0.1, 1.0) for rank in range(2)]
        exact, mean = sum(given) / 2, given[here.rank].clone()
        exchange.average_({"a": mean})
        if step >= 20:
            error += float((mean - exact)[small].square().sum())
            square += float(exact[small].square().sum())
    exchange.close()
    return error / square


def test_small_elements_of_a_block_do_not_wait_for_the_large_ones(threads: Threads) -> None:
    with_weights, without = (threads.run(2, error_of_small_ones, spec)[0] for spec in (SPEC, gw.ErrorFeedback(FOUR)))
    assert with_weights < 1.0
    assert without > 5.0


# ---- energies stay over changes


def energies_in(state: dict[str, torch.Tensor], encode: str = "0") -> dict[str, torch.Tensor]:
    """The energies of a state, by tensor."""
    return {key.split("/", 3)[3]: value for key, value in state.items() if f"/energy/{encode}/" in key}


def over_a_save(first_ranks_states: list[dict[str, torch.Tensor]] | None, own: bool) -> tuple[dict, list[dict]]:
    """Two steps, or the state of others; then two more. Returns the state after the first two, and the means after."""
    exchange = gw.Exchange(gradients(0, 0), gw.Uniform(SPEC, scheme="alltoall"), here.group)
    if first_ranks_states is None:
        for step in range(2):
            exchange.average_(gradients(step, here.rank))
    else:
        whole = {key: value for state in first_ranks_states for key, value in state.items()}
        exchange.load_state_dict(first_ranks_states[here.rank] if own else whole)
    state, means = exchange.state_dict(), []
    for step in range(2, 4):
        given = gradients(step, here.rank)
        exchange.average_(given)
        means.append(given)
    exchange.close()
    return state, means


def test_a_state_brings_the_energies_back(threads: Threads) -> None:
    went_on = threads.run(2, over_a_save, None, True)
    resumed = threads.run(2, over_a_save, [state for state, _ in went_on], True)
    for (_, expected), (_, found) in zip(went_on, resumed, strict=True):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(expected, found, strict=True) for name in NUMELS)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_takes_the_energies(threads: Threads, ranks: int) -> None:
    saved = [state for state, _ in threads.run(2, over_a_save, None, True)]
    found = threads.run(ranks, over_a_save, saved, False)
    for state, means in found:
        for name, energy in energies_in(saved[0]).items():
            assert bool(energy.any()) and torch.equal(energies_in(state)[name], energy)
        assert all(torch.equal(a[name], b[name]) for a, b in zip(means, found[0][1], strict=True) for name in NUMELS)


class Small(torch.nn.Module):
    """Two layers, of which a step may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 96), torch.nn.Linear(96, 32)

    def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
        return self.two(self.one(x)) if deep else self.one(x)


def prepared(plan: gw.Policy) -> tuple[gw.Handle, Small]:
    model = built(0, Small)
    return gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group), model


def backward(model: Small, step: int, deep: bool = True) -> None:
    model.zero_grad()
    model(torch.randn(8, 64, generator=seeded(step, here.rank)), deep).square().mean().backward()


def over_a_change(policies: list[gw.Policy]) -> list[dict[str, torch.Tensor]]:
    """Make a step of each plan, one after another. Returns the energies after each, and after the changes before the next."""
    handle, model = prepared(policies[0])
    found = []
    for step, policy in enumerate(policies):
        if step:
            handle.session.change_to(handle.session.plan_of(policy))
            found.append(energies_in(handle.state_dict()))
        backward(model, step)
        found.append(energies_in(handle.state_dict()))
    handle.detach()
    return found


def test_energies_follow_a_change_of_buckets_and_of_the_scheme(threads: Threads) -> None:
    policies = [
        gw.Policy(default=SPEC, scheme="alltoall"),
        gw.Policy(default=SPEC, scheme="allgather", bucket_bytes=1000, edge_bytes=1000),
        gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=3, scale="ls"), weights=0.9), scheme="alltoall", chunk_bytes=4096),
    ]
    both = threads.run(2, over_a_change, policies)
    for found in both:
        assert found[0].keys() == {"one.weight", "two.weight"}
        for before, after in ((found[0], found[1]), (found[2], found[3])):
            assert all(torch.equal(before[name], after[name]) and bool(before[name].any()) for name in before)
        for each, others in zip(found, both[0], strict=True):
            assert all(torch.equal(each[name], others[name]) for name in each)
        assert not torch.equal(found[1]["one.weight"], found[2]["one.weight"])


def over_a_plan_without_weights(saves: bool) -> list[dict[str, torch.Tensor]]:
    """A step with weights, a step without them, and the change back. Returns the energies after the first, those that are kept
    in the second, and the last ones. saves: the second plan's state goes to another handle first."""
    plain, weighted = gw.Policy(default=gw.QSGD(bits=4), scheme="alltoall"), gw.Policy(default=SPEC, scheme="alltoall")
    handle, model = prepared(weighted)
    backward(model, 0)
    found = [energies_in(handle.state_dict())]
    handle.session.change_to(handle.session.plan_of(plain))
    backward(model, 1)
    state = handle.state_dict()
    assert handle.stats().memory.residual_bytes >= sum(value.nbytes for value in found[0].values())
    if saves:
        handle.detach()
        handle, model = prepared(plain)
        handle.load_state_dict(state)
    handle.session.change_to(handle.session.plan_of(weighted))
    found += [energies_in(state, "left"), energies_in(handle.state_dict())]
    handle.detach()
    return found


@pytest.mark.parametrize("saves", [False, True])
def test_energies_outlive_a_plan_without_weights(threads: Threads, saves: bool) -> None:
    for first, kept, back in threads.run(2, over_a_plan_without_weights, saves):
        assert first.keys() == kept.keys() == back.keys() == {"one.weight", "two.weight"}
        assert all(bool(value.any()) and torch.equal(value, kept[name]) for name, value in first.items())
        assert all(torch.equal(value, back[name]) for name, value in first.items())


def over_a_new_scale() -> list[torch.Tensor]:
    """The energies that a plan without weights keeps, before and after all that was not sent takes up a scale of 4."""
    exchange = gw.Exchange(gradients(0, 0), gw.Uniform(SPEC, scheme="alltoall"), here.group)
    exchange.average_(gradients(0, here.rank))
    tensors = [gw.core.TensorInfo(name, (numel,), "float32") for name, numel in NUMELS.items()]
    exchange.change_to(gw.Uniform(gw.QSGD(bits=4)).plan(tensors, 2))
    found = [exchange.residuals.carried()["energy/c"]]
    exchange.residuals.scale(4.0)
    found.append(exchange.residuals.carried()["energy/c"])
    exchange.close()
    return found


def test_energies_that_a_plan_without_weights_keeps_follow_the_scale(threads: Threads) -> None:
    for before, after in threads.run(2, over_a_new_scale):
        assert bool(before.any()) and torch.equal(16 * before, after)


def over_steps_that_do_not_count(schedule: str, scheme: str) -> list[dict[str, torch.Tensor]]:
    """A usual step, one in which no rank uses the second layer, and one that all ranks leave. Returns the energies after each."""
    handle, model = prepared(gw.Policy(default=SPEC, schedule=schedule, scheme=scheme))
    found = []
    for step in range(3):
        try:
            if step == 2:
                model.one.weight.register_hook(raises)
            backward(model, step, deep=step != 1)
        except ZeroDivisionError:
            handle.reset()
        handle.flush()
        found.append(energies_in(handle.state_dict()))
    handle.detach()
    return found


def raises(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("schedule", "scheme"), [("backward", "alltoall"), ("pipelined", "alltoall"), ("backward", "tree"), ("backward", "grid")]
)
def test_steps_that_do_not_count_leave_the_energies(threads: Threads, schedule: str, scheme: str) -> None:
    both = threads.run(2, over_steps_that_do_not_count, schedule, scheme)
    for (first, unused, left), others in zip(both, [both[0]] * 2, strict=True):
        assert torch.allclose(unused["two.weight"], first["two.weight"], rtol=1e-4, atol=1e-4 * float(first["two.weight"].mean()))
        assert not torch.allclose(unused["one.weight"], first["one.weight"], rtol=1e-2)
        for name in left:
            assert torch.allclose(left[name], unused[name], rtol=1e-4, atol=1e-4 * float(unused[name].mean()))
            assert torch.equal(left[name], others[2][name])


def test_phases_alone_are_refused(threads: Threads) -> None:
    (words,) = threads.run(1, refused_phase)
    assert "whole means" in words


def refused_phase() -> str:
    exchange = gw.Exchange(gradients(0, 0), gw.Uniform(SPEC, scheme="alltoall"), here.group)
    try:
        exchange.begin("reduce")
    except gw.PlanError as error:
        return str(error)
    finally:
        exchange.close()
    return ""


# ---- a warm-up of more bits


def test_a_warm_up_sends_four_bits_and_hands_on_residuals_and_energies(threads: Threads) -> None:
    warming = gw.ErrorFeedback(FOUR, weights=0.98, warm_up_steps=2)
    found = threads.run(2, averaged, warming, "allgather")
    more_bits = threads.run(2, averaged, gw.ErrorFeedback(gw.QSGD(bits=4, scale="ls", levels="lloyd"), weights=0.98), "allgather")
    for name in NUMELS:
        for rank in range(2):
            for step in range(2):
                assert torch.equal(found[rank][0][step][name], more_bits[rank][0][step][name])
            assert not torch.equal(found[rank][0][2][name], more_bits[rank][0][2][name])
        given = [sum(gradients(step, rank)[name] for step in range(STEPS)) / 2 for rank in range(2)]
        left = [found[rank][1][f"rank{rank}/residual/0/{name}"] for rank in range(2)]
        sent = sum(found[0][0][step][name] for step in range(STEPS))
        assert torch.allclose(sent + sum(left), sum(given), atol=1e-4)


def bytes_of_steps(plan: gw.Policy) -> list[int]:
    """The bytes that a rank sends in each of three steps of a model."""
    handle, model = prepared(plan)
    found = []
    for step in range(3):
        backward(model, step)
        handle.session.use_specs_of_now()
        found.append(handle.stats().wire_bytes)
    handle.detach()
    return found


def test_a_model_warms_up_too(threads: Threads) -> None:
    mean = threads.run(2, bytes_of_steps, gw.Policy(default=gw.ErrorFeedback(FOUR, warm_up_steps=2), scheme="alltoall"))[0]
    assert mean[0] > 1.5 * mean[1] and mean[1] == mean[2]


WARMING = gw.ErrorFeedback(FOUR, weights=0.98, warm_up_steps=2)


def trained(schedule: Schedule) -> dict[str, torch.Tensor]:
    """The energies and the weights after some steps of a schedule."""
    model = built(0, Small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = gw.parallelize(model, optimizer, gw.Policy(default=WARMING, schedule=schedule), process_group=here.group)
    for step in range(9):
        backward(model, step)
        optimizer.step()
    handle.flush()
    found = {f"energy of {name}": energy for name, energy in energies_in(handle.state_dict()).items()}
    found |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    handle.detach()
    return found


@pytest.mark.parametrize(
    "schedule",
    [gw.Backward(), gw.Pipelined(), gw.Delayed(k=3), gw.Delayed(k=2, correction=WARMING), gw.LocalSteps(every=3)],
    ids=repr,
)
def test_every_schedule_keeps_the_energies_of_ranks_alike(threads: Threads, schedule: Schedule) -> None:
    for found in (results := threads.run(3, trained, schedule)):
        assert all(torch.equal(value, results[0][name]) for name, value in found.items())
        assert all(bool(value.any()) for name, value in found.items() if name.startswith("energy"))


class SmallWithNothing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))


def state_after_a_change() -> None:
    """A plan without energies keeps those of the plan before, also of a tensor without elements, and takes its own state."""
    model = built(0, SmallWithNothing)
    handle = gw.parallelize(model, plan=gw.Policy(default=SPEC, exempt_vectors=False), process_group=here.group)
    backward(model, 0)
    handle.session.change_to(handle.session.plan_of(gw.Uniform(gw.Identity())))
    residuals = handle.session.exchange.residuals
    state = residuals.state()
    assert any("energy/left" in key and not value.numel() for key, value in state.items())
    residuals.check(state)
    residuals.load(state)
    assert all(torch.equal(value, state[key]) for key, value in residuals.state().items())


def test_energies_of_tensors_without_elements_are_loaded(threads: Threads) -> None:
    threads.run(2, state_after_a_change)
