"""A bounded sequence that counts every item ever added. Pure: no torch."""

from collections import deque
from typing import TypeVar

_Item = TypeVar("_Item")


class Latest(deque[_Item]):
    """The last items of a run of any length, and the number of all items so far, which `handle.stats().decided` reports.

    >>> latest = Latest[str](most=2)
    >>> for each in "abc":
    ...     latest.append(each)
    >>> list(latest), latest[-1], latest.total
    (['b', 'c'], 'c', 3)
    """

    def __init__(self, most: int = 100) -> None:
        super().__init__(maxlen=most)
        self.total = 0
        """Number of items so far, forgotten ones included."""

    def append(self, item: _Item) -> None:
        """Add an item. Forgets the oldest item if there are more than `most`."""
        super().append(item)
        self.total += 1
