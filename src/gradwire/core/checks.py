"""Checks of single values, with the same messages in every format.

Errors begin with the name of the field. The reader of a document (`gradwire.core.strict`) puts the object's path before it.
"""

import functools
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import msgspec

from gradwire.errors import FormatError, GradwireError

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one element, for each dtype a gradient may have."""
ENCODED_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that compressors take. Gradients of other dtypes stay uncompressed."""

_LARGEST = sys.float_info.max
_INT64 = 2**63 - 1  # what torch, and readers in other languages, can hold


def show(value: object) -> str:
    """The value as code, cut to one short line."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def error_words(error: BaseException) -> str:
    """The class and the words of an error: 'ValueError: no such file'.

    >>> error_words(KeyError("x")), error_words(StopIteration())
    ("KeyError: 'x'", 'StopIteration')
    """
    try:
        words = str(error)
    except Exception as problem:  # the class is one of a script, and what it raises there must not hide the error
        words = f"its words are unknown, because __str__ raised {type(problem).__name__}"
    return f"{type(error).__name__}: {words}".removesuffix(": ")


def printable(name: str, longest: int = 80) -> str:
    """The name, if it is one short line of text; else the name as code, cut."""
    return name if name.isprintable() and 0 < len(name) <= longest else show(name)


def near(wrong: object, known: Collection[str]) -> str:
    """` (did you mean 'x'?)` if a known name is close to the wrong name, else ''."""
    if not isinstance(wrong, str) or len(wrong) > 80:  # a search would take long and find nothing
        return ""
    close = get_close_matches(wrong, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def number(field: str, value: object, what: str, *, positive: bool = False, error: type[GradwireError] = FormatError) -> None:
    """Refuse everything but a finite number of at least 0, or above 0 if `positive`."""
    bound = "above 0" if positive else "at least 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise error(f"{field} is {show(value)}, a {type(value).__name__}: it must be {what}, a number {bound}.")
    if not 0 <= value <= _LARGEST or (positive and value == 0):  # false for NaN too
        raise error(f"{field} is {show(value)}: it must be {what}, finite and {bound}. Measure or write it again.")


def whole(
    field: str, value: object, what: str, *, low: int = 0, high: int = _INT64, error: type[GradwireError] = FormatError
) -> None:
    """Refuse everything but a whole number from `low` to `high`, both included."""
    bound = f"from {low} to {high}" if high < _INT64 else f"at least {low} and below 2**63"
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{field} is {show(value)}, a {type(value).__name__}: it must be {what}, a whole number {bound}.")
    if not low <= value <= high:
        raise error(f"{field} is {show(value)}: it must be {what}, a whole number {bound}.")


def numbers(owner: msgspec.Struct, what: str, *fields: str, positive: bool = False) -> None:
    """`number` for these fields of a struct. A field may be None if None is its default."""
    for field, value in _given(owner, fields):
        number(field, value, what, positive=positive)


def wholes(owner: msgspec.Struct, what: str, *fields: str, low: int = 0) -> None:
    """`whole` for these fields of a struct. A field may be None if None is its default."""
    for field, value in _given(owner, fields):
        whole(field, value, what, low=low)


def _given(owner: msgspec.Struct, fields: Collection[str]) -> Iterator[tuple[str, object]]:
    optional = {info.name for info in _fields(type(owner)) if info.default is None}
    return ((field, value) for field in fields if (value := getattr(owner, field)) is not None or field not in optional)


def flags(owner: msgspec.Struct, *fields: str) -> None:
    """Refuse fields of a struct that are not true or false."""
    for field in fields:
        if not isinstance(getattr(owner, field), bool):
            raise FormatError(f"{field} is {show(getattr(owner, field))}: it must be true or false.")


def only_version(value: object) -> None:
    """Refuse all versions but 1, which this release writes."""
    if isinstance(value, bool) or not isinstance(value, int) or value != 1:
        raise FormatError(f"version is {show(value)}: this release writes version 1, a whole number.")


def text(field: str, value: object, what: str, *, error: type[GradwireError] = FormatError) -> None:
    """Refuse everything but a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise error(f"{field} is {show(value)}: it must be {what}, a string that is not empty.")


def word(field: str, value: object, words: Collection[str], *, error: type[GradwireError] = FormatError) -> None:
    """Refuse everything but one of the words."""
    if not isinstance(value, str) or value not in words:
        raise error(f"{field} is {show(value)}: it must be one of {', '.join(words)}{near(value, words)}.")


def unique(field: str, names: Collection[str], part: str, *, error: type[GradwireError] = FormatError) -> None:
    """Refuse duplicate names; `part` follows the index in the message, as in `tensors[3].name`."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            raise error(
                f"{field}[{index}]{part} is {show(name)}, and so is {field}[{first[name]}]{part}: each tensor needs a "
                "name of its own. Give each tensor once."
            )
        first[name] = index


def freeze(owner: msgspec.Struct, *fields: str) -> None:
    """Turn list fields into tuples, so that the struct cannot change and can be hashed."""
    for field in fields:
        value = getattr(owner, field)
        try:
            values = tuple(value) if not isinstance(value, str) else None
        except TypeError:  # a tensor of one number has `__iter__`, too
            values = None
        if values is None:
            raise FormatError(f"{field} is {show(value)}, a {type(value).__name__}: it must be a list.")
        msgspec.structs.force_setattr(owner, field, values)


def freeze_pairs(owner: msgspec.Struct, field: str, what: str) -> None:
    """Turn a list of pairs into a tuple of tuples; `what` describes a pair in messages."""
    freeze(owner, field)
    pairs = []
    for index, pair in enumerate(getattr(owner, field)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise FormatError(f"{field}[{index}] is {show(pair)}: it must be {what}.")
        pairs.append(tuple(pair))
    msgspec.structs.force_setattr(owner, field, tuple(pairs))


def each(field: str, values: Iterable[object], kind: type) -> None:
    """Refuse a list that has anything but instances of `kind`."""
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            raise FormatError(f"{field}[{index}] is {show(value)}, a {type(value).__name__}: it must be a {kind.__name__}.")


_fields = functools.cache(msgspec.structs.fields)


def changed(owner: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct without a default, and those that differ from their default, in order."""
    values = ((info, getattr(owner, info.name)) for info in _fields(type(owner)))
    return {info.name: value for info, value in values if info.required or value != info.default}


def join(*parts: str) -> str:
    """Join parts of a path with dots. No dot comes before `[...]`, and a space follows a colon.

    >>> join("", "buckets[0]", "spec"), join("points", "[3]"), join("tensor 'a':", "dtype")
    ('buckets[0].spec', 'points[3]', "tensor 'a': dtype")
    """
    path = ""
    for part in parts:
        dot = "" if not path or not part or part.startswith("[") else " " if path.endswith(":") else "."
        path += dot + part
    return path


@contextmanager
def under(path: str) -> Iterator[None]:
    """Put a path before the field name in errors that are raised inside."""
    try:
        yield
    except GradwireError as error:
        raise type(error)(join(path, str(error))) from error
