import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gradwire.core import ProcessorNeed, waited_ns

needs_counts = pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this kernel counts no waits")


@pytest.fixture
def shared_processor() -> Iterator[None]:
    """This thread runs on one processor, on which another process computes."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        yield
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, usual)


@needs_counts
def test_a_process_needs_the_processor_that_another_has(shared_processor: None) -> None:
    elapsed_s, on_it_s, before = -time.perf_counter(), -time.process_time(), ProcessorNeed.now()
    until = time.perf_counter() + 0.4
    while time.perf_counter() < until:
        pass
    elapsed_s, on_it_s = elapsed_s + time.perf_counter(), on_it_s + time.process_time()
    assert on_it_s < 0.8 * elapsed_s, "the other process had its part"
    assert ProcessorNeed.now().since(before) == pytest.approx(elapsed_s, rel=0.1)


@pytest.mark.timing
@needs_counts
def test_a_thread_that_sleeps_needs_no_processor() -> None:
    before, before_ns = ProcessorNeed.now(), waited_ns()
    time.sleep(0.2)
    assert 0 <= ProcessorNeed.now().since(before) < 0.1
    assert waited_ns() >= before_ns


def test_waits_of_two_threads_are_not_compared() -> None:
    first = ProcessorNeed(worked_s=1.0, waited_s=5.0, thread=1)
    assert ProcessorNeed(1.5, 0.25, thread=2).since(first) == 0.5
    assert ProcessorNeed(1.5, 5.25, thread=1).since(first) == 0.75
