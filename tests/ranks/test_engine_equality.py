"""What ranks end up with: plain DDP's numbers under an identity plan, and each other's bits under every plan."""

import itertools

import pytest
import torch
import torch.distributed as dist
from threads import Threads, built, here
from torch.nn.parallel import DistributedDataParallel
from worlds import Given, Worlds, digest, seeded

import gradwire as gw

# ---- plain DDP

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
DDP, SMALL_BUCKETS, IDENTITY = "ddp", "ddp with 1 MB buckets", "gradwire"


def train(method: str, optimizer_name: str, steps: int = 8) -> torch.Tensor:
    """All parameters after some steps, one after another: 5 MB in many layers, so that buckets differ."""
    rank = dist.get_rank()
    torch.manual_seed(100 if rank == 0 else rank)
    widths = (64, *[360] * 10, 10)
    layers = [(torch.nn.Linear(a, b), torch.nn.Tanh()) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*itertools.chain(*layers))
    run: torch.nn.Module = model
    if method == DDP:
        run = DistributedDataParallel(model)
    elif method == SMALL_BUCKETS:
        run = DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        gw.parallelize(model, plan=gw.Uniform(gw.Identity()))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(steps):
        generator = seeded(rank, step)
        inputs, labels = torch.randn(8, 64, generator=generator), torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run(inputs), labels).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def distances_from_ddp(optimizer_name: str) -> dict[str, object]:
    reference = train(DDP, optimizer_name)
    ours, small = train(IDENTITY, optimizer_name), train(SMALL_BUCKETS, optimizer_name)
    norm = reference.double().norm()
    return {
        "digests": digest([ours]),
        "equal": torch.equal(ours, reference),
        "ours": ((ours.double() - reference.double()).norm() / norm).item(),
        "small buckets": ((small.double() - reference.double()).norm() / norm).item(),
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_train_bit_for_bit_as_under_ddp(worlds: Worlds, optimizer: str) -> None:
    for found in worlds.run(2, distances_from_ddp, optimizer):
        assert found["equal"], found


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.thorough])])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_more_ranks_train_as_under_ddp_to_rounding(worlds: Worlds, world_size: int, optimizer: str) -> None:
    results = worlds.run(world_size, distances_from_ddp, optimizer)
    assert len({found["digests"] for found in results}) == 1
    for found in results:
        assert found["small buckets"] > 0, "the two DDPs do not differ: this measures nothing"
        assert found["ours"] <= 2 * found["small buckets"]
        if optimizer == "sgd":
            assert found["ours"] <= 1e-7


# ---- all ranks alike

QSGDS = [
    gw.QSGD(bits=bits, scale=scale, rounding=rounding)
    for bits in range(2, 9)
    for scale in ("max", "minmax", "l2")
    for rounding in ("stochastic", "nearest")
]
LOSSY = [gw.Cast("float16"), gw.Cast("bfloat16"), *QSGDS]
FED_BACK = [spec for spec in LOSSY if not (isinstance(spec, gw.QSGD) and spec.scale == "l2" and spec.bits < 4)]
SPECS = [*LOSSY, *(gw.ErrorFeedback(spec) for spec in FED_BACK), gw.Identity()]
SIZES = (1, 7, 123, 4097)
# of the mean gradient, normal numbers in blocks of 128, two encodes: generous, and far below what a wrong scale gives
LARGEST_ERROR = {2: 2.0, 3: 0.6, 4: 0.35, 5: 0.2, 6: 0.1, 7: 0.05, 8: 0.03}


