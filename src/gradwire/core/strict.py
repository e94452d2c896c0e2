"""Reading and writing JSON documents: strict, frozen, errors that name the field, its value and the cure."""

import json
import os
import re
import secrets
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from gradwire.core.checks import changed, join, near, show
from gradwire.core.units import other_unit, unit_note
from gradwire.errors import FormatError, GradwireError

__all__ = ["Document", "convert", "plain"]

T = TypeVar("T", bound=msgspec.Struct)

_MESSAGE = re.compile(r"^(?P<text>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
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


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the formats: a frozen struct that is one JSON file.

    A subclass sets `what` (the format's name in messages) and `remedy` (how to get a right file).
    """

    what: ClassVar[str] = "document"
    remedy: ClassVar[str] = "Write the file again."

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, in the order of the format; optional fields at default left out."""
        return typing.cast(dict[str, Any], plain(self))

    def to_json(self, indent: int | None = 2) -> str:
        """JSON text that ends in a newline; `indent=None` puts it on one line."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step: a reader sees the old file or the whole new one, never a part."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read plain data. Raises FormatError, or SpecError for a wrong compressor spec."""
        return cls._read(data, cls.what)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read JSON text. Raises FormatError, or SpecError for a wrong compressor spec."""
        return cls._read(_parse(text, cls.what), cls.what)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a JSON file. Raises FormatError, or SpecError for a wrong compressor spec, naming the file."""
        source = os.fspath(path)
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise FormatError(f"{source}: cannot be read: {error.strerror}. Check the path. {cls.remedy}") from error
        return cls._read(_parse(text, source), source)

    @classmethod
    def _read(cls, data: object, source: str) -> Self:
        try:
            if isinstance(data, Mapping) and "version" in cls.__struct_fields__:
                _check_version(data, cls)
            return convert(data, cls)
        except GradwireError as error:
            raise type(error)(f"{source}: {error}") from error


def _check_version(data: Mapping[str, object], cls: type[Document]) -> None:
    if "version" not in data:
        raise FormatError(f'version is missing: every {cls.what} says which version it is. Write "version": 1.')
    version = data["version"]
    if isinstance(version, bool) or version != 1:
        raise FormatError(
            f"version is {show(version)}, and this release of gradwire reads version 1. {cls.remedy} "
            "Or use the release that wrote it."
        )


def _parse(text: str | bytes, source: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_no_twins)
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise FormatError(f"{source}: is not JSON: {error}. Comments and trailing commas are not JSON.") from error


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"{twin} stands twice in one object, and only one could count. Remove one.")
    return data


def plain(value: object) -> object:
    """Structs to dicts, tuples to lists. A struct's own `to_dict` decides, if it has one.

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
    except msgspec.ValidationError as error:
        match = _MESSAGE.match(str(error))
        assert match is not None
        path = (match["path"] or "").lstrip(".")
        if isinstance(error.__cause__, GradwireError):  # raised by a struct's own __post_init__
            raise type(error.__cause__)(join(path, str(error.__cause__))) from error
        raise FormatError(_explain(match["text"], path, data, cls)) from error


def _explain(text: str, path: str, data: object, cls: type) -> str:
    value, kind = _walk(path, data, cls)
    names = _NAMED.findall(text)
    if "unknown field" in text:
        known = getattr(kind, "__struct_fields__", ())
        wrong = names[0]
        found = show(value.get(wrong)) if isinstance(value, Mapping) else "unknown"
        cure = other_unit(wrong, known) or f"Its fields are {', '.join(known)}{near(wrong, known)}."
        return f"{join(path, wrong)} is not a field (its value is {found}). {cure}"
    if "missing required field" in text:
        return f"{join(path, names[0])} is missing, and it has no default. Add it."
    expected = _EXPECTED.match(text)
    if expected is None:
        return f"{path or 'the document'} is {show(value)}: {text[:1].lower()}{text[1:]}."
    wanted = " or ".join(_WORDS.get(word, word) for word in expected["type"].split(" | "))
    length = f" of length {expected['length']}" if expected["length"] else ""
    return f"{path or 'the document'} is {show(value)}: it must be {wanted}{length}{unit_note(path)}."


def _walk(path: str, data: Any, kind: Any) -> tuple[Any, Any]:
    """The value at a path and the type declared for it (None where it cannot be told)."""
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
    """The struct class meant by an annotation; of a tagged union, the member whose tag the data has."""
    structs = [k for k in (kind, *typing.get_args(kind)) if isinstance(k, type) and issubclass(k, msgspec.Struct)]
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field and isinstance(data, Mapping) and data.get(config.tag_field) == config.tag:
            return struct
    return structs[0] if structs else None
