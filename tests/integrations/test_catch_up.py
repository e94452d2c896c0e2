"""The steps that a joiner follows and makes again, without a network."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.exchange import TensorMeta
from gradwire.integrations.catch_up import CatchUp
from gradwire.transport import LinkError


class Others:
    """An exchange whose other ranks make a step each time that one is allowed. The mean is the number of the step."""

    def __init__(self) -> None:
        self.step, self.allowed = 0, threading.Semaphore(0)
        self.fails_at: int | None = None
        self.quorum_id, self.made = 1, threading.Semaphore(0)

    def begin(self) -> None:
        self.allowed.acquire(timeout=30)

    def ready_all(self, tensors: dict[str, torch.Tensor]) -> None:
        assert not any(each.any() for each in tensors.values()), "a joiner sends zeros"
        for each in tensors.values():
            each.fill_(self.step)

    def finish_quietly(self) -> bool:
        return self.step != self.fails_at

    def wait(self) -> None:
        pass

    def quorum(self, step: int) -> Any:
        return SimpleNamespace(quorum_id=self.quorum_id, max_step=step, replica_ids=["a", "b"])

    def ask(self) -> Any:
        self.made.release()
        return self.quorum(self.step + 1)

    def catch_up(self) -> CatchUp:
        return CatchUp(self, {"weight": TensorMeta((2,))}, self.quorum(10), self.ask)  # type: ignore[arg-type]

    def go_on(self, steps: int) -> None:
        """Make steps, after which the joiner asks for the next one."""
        for _ in range(steps):
            self.allowed.release()
            assert self.made.acquire(timeout=30)


def number(means: dict[str, torch.Tensor] | None) -> float | None:
    return None if means is None else means["weight"][0].item()


def test_steps_that_others_made_are_made_again_in_their_order() -> None:
    others = Others()
    catch_up = others.catch_up()
    others.go_on(3)
    catch_up.state_came()
    assert [number(catch_up.next()) for _ in range(3)] == [10, 11, 12]
    assert catch_up.is_behind
    after: list[float | None] = []
    waits = threading.Thread(target=lambda: after.append(number(catch_up.next())))
    waits.start()
    while not catch_up._waits:
        time.sleep(0.001)
    others.allowed.release()
    waits.join(30)
    assert after == [13] and not catch_up.is_behind, "the next step is made with the others"
    assert catch_up.next() is None
    catch_up.join()


def test_a_joiner_that_is_slow_is_followed_for_as_many_steps_as_its_state_took() -> None:
    others = Others()
    catch_up = others.catch_up()
    others.go_on(2)
    catch_up.state_came()
    others.go_on(2)
    others.allowed.release()
    catch_up.join()
    assert [number(catch_up.next()) for _ in range(6)] == [10, 11, 12, 13, 14, None]


def test_a_step_that_fails_ends_it() -> None:
    others = Others()
    others.fails_at = 11
    catch_up = others.catch_up()
    others.go_on(1)
    others.allowed.release()
    catch_up.join()
    for look in (catch_up.next, catch_up.check):
        with pytest.raises(LinkError, match="before this one had caught up"):
            look()
    assert catch_up.named is None


def test_another_quorum_ends_it_and_is_kept() -> None:
    others = Others()
    catch_up = others.catch_up()
    others.quorum_id = 2
    others.allowed.release()
    catch_up.join()
    with pytest.raises(LinkError):
        catch_up.next()
    assert catch_up.named.quorum_id == 2 and catch_up.named.max_step == 11
