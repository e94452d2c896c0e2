"""The costs: measured times of encode and decode per spec and device."""

from typing import ClassVar, TypeAlias

import msgspec

from gradwire.core.checks import each, freeze, freeze_pairs, number, only_version, show, whole, word
from gradwire.core.provenance import Made
from gradwire.core.specs.base import SpecField, as_spec
from gradwire.core.strict import Document
from gradwire.errors import FormatError

Points: TypeAlias = tuple[tuple[int, float], ...]
"""(input bytes, microseconds), bytes strictly increasing: points of a piecewise-linear function."""


class CodecCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one spec's codec on one device, by bytes of the uncompressed input, 4 an element: for 16-bit gradients too."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("weigh",)

    spec: SpecField
    device: str
    """gpu or cpu"""
    encode: Points
    decode: Points
    weigh: Points = ()
    """Once in a step, by the bytes of the whole bucket: find the weights of elements, and learn those of the next step. Empty for
    specs without weights, and where `encode` has it."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "spec", as_spec("spec", self.spec))
        word("device", self.device, ("gpu", "cpu"))
        for field in ("encode", "decode", *(("weigh",) if self.weigh else ())):
            freeze_pairs(self, field, "[input bytes, microseconds]")
            _check_points(field, getattr(self, field))


def _check_points(field: str, points: Points) -> None:
    last = -1
    for index, (size, time) in enumerate(points):
        whole(f"{field}[{index}][0]", size, "bytes of uncompressed input")
        number(f"{field}[{index}][1]", time, "a time in microseconds")
        if size <= last:
            raise FormatError(
                f"{field}[{index}][0] is {size} after {last}: bytes must be strictly increasing, or the time between "
                "two points has no meaning. Sort the points and keep one for each size."
            )
        last = size
    if last < 0:
        raise FormatError(f"{field} is []: it needs at least one point. Measure the codec again.")


class Costs(Document, frozen=True, kw_only=True):
    """Codec times, at most one entry for each spec and device."""

    what: ClassVar[str] = "costs"
    remedy: ClassVar[str] = "Costs are made by `gradwire profile` or `handle.profile(FOLDER)`: see docs/how-to/plan-a-cluster.md."
    omit_at_default: ClassVar[tuple[str, ...]] = ("made",)

    version: int = 1
    codecs: tuple[CodecCosts, ...]
    made: Made | None = None

    def __post_init__(self) -> None:
        only_version(self.version)
        freeze(self, "codecs")
        each("codecs", self.codecs, CodecCosts)
        first: dict[object, int] = {}
        for index, codec in enumerate(self.codecs):
            key = (codec.spec, codec.device)
            if key in first:
                raise FormatError(
                    f"codecs[{index}] is {show(codec.spec)} on {codec.device}, and so is codecs[{first[key]}]: a spec has "
                    "one time on a device. Remove one."
                )
            first[key] = index
