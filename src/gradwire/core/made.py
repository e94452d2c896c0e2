"""Where the numbers of a file came from."""

import msgspec

__all__ = ["Made"]


class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host, date and command of a measurement, so that anybody can measure again."""

    host: str
    date: str
    command: str
