"""Ranks that use two handles in different orders are told at once, by the handles."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch, normalised, plain
from worlds import World, Worlds

import gradwire as gw
from gradwire.engine import crossing
from gradwire.transport import exits


def in_other_orders(make: str) -> tuple[float, str]:
    """Two steps in order, then rank 1 begins with the other model. The seconds until an error, and its words."""
    models = [{"plain": plain, "normalised": normalised}[make]() for _ in range(2)]
    handles = [gw.parallelize(model, plan=gw.QSGD(bits=4)) for model in models]
    for step in range(3):
        order = models[::-1] if step == 2 and dist.get_rank() == 1 else models
        began = time.monotonic()
        try:
            for model in order:
                model(batch(step)).square().mean().backward()
        except gw.GradwireError as error:
            told = time.monotonic() - began, f"{type(error).__name__}: {error}"
            for handle in handles:
                handle.detach()
            return told
    return 0.0, ""


@pytest.mark.parametrize("make", ["plain", "normalised"])
def test_crossed_handles_are_named_long_before_the_timeout(make: str) -> None:
    with World(2) as world:
        for seconds, words in world.run(in_other_orders, make):
            assert seconds < 30, words
            assert "handles crossed: rank" in words, words
            assert "rank 0 is in step 2 of handle 1 (of a Sequential)" in words
            assert "rank 1 is in step 2 of handle 2 (of a Sequential)" in words


SOON_S, LONG_S = 0.3, 0.6
"""After which time a step is looked at here, and how long steps take: the next look comes within them."""


@contextmanager
def soon_looked_at() -> Iterator[None]:
    usual, crossing.LONG_S = crossing.LONG_S, SOON_S
    try:
        yield
    finally:
        crossing.LONG_S = usual


@soon_looked_at()
def slow_on_one_rank() -> bool:
    """Long steps, of which ranks begin at different times, are no crossing, nor are two threads."""
    models = [plain() for _ in range(2)]
    handles = [gw.parallelize(model, plan=gw.Identity()) for model in models]

    def train(model: torch.nn.Module) -> None:
        model(batch(0)).square().mean().backward()

    for slow in (0, 1):
        for model in models:
            if dist.get_rank() == slow:
                time.sleep(LONG_S)
            train(model)
    threads = [threading.Thread(target=train, args=[model]) for model in models]
    for thread in threads if dist.get_rank() else threads[::-1]:
        thread.start()
        time.sleep(LONG_S)
    for thread in threads:
        thread.join()
    failures = [handle.session.lanes.failure for handle in handles]
    for handle in handles:
        handle.detach()
    return failures == [None, None]


def test_slow_steps_and_threads_have_not_crossed(worlds: Worlds) -> None:
    assert worlds.run(2, slow_on_one_rank) == [True, True]


@soon_looked_at()
def after_a_long_broadcast() -> bool:
    """Ranks are long in an exchange of the second handle beside steps, and then rank 1 waits long in a step of the first one."""
    models = [plain() for _ in range(2)]
    handles = [gw.parallelize(model, plan=gw.Identity()) for model in models]
    handles[1].session._on_lane(lambda link: time.sleep(LONG_S), "nothing, for long")
    if dist.get_rank() == 0:
        time.sleep(2 * LONG_S)
    models[0](batch(0)).square().mean().backward()
    failures = [handle.session.lanes.failure for handle in handles]
    for handle in handles:
        handle.detach()
    return failures == [None, None]


def test_an_exchange_that_is_over_has_not_crossed(worlds: Worlds) -> None:
    assert worlds.run(2, after_a_long_broadcast) == [True, True]


@soon_looked_at()
def after_a_load() -> bool:
    """Rank 1 is long in a step of the first handle, which then goes back to an earlier step. Rank 0 is long in a step of the
    second handle, to which rank 1 comes late."""
    models = [plain() for _ in range(2)]
    handles = [gw.parallelize(model, plan=gw.Identity()) for model in models]

    def train(model: torch.nn.Module, late: int = -1) -> None:
        if dist.get_rank() == late:
            time.sleep(2 * LONG_S)
        model(batch(0)).square().mean().backward()

    train(models[0])
    state = handles[0].state_dict()
    train(models[0])
    train(models[0], late=0)
    handles[0].load_state_dict(state)
    train(models[1], late=1)
    failures = [handle.session.lanes.failure for handle in handles]
    for handle in handles:
        handle.detach()
    return failures == [None, None]


def test_a_handle_that_goes_back_to_an_earlier_step_has_not_crossed(worlds: Worlds) -> None:
    assert worlds.run(2, after_a_load) == [True, True]


def test_the_store_is_not_freed_while_the_interpreter_ends() -> None:
    """Whoever frees it returns from C++, and a thread that does so then ends the whole process."""
    watch = crossing.Crossing()
    for ends in (False, True):
        watch._store = object()
        with mock.patch.object(exits, "_ends", mock.Mock(is_set=lambda ends=ends: ends)):
            watch._look()  # nothing is watched any more
        assert (watch._store is not None) == ends
