"""Link rates as `tc` writes them."""

import math
import re

from gradwire.errors import TestbedError

_BITS_PER_UNIT = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST_BITS_PER_SECOND = 1e3
_FASTEST_BITS_PER_SECOND = 1e12
_EXAMPLES = '"100mbit", "2.5gbit", "800kbit"'


def parse_rate(text: str) -> float:
    """Read a rate in bits per second. Units are powers of 1000; case does not matter.

    >>> parse_rate("500mbit"), parse_rate("1.5Gbit")
    (500000000.0, 1500000000.0)

    Raises TestbedError for other text, also for tc's ambiguous `mbps`, which means megabytes per second.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z/]*)\s*", text)
    if match is None:
        raise TestbedError(f"{text!r} is not a link rate, a number with a unit. Write, for example, {_EXAMPLES}.")
    number, unit = float(match[1]), match[2].lower()
    if unit not in _BITS_PER_UNIT:
        reason = f"has the unit {match[2]!r}" if unit else "has no unit"
        raise TestbedError(
            f"link rate {text!r} {reason}; the units are {', '.join(_BITS_PER_UNIT)} (bits per second). Write, for example, "
            f"{_EXAMPLES}."
        )
    bits_per_second = number * _BITS_PER_UNIT[unit]
    if not math.isfinite(bits_per_second) or bits_per_second < _SLOWEST_BITS_PER_SECOND:
        raise TestbedError(f"link rate {text!r} is below the minimum of 1kbit. Write, for example, {_EXAMPLES}.")
    if bits_per_second > _FASTEST_BITS_PER_SECOND:
        raise TestbedError(
            f"link rate {text!r} is above 1000gbit, the limit of tc. Leave out the rate for an unlimited link."
        )
    return bits_per_second
