"""Lists of numbers on a command line, such as the rates of a sweep."""

import math
from collections.abc import Callable, Sequence

from gradwire.core import show
from gradwire.errors import FormatError

MOST = 64
"""Most values of one list. More values make no better picture, and each takes planning time."""


def read_rates(text: str) -> tuple[float, ...]:
    """Gb/s between nodes, from a list such as 1,10,25 or 1,2,...,64. Raises FormatError that names the mistake.

    >>> read_rates("1,10,25")
    (1.0, 10.0, 25.0)
    """
    return _read("--inter", text, "a rate in Gb/s", float, math.inf)


def read_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes, from a list such as 1,2,4 or 1,2,4,...,512. Raises FormatError that names the mistake.

    >>> read_nodes("1,2,4,...,64")
    (1, 2, 4, 8, 16, 32, 64)
    """
    return tuple(int(value) for value in _read("--nodes", text, "a whole number of nodes", int, 2**31))


def read_slower(text: str) -> tuple[float, ...]:
    """Factors by which a node's link is slower, from a list such as 1,2,5. Raises FormatError that names the mistake.

    >>> read_slower("1,2,...,8")
    (1.0, 2.0, 4.0, 8.0)
    """
    values = _read("--slow-node", text, "how many times slower a link is", float, math.inf)
    if values[0] < 1:
        raise FormatError(
            f"--slow-node has {values[0]:g}: a link less than 1 time slower is faster, and no step waits for a faster one. Write "
            "factors from 1 on, such as 1,2,5; 1 is the link as it is."
        )
    return values


def _read(option: str, text: str, what: str, convert: Callable[[str], float], limit: float) -> tuple[float, ...]:
    words = [word.strip() for word in text.split(",")]
    cure = f"Write {option} as a rising list, such as 1,2,8, or with a doubling to fill in, such as 1,2,4,...,64."
    values: list[float] = []
    for place, word in enumerate(words):
        if word == "...":
            if not values or place != len(words) - 2:
                raise FormatError(
                    f"{option} is {show(text)}: '...' stands between what it continues and the last value. {cure}"
                )
            continue
        try:
            value = convert(word)
        except ValueError:
            value = math.nan
        if not 0 < value < limit:
            raise FormatError(f"{option} has {show(word)}, which is not {what} above 0. {cure}")
        if words[place - 1] == "..." and place:
            values += _doubled(option, values, value, cure)
        if values and value <= values[-1]:
            raise FormatError(
                f"{option} has {show(word)} after {values[-1]:g}: values must rise, or the picture's lines run back. {cure}"
            )
        values.append(value)
    if len(values) > MOST:
        raise FormatError(
            f"{option} has {len(values)} values, and a sweep takes at most {MOST}: each is planned. {cure}"
        )
    return tuple(values)


def _doubled(option: str, before: Sequence[float], last: float, cure: str) -> list[float]:
    """The values that '...' stands for: those between the value before it and the value after it."""
    if len(before) > 1 and before[-1] != 2 * before[-2]:
        raise FormatError(
            f"{option} has {before[-2]:g},{before[-1]:g},...: '...' continues a doubling, and this is none. {cure}"
        )
    found = [before[-1]]
    while found[-1] < last:
        found.append(2 * found[-1])
    if found[-1] != last:
        raise FormatError(
            f"{option} ends with {last:g}, which doubling {before[-1]:g} never reaches; next to it is {found[-1]:g}. {cure}"
        )
    return found[1:-1]
