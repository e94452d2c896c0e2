"""Residuals in fewer bytes than float32: what they lose is bounded and has mean zero, and nothing else changes."""

import gc
import math

import pytest
import torch
from msgspec.structs import replace
from test_engine_feedback import CARRIED, SIZES, SPECS, Shuffled, poison, residual_sum, resume
from threads import Threads, built, here
from worlds import Given, Worlds, seeded

import gradwire as gw
from gradwire.compressors.stores import BFloat16Store, Int8Store, store_for
from gradwire.kernels.reference.numbers import equal_blocks
from gradwire.kernels.segments import Segment, Segments

NARROW = ("bfloat16", "int8")
NUMELS = (1, 7, 123, 4097)


# ---- one store


def segments() -> Segments:
    rows, at = [], 0
    for index, numel in enumerate(NUMELS):
        rows.append(Segment(at, numel, index + 1, 0, 0))
        at += numel
    return Segments.of(rows)


def uneven(seed: int = 0) -> torch.Tensor:
    """Numbers of magnitudes that differ much from one another, as residuals are."""
    generator = torch.Generator().manual_seed(seed)
    numel = sum(NUMELS)
    return torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))


def key(step: int) -> torch.Tensor:
    return torch.tensor([0, step, 2, 0])


def made(dtype: str) -> BFloat16Store | Int8Store:
    store = store_for(dtype, segments())
    assert store is not None
    return store


def widened(store: BFloat16Store | Int8Store) -> torch.Tensor:
    residual = torch.full((sum(NUMELS),), math.nan)
    store.widen(residual)
    return residual


def largest_nearby(residual: torch.Tensor) -> torch.Tensor:
    """Of each element the largest magnitude of its block."""
    largest = torch.zeros_like(residual)
    for row in segments().rows:
        for at, count, numel in equal_blocks(row.numel, 128):
            where = slice(row.offset + at, row.offset + at + count * numel)
            blocks = residual[where].view(count, numel).abs()
            largest[where] = blocks.amax(dim=1, keepdim=True).expand(count, numel).reshape(-1)
    return largest


def test_float32_needs_no_store() -> None:
    assert store_for("float32", segments()) is None


@pytest.mark.parametrize("dtype", NARROW)
def test_a_new_store_holds_zeros(dtype: str) -> None:
    zeros = widened(made(dtype))
    assert not zeros.any() and not torch.signbit(zeros).any()


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 2.0), ("int8", 1.017)])
def test_a_store_is_as_small_as_it_says(dtype: str, nbytes: float) -> None:
    # besides, codes are padded to 8 elements a tensor, and scales to 16 bytes
    assert made(dtype).held.numel() <= nbytes * sum(NUMELS) + 8 * len(NUMELS) + 16


def test_int8_is_off_by_at_most_a_step_and_not_in_the_mean() -> None:
    residual, store, runs = uneven(), made("int8"), 100
    step = largest_nearby(residual) * (1 + 2**-7) / 127
    total = torch.zeros_like(residual, dtype=torch.float64)
    for run in range(runs):
        store.narrow(residual, key(run))
        held = widened(store)
        assert ((held - residual).abs() <= step * (1 + 1e-5)).all()
        total += held
    # the variance of a rounding is at most a quarter of a step squared: 6 deviations of the mean of all runs
    assert ((total / runs - residual).abs() <= 6 * 0.5 * step / math.sqrt(runs) + 1e-12).all()


def test_bfloat16_is_off_by_at_most_half_a_unit() -> None:
    residual, store = uneven(), made("bfloat16")
    store.narrow(residual, key(0))
    assert ((widened(store) - residual).abs() <= residual.abs() * 2**-8).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_what_was_stored_once_is_stored_again_as_it_was(dtype: str, scale: float) -> None:
    """Of another store and with another random stream: so a state that is saved as float32 loses nothing."""
    for seed in range(10):
        store, again = made(dtype), made(dtype)
        store.narrow(uneven(seed) * scale, key(seed))
        again.narrow_changed(widened(store), key(1000 + seed))
        assert torch.equal(widened(again), widened(store))


