"""Narrow and wide parameters: divided before the sum, added in float32, refused where no kernel takes them."""

import pytest
import torch
from threads import Threads, here
from worlds import Given, Worlds, digest, gradwire_threads

import gradwire as gw

DTYPES = [torch.bfloat16, torch.float16]
SIZES = (1, 7, 123, 4097)


def synchronise(dtype: torch.dtype, plan: gw.Policy, size: float = 1.0) -> tuple[list[torch.Tensor], str]:
    """Gradients after one step."""
    rank = here.rank
    model = Given(SIZES, dtype, seed=rank)
    gw.parallelize(model, plan=plan, process_group=here.group)
    model([g * size for g in model.random_gradients(rank)]).backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad.dtype == dtype for grad in grads)
    return grads, digest([*model.parameters(), *grads])


def added_in_float32(dtype: torch.dtype, world_size: int, size: float = 1.0) -> list[torch.Tensor]:
    """The gradients, divided in their own dtype, summed in float32 in rank order, and rounded once."""
    model = Given(SIZES, dtype)
    shares = [[(g * size).mul(1.0 / world_size) for g in model.random_gradients(r)] for r in range(world_size)]
    return [sum(s.float() for s in column).to(dtype) for column in zip(*shares, strict=True)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_identity_adds_narrow_gradients_in_float32(threads: Threads, dtype: torch.dtype, scheme: str, world_size: int) -> None:
    plan = gw.Uniform(gw.Identity(), scheme=scheme, chunk_bytes=3000)
    results = threads.run(world_size, synchronise, dtype, plan)
    assert len({bits for _, bits in results}) == 1
    for got, want in zip(results[0][0], added_in_float32(dtype, world_size), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("scheme", [None, "alltoall", "allgather"])
def test_division_comes_before_the_sum(threads: Threads, scheme: str | None) -> None:
    """Gradients near float16's largest number, whose sum of three is beyond it."""
    plan = gw.Uniform(gw.Identity(), scheme=scheme)
    for grads, _ in threads.run(3, synchronise, torch.float16, plan, 12000.0):
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("spec", "largest"),
    [(gw.QSGD(bits=8), 0.05), (gw.ErrorFeedback(gw.QSGD(bits=8)), 0.05), (gw.Cast("float16"), 0.01)],
)
def test_compressed_narrow_gradients(threads: Threads, dtype: torch.dtype, scheme: str, spec: gw.Spec, largest: float) -> None:
    results = threads.run(3, synchronise, dtype, gw.Uniform(spec, scheme=scheme, chunk_bytes=3000))
    assert len({bits for _, bits in results}) == 1
    got = torch.cat([grad.float() for grad in results[0][0]])
    want = torch.cat([grad.float() for grad in added_in_float32(dtype, 3)])
    assert (got - want).norm() / want.norm() < largest


def refuse_float64() -> tuple[str, list[str], torch.Tensor]:
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(gw.PlanError) as caught:
        gw.parallelize(model, plan=gw.QSGD(bits=4))
    threads = gradwire_threads()
    gw.parallelize(model, plan=gw.Identity()).detach()
    return str(caught.value), threads, model.weight.detach()


def test_float64_is_refused_with_a_compressor(worlds: Worlds) -> None:
    for told, threads, _ in worlds.run(2, refuse_float64):
        assert "float64" in told
        assert "gw.Identity()" in told
        assert threads == []
