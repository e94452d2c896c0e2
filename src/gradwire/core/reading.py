"""JSON text to plain data."""

import json
import math
from collections.abc import Mapping

from gradwire.core.checks import join, printable, show
from gradwire.errors import FormatError

TOO_DEEP = "lists and objects are nested deeper than in any document of gradwire. Remove some levels."


def parse(text: str | bytes, source: str) -> object:
    """Plain data of one JSON document. Raises FormatError that begins with `source`."""
    try:
        decoded = text.removeprefix("\ufeff") if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(decoded, object_pairs_hook=_no_twins)
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{source}: is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save it as UTF-8."
        ) from error
    except RecursionError as error:
        raise FormatError(f"{source}: {TOO_DEEP}") from error
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise FormatError(f"{source}: is not JSON: {error}. Comments and trailing commas are not JSON.") from error


def check_plain(data: object, *path: str) -> None:
    """Raise FormatError, with the path, for numbers that are not finite and for text that is not Unicode."""
    if isinstance(data, float) and not math.isfinite(data):
        raise FormatError(
            f"{join(*path) or 'the document'} is {data}, which is not a finite number. Correct the value."
        )
    if isinstance(data, str) and not data.isascii() and any("\ud800" <= char <= "\udfff" for char in data):
        raise FormatError(
            f"{join(*path) or 'the document'} is {show(data)}: half of a surrogate pair is no character, and a file cannot "
            "store it. Correct the escape."
        )
    if isinstance(data, Mapping):
        for key, value in data.items():
            check_plain(key, *path, show(key))
            check_plain(value, *path, printable(str(key)))
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            check_plain(value, *path, f"[{index}]")


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data: dict[str, object] = {}
    for key, value in pairs:
        if key in data:
            raise FormatError(f"{printable(key)} stands twice in one object: a key has one value. Remove one.")
        data[key] = value
    return data
