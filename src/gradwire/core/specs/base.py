"""What a spec is, and the registry by which JSON names it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import msgspec

from gradwire.core import entry_points
from gradwire.core.checks import changed, near, show, under
from gradwire.core.payload import coded_bytes
from gradwire.core.strict import convert, plain
from gradwire.errors import GradwireError, SpecError

_REGISTRY: dict[str, type["Spec"]] = {}


class ElementRun(NamedTuple):
    """Elements of one tensor that are encoded together with others: what sizes follow from."""

    numel: int
    bits: int = 0
    """Bits an element, where they differ by tensor; else 0."""
    shape: tuple[int, ...] = ()
    """The whole tensor's shape, where the compressor wants whole tensors; else empty."""


class Law(NamedTuple):
    """What one encode and decode of a gradient does to it, as tests measure it.

    kind: exact; unbiased (the mean over the random stream is the gradient); contractive (the squared error is at most
    1 - delta of the squared norm, over the random stream in the mean); none (only error feedback makes it right).
    """

    kind: str
    delta: float = 0.0
    """For contractive: how much is kept at least of a run's squared norm, whatever the run."""


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every spec. A subclass sets `id`, declares its fields, checks them in `__post_init__` and registers.

    What planner, engine and tests need to know of a method without running it is declared here: how large payloads are,
    how they combine, what is remembered, and which law holds.
    """

    id: ClassVar[str] = ""
    """The word that stands for the class in JSON."""
    always_written: ClassVar[tuple[str, ...]] = ()
    """Fields that JSON and repr show even at their default."""
    varies_in_family: ClassVar[tuple[str, ...]] = ()
    """Fields in which specs that share one exchange may differ."""
    schemes: ClassVar[tuple[str, ...]] = ("alltoall", "allgather")
    """The schemes that carry it, the default first."""
    rounds: ClassVar[int] = 0
    """How many times payloads are summed on the wire, as float32; 0 where they are gathered and decoded instead."""
    state: ClassVar[tuple[str, ...]] = ()
    """What it remembers between steps of every element, float32 each. 'residual': what was not sent yet."""
    example: ClassVar[tuple[Any, ...]] = ()
    """Usual values of the fields that have no default, for lists that show one spec of every class."""
    encodes: ClassVar[bool] = True
    """Whether gradients are encoded. Identity's are not: they travel as they are."""

    @property
    def owns_momentum(self) -> bool:
        """Whether it applies momentum itself, so that an optimizer beside it must not."""
        return False

    @property
    def law(self) -> Law:
        """What one encode does, without memory of other steps."""
        return Law("none")

    @property
    def granularity(self) -> int:
        """What is encoded at once may begin and end only where a tensor does, or at multiples of so many elements from a
        tensor's start. 0: only where a tensor does."""
        return 1

    @property
    def element_bits(self) -> int:
        """`ElementRun.bits` of tensors with this spec."""
        return 0

    @property
    def feedback(self) -> bool:
        """Whether what one step loses is sent in a later one."""
        return "residual" in self.state

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        """Bytes of the payload of these runs, of a gradient of so many bytes an element. Never depends on values."""
        raise NotImplementedError(f"{type(self).__name__}.payload_bytes")

    def at_step(self, step: int) -> "Spec":
        """What runs in this step, for specs that begin otherwise."""
        return self

    def under_feedback(self) -> "Spec":
        """What runs inside ErrorFeedback, for specs that are better made another way there."""
        return self

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


class BlockSpec(Spec, frozen=True):
    """Base of specs whose elements share scales in blocks of `block`, a field of theirs; 0 is as much as is encoded at once."""

    code_bits: ClassVar[int] = 8
    """Of an element in the payload, where tensors have none of their own."""
    scales: ClassVar[int] = 1
    """bfloat16 numbers of each block in the payload."""
    if TYPE_CHECKING:
        block: int

    @property
    def granularity(self) -> int:
        return self.block or 8192

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return sum(coded_bytes([(run.numel, self.code_bits) for run in runs], self.block, self.scales))


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
    """The registered classes by id, a copy. Those of installed packages that were not needed yet are not among them."""
    return dict(_REGISTRY)


def installed_specs() -> dict[str, type[Spec]]:
    """The registered classes by id and those of all installed packages."""
    for name in entry_points.names(entry_points.SPECS):
        _installed(name)
    return registered_specs()


def example_specs() -> tuple[Spec, ...]:
    """One spec of every installed class, with the usual settings, by id. A class without `example` whose fields have no
    defaults is left out.

    >>> [spec for spec in example_specs() if spec.id.startswith("t")]
    [TernGrad(), TopK(0.01), Truncate(4.0), TwoBit()]
    """
    return tuple(cls(*cls.example) for _, cls in sorted(installed_specs().items()) if _has_example(cls))


def _has_example(cls: type[Spec]) -> bool:
    return all(not field.required for field in msgspec.structs.fields(cls)[len(cls.example) :])


def _installed(name: object) -> type[Spec] | None:
    """The registered class of this id, or that of an installed package."""
    if not isinstance(name, str):
        return None
    if name not in _REGISTRY and name in entry_points.names(entry_points.SPECS):
        entry_points.load(entry_points.SPECS, name, partial(_registered_as, name), SpecError)
    return _REGISTRY.get(name)


def _registered_as(name: str, cls: type[Spec]) -> None:
    if getattr(cls, "id", None) != name:
        raise SpecError(f"its class {cls!r} has another id. Name the entry point as the class's `id`.")
    register_spec(cls)


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
    cls = _installed(name)
    if cls is None:
        raise SpecError(
            f"id is {show(name)}, which is no registered compressor: it must be one of {', '.join(known)}"
            f"{near(name, known)}. A compressor of your own is registered with `register_spec`, or by its package's entry point."
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
