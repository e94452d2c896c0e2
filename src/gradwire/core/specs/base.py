"""The base class of specs, the registry of specs by id, and specs as they are written in Python: `ErrorFeedback(TopK(0.01))`."""

import ast
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import msgspec

from gradwire.core import entry_points
from gradwire.core.checks import changed, near, number, show, under, whole
from gradwire.core.payload import RAW, SCALE_ALIGN, coded_bytes
from gradwire.core.strict import convert, plain
from gradwire.errors import GradwireError, SpecError

_REGISTRY: dict[str, type["Spec"]] = {}
_LATE = 2**61
"""A step after any warm-up."""
_DEEPEST = 8
"""The most specs in one, itself counted."""


_BATCHED = frozenset(
    {
        *("exponential_decode", "exponential_encode", "fitted_decode", "fitted_encode", "fp8_decode", "fp8_encode"),
        *("natural_decode", "natural_encode", "qsgd_decode", "qsgd_encode", "terngrad_encode", "threshold_decode"),
        "threshold_encode",
    }
)
"""The kernels whose calls may have several payloads. Triton's encode or decode these in one launch."""


class ElementRun(NamedTuple):
    """Elements of one tensor that are encoded together with others. Payload sizes depend on these."""

    numel: int
    bits: int = 0
    """Bits an element, if they differ by tensor; RAW for uncompressed tensors in a payload of compressed ones; else 0."""
    shape: tuple[int, ...] = ()
    """The tensor's shape, if the compressor needs whole tensors; else empty."""


class Law(NamedTuple):
    """The effect of one encode and decode on a gradient. Tests measure it.

    kind: exact; unbiased (the mean over the random stream is the gradient); contractive (the squared error is at most
    1 - delta of the squared norm, in the mean over the random stream); none (needs error feedback).
    """

    kind: str
    delta: float = 0.0
    """For contractive: the least part of the squared norm that is kept, of every run."""


class Kernels(NamedTuple):
    """The kernels of a compressor that has one for each direction: the name of the kernel, then its settings. They are called as

    encode(src, residual, segments, [random stream,] [weights,] *settings, payload)
    decode(payload, segments, [dtype,] [weights,] *settings, add, dst)
    """

    encode: tuple[Any, ...]
    decode: tuple[Any, ...]
    random: bool = False
    """Whether the encode takes the random stream."""
    typed: bool = False
    """Whether the payload holds numbers of the gradient's dtype, which the decode takes."""
    joined: bool = False
    """Whether the kernels see the tensors of a bucket as one."""
    weighted: bool = False
    """Whether both kernels take the weights of the elements, or None."""