@pytest.mark.parametrize("dtype", NARROW)
def test_blocks_that_did_not_change_stay_as_they_were(dtype: str) -> None:
    store, changed = made(dtype), slice(2000, 2100)
    store.narrow(uneven(), key(0))
    before = widened(store)
    residual = before.clone()
    residual[changed] += 0.3
    store.narrow_changed(residual, key(1))
    after = widened(store)
    near = torch.zeros_like(before, dtype=torch.bool)
    near[changed.start - 128 : changed.stop + 128] = True
    assert torch.equal(after[~near], before[~near])
    assert abs((after - before)[changed].mean().item() - 0.3) < 0.1


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_is_not_finite_is_not_held(dtype: str, value: float) -> None:
    store, residual = made(dtype), uneven()
    residual[3000] = value
    store.narrow_changed(residual, key(0))
    assert widened(store).isfinite().all()
    assert widened(store)[4000:].any()


# ---- over the steps


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
"""What gradients of a dtype lose of themselves on the way, residuals or not."""


def may_be_lost(residual: torch.Tensor, dtype: str) -> float:
    """Of an element, by storing this residual: int8 is off by less than a step, in the root mean square half a one."""
    largest = residual.abs().max().item()
    return largest * 2**-8 if dtype == "bfloat16" else 0.5 * largest / 126


def drift(spec: gw.Spec, scheme: str, dtype: torch.dtype, residual_dtype: str) -> tuple[float, bool]:
    """The largest quotient of what went astray over the steps and of what stores may lose."""
    rank, world_size = here.rank, here.world_size
    model = Shuffled(SIZES, dtype, seed=rank)
    policy = gw.Uniform(spec, scheme=scheme, bucket_bytes=1000, chunk_bytes=3000, residual_dtype=residual_dtype)
    handle = gw.parallelize(model, plan=policy, process_group=here.group)
    true = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    received = {name: torch.zeros_like(t) for name, t in true.items()}
    lost = {name: torch.zeros(1, dtype=torch.float64) for name in true}
    worst = 0.0
    for step in range(6):
        model.zero_grad()
        model(model.random_gradients(rank, step)).backward()
        means = model.mean_of(lambda r, s=step: model.random_gradients(r, s), world_size)
        state = handle.state_dict()
        for (name, parameter), mean in zip(model.named_parameters(), means, strict=True):
            true[name] += mean
            received[name] += parameter.grad.double()
            held = residual_sum(state, name).expand(true[name].numel()).reshape(true[name].shape).contiguous()
            here.add_up(held)
            parts = [value for key, value in state.items() if key.endswith(f"/{name}") and "/residual/" in key]
            losses = torch.tensor([may_be_lost(part, residual_dtype) for part in parts], dtype=torch.float64)
            # after the first step residuals move to other buckets, and are stored once more
            stores = losses.repeat(3 if step == 0 else 1)
            # what is rounded at random adds up by its squares
            now = stores.sum() if residual_dtype == "bfloat16" else (stores**2).sum()
            here.add_up(now)
            lost[name] += now
            root = lost[name] if residual_dtype == "bfloat16" else lost[name].sqrt()
            allowed = root.item() * (math.sqrt(true[name].numel()) + 6) + ROUNDING[dtype] * true[name].norm().item()
            worst = max(worst, (received[name] + held - true[name]).norm().item() / allowed)
    return worst, any(bucket.residual_dtype == residual_dtype for bucket in handle.plan.buckets)


@pytest.mark.parametrize(("spec", "scheme"), CARRIED, ids=repr)
def test_what_goes_astray_is_what_stores_may_lose(threads: Threads, spec: gw.Spec, scheme: str) -> None:
    """Of both encodes of the scheme: what parameters got and what ranks hold back is what was given, but for that."""
    for worst, narrow in threads.run(3, drift, spec, scheme, torch.float32, "int8"):
        assert narrow
        assert worst < 1


