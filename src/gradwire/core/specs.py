"""Specs: frozen data that names a compressor.

A spec is configuration, registry key, repr, equality and JSON at once. This module holds the data only; what a spec
does is in `gradwire.compressors`, which looks it up by class.

>>> spec = ErrorFeedback(QSGD(bits=4))
>>> spec
ErrorFeedback(QSGD(bits=4, block=128))
>>> spec.to_dict()
{'id': 'error_feedback', 'inner': {'id': 'qsgd', 'bits': 4, 'block': 128}}
>>> spec_from_dict(spec.to_dict()) == spec
True
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from gradwire.core.checks import changed, near, show, under, whole, word
from gradwire.core.strict import convert, plain
from gradwire.errors import GradwireError, SpecError

__all__ = ["QSGD", "Cast", "ErrorFeedback", "Identity", "Spec", "register_spec", "registered_specs", "spec_from_dict"]

_REGISTRY: dict[str, type["Spec"]] = {}


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every spec. A subclass sets `id`, declares its fields, checks them in `__post_init__` and registers.

    `id` is the word that stands for the class in JSON. `always_written` are fields that JSON and repr show even at
    their default. `varies_in_family` are fields in which specs that share one exchange may differ.
    """

    id: ClassVar[str] = ""
    always_written: ClassVar[tuple[str, ...]] = ()
    varies_in_family: ClassVar[tuple[str, ...]] = ()

    def _shown(self) -> dict[str, Any]:
        shown = changed(self)
        names = [name for name in self.__struct_fields__ if name in shown or name in self.always_written]
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The JSON object: `id`, then the fields that are not at their default or are always written."""
        return {"id": self.id} | {name: plain(value) for name, value in self._shown().items()}

    def __repr__(self) -> str:
        required = {info.name for info in msgspec.structs.fields(self) if info.required}
        shown = self._shown().items()
        parts = [repr(value) if name in required else f"{name}={value!r}" for name, value in shown]
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def family(self) -> str:
        """Tensors whose specs have the same family may share one encode call and one exchange.

        >>> QSGD(bits=2).family == QSGD(bits=8).family, QSGD(block=64).family == QSGD(block=128).family
        (True, False)
        """
        names = [name for name in self.__struct_fields__ if name not in self.varies_in_family]
        values = [(name, getattr(self, name)) for name in names]
        inside = ",".join(f"{n}={v.family if isinstance(v, Spec) else v}" for n, v in values)
        return f"{self.id}({inside})"


S = TypeVar("S", bound=Spec)


def register_spec(cls: type[S]) -> type[S]:
    """Class decorator: make a spec class readable from JSON. Raises SpecError if its id is missing or taken."""
    if not cls.id:
        raise SpecError(
            f"{cls.__name__}.id is {cls.id!r}: it must be a word. Set `id: ClassVar[str] = ...` in the class."
        )
    taken = _REGISTRY.get(cls.id)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise SpecError(
            f"id {cls.id!r} of {cls.__module__}.{cls.__qualname__} belongs to {taken.__module__}.{taken.__qualname__} "
            "already, and JSON could not tell them apart. Choose another id."
        )
    _REGISTRY[cls.id] = cls
    return cls


def registered_specs() -> dict[str, type[Spec]]:
    """The registered classes by id, a copy."""
    return dict(_REGISTRY)


def spec_from_dict(data: Mapping[str, object]) -> Spec:
    """Read a spec from its JSON object. Fields at their default may be left out.

    Raises SpecError that names the wrong field, its value and the cure.

    >>> spec_from_dict({"id": "qsgd", "bits": 2})
    QSGD(bits=2, block=128)
    """
    if not isinstance(data, Mapping):
        raise SpecError(f'{show(data)} is not a spec: it must be an object such as {{"id": "qsgd", "bits": 4}}.')
    known = sorted(_REGISTRY)
    if "id" not in data:
        raise SpecError(f"id is missing in {show(dict(data))}: it says which compressor. Known: {', '.join(known)}.")
    name = data["id"]
    cls = _REGISTRY.get(name) if isinstance(name, str) else None
    if cls is None:
        raise SpecError(
            f"id is {show(name)}, which is no registered compressor: it must be one of {', '.join(known)}"
            f"{near(name, known)}. A compressor of your own is registered with `register_spec`."
        )
    try:
        return convert({key: value for key, value in data.items() if key != "id"}, cls)
    except SpecError:
        raise
    except GradwireError as error:
        raise SpecError(f"{error} (in spec {name!r})") from error


def as_spec(field: str, value: object) -> Spec:
    """The spec itself, or the spec read from its JSON object; errors begin with the field."""
    if isinstance(value, Spec):
        return value
    if isinstance(value, Mapping):
        with under(field):
            return spec_from_dict(value)
    raise SpecError(f"{field} is {show(value)}, a {type(value).__name__}: it must be a spec such as QSGD(bits=4).")


if TYPE_CHECKING:
    SpecField = Spec
else:
    SpecField = Any  # msgspec leaves it as it is; __post_init__ reads it through the registry, which is open


@register_spec
class Identity(Spec, frozen=True):
    """No compression: the payload is the gradient's own bytes. Exact, 4 bytes an element for float32."""

    id: ClassVar[str] = "identity"


