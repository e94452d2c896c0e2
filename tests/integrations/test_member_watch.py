"""Connections that show when another member's process ends, and those with the stores of members."""

import socket
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

import gradwire as gw
from gradwire.integrations import handover
from gradwire.integrations.member_watch import MemberWatch, url_of
from gradwire.testbed import free_port
from gradwire.transport import LinkError


def checks_until_it_raises(watch: MemberWatch) -> str:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            watch.check()
        except LinkError as error:
            return str(error)
        time.sleep(0.01)
    return "it never raised"


def test_members_that_live_are_not_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        watch = MemberWatch([f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)])
        with first.accept()[0], second.accept()[0]:
            watch.check()
        watch.close()


def test_a_member_that_ended_before_is_reported_by_its_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    watch = MemberWatch([address])
    assert address in checks_until_it_raises(watch)
    watch.close()


@pytest.mark.parametrize("accepts", [True, False])
def test_a_member_that_ends_is_reported(accepts: bool) -> None:
    """Its process may end before it accepted the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    watch = MemberWatch([address])
    watch.check()
    if accepts:
        listener.accept()[0].close()
    listener.close()
    assert address in checks_until_it_raises(watch)
    watch.close()


def test_a_watch_that_is_closed_reports_nothing() -> None:
    watch = MemberWatch([f"127.0.0.1:{free_port()}"])
    watch.close()
    watch.check()


def test_a_store_where_nobody_listens_is_given_up_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(LinkError, match="refused"):
        handover.reach(f"127.0.0.1:{free_port()}", timedelta(seconds=120))
    assert time.monotonic() - began < 20


def test_attempts_to_reach_a_store_get_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a member may be so long that no short attempt succeeds."""
    store, attempts = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), list[float]()

    def of_far_away(*place: Any, timeout: timedelta, **options: Any) -> TCPStore:
        attempts.append(timeout.total_seconds())
        if attempts[-1] < 3:
            raise TimeoutError("the other end has not answered yet")
        return TCPStore(*place, timeout=timeout, **options)

    monkeypatch.setattr(handover, "TCPStore", of_far_away)
    reached = handover.reach(f"127.0.0.1:{store.port}", timedelta(seconds=120))
    assert attempts == [1, 2, 4] and reached.timeout == timedelta(seconds=120)


@pytest.mark.parametrize("address", ["localhost", "localhost:port", "::1:29510", "127.0.0.1:65536", ":29510", ""])
def test_an_address_without_host_or_port_is_refused_by_name(address: str) -> None:
    with pytest.raises(gw.PlanError, match=r"HOST:29510, or \[::1\]:29510") as refused:
        url_of(address)
    assert repr(address) in str(refused.value)


@pytest.mark.parametrize("address", ["node0:29510", "[::1]:29510", "http://10.0.0.1:29510"])
def test_an_address_may_be_a_url(address: str) -> None:
    assert url_of(address).port == 29510
