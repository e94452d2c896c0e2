"""Fixtures shared by all tests, and which cases `make test` leaves to `make test-slow`."""

import gc
import getpass
import os
import re
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import triton_processes
import turns
from interpreters import Interpreters
from sampling import chance, sample, values_that_run
from threads import Threads
from worlds import Worlds

from gradwire.testbed import namespaces, permission_problem
from gradwire.testbed.namespaces import needs_user_namespace

# on a busy machine an example of microseconds takes a second now and then; in CI the examples are the same in every run: a change
# fails by what it changed, and `make fuzz` looks for more
hypothesis.settings.register_profile("busy", deadline=None, derandomize="GRADWIRE_CI_CASES" in os.environ)
hypothesis.settings.load_profile("busy")

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers use the folder of the process that started them
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # pytest keeps `tmp_path` of the latest runs there
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}")
    # the temporary files of the tests and of all that they start; multiprocessing removes its own before (-100)
    folder = tempfile.mkdtemp(prefix="gradwire-tests-")
    Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    os.environ.setdefault("GRADWIRE_TURN", str(turns.of_commit()))
    os.environ.setdefault("GRADWIRE_CACHE_DIR", folder)
    os.environ.setdefault("GRADWIRE_FLIGHT_DIR", folder)

torch.set_num_threads(1)  # tests run in two processes, and operations are small

# a shell that put the tests in the background has SIGINT ignored, nohup has SIGHUP, and what they start would inherit that
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

LONGEST_FIRST = (
    "test_soak", "test_doc_blocks", "test_bench_gpu", "test_bench_worker", "test_power_loss", "test_short_memory", "test_fsdp2",
    "test_elastic", "test_in_lightning", "test_kernels_triton", "test_in_process", "test_staging", "test_streams",
    "test_kernel_variants",
    "test_torch_tests", "test_docs_build", "test_testbed", "test_engine_residuals", "test_options_run", "test_auto_local",
    "test_exchange", "test_engine_equality", "test_auto_live", "test_auto_schedules", "test_auto_bits", "test_pipelined",
    "test_doctor", "test_examples", "test_bench_demo", "test_bench_schemes", "test_outside", "test_engine_faults",
    "test_scripts_interrupts", "test_engine_feedback", "test_damage", "test_engine_recovery", "test_delayed_scripts",
    "test_predict", "test_local_kills", "test_scripts_compile", "test_fuzz_formats", "test_phases",
)  # fmt: skip
"""Files that take longest, or wait most. A worker that took one of them up last would leave the others idle."""

WITH_TRITON = ("test_kernels_triton", "test_kernels_local_update")
"""How the names of files begin that use the fixtures `interpreter` and `compiler`."""

WITH_FRAMEWORKS = ("test_in_accelerate", "test_in_lightning", "test_in_transformers", "test_scripts_in_trainers")
"""Files that use the fixture `framework_worlds`."""

QUICK_CASES = {
    "ranks": 2,
    "integrations": 2,
    "scripts": 2,
    "kernels": 6,
    "compressors": 30,
    "costs": 30,
    "planner": 30,
    "exchange": 16,
}
"""How many cases of a parametrized test `make test` runs at most, by folder. Other folders run all cases."""

SLOW_CASES = 12
"""How many of the others `make test-slow` runs at most, where a case starts ranks; `make test-all` runs all."""

CI_SLOW = ("ranks", "integrations", "kernels")
"""Folders in which `make test-ci` runs at most `QUICK_CASES` of a test's cases, those with the mark `slow` among them: the first
ones as written."""

_SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)
_TIMING = re.compile(r"pytest\.mark\.timing\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files alone of which no test runs: to load what they import takes seconds."""
    marks = config.option.markexpr
    if collection_path.suffix != ".py" or not marks.startswith(("not slow", "timing")):
        return None
    text = collection_path.read_text(encoding="utf-8")
    runs = _TIMING.search(text) if marks.startswith("timing") else not _SLOW_FILE.search(text)
    return None if runs else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and do not look at their modules later: all of that stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_is_loaded_stays() -> Iterator[None]:
    """Do not look for garbage in modules that the file loaded: a package has 100,000 objects, a tenth of a second each time."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, and leave out some where there are very many and the command names no test. Order files for the workers of
    xdist, each of which takes up the next when it is done with one."""
    cases: dict[tuple[str, str, bool], list[pytest.Function]] = defaultdict(list)
    left_out: list[pytest.Item] = []
    named = bool(config.option.keyword) or any("::" in argument for argument in config.args)
    for item in items:
        if "for_cuda" in item.name:  # a compiler starts for them
            item.add_marker("slow")
        many = isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.path.parent.name in QUICK_CASES
        if many and is_sampled(item):
            cases[str(item.path), item.originalname, item.get_closest_marker("slow") is None].append(item)
    left = config.stash.setdefault(_SAMPLED, {})
    for (*_, may_be_quick), of_one_test in cases.items():
        folder = of_one_test[0].path.parent.name
        quick = sample(of_one_test, QUICK_CASES[folder]) if may_be_quick else set()
        slow = sorted((case for case in of_one_test if case not in quick), key=chance if may_be_quick else lambda case: 0)
        out = [] if named else left_out_of(slow, of_one_test, folder)
        if slow:
            tests, of_make_test, run, total = left.get(folder, (0, 0, 0, 0))
            count = len(of_one_test)
            left[folder] = tests + 1, of_make_test + len(quick), run + count - len(out), total + count
        for item in slow:
            item.add_marker("slow")
        left_out += out
    gone = {*left_out, *(() if named else those_that_wait(items))}
    config.hook.pytest_deselected(items=[*gone])
    items[:] = [item for item in items if item not in gone]
    place = {name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def those_that_wait(items: list[pytest.Item]) -> list[pytest.Item]:
    """Mark costly tests slow whose turn it is not, and return them if `make test-ci` runs now, which leaves them out."""
    costly = turns.turns(turns.COSTLY.read_text(encoding="utf-8"))
    turn = int(os.environ["GRADWIRE_TURN"])
    waiting = [item for item in items if turns.of_test(item.nodeid, costly) not in (None, turn)]
    for item in waiting:
        item.add_marker("slow")
    return waiting if _IS_CI and "GRADWIRE_ALL_CASES" not in os.environ else []


def is_sampled(case: pytest.Item) -> bool:
    """Whether some cases of its test may be left out: `make test-slow` runs every case that has the mark `slow` itself, and
    `make test-ci` a sample of those too where each takes long: it trains ranks anew, or compiles a kernel."""
    marks = {mark.name for mark in case.iter_markers()}
    if "whole" in marks:
        return False
    return "slow" not in marks or (_IS_CI and case.path.parent.name in CI_SLOW and not marks & {"thorough", "timing"})


def left_out_of(slow: list[pytest.Function], cases: list[pytest.Function], folder: str) -> list[pytest.Function]:
    """The slow cases of a test that neither `make test-slow` runs, nor `make test-ci` if that is what runs now."""
    if "GRADWIRE_ALL_CASES" in os.environ:
        return []
    if _IS_CI:
        first = sample(cases, QUICK_CASES[folder], in_order=len(slow) == len(cases))
        more = QUICK_CASES[folder] - (len(cases) - len(slow))
        return sorted(slow, key=lambda case: case not in first)[max(0, more) :]
    return slow[SLOW_CASES:] if folder == "ranks" else []


_IS_CI = "GRADWIRE_CI_CASES" in os.environ

_SAMPLED = pytest.StashKey[dict[str, tuple[int, int, int, int]]]()
"""By folder: how many tests have more cases than `make test` runs, how many cases it runs of them, how many `make test-slow` or
`make test-ci` run with them, and how many there are."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what was sampled from a worker to the process that prints. Triton complains of what is frozen at the end."""
    gc.unfreeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sampled"] = session.config.stash.get(_SAMPLED, {})


class Workers:
    """Tells workers of pytest-xdist what to run, and receives what they sampled; every worker samples alike."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give all files to one worker that need the processes of `triton_processes`, or those with frameworks loaded: they take
        seconds to start."""
        if config.getvalue("dist") != "loadfile":
            return None
        from xdist.scheduler import LoadFileScheduling

        class ByProcesses(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file = super()._split_scope(nodeid)
                if Path(file).stem.startswith(WITH_TRITON):
                    return "tests of Triton"
                return "tests of frameworks" if Path(file).stem in WITH_FRAMEWORKS else file

        return ByProcesses(config, log)

    def pytest_testnodedown(self, node: Any) -> None:
        self._config.stash[_SAMPLED] = getattr(node, "workeroutput", {}).get("sampled", {})


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Workers(config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which folders' cases are a sample, so that a green run is not taken for all cases."""
    sampled = config.stash.get(_SAMPLED, {})
    if sampled and "GRADWIRE_ALL_CASES" not in os.environ and not config.option.markexpr.startswith("timing"):
        terminalreporter.section("sampled cases")
        with_slow = "`make test-ci`" if _IS_CI else "with `make test-slow`"
        for folder, (tests, quick, run, total) in sorted(sampled.items()):
            terminalreporter.write_line(
                f"{folder}: of {total} cases of {tests} tests `make test` runs {quick}, {with_slow} {run}"
            )
        if "not slow" in config.option.markexpr or _IS_CI:
            terminalreporter.write_line(
                f"Of the tests in tests/costly.txt a fifth runs, by the commit: turn {int(os.environ['GRADWIRE_TURN']) + 1} of "
                f"{turns.TURNS}. GRADWIRE_TURN=0 to 4 chooses."
            )
        if "not thorough" in config.option.markexpr:
            terminalreporter.write_line("Tests with the mark `thorough` run in `make test-slow`.")
        terminalreporter.write_line("`make test-all` runs every case.")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Ranks to run functions on; see support/worlds.py."""
    kept = Worlds()
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def threads() -> Iterator[Threads]:
    """Ranks that are threads of this process; see support/threads.py."""
    made = Threads()
    yield made
    made.close()


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Interpreters]:
    """Starts programs that have torch loaded; see support/interpreters.py."""
    made = Interpreters()
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_worlds() -> Iterator[Worlds]:
    """Ranks for one file of tests alone, which may set environment variables in them."""
    kept = Worlds()
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def framework_worlds() -> Iterator[Worlds]:
    """The same, with Accelerate, Transformers and Lightning loaded."""
    kept = Worlds(frameworks=True)
    yield kept
    kept.close()


@pytest.fixture
def papers_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the papers' methods to the planner's, as `python -m benchmarks plan` does."""
    from every_method import OF_PAPERS

    from gradwire.planner.methods import METHODS

    for name, planner in OF_PAPERS.items():
        monkeypatch.setitem(METHODS, name, planner)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[triton_processes.Interpreter]:
    with triton_processes.interpreter() as made:
        yield made


@pytest.fixture(scope="session")
def compiler() -> Iterator[triton_processes.Compiler]:
    with triton_processes.compiler() as made:
        yield made


@pytest.fixture(scope="module")
def ptx(compiler: triton_processes.Compiler, request: pytest.FixtureRequest) -> dict[str, Future[str]]:
    """The PTX of the kernels in the file's table COMPILED that its tests look at, when it is made."""
    wanted = values_that_run(request, "name", of="ptx")
    return compiler.start({name: case for name, case in request.module.COMPILED.items() if name in wanted})


def _why_no_network() -> str | None:
    problem = permission_problem()
    if problem is None and needs_user_namespace():
        return "not root: run pytest under `unshare -Urnm --map-root-user` with a tmpfs on /run"
    return problem


@pytest.fixture
def clean() -> Iterator[None]:
    """For tests that make namespaces: skip where none can be made, and see that none of this process stays."""
    reason = _why_no_network()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    yield
    assert namespaces.existing(f"gradwire-{namespaces.this_owner()}-") == []
