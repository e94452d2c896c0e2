"""Fixtures shared by all tests."""

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import triton_processes
from worlds import Worlds

# on a busy machine an example of microseconds takes a second now and then
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# a shell that put the tests in the background has SIGINT ignored, nohup has SIGHUP, and what they start would inherit that
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks to run functions on; see worlds.py."""
    kept = Worlds()
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[triton_processes.Interpreter]:
    with triton_processes.interpreter() as made:
        yield made


@pytest.fixture(scope="session")
def compiler() -> Iterator[triton_processes.Compiler]:
    with triton_processes.compiler() as made:
        yield made