class ElementWeights(NamedTuple):
    """How the weights of the elements follow from the means of earlier steps; see `gradwire.kernels.reference.weights`."""

    keep: float
    """The part of the old mean square that a step keeps."""
    floor: float
    """The part of a block's mean square that is added to the mean square of each element."""
    block: int
    """Elements of a block."""


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every spec. A subclass sets `id`, declares its fields, checks them in `__post_init__` and registers.

    The class declares what planner, engine and tests need: the size of payloads, how they are summed, the state, and the law.
    """

    id: ClassVar[str] = ""
    """The name of the class in JSON."""
    always_written: ClassVar[tuple[str, ...]] = ()
    """Fields that JSON and repr always show, even at their default."""
    varies_in_family: ClassVar[tuple[str, ...]] = ()
    """Fields that may differ between specs of one exchange."""
    schemes: ClassVar[tuple[str, ...]] = ("alltoall", "allgather")
    """The schemes that can send the payloads, the default first."""
    rounds: ClassVar[int] = 0
    """The number of sums of payloads on the wire, as float32; 0: payloads are gathered and decoded instead."""
    state: ClassVar[tuple[str, ...]] = ()
    """The state of every element between steps, float32 each. 'residual': the part that was not sent yet."""
    example: ClassVar[tuple[Any, ...]] = ()
    """Usual values of the fields without default, for lists with one spec of every class."""
    encodes: ClassVar[bool] = True
    """Whether gradients are encoded. Only Identity sends them uncompressed."""
    touches_segments_only: ClassVar[bool] = False
    """Whether encode and decode leave elements outside their segments alone."""
    keeps_zeros: ClassVar[bool] = True
    """Whether zeros decode to zeros, also among other values. Else rows of an embedding that no batch used are changed."""
    follows_scale: ClassVar[bool] = True
    """Whether a number times the gradient is sent as this number times the values. Else a loss scale changes what is sent."""
    votes: ClassVar[bool] = False
    """Whether the sum over ranks is a vote: each rank counts as much as any other, also one whose gradient is zero."""
    compressor: ClassVar[Any] = None
    """The factory of the spec's compressor, or its "module:name". None if `kernels` describes the compressor completely."""

    def kernels(self, part: float = 1.0) -> Kernels | None:
        """The kernels of encode and decode; None for a method that takes more than one kernel. `part`: what gradients were
        multiplied by, for methods that compare with a fixed magnitude."""
        return None

    @property
    def batches(self) -> bool:
        """Whether one launch on a GPU encodes several payloads, decodes them, or adds up those of several ranks."""
        kernels = self.kernels()
        if kernels is None or self.compressor is not None or kernels.joined or kernels.typed:
            return False
        return {kernels.encode[0], kernels.decode[0]} <= _BATCHED

    @property
    def random_seed(self) -> int:
        """The seed of the random numbers that an encode draws; 0 if it draws none."""
        return int(getattr(self, "seed", 0))

    @property
    def owns_momentum(self) -> bool:
        """Whether the compressor applies momentum. Then the optimizer must not."""
        return False

    @property
    def law(self) -> Law:
        """The law of one encode without state."""
        return Law("none")

    @property
    def granularity(self) -> int:
        """A tensor may be cut at multiples of this number of elements from its start. 0: a tensor is never cut."""
        return 1

    @property
    def carries_uncompressed(self) -> bool:
        """Whether payloads have room for uncompressed tensors, so that these may share a bucket with tensors of this spec."""
        return self.encodes and self.touches_segments_only and not self.rounds

    @property
    def element_bits(self) -> int:
        """`ElementRun.bits` of tensors with this spec."""
        return 0

    @property
    def feedback(self) -> bool:
        """Whether a later step sends the error of a step."""
        return "residual" in self.state

    @property
    def element_weights(self) -> ElementWeights | None:
        """The weights that elements are divided by before an encode; None: there are none."""
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes of memory of an element between steps: a float32 for each name in `state`, and 5 more with weights."""
        return 4 * len(self.state) + (5 if self.element_weights is not None else 0)

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        """Bytes of the payload of these runs. itemsize: bytes of a gradient element. Independent of values."""
        name = type(self).__name__
        raise SpecError(
            f"{name} has no payload_bytes: ranks must know the size of a payload before it comes. Define "
            f"`def payload_bytes(self, runs, itemsize)` in {name}; it returns the bytes."
        )

    def indexed(self, runs: Sequence[ElementRun]) -> int:
        """The elements of the largest group of these runs of which each has an index; 0 if no element has one."""
        return 0

    def bytes_beside(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        """`payload_bytes` of runs of which those with `bits` RAW travel uncompressed behind the payload of the others."""
        raw = sum(run.numel for run in runs if run.bits == RAW)
        coded = [run for run in runs if run.bits != RAW]
        size = self.payload_bytes(coded, itemsize) if coded or not raw else 0
        return -(-size // SCALE_ALIGN) * SCALE_ALIGN + raw * itemsize if raw else size

    def at_step(self, step: int) -> "Spec":
        """The spec of this step, for specs that change during the first steps."""
        return self

    @property
    def settled(self) -> "Spec":
        """The spec of all late steps."""
        return self.at_step(_LATE)

    def under_feedback(self) -> "Spec":
        """The spec inside ErrorFeedback, for specs with other best settings there."""
        return self

    def check_fed_back(self, field: str) -> None:
        """Raise SpecError, which names `field`, if error feedback around this spec may never send an error."""

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
        """The name of the spec's family. Tensors with specs of one family may share one encode call and one exchange.

        >>> from gradwire.core.specs import QSGD
        >>> QSGD(bits=2).family == QSGD(bits=8).family, QSGD(block=64).family == QSGD(block=128).family
        (True, False)
        """
        names = [name for name in self.__struct_fields__ if name not in self.varies_in_family]
        values = [(name, getattr(self, name)) for name in names]
        inside = ",".join(f"{n}={v.family if isinstance(v, Spec) else v}" for n, v in values)
        return f"{self.id}({inside})"


class BlockSpec(Spec, frozen=True):
    """Base of specs with scales for blocks of `block` elements. `block` 0: one block is the whole run."""

    touches_segments_only: ClassVar[bool] = True
    code_bits: ClassVar[int] = 8
    """Bits of an element in the payload, if all tensors have the same."""
    scales: ClassVar[int] = 1
    """bfloat16 numbers of each block in the payload."""
    ternary: ClassVar[bool] = False
    """Whether codes of 2 bits stand for three values, and are packed in base 3."""
    if TYPE_CHECKING:
        block: int

    @property
    def granularity(self) -> int:
        return self.block or 8192

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        coded = [(run.numel, self.code_bits) for run in runs]
        return sum(coded_bytes(coded, self.block, self.scales, self.ternary))


def of_part(part: str, name: str) -> Any:
    """The property that a spec has from the spec in its field `part`."""
    return property(lambda spec: getattr(getattr(spec, part), name))


S = TypeVar("S", bound=Spec)


def register_spec(cls: type[S]) -> type[S]:
    """Class decorator: make a spec class readable from JSON. Raises SpecError if its id is missing or taken."""
    if not cls.id:
        raise SpecError(f"{cls.__name__}.id is {cls.id!r}: it must be a word. Set `id: ClassVar[str] = ...` in the class.")
    taken = _REGISTRY.get(cls.id)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise SpecError(
            f"id {cls.id!r} of {cls.__module__}.{cls.__qualname__} belongs to {taken.__module__}.{taken.__qualname__} "
            "already: in JSON an id stands for one class. Choose another id."
        )
    _REGISTRY[cls.id] = cls
    return cls


def registered_specs() -> dict[str, type[Spec]]:
    """A copy of the registered classes by id. Classes of installed packages are registered when they are first needed."""
    return dict(_REGISTRY)


def installed_specs() -> dict[str, type[Spec]]:
    """All classes by id, including those of installed packages."""
    for name in entry_points.names(entry_points.SPECS):
        _installed(name)
    return registered_specs()


def example_specs() -> tuple[Spec, ...]:
    """One spec of every installed class, with the usual settings, by id; none of a class without defaults and `example`.

    >>> [spec for spec in example_specs() if spec.id.startswith("t")]
    [TernGrad(), Threshold(0.001), TopK(0.01), Truncate(4.0), TwoBit()]
    """
    classes = [cls for _, cls in sorted(installed_specs().items())]
    fields = {cls: msgspec.structs.fields(cls)[len(cls.example) :] for cls in classes}
    return tuple(cls(*cls.example) for cls in classes if not any(field.required for field in fields[cls]))


def _installed(name: object) -> type[Spec] | None:
    """The class of this id, registered or in an installed package."""
    if not isinstance(name, str):
        return None
    if name not in _REGISTRY and name in entry_points.names(entry_points.SPECS):
        entry_points.load(entry_points.SPECS, name, partial(_registered_as, name), SpecError)
    return _REGISTRY.get(name)


def _registered_as(name: str, cls: type[Spec]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Spec)):
        raise SpecError(f"{show(cls)} is no subclass of gradwire.Spec.")
    if cls.id != name:
        raise SpecError(
            f"the id of {cls.__name__} is {show(cls.id)}, which differs. The entry point needs the class's `id` as name."
        )
    register_spec(cls)


def spec_from_dict(data: Mapping[str, object]) -> Spec:
    """Read a spec from its JSON object. Fields at their default may be left out.

    Raises SpecError that names the wrong field, its value and the cure.

    >>> spec_from_dict({"id": "qsgd", "bits": 2})
    QSGD(bits=2, block=128)
    """
    if not isinstance(data, Mapping):
        raise SpecError(f'{show(data)} is not a spec: it must be an object such as {{"id": "qsgd", "bits": 4}}.')
    _check_depth(data)
    known = sorted(_REGISTRY)
    if "id" not in data:
        raise SpecError(f"id is missing in {show(dict(data))}: the id names the compressor. Known: {', '.join(known)}.")
    name = data["id"]
    cls = _installed(name)
    if cls is None:
        raise SpecError(
            f"id is {show(name)}, which is no registered compressor: it must be one of {', '.join(known)}"
            f"{near(name, known)}. Register your own with `register_spec`, or by an entry point of its package."
        )
    try:
        return convert({key: value for key, value in data.items() if key != "id"}, cls)
    except SpecError:
        raise
    except GradwireError as error:
        raise SpecError(f"{error} (in spec {name!r})") from error


def _check_depth(data: Mapping[str, object]) -> None:
    depth, layer = 0, [data]
    while layer:
        depth, layer = depth + 1, [inner for each in layer for inner in each.values() if isinstance(inner, Mapping)]
    if depth > _DEEPEST:
        raise SpecError(f"a spec is nested {depth} deep: it holds at most {_DEEPEST - 1} others. Take some away.")


def spec_from_text(text: str) -> Spec:
    """Read a spec from its repr, in which fields may be left out. Nothing is evaluated but literals. Words need no quotes.

    Raises SpecError that names the mistake.

    >>> spec_from_text("ErrorFeedback(QSGD(bits=2))")
    ErrorFeedback(QSGD(bits=2, block=128, rounding='nearest'))
    >>> spec_from_text("Identity")
    Identity()
    >>> spec_from_text("Cast(dtype=bfloat16)")
    Cast(dtype='bfloat16')
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{show(text)} is no spec: write one as in Python, such as QSGD(bits=4).") from error
    return _spec_of(tree, text)


