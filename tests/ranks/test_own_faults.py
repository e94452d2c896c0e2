"""Compressors, collectives and schedules of a script's own that raise on one rank: all ranks say which rank, and why."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
from threads import Threads, here
from worlds import Given

import gradwire as gw
from gradwire.collectives import schemes
from gradwire.compressors import Compressor
from gradwire.core.schedules import Schedule
from gradwire.core.specs.base import ElementRun
from gradwire.engine.schedules.backward import BackwardSchedule


class Wordless(Exception):
    """An exception whose author made a mistake."""

    def __str__(self) -> str:
        raise AttributeError("words")


def fail(error: Exception) -> None:
    """Raise the error on rank 1, with a cause."""
    if here.rank == 1:
        raise error from OSError("its cause")


class FailingCompressor(Compressor):
    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: torch.Tensor) -> None:
        fail(self.spec.error)  # type: ignore[attr-defined]
        payload.zero_()

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None:
        if not add:
            for offset, numel, *_ in segments.rows:
                dst[offset : offset + numel] = 0


class Failing(gw.Spec, frozen=True):
    id: ClassVar[str] = "failing"
    compressor: ClassVar = FailingCompressor
    error: ClassVar[Exception]

    def payload_bytes(self, runs: Any, itemsize: int) -> int:
        return sum(run.numel for run in runs)


class FailingSchedule(Schedule, frozen=True, tag="failing"):
    place: str

    @property
    def engine(self) -> str:
        return f"{__name__}:FailingEngine"


class FailingEngine(BackwardSchedule):
    def __init__(self, reducer: Any, schedule: Any, job: Any) -> None:
        self._place = schedule.place
        self._fail("__init__")
        super().__init__(reducer, schedule, job)

    def _fail(self, place: str) -> None:
        if place == self._place:
            fail(ValueError("no such file"))

    def attach(self) -> None:
        self._fail("attach")

    def on_forward(self, module: torch.nn.Module) -> None:
        self._fail("on_forward")

    def let_go(self) -> Callable[[], None]:
        self._fail("let_go")
        return super().let_go()


def started(make: Callable[[Given], Any]) -> BaseException | None:
    """What a rank raises where a handle or an exchange is made, and a step runs."""
    model, made = Given([300, 50], seed=0), None
    try:
        made = make(model)
        model(model.random_gradients(0)).backward()
        if isinstance(made, gw.Exchange):
            made.average_()
    except BaseException as error:
        for each in (error, error.__cause__):
            if each is not None:
                each.__traceback__ = None  # it holds what was made
        return error
    finally:
        here.gather(None)  # no rank is gone while another one still waits
        if made is not None:
            with suppress(gw.GradwireError):
                made.close() if isinstance(made, gw.Exchange) else made.detach()
    return None


def parallelized(plan: Any) -> Callable[[Given], Any]:
    return lambda model: gw.parallelize(model, plan=plan, process_group=here.group)


def exchanged(plan: Any) -> Callable[[Given], Any]:
    return lambda model: gw.Exchange(dict(model.named_parameters()), plan, here.group)


@pytest.mark.parametrize("error", [ValueError("no such file"), Wordless()], ids=["words", "no words"])
@pytest.mark.parametrize("make", [parallelized, exchanged])
def test_a_compressor_that_raises_at_the_start_is_named(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any], error: Exception
) -> None:
    monkeypatch.setattr(Failing, "error", error, raising=False)
    other, own = threads.run(2, started, make(gw.Uniform(Failing())))
    assert own is error and isinstance(own.__cause__, OSError)
    words = "ValueError: no such file" if isinstance(error, ValueError) else "Wordless: its words are unknown, because __str__"
    assert isinstance(other, gw.DisagreementError) and other.ranks == (1,)
    assert f"because some of them failed: rank 1: Failing() of float32 on cpu raised {words}" in str(other)


def test_a_compressor_that_refuses_the_golden_gradient_alike_on_all_ranks_may_run(threads: Threads) -> None:
    class Choosy(FailingCompressor):
        def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: torch.Tensor) -> None:
            if segments.numel == 96 * 64 + 300:
                raise ValueError("two tensors at once")
            payload.zero_()

    class ChoosySpec(Failing, frozen=True):
        id: ClassVar[str] = "choosy"
        compressor: ClassVar = Choosy

    assert threads.run(2, started, parallelized(gw.Uniform(ChoosySpec()))) == [None, None]


@pytest.mark.parametrize("place", ["__init__", "attach", "let_go", "on_forward"])
def test_a_schedule_that_raises_on_one_rank_is_named_on_all(threads: Threads, place: str) -> None:
    plan = gw.Policy(default=gw.QSGD(), schedule=FailingSchedule(place))
    other, own = threads.run(2, started, parallelized(plan))
    assert isinstance(other, gw.CommunicationError) and other.ranks == (1,)
    assert "rank 1 says: " in str(other) and "ValueError: no such file" in str(other)
    if place == "on_forward":
        assert isinstance(own, gw.StepStateError) and isinstance(own.__cause__, ValueError)
    else:
        assert isinstance(own, ValueError) and isinstance(own.__cause__, OSError)


@pytest.mark.parametrize("make", [parallelized, exchanged])
def test_a_collective_that_raises_on_one_rank_is_named_on_all(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]
) -> None:
    usual = schemes.AllGather.__init__

    def made(self: Any, *arguments: Any) -> None:
        fail(ValueError("no such file"))
        usual(self, *arguments)

    monkeypatch.setattr(schemes.AllGather, "__init__", made)
    other, own = threads.run(2, started, make(gw.Uniform(gw.QSGD(), scheme="allgather")))
    assert isinstance(own, ValueError) and isinstance(other, gw.CommunicationError)
    assert "rank 1 says: ValueError: no such file." in str(other)


class ForgetfulEngine(BackwardSchedule):
    def let_go(self) -> Any:
        return None


def test_a_schedule_that_returns_nothing_to_let_go_with_is_refused(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingSchedule, "engine", ForgetfulEngine)
    plan = gw.Policy(default=gw.QSGD(), schedule=FailingSchedule("nowhere"))
    (error,) = threads.run(1, started, parallelized(plan))
    assert isinstance(error, gw.PlanError) and "let_go of ForgetfulEngine returned None: it must return the function" in str(
        error
    )


class Endless(Failing, frozen=True):
    id: ClassVar[str] = "endless"

    def payload_bytes(self, runs: "list[ElementRun]", itemsize: int) -> int:
        return 10**15


def test_a_spec_with_payloads_larger_than_any_memory_is_named(threads: Threads) -> None:
    (error,) = threads.run(1, started, parallelized(gw.Uniform(Endless())))
    assert isinstance(error, gw.SpecError) and "payload_bytes of Endless() gives 1000000000000000 bytes for" in str(error)