NARROW_SOME = [
    (SPECS[0], "alltoall"),
    (SPECS[0], "allgather"),
    (gw.ErrorFeedback(gw.TopK(0.05)), "alltoall"),
    (gw.DGC(0.05, momentum=0.5), "alltoall"),
    (gw.EFSignSGD(), "alltoall"),
    (gw.PowerSGD(rank=1, start_step=0), "allreduce"),
    (gw.ErrorFeedback(gw.RandomK(0.1)), "allreduce"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("residual_dtype", NARROW)
def test_narrow_gradients_and_other_stores_go_as_little_astray(threads: Threads, dtype: torch.dtype, residual_dtype: str) -> None:
    for spec, scheme in NARROW_SOME:
        if not spec.owns_momentum:
            for worst, _ in threads.run(2, drift, spec, scheme, dtype, residual_dtype):
                assert worst < 1, spec


@pytest.mark.parametrize(("spec", "scheme"), NARROW_SOME, ids=repr)
@pytest.mark.parametrize(("residual_dtype", "keep_plan"), [("int8", True), ("int8", False), ("bfloat16", False)])
def test_a_resumed_run_repeats_the_uninterrupted_one(
    threads: Threads, spec: gw.Spec, scheme: str, residual_dtype: str, keep_plan: bool
) -> None:
    for at_once, in_two in threads.run(3, resume, spec, scheme, 3, keep_plan, residual_dtype):
        assert in_two == at_once


def resume_otherwise(before: str, after: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The residuals of a state that was saved with one dtype, and of a handle of another that has loaded it."""
    rank = here.rank
    handles = []
    for residual_dtype in (before, after):
        model = Given([(17, 241)])
        policy = gw.Uniform(SPECS[0], residual_dtype=residual_dtype)
        handles.append((model, gw.parallelize(model, plan=policy, process_group=here.group)))
    (model, saving), (_, loading) = handles
    for step in range(2):
        model.zero_grad()
        model(model.random_gradients(rank, step)).backward()
    saved = saving.state_dict()
    loading.load_state_dict(saved)
    loaded = loading.state_dict()
    return [(saved[name], loaded[name]) for name in saved if "/residual/" in name]


@pytest.mark.parametrize(("before", "after"), [("int8", "float32"), ("float32", "int8"), ("float32", "bfloat16")])
def test_a_run_may_go_on_with_another_residual_dtype(threads: Threads, before: str, after: str) -> None:
    for pairs in threads.run(2, resume_otherwise, before, after):
        assert len(pairs) == 2
        for saved, loaded in pairs:
            assert saved.any()
            if after == "float32":
                assert torch.equal(loaded, saved)
            else:
                assert 0 < (loaded - saved).abs().max() <= 2 * may_be_lost(saved, after) * (1 + 2**-6)


# ---- bad steps


@pytest.mark.parametrize("scheme", ["alltoall", "allgather", "allreduce"])
@pytest.mark.parametrize("residual_dtype", NARROW)
def test_what_is_not_finite_is_seen_by_all_and_remembered_by_none(threads: Threads, scheme: str, residual_dtype: str) -> None:
    for found in threads.run(2, poison, scheme, math.nan, torch.float32, residual_dtype):
        assert found["made finite"] == found["in other steps"] == found["residuals"] == []


def bad_step(spec: gw.Spec, scheme: str, residual_dtype: str, value: float) -> list[str]:
    """The residuals that a step in which nothing is finite did change."""
    rank = here.rank
    model = Given([(20, 300)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = gw.Uniform(spec, scheme=scheme, residual_dtype=residual_dtype)
    handle = gw.parallelize(model, optimizer, plan=policy, process_group=here.group)
    states = []
    for bad in (False, True):
        model.zero_grad()
        gradients = [torch.full((20, 300), value)] if bad else model.random_gradients(rank)
        model(gradients).backward()
        states.append({key: value for key, value in handle.state_dict().items() if "/residual/" in key})
    before, after = states
    assert all(residual.any() for residual in before.values())
    return [key for key in before if not torch.equal(before[key], after[key])]


@pytest.mark.parametrize(("spec", "scheme"), NARROW_SOME, ids=repr)
@pytest.mark.parametrize("residual_dtype", NARROW)
def test_a_bad_step_leaves_residuals_as_they_were(threads: Threads, spec: gw.Spec, scheme: str, residual_dtype: str) -> None:
    for changed in threads.run(2, bad_step, spec, scheme, residual_dtype, math.nan):
        assert changed == []


# ---- what it is for


def bytes_of_tensors() -> int:
    """Of all tensors of this process, memory that several share counted once."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # those of torch.compile have no memory
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in kinds and t.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_held(scheme: str) -> dict[str, int]:
    """What residuals take, with what is needed to use them, beside what a run without takes."""
    held: dict[str, int] = {}
    for residual_dtype in ("none", "float32", "bfloat16", "int8"):
        spec, kept = gw.QSGD(bits=4), {} if residual_dtype == "none" else {"residual_dtype": residual_dtype}
        policy = gw.Uniform(gw.ErrorFeedback(spec) if kept else spec, scheme=scheme, **kept)
        model = Given([(512, 512)] * 16)
        before = bytes_of_tensors()
        handle = gw.parallelize(model, plan=policy)
        for step in range(2):
            model.zero_grad()
            model(model.random_gradients(step)).backward()
        model.zero_grad()
        held[residual_dtype] = bytes_of_tensors() - before
        handle.detach()
        del model, handle
    return {name: nbytes - held["none"] for name, nbytes in held.items()}


@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
def test_memory_is_a_quarter_and_one_scratch_a_lane(worlds: Worlds, scheme: str) -> None:
    gradient = 16 * 512 * 512 * 4
    residuals = gradient * (3 if scheme == "alltoall" else 2) // 2  # of 2 ranks one owns half of the sum
    for held in worlds.run(2, bytes_held, scheme):
        scratch = 2 * 2**21 // (2 if scheme == "alltoall" else 1)  # two lanes, buckets of 2 MiB, half of them at once
        assert abs(held["float32"] / residuals - 1) < 0.01
        assert held["bfloat16"] < 0.51 * residuals + scratch
        assert held["int8"] < 0.26 * residuals + scratch


def student_and_teacher() -> tuple[torch.nn.Module, torch.nn.Module]:
    student = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    return student, torch.nn.Linear(20, 5)


def learn(residual_dtype: str) -> list[float]:
    """Losses of 60 steps of a small network that is sent by Top-k."""
    rank = here.rank
    model, teacher = built(0, student_and_teacher)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    policy = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05)), residual_dtype=residual_dtype)
    gw.parallelize(model, plan=policy, process_group=here.group)
    losses = []
    for step in range(60):
        inputs = torch.randn(64, 20, generator=seeded(rank, step))
        loss = (model(inputs) - teacher(inputs).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_learns_as_with_float32_residuals(threads: Threads) -> None:
    last = {dtype: sum(threads.run(2, learn, dtype)[0][-10:]) / 10 for dtype in ("float32", *NARROW)}
    first = threads.run(2, learn, "float32")[0][0]
    assert last["float32"] < first / 3
    assert abs(last["bfloat16"] / last["float32"] - 1) < 0.03
    assert abs(last["int8"] / last["float32"] - 1) < 0.03


def refuse() -> list[str]:
    """What is said of plans whose residuals cannot be as they ask."""
    told = []
    for spec, residual_dtype in ((SPECS[0], "float16"), (gw.QSGD(), "int8")):
        model = Given([(3, 5)])
        plan = gw.Uniform(spec).plan([gw.TensorInfo("p0", (3, 5), "float32")])
        (bucket,) = plan.buckets
        with pytest.raises(gw.PlanError) as caught:
            other = replace(plan, buckets=(replace(bucket, residual_dtype=residual_dtype),))
            gw.parallelize(model, plan=other, process_group=here.group)
        told.append(str(caught.value))
    return told


def test_a_plan_whose_residuals_cannot_be_so_is_refused_with_the_cure(threads: Threads) -> None:
    for unknown, without in threads.run(1, refuse):
        assert "residual_dtype 'float16'" in unknown
        assert "Write float32 or bfloat16 or int8." in unknown
        assert "residual_dtype 'int8'" in without
        assert "Write float32." in without
