"""The host-staged lane on the double of streams: ranks have the bits of CPU ranks, and nothing is touched too early."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_double import Device, run_staged_ranks
from worlds import Given

import gradwire as gw
from gradwire.core import COLLECTIVES, example_specs, innermost, schedule_kinds
from gradwire.exchange import layout
from gradwire.kernels import cpu, kernels_for
from gradwire.transport import Lanes, broadcast_bytes, in_process
from gradwire.transport.adapters import adapter_gbps
from gradwire.transport.in_process import run_ranks

SHAPES = ((17, 19), (130,), (1,), (13, 11))
TIMEOUT_S = 300.0
"""Of a busy machine."""

SPECS = tuple(gw.Truncate(4.0, unsafe=True) if isinstance(spec, gw.Truncate) else spec for spec in example_specs())
FACTORS = (gw.PowerSGD(), gw.PowerSGD(rank=2, start_step=0))
"""The second one has factors from the first step on."""


@contextmanager
def kernels_in_torch() -> Iterator[None]:
    """The double sees operations of torch alone."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(cpu, "available", lambda: "the double sees none of them")
        kernels_for.cache_clear()
        yield
    kernels_for.cache_clear()


def means(group: Any, plan: gw.Policy) -> dict[str, torch.Tensor]:
    """The means of two exchanges of tensors for each rule, or for the default if there are no rules."""
    random = torch.Generator().manual_seed(group.rank)
    patterns = [str(which) for which, _ in plan.rules] or ["t*"]
    names = {pattern.replace("*", str(number)): shape for pattern in patterns for number, shape in enumerate(SHAPES)}
    tensors = {name: torch.zeros(shape) for name, shape in names.items()}
    exchange = gw.Exchange(tensors, plan=plan, process_group=group)
    found = {}
    for step in range(2):
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        exchange.average_()
        found |= {f"{name} in step {step}": tensor.clone() for name, tensor in tensors.items()}
    assert exchange.lanes.staged == (type(group).__name__ == "StagedGroup")
    exchange.close()
    return found