@register_spec
class Cast(Spec, frozen=True):
    """A narrower float on the wire, rounded to nearest even: 2 bytes an element."""

    id: ClassVar[str] = "cast"
    always_written: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: str = "float16"
    """float16: less error, overflows beyond 65504; bfloat16: 8 times the error, float32's whole range."""

    def __post_init__(self) -> None:
        word("dtype", self.dtype, ("float16", "bfloat16"), error=SpecError)


@register_spec
class QSGD(Spec, frozen=True):
    """Uniform quantisation to `bits` bits with one scale per block (QSGD; CGX's compressor; notes D6, D7).

    Raises SpecError for a value outside its range.
    """

    id: ClassVar[str] = "qsgd"
    always_written: ClassVar[tuple[str, ...]] = ("bits", "block")
    varies_in_family: ClassVar[tuple[str, ...]] = ("bits",)

    bits: int = 4
    """2 to 8 bits an element, sign included. Fewer bits: fewer bytes, more error."""
    block: int = 128
    """Elements that share one scale: a power of two from 32 to 8192. Larger: fewer scale bytes, more error."""
    scale: str = "max"
    """max: the block's largest magnitude; minmax: 2^bits levels between minimum and maximum, less error, twice the
    scale bytes; l2: the block's norm, much more error at few bits (CGX's formula, for comparison)."""
    rounding: str = "stochastic"
    """stochastic: unbiased, more error; nearest: biased, less error (give it ErrorFeedback)."""
    seed: int = 0
    """Of the stochastic rounding. Another seed: other noise, the same size of error."""

    def __post_init__(self) -> None:
        whole("bits", self.bits, "the bits of an element", low=2, high=8, error=SpecError)
        whole("block", self.block, "the elements of a block", low=32, high=8192, error=SpecError)
        if self.block & (self.block - 1):
            lower = 1 << (self.block.bit_length() - 1)
            raise SpecError(f"block is {self.block}: it must be a power of two. Use {lower} or {2 * lower}.")
        word("scale", self.scale, ("max", "minmax", "l2"), error=SpecError)
        word("rounding", self.rounding, ("stochastic", "nearest"), error=SpecError)
        whole("seed", self.seed, "a seed", low=0, high=2**63 - 1, error=SpecError)


@register_spec
class ErrorFeedback(Spec, frozen=True):
    """Carries what `inner` lost to the next step, one residual per encode (notes D3).

    With it: sums of steps lose nothing in the long run; the price is memory for the residual and delayed updates.
    Raises SpecError around Identity, which loses nothing, and around another ErrorFeedback.
    """

    id: ClassVar[str] = "error_feedback"

    inner: SpecField

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "inner", as_spec("inner", self.inner))
        if isinstance(self.inner, Identity):
            raise SpecError(
                "inner is Identity(), which loses nothing, so there is nothing to carry. Use Identity() alone."
            )
        if isinstance(self.inner, ErrorFeedback):
            raise SpecError(f"inner is {self.inner!r}: one residual already carries all of the error. Use it alone.")
