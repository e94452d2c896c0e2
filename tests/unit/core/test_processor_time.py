import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gradwire.core import needed_s, waited_ns

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
    elapsed_s, on_it_s, needed = -time.perf_counter(), -time.process_time(), -needed_s()
    until = time.perf_counter() + 0.4
    while time.perf_counter() < until:
        pass
    elapsed_s, on_it_s, needed = elapsed_s + time.perf_counter(), on_it_s + time.process_time(), needed + needed_s()
    assert on_it_s < 0.8 * elapsed_s, "the other process had its part"
    assert needed == pytest.approx(elapsed_s, rel=0.1)


@needs_counts
def test_a_thread_that_sleeps_needs_no_processor() -> None:
    before_s, before_ns = needed_s(), waited_ns()
    time.sleep(0.2)
    assert needed_s() - before_s < 0.1
    assert waited_ns() >= before_ns