def _spec_of(node: ast.expr, text: str) -> Spec:
    call = ast.Call(func=node, args=[], keywords=[]) if isinstance(node, ast.Name) else node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SpecError(f"{show(text)} is no spec: write one as in Python, such as QSGD(bits=4).")
    name = call.func.id
    cls = _class_of(name, registered_specs()) or _class_of(name, installed_specs())
    if cls is None:
        names = sorted({each.__name__ for each in registered_specs().values()})
        raise SpecError(f"there is no spec {show(name)}: it must be one of {', '.join(names)}{near(name, names)}.")
    fields = msgspec.structs.fields(cls)
    known = [field.name for field in fields]
    if len(call.args) > len(known):
        raise SpecError(f"{name} takes at most {len(known)} values ({', '.join(known)}), not {len(call.args)}.")
    values = {field.name: _value_of(argument, text, field) for field, argument in zip(fields, call.args, strict=False)}
    for keyword in call.keywords:
        if keyword.arg not in known or keyword.arg in values:
            problem = "is given twice" if keyword.arg in values else f"is not a field of {name}: it has {', '.join(known)}"
            raise SpecError(f"{keyword.arg} {problem}.")
        values[keyword.arg] = _value_of(keyword.value, text, fields[known.index(keyword.arg)])
    if missing := [field.name for field in fields if field.required and field.name not in values]:
        raise SpecError(f"{missing[0]} is missing in {name}(...): it has no default. Write {name}({missing[0]}=...).")
    return cls(**values)


