"""A step of the `delayed` schedule whose exchange is under way."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from gradwire.collectives.streams import Mark
from gradwire.engine.control import Report, State
from gradwire.engine.executor import Executor

__all__ = ["Launched", "finish_quietly"]


@dataclass
class Launched:
    """What is known of it until it lands."""

    executor: Executor
    state: State
    told: "Future[list[Report]]"
    sending: "list[Future[Mark]]"
    """Of the broadcast of buffers, if there are any."""
    update: Callable[[], None] | None
    """Steps the optimizer, with the values that its groups had when the script did."""


def finish_quietly(under_way: list[Launched]) -> None:
    """Other ranks need what this one still sends, also when its script has ended."""
    for launched in under_way:
        with suppress(Exception):
            launched.executor.finish(launched.told, *launched.sending)
