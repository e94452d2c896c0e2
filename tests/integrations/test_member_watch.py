"""Connections that show when another member's process ends."""

import socket
import time

import pytest

from gradwire.integrations.member_watch import MemberWatch
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
