"""A list of bounded length that keeps the latest items. Pure: no torch."""

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar, overload

_Item = TypeVar("_Item")


class Latest(Sequence[_Item], Generic[_Item]):
    """The last `most` items of a sequence of any length, and the number of all items.

    >>> latest = Latest[str](most=2)
    >>> for each in "abc":
    ...     latest.append(each)
    >>> list(latest), latest[-1], latest.total
    (['b', 'c'], 'c', 3)
    """

    def __init__(self, most: int = 100) -> None:
        self._kept: deque[_Item] = deque(maxlen=most)
        self.total = 0
        """Number of items so far, forgotten ones included."""

    def append(self, item: _Item) -> None:
        """Add an item, and forget the oldest one if there are too many."""
        self._kept.append(item)
        self.total += 1

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> _Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...

    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        return list(self._kept)[index] if isinstance(index, slice) else self._kept[index]
