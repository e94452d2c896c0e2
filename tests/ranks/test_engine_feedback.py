"""Error feedback loses nothing, a resumed run repeats the one that went on, and a NaN is never made finite."""

import itertools
from typing import Any

import pytest
import torch
from threads import Threads, here
from worlds import Given, Worlds, digest

import gradwire as gw

SIZES = (1, (3, 41), (17, 241), 300)
SPECS: list[gw.Spec] = [
    gw.ErrorFeedback(gw.QSGD(bits=2)),
    gw.ErrorFeedback(gw.QSGD(bits=4, rounding="nearest", scale="minmax")),
    gw.ErrorFeedback(gw.QSGD(bits=3, block=32, scale="l2")),
    gw.ErrorFeedback(gw.Cast("bfloat16")),
    gw.ErrorFeedback(gw.QSGD(bits=3, levels="exponential")),
    gw.ErrorFeedback(gw.TernGrad(clip=2.5)),
    gw.ErrorFeedback(gw.Int8()),
    gw.ErrorFeedback(gw.FP8("e5m2")),
    gw.ErrorFeedback(gw.Natural()),
    gw.TwoBit(),
    gw.TwoBit(threshold=0.3),
    gw.EFSignSGD(),
    gw.OneBit(),
    gw.ErrorFeedback(gw.TopK(0.05)),
    gw.ErrorFeedback(gw.TopK(0.05, selection="sampled", per="bucket")),
    gw.ErrorFeedback(gw.BlockTopK(0.1)),
    gw.ErrorFeedback(gw.Threshold(0.5, capacity=0.1)),
    gw.ErrorFeedback(gw.RandomK(0.1)),
    gw.ErrorFeedback(gw.RandomK(0.1, indices="own")),
    gw.DGC(0.05, momentum=0.0, warm_up_steps=4),
    gw.PowerSGD(rank=1, start_step=0),
    gw.PowerSGD(rank=1, start_step=4),
    gw.PowerSGD(rank=2, warm_start=False, start_step=0),
]
CARRIED = [(spec, scheme) for spec in SPECS for scheme in spec.schemes]


class Shuffled(Given):
    """Gradients become ready in another order than that of registration, so the plan is made again after step 1."""

    def forward(self, gradients: Any) -> torch.Tensor:
        parameters, gradients = list(self.parameters()), list(gradients)
        chain = torch.zeros(())
        for index in (2, 0, 3, 1):  # the last used is ready first
            if gradients[index] is not None:
                chain = (parameters[index] * gradients[index]).sum().float() + chain * 1.0
        return chain


