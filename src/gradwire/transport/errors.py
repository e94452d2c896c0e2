"""The failures of a transfer, before they are known to belong to a bucket and a step."""

from collections.abc import Iterator
from contextlib import contextmanager


class LinkError(Exception):
    """A transfer failed. `peer` is the other rank within the group, None for a collective of all ranks."""

    def __init__(self, peer: int | None, cause: Exception) -> None:
        super().__init__(str(cause).strip() or type(cause).__name__)
        self.peer = peer


class DamagedError(LinkError):
    """Bytes of that rank were changed on the way."""


@contextmanager
def transfer(peer: int | None = None) -> Iterator[None]:
    """Turn errors of a backend into LinkError."""
    try:
        yield
    except Exception as error:
        raise LinkError(peer, error) from error
