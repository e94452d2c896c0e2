"""PyTorch's own tests of process groups, each in some places: what `python -m benchmarks torch_tests` starts.

    python -m benchmarks.torch_test_cases FILE PLACE[,PLACE...] [WORD ...]

Appends one JSON object for each test to FILE: the place, the test's name, how it ended and why. Places: gloo alone; gradwire's
backend wherever a test asks for gloo; gradwire's hook in every DistributedDataParallel, with one plan or with auto. With WORDs,
only tests with one of them in their names run. BACKEND, WORLD_SIZE and TEMP_DIR are variables that PyTorch's tests need when they
are imported.
"""

import importlib.util
import inspect
import json
import os
import re
import sys
import types
import unittest
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

if importlib.util.find_spec("expecttest") is None:
    # PyTorch's test classes derive from its class, and the tests of process groups call nothing of it
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest, TensorPipeAgentRpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

import gradwire as gw
import gradwire.integrations.c10d
from gradwire.bench.ranks import die_with

RUNNER = os.getpid()


def use_backend() -> None:
    """Make all later groups of gloo gradwire's."""

    def replaced(make: Any) -> Any:
        signature = inspect.signature(make)

        @wraps(make)
        def made(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            if bound.arguments.get("backend") == "gloo":
                bound.arguments["backend"] = "gradwire"
            return make(*bound.args, **bound.kwargs)

        return made

    for name in ("init_process_group", "new_group"):
        made = replaced(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, made)


def use_hook(state: Callable[[], gw.DDPState]) -> None:
    """Give each later DistributedDataParallel gradwire's hook with a state of its own."""
    build, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @wraps(build)
    def built(model: Any, *arguments: Any, **named: Any) -> None:
        build(model, *arguments, **named)
        register(model, state(), gw.ddp_hook)
        _hooked().touch()

    def refused(*arguments: Any, **named: Any) -> None:
        _hooked().unlink()
        raise unittest.SkipTest("the test registers a hook of its own")

    DistributedDataParallel.__init__ = built  # type: ignore[assignment, method-assign]
    DistributedDataParallel.register_comm_hook = refused  # type: ignore[method-assign]


def _hooked() -> Path:
    """Is there when the test that runs has built a model with gradwire's hook."""
    return Path(os.environ["TOLD_DIR"], "hooked")  # torch's tests move TEMP_DIR


PLACES: dict[str, Callable[[], None]] = {
    "gloo": lambda: None,
    "backend": use_backend,
    "hook": partial(use_hook, partial(gw.DDPState, gw.Identity())),
    "auto hook": partial(use_hook, partial(gw.DDPState, accuracy="exact")),
}


class FreshRanks(MultiProcessTestCase):
    """Each test has ranks of its own, forked from a process of one thread, in which nothing has run. None outlives the test."""

    place = ""

    def setUp(self) -> None:
        super().setUp()
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"the process that forks the ranks has {threads} threads, which no rank would have.")
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        super().tearDown()

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)  # looks at rank 0 alone
        if fn not in self.skip_return_code_checks:
            self.assertEqual([process.exitcode for process in self.processes], [0] * len(self.processes))

    @classmethod
    def _run(cls, *arguments: Any, **named: Any) -> None:
        die_with(RUNNER)
        PLACES[cls.place]()
        super()._run(*arguments, **named)


class Collectives(FreshRanks, TestDistBackend, DistributedTest._DistTestBase):
    """Collectives and DDP."""


class DdpUnderDistAutograd(DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, FreshRanks):
    """DDP combined with layers on other ranks."""


class DdpComparison(DdpComparisonTest, TensorPipeRpcAgentTestFixture, FreshRanks):
    """Gradients of DDP in distributed autograd, compared with those of DDP alone."""


class Rpc(RpcTest, TensorPipeAgentRpcTest, TensorPipeRpcAgentTestFixture, FreshRanks):
    """Remote calls. Only tests that make process groups run."""


def cases(words: Sequence[str]) -> list[unittest.TestCase]:
    """The tests, those with one of the words in their names if there are words."""
    found: list[unittest.TestCase] = []
    for group in (Collectives, DdpUnderDistAutograd, DdpComparison, Rpc):
        for name in unittest.defaultTestLoader.getTestCaseNames(group):
            wanted = not words or any(word in name for word in words)
            if wanted and (group is not Rpc or "init_process_group" in inspect.getsource(inspect.unwrap(getattr(Rpc, name)))):
                found.append(group(name))
    return found


class Told(unittest.TestResult):
    """Appends to a file how each test ended."""

    def __init__(self, file: str, place: str) -> None:
        super().__init__()
        self.file, self.place = file, place

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        _hooked().unlink(missing_ok=True)
        self.how, self.why = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.how, self.why = "skipped", reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.how, self.why = "failed", reason_of(str(err[1]))

    addFailure = addError

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        if self.place.endswith("hook") and not _hooked().exists():
            return  # nothing of gradwire's was in it
        told = {"place": self.place, "test": test._testMethodName, "how": self.how, "why": self.why}
        with open(self.file, "a") as file:
            print(json.dumps(told), file=file)


def reason_of(error: str) -> str:
    """Return the errors of all ranks without their tracebacks."""
    raised = []
    for rank in re.split(r"^Process \d+ exited with error code .*$", error, flags=re.MULTILINE):
        lines = [line.strip() for line in rank.splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
        raised += (named or lines)[-1:]
    return "; ".join(dict.fromkeys(raised))


def main(arguments: Sequence[str]) -> None:
    """Run the tests in the places."""
    file, places, *words = arguments
    os.environ["TOLD_DIR"] = str(Path(file).parent)
    for FreshRanks.place in places.split(","):
        unittest.TestSuite(cases(words)).run(Told(file, FreshRanks.place))


if __name__ == "__main__":
    main(sys.argv[1:])
