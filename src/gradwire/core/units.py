"""Recognises a field that is known under another unit: `backward_ms` is `backward_us`, `mbps` is `gbps`."""

from collections.abc import Collection

_UNITS = {
    "times are microseconds": {"ns", "us", "usec", "ms", "msec", "s", "sec", "seconds", "millis", "micros", "time"},
    "rates are gigabits per second": {
        *("bps", "kbps", "mbps", "gbps", "kbit", "mbit", "gbit", "mbits", "gbits", "bandwidth", "rate"),
    },
    "sizes are bytes": {"b", "byte", "bytes", "kb", "kib", "mb", "mib", "gb", "gib", "kilobytes", "megabytes", "size"},
}


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