def residual_sum(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What this rank has not sent yet. Gradients are divided before they are encoded, so residuals just add up."""
    total = torch.zeros(1, dtype=torch.float64)
    for key, value in state.items():
        if key.endswith(f"/{name}") and "/residual/" in key:
            total = total + value.double()
    return total


def telescope(
    spec: gw.Spec, scheme: str, dtype: torch.dtype, probe_codec: bool, idle: tuple[int, ...] = ()
) -> tuple[list[float], bool]:
    """How far, step by step, received gradients plus what is held back are from the true ones.

    In the steps of `idle` no rank uses the third parameter.
    """
    rank, world_size = here.rank, here.world_size
    model = Shuffled(SIZES, dtype, seed=rank)
    handle = gw.parallelize(
        model, plan=gw.Uniform(spec, scheme=scheme, bucket_bytes=1000, chunk_bytes=3000), process_group=here.group
    )
    first_plan = handle.plan
    true = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    received = {name: torch.zeros_like(t) for name, t in true.items()}
    off = []
    for step in range(6):
        model.zero_grad()
        gradients: list[torch.Tensor | None] = [*model.random_gradients(rank, step)]
        if step in idle:
            gradients[2] = None
        model(gradients).backward()
        if probe_codec:
            handle.time_codec(repeats=1)
        means = model.mean_of(lambda r, s=step: model.random_gradients(r, s), world_size)
        for index, ((name, parameter), mean) in enumerate(zip(model.named_parameters(), means, strict=True)):
            if index == 2 and step in idle:
                assert parameter.grad is None
            else:
                true[name] += mean
                received[name] += parameter.grad.double()
        state, worst = handle.state_dict(), 0.0
        for name in true:
            held = residual_sum(state, name).expand(true[name].numel()).reshape(true[name].shape).contiguous()
            here.add_up(held)
            worst = max(worst, ((received[name] + held - true[name]).norm() / true[name].norm()).item())
        off.append(worst)
    return off, handle.plan != first_plan


@pytest.mark.parametrize(("spec", "scheme"), CARRIED, ids=repr)
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost_over_the_steps(threads: Threads, spec: gw.Spec, scheme: str, world_size: int) -> None:
    """Of all encodes of the scheme, that of the sum too: what parameters got and what ranks hold back is what was given."""
    for off, planned_again in threads.run(world_size, telescope, spec, scheme, torch.float32, False):
        assert planned_again, "the order of gradients is the guessed one: this measures less than it should"
        assert max(off) < 1e-5


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [(SPECS[0], "alltoall"), (SPECS[0], "allgather"), (gw.PowerSGD(rank=1, start_step=0), "allreduce")],
    ids=repr,
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost_in_steps_that_leave_a_parameter_out(
    threads: Threads, spec: gw.Spec, scheme: str, world_size: int
) -> None:
    for off, _ in threads.run(world_size, telescope, spec, scheme, torch.float32, False, (1, 2, 4)):
        assert max(off) < 1e-5


@pytest.mark.parametrize(("spec", "scheme"), [(SPECS[0], "alltoall"), (gw.PowerSGD(rank=1, start_step=0), "allreduce")], ids=repr)
def test_measuring_the_codec_takes_nothing_away(threads: Threads, spec: gw.Spec, scheme: str) -> None:
    for off, _ in threads.run(3, telescope, spec, scheme, torch.float32, True):
        assert max(off) < 1e-5


def test_nothing_is_lost_with_narrow_gradients(threads: Threads) -> None:
    """But for rounding to bfloat16 what is received and what is divided; a tensor has one element, and 8 bits of it."""
    for off, _ in threads.run(3, telescope, SPECS[0], "alltoall", torch.bfloat16, False):
        assert max(off) < 0.03


# ---- resuming


def resume(spec: gw.Spec, scheme: str, at: int, keep_plan: bool, residual_dtype: str = "float32") -> tuple[str, str]:
    """Six steps at once, and again in two halves with everything made anew in between."""
    rank = here.rank
    policy = gw.Uniform(spec, scheme=scheme, bucket_bytes=1000, chunk_bytes=3000, residual_dtype=residual_dtype)
    digests = []
    for pause in (None, at):
        model, plan = Shuffled(SIZES, seed=rank), policy
        handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group)
        for step in range(6):
            if step == pause:
                weights, state = model.state_dict(), handle.state_dict()
                plan = handle.plan if keep_plan else policy
                handle.detach()
                model = Shuffled(SIZES, seed=100 + rank)
                model.load_state_dict(weights)
                handle = gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, process_group=here.group)
                handle.load_state_dict(state)
            model.zero_grad()
            model(model.random_gradients(rank, step)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        digests.append(digest([*model.parameters(), *(p.grad for p in model.parameters())]))
    return digests[0], digests[1]


RESUMED = [
    *((spec, scheme) for spec in (gw.QSGD(bits=4), SPECS[0], SPECS[3]) for scheme in ("alltoall", "allgather")),
    (gw.Signum(), "alltoall"),
    (gw.EFSignSGD(), "alltoall"),
    (gw.ErrorFeedback(gw.TopK(0.05)), "allgather"),
    (gw.ErrorFeedback(gw.RandomK(0.1)), "allreduce"),
    (gw.ErrorFeedback(gw.RandomK(0.1, indices="own")), "alltoall"),
    (gw.DGC(0.05, warm_up_steps=5), "allgather"),
    (gw.DGC(0.05, momentum=0.5), "alltoall"),
    (gw.PowerSGD(rank=1, start_step=0), "allreduce"),
    (gw.PowerSGD(rank=1, start_step=5), "allreduce"),
    (gw.PowerSGD(rank=1, warm_start=False, start_step=0), "allreduce"),
]


@pytest.mark.parametrize(("spec", "scheme"), RESUMED, ids=repr)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("keep_plan", [True, False], ids=["same plan", "same policy"])
def test_a_resumed_run_repeats_the_uninterrupted_one(
    threads: Threads, spec: gw.Spec, scheme: str, at: int, keep_plan: bool
) -> None:
    for at_once, in_two in threads.run(3, resume, spec, scheme, at, keep_plan):
        assert in_two == at_once


def load_wrong_states() -> list[str]:
    model = Given([3, 5])
    handle = gw.parallelize(model, plan=gw.ErrorFeedback(gw.QSGD()), process_group=here.group)
    model([torch.ones(3), torch.ones(5)]).backward()
    state = handle.state_dict()
    prefix = f"rank{here.rank}"
    told = []
    without = {key: value for key, value in state.items() if not key.endswith("residual/0/p0")}
    longer = state | {f"{prefix}/residual/0/p0": torch.zeros(4)}
    unknown = state | {f"{prefix}/residual/0/p9": torch.zeros(4)}
    for wrong in ({}, without, longer, unknown):
        with pytest.raises(ValueError) as caught:
            handle.load_state_dict(wrong)
        told.append(str(caught.value))
    others = {key.replace(prefix, "rank9"): value for key, value in state.items()}
    handle.load_state_dict(state | others)
    return told


def test_states_that_do_not_fit_are_refused_by_name(threads: Threads) -> None:
    for empty, without, longer, unknown in threads.run(2, load_wrong_states):
        assert "holds nothing" in empty
        assert "residual/0/p0" in without
        assert "4 elements" in longer and "3" in longer
        assert "residual/0/p9" in unknown


# ---- what is not finite

LOSSY = [
    *(
        gw.QSGD(bits=b, scale=s, rounding=r)
        for b, s in [*itertools.product((2, 4, 8), ("max", "minmax")), (4, "l2"), (8, "l2")]
        for r in ("stochastic", "nearest")
    ),
    gw.Cast("float16"),
    gw.Cast("bfloat16"),
    gw.QSGD(levels="exponential"),
    gw.TernGrad(),
    gw.TernGrad(clip=2.5),
    gw.Int8(),
    gw.FP8("e4m3"),
    gw.FP8("e5m2"),
    gw.Natural(),
    gw.TopK(0.05),
    gw.TopK(0.05, selection="sampled"),
    gw.BlockTopK(0.05),
    gw.Threshold(0.1),
    gw.RandomK(0.1, indices="own"),
]
REMEMBERING = [gw.TwoBit(), gw.TwoBit(threshold=0.1), gw.EFSignSGD(), gw.OneBit(), gw.DGC(0.1, momentum=0.0)]
"""Signs without a magnitude are not here: they have no way to say that something is not finite."""
SUMMED = [gw.RandomK(0.1), gw.ErrorFeedback(gw.RandomK(0.1)), gw.PowerSGD(rank=1, start_step=0)]
ANYWHERE = (gw.RandomK, gw.PowerSGD)
"""Here it is seen somewhere in the tensor, not always where it was."""
NUMEL = 300


def poison(scheme: str, value: float, dtype: torch.dtype, residual_dtype: str = "float32") -> dict[str, list[str]]:
    """One element of rank 0's gradient of every tensor is `value` in step 1 of 3."""
    rank = here.rank
    specs = [*LOSSY, *(gw.ErrorFeedback(spec) for spec in LOSSY), *REMEMBERING, gw.Identity()]
    specs = SUMMED if scheme == "allreduce" else specs
    model = torch.nn.ModuleList([Given([(10, NUMEL // 10)], dtype, seed=rank) for _ in specs])
    rules = [(f"{index}.*", spec) for index, spec in enumerate(specs)]
    policy = gw.Policy(default=rules[0][1], rules=rules, scheme=scheme, residual_dtype=residual_dtype)
    handle = gw.parallelize(model, plan=policy, process_group=here.group)
    made_finite, spread, residuals = [], [], []
    for step in range(3):
        model.zero_grad()
        losses = []
        for index, part in enumerate(model):
            (gradient,) = part.random_gradients(rank, step, index)
            if step == 1 and rank == 0:
                gradient.view(-1)[index % NUMEL] = value
            losses.append(part([gradient]))
        torch.stack(losses).sum().backward()
        for index, (spec, part) in enumerate(zip(specs, model, strict=True)):
            finite = part.p0.grad.isfinite().view(-1)
            anywhere = isinstance(getattr(spec, "inner", spec), ANYWHERE)
            if step == 1 and (finite.all() if anywhere else finite[index % NUMEL]):
                made_finite.append(repr(spec))
            if step != 1 and not finite.all():
                spread.append(repr(spec))
    for key, residual in handle.state_dict().items():
        if not residual.isfinite().all():
            residuals.append(key)
    return {
        "made finite": made_finite,
        "in other steps": spread,
        "residuals": residuals,
        "bits": [digest(model.parameters())],
    }


@pytest.mark.parametrize("scheme", ["alltoall", "allgather", "allreduce"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so_on_all_ranks(threads: Threads, scheme: str, value: float, dtype: torch.dtype) -> None:
    results = threads.run(2, poison, scheme, value, dtype)
    for found in results:
        assert found["made finite"] == found["in other steps"] == found["residuals"] == []


def finite_after(spec: gw.Spec, element: int) -> bool:
    """Whether the mean is finite everywhere if this element of rank 0's gradient is NaN."""
    part = Given([(10, NUMEL // 10)], torch.float32, seed=0)
    handle = gw.parallelize(part, plan=gw.Uniform(spec), process_group=here.group)
    gradient = torch.ones(10, NUMEL // 10)
    if here.rank == 0:
        gradient.view(-1)[element] = float("nan")
    part([gradient]).backward()
    handle.detach()
    return bool(part.p0.grad.isfinite().all())


@pytest.mark.parametrize(
    ("spec", "finite"),
    [(gw.SignSGD(), [True, True]), (gw.Signum(), [True, True]), (gw.Truncate(4.0, unsafe=True), [False, True])],
    ids=repr,
)
def test_signs_alone_and_dropped_elements_do_not_say_that_something_is_not_finite(
    threads: Threads, spec: gw.Spec, finite: list[bool]
) -> None:
    for element, expected in zip([0, NUMEL - 1], finite, strict=True):
        assert threads.run(2, finite_after, spec, element) == [expected] * 2
    assert "NaN" in (type(spec).__doc__ or "")


def scale_losses(spec: gw.Spec, scheme: str) -> tuple[list[int], str, bool]:
    """Which steps a loss scaler skipped. Rank 1's gradients overflow at some scale, rank 0's never."""
    rank = here.rank
    torch.manual_seed(rank)
    model = torch.nn.Linear(300, 4)
    gw.parallelize(model, plan=gw.Uniform(spec, scheme=scheme))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    skipped = []
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 300) * (20.0 if rank else 0.001)).sum()
        if step == 8 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
    return skipped, digest(model.parameters()), all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("spec", "overflows"),
    [
        (gw.Cast("float16"), True),
        (gw.ErrorFeedback(gw.Cast("float16")), True),
        (gw.QSGD(bits=4), False),
        (gw.ErrorFeedback(gw.QSGD(bits=4)), False),
    ],
)
@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
def test_a_loss_scaler_skips_the_same_steps_on_all_ranks(worlds: Worlds, spec: gw.Spec, overflows: bool, scheme: str) -> None:
    results = worlds.run(2, scale_losses, spec, scheme)
    assert results[0] == results[1]
    skipped, _, finite = results[0]
    assert 8 in skipped
    assert (0 in skipped) == overflows
    assert len(skipped) < 12
    assert finite
