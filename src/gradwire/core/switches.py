"""Switches: environment variables that are on or off."""

import os

from gradwire.core.checks import show
from gradwire.errors import FormatError

SHARED_MEMORY = "GRADWIRE_SHARED_MEMORY"
"""Whether ranks of a machine share memory. They use TCP where it is off for one of them."""
RECORD_ARGUMENTS = "GRADWIRE_RECORD_ARGUMENTS"
"""Whether records and profiles keep the arguments of the script."""
SWITCH_WORDS = {"on": True, "1": True, "off": False, "0": False}
_DEFAULTS = {SHARED_MEMORY: True, RECORD_ARGUMENTS: False}


def switch(name: str) -> bool:
    """Return whether a switch is on; its default where it is empty or not set. Raises FormatError for other words."""
    value, default = os.environ.get(name, ""), _DEFAULTS[name]
    if value not in ("", *SWITCH_WORDS):
        raise FormatError(
            f"{name} is {show(value)}, which is neither on nor off. Set it to `on` or `off`, or not at all for "
            f"`{'on' if default else 'off'}`."
        )
    return SWITCH_WORDS.get(value, default)


def check_switches() -> None:
    """Raises FormatError for a switch that has other words, so that all ranks know it before any of them begins."""
    for name in _DEFAULTS:
        switch(name)
