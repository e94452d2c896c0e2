"""JSON text to plain data, within bounds that no document of ours comes near.

What is refused here would be an exception of Python's, or much memory for a small file, further on.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping

from gradwire.core.checks import join, printable, show
from gradwire.errors import FormatError

__all__ = ["check_finite", "check_plain", "parse"]

DEEPEST = 32
"""Lists and objects inside each other. A plan has 6: buckets, bucket, map of specs, spec, inner spec, fields."""
LONGEST_NUMBER = 600
"""Digits beyond which a whole number is read as infinite: none that is allowed has so many, and Python may refuse more."""
LONGEST_NAME = 10_000
"""Characters of a field's or a tensor's name in an object."""
MEMORY_FACTOR, SPARE_BYTES = 10, 16 * 2**20
"""Reading takes at most so many times the text's own bytes, and so many more."""

_MOST_BYTES = {"{": 150, "[": 130, ",": 160, ":": 85}
"""What Python needs at most, on 64 bits, for an object, a list, a value and a key until a document is made and checked:
with these numbers the bound above holds for the densest texts of each kind, valid or not."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(text: str | bytes, source: str) -> object:
    """Plain data of one JSON document. Raises FormatError that begins with `source`."""
    try:
        _check_density(text)
        decoded = text.removeprefix("\ufeff") if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(decoded, object_pairs_hook=_no_twins, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{source}: is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save it as UTF-8."
        ) from error
    except RecursionError as error:
        raise FormatError(f"{source}: {_TOO_DEEP}") from error
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
    except ValueError as error:  # JSONDecodeError
        raise FormatError(f"{source}: is not JSON: {error}. Comments and trailing commas are not JSON.") from error


_HALF = "half of a surrogate pair is no character, and no file can hold it. Correct the escape."
_TOO_DEEP = f"lists and objects nest deeper than {DEEPEST} levels, which no document of gradwire's does. Remove some."


def check_plain(data: object) -> None:
    """Raise FormatError, with the path, for text that is not Unicode, keys that are not strings, and too deep nesting."""
    path: list[str] = []
    levels: list[Iterator[tuple[str, object]]] = [iter([("", data)])]
    while levels:
        for part, value in levels[-1]:
            if isinstance(value, str):
                if _SURROGATE.search(value):
                    raise FormatError(f"{join(*path, part) or 'the document'} is {show(value)}: {_HALF}")
            elif isinstance(value, (Mapping, list, tuple)):
                if len(levels) > DEEPEST:
                    where = join(*path[:8])
                    raise FormatError(f"{'the document' * where.startswith('[')}{where}...: {_TOO_DEEP}")
                path.append(part)
                levels.append(_members(value, path))
                break
        else:
            levels.pop()
            if path:
                path.pop()


def check_finite(data: object, *path: str) -> None:
    """Raise FormatError, with the path, for an infinite number or NaN, which no file of ours can hold."""
    if isinstance(data, float) and not math.isfinite(data):
        raise FormatError(f"{join(*path) or 'the document'} is {data}, which is no finite number. Correct it.")
    if isinstance(data, (Mapping, list, tuple)):
        for part, value in _members(data, list(path)):
            check_finite(value, *path, part)


def _members(
    value: Mapping[object, object] | list[object] | tuple[object, ...], path: list[str]
) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        for index, item in enumerate(value):
            yield f"[{index}]", item
        return
    for key, item in value.items():
        if not isinstance(key, str):
            where, kind = join(*path, show(key)), type(key).__name__
            raise FormatError(f"{where} is no name, but a {kind}: names of fields and tensors are strings. Correct it.")
        if len(key) > LONGEST_NAME:
            raise FormatError(f"{join(*path, show(key))} is no name: it has {len(key):_} characters. Shorten it.")
        if _SURROGATE.search(key):
            raise FormatError(f"{join(*path, show(key))} is no name: {_HALF}")
        yield printable(key), item


def _check_density(text: str | bytes) -> None:
    """Refuse text that is all brackets and commas: of `[[],[],[],...` each 3 bytes would take 70 in memory."""
    needed = 0
    for mark, cost in _MOST_BYTES.items():
        needed += cost * (text.count(mark) if isinstance(text, str) else text.count(mark.encode()))
    if needed > MEMORY_FACTOR * len(text) + SPARE_BYTES:
        raise FormatError(
            f"reading its {len(text):_} bytes could take {needed:_} of memory, as they are mostly brackets and commas. "
            "Write it with indentation, as `save` does."
        )


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= LONGEST_NUMBER else float(digits)


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise FormatError(f"{printable(key)} stands twice in one object, and only one could count. Remove one.")
            seen.add(key)
    return data
