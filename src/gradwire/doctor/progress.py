"""What is being done, on a terminal; elsewhere nothing."""

from types import TracebackType
from typing import Self

from rich.console import Console

__all__ = ["Spinner"]


class Spinner:
    """A line that turns and says what is being done; it appears with the first thing said."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
            self._status.start()

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
