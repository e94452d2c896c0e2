"""Rules: which tensors a spec is for."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gradwire.core.checks import DTYPE_BYTES, changed, show, text, under, whole, word
from gradwire.core.specs import Spec, as_spec
from gradwire.core.strict import convert
from gradwire.core.tensors import TensorInfo
from gradwire.errors import FormatError


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors by name, size, number of dimensions and dtype; a tensor must fulfil all that is given.

    >>> Where("*embed*|*head*", min_numel=10_000).matches(TensorInfo("embed.weight", (1000, 64), "float32"))
    True
    """

    names: str = "*"
    """Patterns as in fnmatch, case counts, on whole tensor names; | between alternatives."""
    min_numel: int = 0
    """Elements, at least."""
    max_numel: int | None = None
    """Elements, at most."""
    min_dims: int = 0
    """Dimensions, at least."""
    max_dims: int | None = None
    """Dimensions, at most: 1 for biases and norms."""
    dtype: str | None = None
    """As 'float32' or 'bfloat16'."""

    def __post_init__(self) -> None:
        text("names", self.names, "a pattern of tensor names")
        whole("min_numel", self.min_numel, "elements")
        whole("min_dims", self.min_dims, "dimensions")
        for field in ("max_numel", "max_dims"):
            if (most := getattr(self, field)) is not None:
                whole(field, most, "elements" if field == "max_numel" else "dimensions")
        if self.dtype is not None:
            word("dtype", self.dtype, tuple(DTYPE_BYTES))

    def matches(self, tensor: TensorInfo) -> bool:
        """Whether the tensor is one of those."""
        return (
            any(fnmatchcase(tensor.name, pattern) for pattern in self.names.split("|"))
            and self.min_numel <= tensor.numel
            and (self.max_numel is None or tensor.numel <= self.max_numel)
            and self.min_dims <= len(tensor.shape)
            and (self.max_dims is None or len(tensor.shape) <= self.max_dims)
            and self.dtype in (None, tensor.dtype)
        )

    def __repr__(self) -> str:
        return f"Where({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"


def as_rule(index: int, rule: Any) -> tuple[str | Where, Spec]:
    """(pattern or Where, spec) from what a user or a JSON file gives."""
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise FormatError(f"rules[{index}] is {show(rule)}: it must be a pair of pattern and spec.")
    which, field = rule[0], f"rules[{index}][0]"
    if isinstance(which, Mapping):
        with under(field):
            which = convert(dict(which), Where)
    elif not isinstance(which, Where):
        text(field, which, "a pattern of tensor names or a Where")
    return which, as_spec(f"rules[{index}][1]", rule[1])


def useless(which: str | Where, spec: Spec, matched: Sequence[str], tensors: Sequence[TensorInfo]) -> str:
    """What to say of a rule without effect; `matched` are the tensors that it matches."""
    rule = f"rule ({which!r}, {spec!r})"
    if matched:
        return (
            f"{rule} has no effect: earlier rules take all {len(matched)} tensors that it matches. Put it before them."
        )
    names = [tensor.name for tensor in tensors]
    pattern = which if isinstance(which, str) else which.names
    close = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
    return f"{rule} matches none of the {len(names)} tensors. Nearest names: {', '.join(close)}. Correct or remove it."
