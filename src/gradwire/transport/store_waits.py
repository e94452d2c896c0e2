"""Waits for keys of a rendezvous store. They end early where a rank that should write a key is gone."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

Check = Callable[[], None]
"""Raises LinkError where another rank of a group is gone. It is called again and again while ranks wait for each other."""
LOOK_S = 0.1
"""The longest time between two calls of a check."""
_SOON_S, _AGAIN_S = 0.001, 0.01
"""The shortest and the longest time between two questions for keys: the times double, since ranks mostly come at once. A store's
own wait of so short a time would log a warning each time."""


def await_keys(store: Any, keys: Sequence[str], timeout: timedelta, check: Check | None) -> None:
    """Wait until the store has all keys. check: None where nobody knows which ranks are gone. Raises what the check raises; after
    the timeout TimeoutError, or an error of the store."""
    if check is None:
        store.wait(keys, timeout)
        return
    until, again_s = time.monotonic() + timeout.total_seconds(), _SOON_S
    while not store.check(keys):
        check()
        if time.monotonic() > until:
            raise TimeoutError(f"the store did not get {', '.join(keys)} within {timeout.total_seconds():g} s")
        time.sleep(again_s)
        again_s = min(2 * again_s, _AGAIN_S)
