"""Profiles and codec times in the form in which ByteComp's authors published theirs (inputs of the Espresso scheduler).

A profile is `{"model": ..., "source": ..., "tensors": [[name, elements, microseconds since the gradient before], ...]}`, float32,
in gradient-ready order. Codec times are `{"dgc_comp_overhead": [[none, fp16, one level, two levels], [the same of decode alone],
[cpu]], ...}`, in microseconds; the first list is encode and decode together. They are constant up to 2^20 elements and from there
on proportional to the size. There are no forward times. What the CPU's number means is not told, so it is left out.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from gradwire.core.checks import number, printable, show, text, under, whole
from gradwire.core.costs import CodecCosts, Costs
from gradwire.core.made import Made
from gradwire.core.profile import Profile, TensorProfile
from gradwire.core.reading import parse
from gradwire.core.specs import DGC, Cast, EFSignSGD, OneBit, RandomK, Spec
from gradwire.errors import FormatError, GradwireError

__all__ = ["costs_from", "import_file", "profile_from"]

_SUFFIX = "_comp_overhead"
_SPECS: dict[str, Spec] = {
    "random": RandomK(ratio=0.01),
    "dgc": DGC(ratio=0.01),
    "efsignsgd": EFSignSGD(),
    "onebit": OneBit(),
}
_FP16, _ONE_LEVEL = 1, 2
_CONSTANT_BYTES = 4 * 2**20
_FORM = "See gradwire.costs.imported for the form, or write profile.json and costs.json by hand."


def import_file(path: str | os.PathLike[str], batch: int, device: str) -> Profile | Costs:
    """Read either kind of file. batch, device: of the profile, which does not say them. Raises FormatError naming the file."""
    source = printable(os.fspath(path), longest=4096)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{source}: cannot be read: {error.strerror or error}. Check the path.") from error
    data = parse(content, source)
    try:
        if not isinstance(data, Mapping):
            raise FormatError(f"it holds {show(data)}, and an object with tensors or codec times is expected. {_FORM}")
        return profile_from(data, batch, device) if "tensors" in data else costs_from(data)
    except GradwireError as error:
        raise type(error)(f"{source}: {error}") from error


def profile_from(data: Mapping[str, object], batch: int, device: str) -> Profile:
    """The profile of such a file. batch: samples per rank and step; device: what computed, such as V100.

    Raises FormatError that names the wrong entry.

    >>> profile = profile_from({"model": "two", "tensors": [["fc.bias", 10, 0], ["fc.weight", 640, 72]]}, 32, "V100")
    >>> profile.tensors[1].shape, profile.tensors[1].backward_us
    ((640,), 72.0)
    """
    rows = data.get("tensors")
    if not isinstance(rows, (list, tuple)):
        raise FormatError(f"tensors is {show(rows)}: it must be a list of [name, elements, microseconds]. {_FORM}")
    tensors = []
    for index, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or len(row) != 3:
            raise FormatError(f"tensors[{index}] is {show(row)}: it must be [name, elements, microseconds]. {_FORM}")
        name, numel, gap_us = row
        text(f"tensors[{index}][0]", name, "a tensor's name")
        whole(f"tensors[{index}][1]", numel, "elements")
        number(f"tensors[{index}][2]", gap_us, "microseconds since the gradient before")
        tensors.append(TensorProfile(name=name, shape=(numel,), dtype="float32", backward_us=float(gap_us)))
    return Profile(
        model=str(data.get("model", "imported")),
        batch=batch,
        device=device,
        made=Made(
            host=device, date="not recorded", command=f"imported from {data.get('source', 'a file without source')}"
        ),
        tensors=tuple(tensors),
    )


def costs_from(data: Mapping[str, object]) -> Costs:
    """The codec times of such a file, on the GPU. Encode is what is left of both together without decode.

    Raises FormatError that names the wrong entry.

    >>> costs = costs_from({"dgc_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]]})
    >>> [(codec.spec, codec.encode[0]) for codec in costs.codecs]
    [(Cast(dtype='float16'), (4194304, 4.0)), (DGC(), (4194304, 356.0))]
    """
    if not data:
        raise FormatError(f"it is empty, and at least one NAME{_SUFFIX} is expected. {_FORM}")
    found: dict[Spec, CodecCosts] = {}
    for key, value in data.items():
        spec = _SPECS.get(key.removesuffix(_SUFFIX)) if key.endswith(_SUFFIX) else None
        if spec is None:
            known = ", ".join(name + _SUFFIX for name in _SPECS)
            raise FormatError(f"{show(key)} is no compressor that is known here: it must be one of {known}. {_FORM}")
        with under(key):
            for each, column in ((Cast(), _FP16), (spec, _ONE_LEVEL)):
                found.setdefault(each, _codec(each, value, column))
    return Costs(codecs=tuple(found.values()))


def _codec(spec: Spec, value: object, column: int) -> CodecCosts:
    both, decode = (_entry(value, row, column) for row in (0, 1))
    if decode > both:
        raise FormatError(
            f"[1][{column}] is {decode} us for decode alone, and [0][{column}], for encode and decode, is {both}. Correct it."
        )
    return CodecCosts(spec=spec, device="gpu", encode=_curve(both - decode), decode=_curve(decode))


def _entry(value: object, row: int, column: int) -> float:
    try:
        entry = value[row][column]  # type: ignore[index]
    except (TypeError, IndexError, KeyError):
        raise FormatError(
            f"{show(value)} has no [{row}][{column}]: it must be lists of 4 microseconds. {_FORM}"
        ) from None
    number(f"[{row}][{column}]", entry, "a time in microseconds")
    return float(entry)


def _curve(us: float) -> tuple[tuple[int, float], ...]:
    """Constant up to the threshold, then proportional to the size."""
    return ((_CONSTANT_BYTES, us), (2 * _CONSTANT_BYTES, 2 * us))
