"""Reading and writing of JSON documents: strict and frozen, with errors that name the field, its value and the cure."""

import json
import math
import os
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from gradwire.core.checks import changed, join, near, printable, show
from gradwire.core.files import write_whole
from gradwire.errors import FormatError, GradwireError

T = TypeVar("T", bound=msgspec.Struct)

_MESSAGE = re.compile(r"^(?P<text>.*?)(?: - at `\$(?P<path>(?:\.\w+|\[\d+\]|\[\.\.\.\])*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<type>[^`]*)`(?: of length (?P<length>\d+))?")
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_NAMED = re.compile(r"`([^`]*)`")
_UNITS = {
    "times are microseconds": {"ns", "us", "usec", "ms", "msec", "s", "sec", "seconds", "millis", "micros", "time"},
    "rates are gigabits per second": {
        *("bps", "kbps", "mbps", "gbps", "kbit", "mbit", "gbit", "mbits", "gbits", "bandwidth", "rate")
    },
    "sizes are bytes": {"b", "byte", "bytes", "kb", "kib", "mb", "mib", "gb", "gib", "kilobytes", "megabytes", "size"},
}
"""Kinds of units, to recognise a field under another unit: `backward_ms` is `backward_us`, `mbps` is `gbps`."""
_TOO_DEEP = "lists and objects are nested deeper than in any document of gradwire. Remove some levels."


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the formats: a frozen struct that is one JSON file.

    A subclass sets `what` (the format's name in messages), `remedy` (how to get a right file) and `private` (whether others than
    this user may not read a new file).
    """

    what: ClassVar[str] = "document"
    remedy: ClassVar[str] = "Write the file again."
    private: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings in the order of the format. Optional fields at their default are left out."""
        return typing.cast(dict[str, Any], plain(self))

    def to_json(self, indent: int | None = 2) -> str:
        """JSON text that ends in a newline; with `indent=None` on one line."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step: a reader sees the old file or the whole new file, never a part.

        Raises WriteError if the file cannot be written.
        """
        write_whole(path, self.to_json(), self.private)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read plain data. Raises FormatError, or SpecError for a wrong compressor spec."""
        return cls._read(data, cls.what)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read JSON text. Raises FormatError, or SpecError for a wrong compressor spec."""
        return cls._read(parse(text, cls.what), cls.what)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a JSON file. Raises FormatError, or SpecError for a wrong compressor spec, naming the file."""
        return cls._read(*read(path, f" {cls.remedy}"))

    @classmethod
    def _read(cls, data: object, source: str) -> Self:
        try:
            if isinstance(data, Mapping) and "version" in cls.__struct_fields__:
                _check_version(data, cls)
            document = convert(data, cls)
            check_plain(data)  # values that no field has refused
            return document
        except RecursionError as error:
            raise FormatError(f"{source}: {_TOO_DEEP}") from error
        except GradwireError as error:
            raise type(error)(f"{source}: {error}") from error


def _check_version(data: Mapping[str, object], cls: type[Document]) -> None:
    if "version" not in data:
        raise FormatError(f'version is missing: every {cls.what} needs a version. Write "version": 1.')
    version = data["version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        why = "no release wrote another version before 1."
    elif version > 1:
        why = "a later release wrote the file. Update gradwire, or write the file for this release."
    else:
        return
    raise FormatError(
        f"version is {show(version)}, and this release of gradwire reads version 1, a whole number: {why} {cls.remedy}"
    )


def plain(value: object) -> object:
    """Turn structs into dicts, and tuples into lists. A struct with a `to_dict` of its own uses it.

    Fields that a class lists in `omit_at_default` are left out when they have their default.
    """
    if isinstance(value, msgspec.Struct):
        if not isinstance(value, Document) and hasattr(value, "to_dict"):
            return value.to_dict()
        omit = getattr(type(value), "omit_at_default", ())
        config = value.__struct_config__
        result: dict[str, object] = {config.tag_field: config.tag} if config.tag_field else {}
        shown = changed(value)
        for name in value.__struct_fields__:
            if name in shown or name not in omit:
                result[name] = plain(getattr(value, name))
        return result
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def convert(data: object, cls: type[T]) -> T:
    """Turn plain data into a struct; errors begin with the path of the wrong field."""
    try:
        return msgspec.convert(data, cls, strict=True)
    except UnicodeEncodeError:
        check_plain(data)  # says where
        raise
    except msgspec.ValidationError as error:
        match = _MESSAGE.match(str(error))
        assert match is not None
        path = (match["path"] or "").lstrip(".")
        if isinstance(error.__cause__, GradwireError):  # raised by a struct's own __post_init__
            raise type(error.__cause__)(join(path, str(error.__cause__))) from error
        raise FormatError(_explain(match["text"], path, data, cls)) from error


def _explain(text: str, path: str, data: object, cls: type) -> str:
    value, kind = _walk(path, data, cls)
    if "unknown field" in text:
        # a name such as "x - at `$.y" looks like a path: then the field belongs to the document
        unknown = _unknown(path, value, kind) or _unknown("", data, cls)
        if unknown:
            return unknown
    if "missing required field" in text and (missing := _NAMED.findall(text)):
        return f"{join(path, missing[0])} is missing, and it has no default. Add it."
    expected = _EXPECTED.match(text)
    if expected is None:
        found = "" if "[...]" in path else f" is {show(value)}"
        return f"{path or 'the document'}{found}: {text[:1].lower()}{text[1:]}."
    wanted = " or ".join(_WORDS.get(word, word) for word in expected["type"].split(" | "))
    length = f" of length {expected['length']}" if expected["length"] else ""
    return f"{path or 'the document'} is {show(value)}: it must be {wanted}{length}{unit_note(path)}."


def _unknown(path: str, value: object, struct: Any) -> str:
    """A sentence about the first name in `value` that is no field of the struct; '' for none."""
    if struct is None or not isinstance(value, Mapping):
        return ""
    known, tag = struct.__struct_fields__, struct.__struct_config__.tag_field
    wrong = next((name for name in value if name not in known and name != tag), None)
    if wrong is None:
        return ""
    cure = other_unit(wrong, known) or f"Its fields are {', '.join(known)}{near(wrong, known)}."
    return f"{join(path, printable(wrong))} is not a field (its value is {show(value[wrong])}). {cure}"


def _walk(path: str, data: Any, kind: Any) -> tuple[Any, Any]:
    """The value at a path and its declared type, or None if the type is unknown, as behind a map's key."""
    if "[...]" in path:
        return None, None
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            data = data[name or int(index)]
        except (KeyError, IndexError, TypeError):
            return None, None
        kind = _inner(kind, name)
    return data, _struct_of(kind, data)


