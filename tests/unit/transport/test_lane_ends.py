"""A lane's thread has room for what C++ keeps on its stack. At its end nobody waits for a job that it will not do."""

import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import gradwire as gw
from gradwire.transport import Lanes, LinkError, SilentLink
from gradwire.transport.in_process import InProcessGroup, run_ranks
from gradwire.transport.lanes import Lane


class Unused(SilentLink):
    """A link that nothing is sent over."""

    def close(self) -> None:
        pass

    break_off = abandon = close


def made_lane() -> Lane:
    group: Any = SimpleNamespace(rank=0, world_size=1)
    link: Any = Unused(group)
    return Lane("lane", link)


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = made_lane()
    yield made
    made.stop()


def stack_bytes(link: Any) -> int:
    """The size of the present thread's stack."""
    c, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    c.pthread_self.restype, size, place = ctypes.c_size_t, ctypes.c_size_t(), ctypes.c_void_p()
    c.pthread_getattr_np(ctypes.c_size_t(c.pthread_self()), attributes)
    c.pthread_attr_getstack(attributes, ctypes.byref(place), ctypes.byref(size))
    c.pthread_attr_destroy(attributes)
    return size.value


def test_a_script_that_gives_threads_small_stacks_gives_lanes_none() -> None:
    usual = threading.stack_size(2**18)
    try:
        lane = made_lane()
        assert threading.stack_size() == 2**18
    finally:
        threading.stack_size(usual)
    assert lane.submit(stack_bytes).result(5) >= 2**22
    lane.stop()


def test_a_job_after_the_end_fails(lane: Lane) -> None:
    assert lane.submit(lambda link: 3).result(5) == 3
    lane.stop()
    with pytest.raises(LinkError, match="was closed"):
        lane.submit(lambda link: 3).result(5)


def test_jobs_of_a_thread_that_never_returns_fail(lane: Lane) -> None:
    never = threading.Event()
    stuck, behind = lane.submit(lambda link: never.wait(20)), lane.submit(lambda link: 3)
    lane.stop()
    for future in (stuck, behind):
        with pytest.raises(LinkError, match="was closed"):
            future.result(5)
    never.set()


def after_abort(group: InProcessGroup) -> list[str]:
    lanes = Lanes(group)
    lanes.open({}, None)
    lanes.abort()
    said = []
    for use in (lambda: lanes.begin(0), lanes.check):
        with pytest.raises(gw.StepStateError) as caught:
            use()
        said.append(str(caught.value))
    return said


def test_lanes_that_were_aborted_begin_no_step() -> None:
    for said in run_ranks(2, after_abort):
        assert all("aborted" in words for words in said)
