"""Groups whose ranks share a store and no process group, lanes that close at once, and residuals that go on to other ranks."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.transport import Group, LinkError
from gradwire.transport.rendezvous import Rendezvous

NUMEL = 4097


def together(size: int, function: Callable[[Group], Any], name: str = "first", timeout_s: float = 20.0) -> list[Any]:
    """What the function returns on each rank of a new group. Ranks are threads, with connections as between processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank_of(rank: int) -> Any:
        own = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
        return function(Group.of_store(own, rank, size, timedelta(seconds=timeout_s)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("plan", [gw.Identity(), gw.QSGD(bits=4)], ids=["exact", "4 bits"])
def test_ranks_without_a_process_group_average(size: int, plan: gw.Spec) -> None:
    def mean(group: Group) -> torch.Tensor:
        values = gradient(group.rank)
        exchange = gw.Exchange({"values": values}, plan, group)
        exchange.average_()
        exchange.close()
        return values

    assert not dist.is_initialized()
    means = together(size, mean)
    true = torch.stack([gradient(rank) for rank in range(size)]).mean(0)
    assert all(torch.equal(each, means[0]) for each in means)
    assert (means[0] - true).norm() <= (1e-6 if plan == gw.Identity() else 0.4) * true.norm()


def test_an_abort_in_the_middle_of_a_step_ends_the_others_waits_and_closes_everything() -> None:
    def live(group: Group) -> tuple[bool, float]:
        values = {name: gradient(group.rank) for name in ("first", "second")}
        exchange = gw.Exchange(values, gw.QSGD(bits=4), group)
        exchange.average_()
        exchange.begin()
        exchange.ready("first")
        if group.rank == 0:
            time.sleep(0.2)  # the others wait for its second tensor
            began = time.monotonic()
            exchange.abort()
            return False, time.monotonic() - began
        exchange.ready("second")
        began = time.monotonic()
        counts = exchange.finish_quietly()
        exchange.abort()
        return counts, time.monotonic() - began

    together(3, live, "before")  # what stays is there before it is counted
    descriptors, threads = open_descriptors(), own_threads()
    found = together(3, live)
    assert not any(counts for counts, _ in found)
    assert max(seconds for _, seconds in found) < 12, "a timeout of 20 s ended the waits, and not the abort"
    until = time.monotonic() + 10
    while (open_descriptors(), own_threads()) > (descriptors, threads) and time.monotonic() < until:
        time.sleep(0.05)  # threads of the store's clients end after their last use
    assert (open_descriptors(), own_threads()) == (descriptors, threads)


def open_descriptors() -> int:
    """Sockets of this process."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return found


def own_threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("gradwire"))


@pytest.mark.parametrize(("scheme", "factors"), [("allgather", [1.5]), ("alltoall", [1.5, 1.0])])
def test_residuals_go_on_to_a_group_of_another_size(scheme: str, factors: list[float]) -> None:
    """Those of the own gradient are parts of a mean over other ranks, those of the sum are of the mean."""
    spec = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), scheme=scheme)

    def train(group: Group) -> dict[str, torch.Tensor]:
        exchange = gw.Exchange({"values": gradient(group.rank)}, spec, group)
        exchange.average_()
        state = exchange.residuals.state()
        exchange.abort()
        return state

    kept = together(3, train, "three")

    def go_on(group: Group) -> tuple[dict[str, torch.Tensor], int]:
        exchange = gw.Exchange({"values": gradient(group.rank)}, spec, group)
        exchange.go_on(kept[group.rank], 7, 3)
        carried, step = exchange.residuals.carried(), exchange.step
        exchange.close()
        return carried, step

    for rank, (carried, step) in enumerate(together(2, go_on, "two")):
        encodes = [key for key in sorted(kept[rank]) if kept[rank][key].any()]
        assert step == 7 and encodes == [f"residual/{encode}/values" for encode in range(len(factors))]
        expected = sum(factor * kept[rank][key] for factor, key in zip(factors, encodes, strict=True))
        assert torch.allclose(carried["residual/values"], expected)


def test_residuals_of_a_step_that_failed_are_those_before_it() -> None:
    def live(group: Group) -> tuple[bool, bool]:
        exchange = gw.Exchange({"values": gradient(group.rank)}, gw.ErrorFeedback(gw.QSGD(bits=2)), group)
        exchange.average_()
        before = exchange.residuals.carried()["residual/values"].clone()
        put_back = exchange.keep_residuals()
        exchange.begin()
        if group.rank == 0:
            time.sleep(0.2)
            exchange.abort()
            return True, True
        exchange.ready("values", gradient(5))
        counts = exchange.finish_quietly()
        exchange.abort()
        changed = not torch.equal(exchange.residuals.carried()["residual/values"], before)
        put_back()
        return counts, changed and torch.equal(exchange.residuals.carried()["residual/values"], before)

    assert together(2, live)[1] == (False, True)


def test_a_rank_knows_its_own_failure_from_anothers() -> None:
    def live(group: Group) -> Exception | None:
        exchange = gw.Exchange({"values": gradient(group.rank)}, gw.QSGD(bits=4), group)
        if group.rank == 0:

            def broken(*_: Any) -> None:
                raise ValueError("this codec is broken")

            exchange._buckets[0].chunks[0].run = broken  # type: ignore[method-assign]
        exchange.begin()
        exchange.ready("values")
        assert not exchange.finish_quietly()
        own = exchange.own_failure()
        exchange.abort()
        return own

    first, second = together(2, live)
    assert isinstance(first, ValueError) and second is None


def test_a_group_of_a_store_needs_all_its_ranks() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    with pytest.raises(gw.CommunicationError, match="could not begin"):
        gw.Exchange({"values": torch.ones(3)}, gw.Identity(), Group.of_store(store, 0, 2, timedelta(seconds=1)))
    assert time.monotonic() - began < 10
    with socket.create_connection(("127.0.0.1", store.port)):
        pass


def gone_after(seconds: float) -> Callable[[], None]:
    """A check that finds another rank gone, so much later."""
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until:
            raise LinkError(None, ConnectionError("rank 1 ended"))

    return check


@pytest.mark.parametrize("missing", ["name and key", "card", "calls"])
def test_a_wait_for_a_rank_that_is_gone_ends_before_the_timeout(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def begin(group: Group) -> None:
        with pytest.raises(gw.CommunicationError, match="rank 1 ended"):
            gw.Exchange({"values": torch.ones(3)}, gw.Identity(), group)

    if missing == "calls":
        monkeypatch.setattr(Rendezvous, "_begin_call", lambda *_: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {"name and key": [1], "card": [0], "calls": [0, 1]}[missing]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                begin,
                [Group.of_store(store.clone(), rank, 2, timedelta(seconds=60), gone_after(1)) for rank in ranks],
            )
        )
    assert time.monotonic() - began < 15


def test_a_check_that_finds_nobody_gone_leaves_the_timeout() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = Group.of_store(store, 0, 2, timedelta(seconds=1), gone_after(60))
    with pytest.raises(gw.CommunicationError, match="could not begin"):
        gw.Exchange({"values": torch.ones(3)}, gw.Identity(), group)