def same_bits(run: Any, plan: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the tensors that ranks return on the double and as CPU ranks."""
    default = plan.default if isinstance(plan, gw.Policy) else gw.Identity()
    # factors of low rank are added up in another order by C++
    with kernels_in_torch() if isinstance(innermost(default), gw.PowerSGD) else warnings.catch_warnings():
        expected = run_ranks(size, run, plan, timeout_s=TIMEOUT_S)
    monkeypatch.setattr(layout, "launches", lambda device: True)
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        found = run_staged_ranks(device, size, run, TIMEOUT_S, plan)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=[pytest.mark.slow, pytest.mark.thorough]) for size in (4, 8))])
def test_every_spec_has_the_bits_of_cpu_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [(f"{spec.id}.*", spec) for spec in SPECS if not isinstance(innermost(spec), gw.PowerSGD)]
    assert len(rules) > 15
    policy = gw.Policy(default=gw.Identity(), rules=rules, exempt_vectors=False, bucket_bytes=1500, chunk_bytes=1000)
    same_bits(means, policy, size, monkeypatch)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("spec", FACTORS, ids=repr)
def test_factors_have_the_bits_of_cpu_ranks(spec: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = gw.Policy(default=spec, exempt_vectors=False, bucket_bytes=1500, chunk_bytes=1000)
    same_bits(means, policy, size, monkeypatch)


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def test_the_fastest_adapter_counts_and_an_unknown_speed_is_unknown(tmp_path: Path) -> None:
    assert adapter_gbps(tmp_path) is None
    files = {"net/lo/operstate": "unknown", "net/eth0/operstate": "up", "net/eth0/speed": "25000", "net/eth0/device/x": ""}
    assert adapter_gbps(written(tmp_path, files)) == 25.0
    port = {"infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)", "infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}
    assert adapter_gbps(written(tmp_path, port)) == 200.0
    assert adapter_gbps(written(tmp_path, {"infiniband/mlx5_0/ports/1/state": "1: DOWN"})) == 25.0
    assert adapter_gbps(written(tmp_path, {"net/eth0/speed": "-1"})) is None


def lanes_for_nccl(group: Any) -> bool:
    """Whether lanes for a GPU count the adapters between nodes as slow."""
    made = Lanes(group)
    try:
        return made._is_slow_between_nodes()
    finally:
        made.stop()


@pytest.mark.parametrize(
    ("gbps", "nodes", "slow"),
    [([25.0, 100.0], "ab", True), ([100.0, 100.0], "ab", False), ([25.0, 25.0], "aa", False), ([25.0, None], "ab", False)],
)
def test_slow_adapters_between_nodes_choose_the_staged_lane(
    gbps: list[float | None], nodes: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(gbps)
    monkeypatch.setattr(in_process, "adapter_gbps", lambda: left.pop())
    assert run_ranks(2, lanes_for_nccl, nodes=list(nodes)) == [slow, slow]


def pinned_after_a_broadcast(group: Any) -> int:
    """The bytes of the largest slot after a large tensor was sent to all ranks, between small ones."""
    lanes = Lanes(group)
    lanes.open({}, torch.device("cpu"))
    values = [torch.full((numel,), float(group.rank)) for numel in (3, 5001, 20)]
    lanes.run(lanes.data[0], partial(broadcast_bytes, tensors=values, piece_bytes=1000))
    assert not torch.cat(values).any()
    largest = max(slot.memory.numel() for slot in lanes.data[0].link.pinned._ring)  # type: ignore[union-attr]
    lanes.stop()
    return largest


def test_a_large_tensor_locks_no_more_memory_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        for largest in run_staged_ranks(device, 2, pinned_after_a_broadcast, TIMEOUT_S):
            assert 0 < largest < 1100


def fetched_in_a_broadcast(group: Any) -> tuple[int, list[float]]:
    """How many tensors were copied to the host in a broadcast of rank 1's values, and the values."""
    lanes, fetched = Lanes(group), list[torch.Tensor]()
    lanes.open({}, torch.device("cpu"))
    ring: Any = lanes.data[0].link.pinned
    fetch = ring.fetch
    ring.fetch = lambda parts: (fetched.extend(parts), fetch(parts))[1]
    values = torch.full((3,), float(group.rank))
    lanes.run(lanes.data[0], lambda link: link.broadcast(values, 1).wait())
    lanes.stop()
    return len(fetched), values.tolist()


def test_only_the_root_of_a_broadcast_copies_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        found = run_staged_ranks(device, 3, fetched_in_a_broadcast, TIMEOUT_S)
    assert found == [(0, [1.0] * 3), (1, [1.0] * 3), (0, [1.0] * 3)]


SCHEMES = [name for name, each in COLLECTIVES.items() if each.carries(gw.QSGD(bits=4))]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_bits_of_cpu_ranks(scheme: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = gw.Policy(default=gw.QSGD(bits=4), scheme=scheme, exempt_vectors=False, bucket_bytes=1500, chunk_bytes=1000)
    same_bits(means, policy, size, monkeypatch)


def weights(group: Any, policy: gw.Policy) -> list[torch.Tensor]:
    """The weights after some steps of a training, and the means of the last one where scripts see them."""
    model = Given([300, 20, 50], seed=0)
    model.register_buffer("seen", torch.full((3,), float(group.rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5)
    handle = gw.parallelize(model, optimizer, plan=policy, process_group=group, drift_check_steps=2)
    for step in range(5):
        optimizer.zero_grad()
        model(model.random_gradients(group.rank, step)).backward()
        optimizer.step()
    handle.flush()
    saved = {name: value.clone() for name, value in handle.state_dict().items() if isinstance(value, torch.Tensor)}
    found = [parameter.detach().clone() for parameter in model.parameters()]
    handle.detach()
    return [*found, model.seen.clone(), *(saved[name] for name in sorted(saved))]


SCHEDULES = {
    "backward": gw.Backward(),
    "pipelined": gw.Pipelined(),
    "sharded": gw.Pipelined(shard_optimizer=True),
    "delayed": gw.Delayed(k=2),
    "local": gw.LocalSteps(every=2),
    "local, delayed": gw.LocalSteps(every=3, delay=1, mixing=0.5),
}


def test_every_registered_schedule_and_collective_is_among_them() -> None:
    missing = {*schedule_kinds()} - {schedule.word for schedule in SCHEDULES.values()}
    assert not missing, f"add an object to SCHEDULES for {sorted(missing)}"
    assert {*COLLECTIVES} - {*SCHEMES} == {"allreduce"}, "which carries payloads that the backend adds up, such as PowerSGD's"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_with_the_weights_of_cpu_ranks(schedule: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gw.Identity() if schedule == "sharded" else gw.ErrorFeedback(gw.QSGD(bits=4))
    policy = gw.Uniform(spec, schedule=SCHEDULES[schedule], bucket_bytes=1000, chunk_bytes=500)
    same_bits(weights, policy, size, monkeypatch)
