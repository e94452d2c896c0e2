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

LONGEST_FIRST = (
    "test_soak", "test_engine_feedback", "test_bench_worker", "test_doctor", "test_engine_faults", "test_engine_equality",
    "test_scripts_interrupts", "test_kernels_triton_blocks", "test_predict", "test_bench_schemes", "test_bench_demo",
)  # fmt: skip
"""Files that take longest, or wait most. A worker that took one of them up last would leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files for the workers of xdist, each of which takes up the next when it is done with one."""
    place = {name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


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
