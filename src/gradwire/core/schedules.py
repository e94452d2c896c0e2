"""Schedules: when the phases of a bucket run. Frozen data; the engine executes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from gradwire.core.checks import near, show, under, whole
from gradwire.core.specs import Spec, as_spec
from gradwire.core.strict import convert
from gradwire.errors import FormatError

__all__ = ["Backward", "Delayed", "Pipelined", "Schedule", "as_schedule"]

if TYPE_CHECKING:
    OptionalSpec = Spec | None
else:
    OptionalSpec = Any


class Backward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="backward"):
    """Both phases as soon as the bucket's gradients are ready: wait-free backpropagation."""


class Pipelined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pipelined"):
    """The reduce phase in backward, the gather phase in the next forward (DeAR)."""


class Delayed(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="delayed",
    repr_omit_defaults=True,
):
    """A local update now, the global update one step later (CD-SGD)."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("correction",)

    k: int | None = 5
    """Every k-th step is a correction. Smaller: closer to plain SGD, more bytes; None: never corrects."""
    correction: OptionalSpec = None
    """What travels in a correction step; None is the uncompressed gradient. Fewer bits: fewer bytes, more error."""

    def __post_init__(self) -> None:
        if self.k is not None:
            whole("k", self.k, "the steps from one correction to the next, or null", low=1)
        if self.correction is not None:
            msgspec.structs.force_setattr(self, "correction", as_spec("correction", self.correction))


Schedule: TypeAlias = Backward | Pipelined | Delayed

_BY_WORD: dict[str, Schedule] = {"backward": Backward(), "pipelined": Pipelined(), "delayed": Delayed()}


def as_schedule(value: object) -> Schedule:
    """A schedule, or the one that its bare word or its JSON object names. Raises FormatError for any other value.

    >>> as_schedule("backward"), as_schedule({"kind": "delayed", "k": 2})
    (Backward(), Delayed(k=2))
    """
    if isinstance(value, (Backward, Pipelined, Delayed)):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else value
    if not isinstance(kind, str) or kind not in _BY_WORD:
        raise FormatError(
            f"schedule is {show(value)}: it must be Backward(), Pipelined() or Delayed(...), one of the words "
            f'{", ".join(_BY_WORD)}{near(kind, _BY_WORD)}, or in JSON an object such as {{"kind": "backward"}}.'
        )
    if isinstance(value, str):
        return _BY_WORD[kind]
    with under("schedule"):
        return convert(value, type(_BY_WORD[kind]))