def every_spec_at_once(scheme: str) -> dict[str, object]:
    """One model with four tensors for each spec, under one policy; small buckets, chunks, and empty shards."""
    rank, world_size = here.rank, here.world_size
    model = built(rank, lambda: torch.nn.ModuleList([Given(SIZES) for _ in SPECS]))
    policy = gw.Policy(
        default=gw.Identity(),
        rules=[(f"{index}.*", spec) for index, spec in enumerate(SPECS)],
        scheme=scheme,
        bucket_bytes=4000,
        chunk_bytes=5000,
    )
    handle = gw.parallelize(model, plan=policy, process_group=here.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at_start = digest(model.parameters())
    errors: list[float] = []
    after_steps = []
    for step in range(3):
        optimizer.zero_grad()
        drawn = [part.random_gradients(rank, step, index) for index, part in enumerate(model)]
        torch.stack([part(gradients) for part, gradients in zip(model, drawn, strict=True)]).sum().backward()
        if step == 0:
            for index, part in enumerate(model):
                true = list(part.mean_of(lambda r, i=index, p=part: p.random_gradients(r, 0, i), world_size))
                wrong = torch.cat([p.grad.double() - t for p, t in zip(part.parameters(), true, strict=True)])
                errors.append((wrong.norm() / torch.cat(true).norm()).item())
        optimizer.step()
        after_steps.append(digest([*model.parameters(), *(p.grad for p in model.parameters())]))
    stats = handle.stats()
    handle.detach()
    return {
        "start": at_start,
        "steps": after_steps,
        "errors": errors,
        "chunked": any(bucket.chunks > 1 for bucket in stats.buckets),
    }


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(size, marks=[pytest.mark.slow, pytest.mark.thorough]) for size in (3, 4))]
)
@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
def test_all_ranks_hold_the_same_bits(worlds: Worlds, world_size: int, scheme: str) -> None:
    results = worlds.run(world_size, every_spec_at_once, scheme)
    assert all(found["start"] == results[0]["start"] for found in results)
    assert all(found["steps"] == results[0]["steps"] for found in results)
    assert results[0]["chunked"]
    for spec, error in zip(SPECS, results[0]["errors"], strict=True):
        inner = spec.inner if isinstance(spec, gw.ErrorFeedback) else spec
        if isinstance(inner, gw.QSGD) and inner.scale != "l2":
            assert error < LARGEST_ERROR[inner.bits], spec
        elif not isinstance(inner, gw.QSGD):
            assert error < (1e-6 if isinstance(inner, gw.Identity) else 0.01), spec


def big_and_odd(spec: gw.Spec, scheme: str | None) -> tuple[str, float]:
    rank, world_size = here.rank, here.world_size
    model = built(rank, lambda: Given([2**20 + 1]))
    handle = gw.parallelize(model, plan=gw.Uniform(spec, scheme=scheme), process_group=here.group)
    for step in range(2):
        model.zero_grad()
        model(model.random_gradients(rank, step)).backward()
    (true,) = model.mean_of(lambda r: model.random_gradients(r, 1), world_size)
    error = (model.p0.grad.double() - true).norm() / true.norm()
    handle.detach()
    return digest([model.p0, model.p0.grad]), error.item()


@pytest.mark.parametrize(
    ("spec", "scheme", "largest"),
    [
        (gw.QSGD(bits=4), "alltoall", 0.3),
        (gw.QSGD(bits=4), "allgather", 0.25),
        (gw.Identity(), "allreduce", 1e-6),
        (gw.Identity(), "alltoall", 1e-6),
    ],
)
def test_a_large_tensor_of_odd_size(threads: Threads, spec: gw.Spec, scheme: str, largest: float) -> None:
    results = threads.run(3, big_and_odd, spec, scheme)
    assert len({bits for bits, _ in results}) == 1
    assert results[0][1] < largest


# ---- two groups at once


def two_groups(steps: int) -> int:
    """Ranks 0, 1 and 2, 3 train apart, while all four sum their losses in the loop."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, peers = groups[rank // 2], (0, 1) if rank < 2 else (2, 3)
    model = Given([5, 300, 1000])
    # small integers and their halves are exact in float16 too
    plan = gw.Uniform(gw.Cast("float16") if rank < 2 else gw.Identity(), scheme="alltoall", chunk_bytes=1024)
    gw.parallelize(model, plan=plan, process_group=mine)

    def integers(of: int, step: int) -> list[torch.Tensor]:
        return [torch.randint(-50, 50, p.shape, generator=seeded(of, step)).float() for p in model.parameters()]

    wrong = 0
    for step in range(steps):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss = model(integers(rank, step))
        share = torch.tensor([float(rank + step)])
        if step % 3 == 0:
            dist.all_reduce(share)
        loss.backward()
        if step % 3 == 1:
            dist.all_reduce(share)
        want = [(a + b) / 2 for a, b in zip(integers(peers[0], step), integers(peers[1], step), strict=True)]
        if step % 3 == 2:
            dist.all_reduce(share)
        wrong += share.item() != 6 + 4 * step
        wrong += sum(not torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return wrong


def test_two_groups_train_apart_while_the_user_sums_the_loss(worlds: Worlds) -> None:
    assert worlds.run(4, two_groups, 60) == [0, 0, 0, 0]