def _class_of(name: str, classes: Mapping[str, type[Spec]]) -> type[Spec] | None:
    """The class of this name: gradwire's own, if it has one. Raises SpecError if several packages have one."""
    packages = {cls: _package(cls) for cls in classes.values() if cls.__name__ == name}
    found = [cls for cls, package in packages.items() if package == "gradwire"] or [*packages]
    if len(found) > 1:
        owners = " and ".join(f"{package} (id {cls.id!r})" for cls, package in packages.items())
        raise SpecError(
            f"{show(name)} is the name of a spec class in {owners}: the text could mean either. Rename one, or write the spec as "
            f'JSON, such as {{"id": {found[0].id!r}}}.'
        )
    return found[0] if found else None


def _package(cls: type[Spec]) -> str:
    return entry_points.origin(entry_points.SPECS, cls.id, cls.__module__)


def _value_of(node: ast.expr, text: str, field: msgspec.structs.FieldInfo) -> Any:
    if isinstance(node, ast.Name) and field.type is not SpecField:
        return node.id  # the field's own check names the field, and the values that it takes
    if isinstance(node, (ast.Call, ast.Name)):
        return _spec_of(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SpecError(f"{ast.unparse(node)} in {show(text)} is neither a number, a word in quotes nor a spec.") from error


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
    SpecField = Any  # msgspec accepts any value; __post_init__ converts it by the registry


def check_block(block: object, what: str = "the elements of a block", high: int = 8192) -> None:
    """Refuse everything but a power of two from 32 to `high`."""
    whole("block", block, what, low=32, high=high, error=SpecError)
    assert isinstance(block, int)
    if block & (block - 1):
        lower = 1 << (block.bit_length() - 1)
        raise SpecError(f"block is {block}: it must be a power of two. Use {lower} or {2 * lower}.")


def check_seed(seed: object) -> None:
    """Refuse everything but a seed of a random stream."""
    whole("seed", seed, "a seed", low=0, high=2**63 - 1, error=SpecError)


def check_ratio(field: str, ratio: object) -> None:
    """Refuse everything but a part of all elements."""
    number(field, ratio, "the part of the elements that is sent", positive=True, error=SpecError)
    assert isinstance(ratio, (int, float))
    if ratio > 1:
        raise SpecError(f"{field} is {ratio}: it is a part of the elements, at most 1. Write 0.01 for one in a hundred.")


def check_momentum(momentum: object, error: type[GradwireError] = SpecError) -> None:
    """Refuse everything but a number of at least 0 and below 1."""
    number("momentum", momentum, "the part of the old mean that is kept", error=error)
    assert isinstance(momentum, (int, float))
    if momentum >= 1:
        raise error(f"momentum is {momentum}: it must be below 1, or old gradients never decay. Use 0.9.")
