"""Connections that a forked process closes at once.

A worker of a DataLoader that is left when its rank is killed must not keep connections open: other ranks would wait.
"""

import os
import weakref
from contextlib import suppress
from typing import Any

_open: "weakref.WeakSet[Any]" = weakref.WeakSet()


def close_in_child(each: Any) -> None:
    """Let every process that is forked from now on call its `close_copies()`."""
    _open.add(each)


def _close() -> None:
    for each in list(_open):
        with suppress(Exception):  # the others are to be closed too
            each.close_copies()


os.register_at_fork(after_in_child=_close)