def _inner(kind: Any, name: str) -> Any:
    if name:
        struct = _struct_of(kind, None)
        return typing.get_type_hints(struct).get(name) if struct is not None else None
    arguments = typing.get_args(kind)
    return arguments[0] if arguments else None


def _struct_of(kind: Any, data: Any) -> Any:
    """The struct class in an annotation; in a tagged union, the class with the tag of the data."""
    structs = [k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and issubclass(k, msgspec.Struct)]
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field and isinstance(data, Mapping) and data.get(config.tag_field) == config.tag:
            return struct
    return structs[0] if structs else None


def _split(field: str) -> tuple[frozenset[str], str]:
    """The words of a field without its unit, and the kind of the unit ('' for none)."""
    rest, unit = set(), ""
    for token in field.lower().split("_"):
        kind = next((kind for kind, words in _UNITS.items() if token in words), None)
        if kind is None:
            rest.add(token)
        else:
            unit = unit or kind
    return frozenset(rest), unit


def other_unit(field: str, known: Collection[str]) -> str:
    """A sentence with the right field, if `field` is a known field with another unit or without a unit; else ''.

    >>> other_unit("backward_ms", ["name", "backward_us"])
    'Times are microseconds: backward_us.'
    >>> other_unit("colour", ["name", "backward_us"])
    ''
    """
    rest, unit = _split(field)
    for name in known:
        known_rest, known_unit = _split(name)
        if known_unit and rest == known_rest and unit in ("", known_unit):
            return f"{known_unit[0].upper()}{known_unit[1:]}: {name}."
    return ""


def unit_note(path: str) -> str:
    """` (times are microseconds)` for the path of a field that has a unit in its name, else ''.

    >>> unit_note("tensors[0].backward_us")
    ' (times are microseconds)'
    """
    unit = _split(path.rpartition(".")[2])[1]
    return f" ({unit})" if unit else ""


def read(path: str | os.PathLike[str], remedy: str = "") -> tuple[object, str]:
    """Plain data of a JSON file, and the file's name for messages. Raises FormatError naming the file."""
    source = printable(os.fspath(path), longest=4096)
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"{source}: cannot be read: {reason}. Check the path.{remedy}") from error
    return parse(text, source), source


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
        raise FormatError(f"{source}: {_TOO_DEEP}") from error
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise FormatError(f"{source}: is not JSON: {error}. Comments and trailing commas are not JSON.") from error


def check_plain(data: object, *path: str) -> None:
    """Raise FormatError, with the path, for numbers that are not finite and for text that is not Unicode."""
    if isinstance(data, float) and not math.isfinite(data):
        raise FormatError(f"{join(*path) or 'the document'} is {data}, which is not a finite number. Correct the value.")
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
