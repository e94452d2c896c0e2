"""Profiles and codec times as ByteComp's authors published them (inputs of the Espresso scheduler), and codec times in CSV.

A profile is `{"model": ..., "source": ..., "tensors": [[name, elements, microseconds since the gradient before], ...]}`, float32,
in gradient-ready order, without forward times. Codec times are `{"dgc_comp_overhead": [[none, fp16, one level, two levels], [the
same of decode alone], [cpu]], ...}`, in microseconds; the first list is encode and decode together. Times are constant up to 2^20
elements, and from there on proportional to the size. The CPU's number is ignored: its meaning is not published.

A file whose name ends with .csv holds codec times of any tool. Its first line names the columns, in any order. Each other line
is one measured size: bytes of the uncompressed input (4 an element), microseconds of one encode and of one decode. A spec is
written as in Python or as in JSON; a spec with a comma is quoted. Lines that are empty or begin with # do not count.

    spec,device,bytes,encode_us,decode_us
    "QSGD(bits=4, block=128)",gpu,4096,12.0,9.0
    "QSGD(bits=4, block=128)",gpu,4194304,40.5,25.0
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping

from gradwire.core import (
    DGC,
    Cast,
    CodecCosts,
    Costs,
    EFSignSGD,
    Made,
    OneBit,
    Profile,
    RandomK,
    Spec,
    TensorProfile,
    near,
    number,
    printable,
    read,
    read_text,
    show,
    spec_from_dict,
    spec_from_text,
    text,
    under,
    whole,
    word,
)
from gradwire.errors import FormatError

COLUMNS = ("spec", "device", "bytes", "encode_us", "decode_us")


def costs_from_csv(text: str, source: str) -> Costs:
    """Read the costs from CSV text; `source` names the file in `made`.

    Raises FormatError, or SpecError for a spec, that begins with the number of the line.

    >>> costs = costs_from_csv("spec,device,bytes,encode_us,decode_us\\nQSGD(bits=4),cpu,4096,12,9\\n", "times.csv")
    >>> costs.codecs[0].spec, costs.codecs[0].encode
    (QSGD(bits=4, block=128), ((4096, 12.0),))
    """
    times: dict[tuple[Spec, str], dict[int, tuple[float, float, int]]] = {}
    for line, row in _rows(text):
        with under(f"line {line}:"):
            key, nbytes, encode_us, decode_us = _read(row)
            known = times.setdefault(key, {})
            if nbytes in known:
                raise FormatError(
                    f"{show(key[0])} on {key[1]} has times of {nbytes} bytes here and in line {known[nbytes][2]}: a size has one "
                    "time. Keep the median of repeated measurements."
                )
            known[nbytes] = encode_us, decode_us, line
    if not times:
        raise FormatError(f"there are no times in it. The first line must be {','.join(COLUMNS)}; a line for each size follows.")
    codecs = []
    for (spec, device), points in times.items():
        by_size = sorted(points.items())
        encode, decode = (tuple((nbytes, row[column]) for nbytes, row in by_size) for column in (0, 1))
        codecs.append(CodecCosts(spec=spec, device=device, encode=encode, decode=decode))
    made = Made(host="not recorded", date="not recorded", command=f"imported from {source}")
    return Costs(codecs=tuple(codecs), made=made)


def _rows(text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The number of each line with times, and its values by column."""
    header: list[str] | None = None
    for line, written in enumerate(text.splitlines(), 1):
        if not written.strip() or written.lstrip().startswith("#"):
            continue
        values = [value.strip() for value in next(csv.reader([written], skipinitialspace=True))]
        if header is None:
            header = values
            _check_header(line, header)
        elif len(values) != len(header):
            raise FormatError(
                f"line {line}: {show(written)} has {len(values)} values, but there are {len(header)} columns. Put a spec with a "
                'comma in quotes, such as "QSGD(bits=4, block=128)", and write every value.'
            )
        else:
            yield line, dict(zip(header, values, strict=True))


def _check_header(line: int, header: list[str]) -> None:
    unknown = [name for name in header if name not in COLUMNS]
    missing = [name for name in COLUMNS if name not in header]
    if unknown or missing or len({*header}) < len(header):
        close = near(unknown[0], COLUMNS) if unknown else ""
        raise FormatError(
            f"line {line}: the columns are {', '.join(map(show, header))}{close}: each of {', '.join(COLUMNS)} must be there "
            "once and no other. Times are microseconds, bytes are those of the uncompressed input. Correct the first line."
        )


def _read(row: Mapping[str, str]) -> tuple[tuple[Spec, str], int, float, float]:
    written = row["spec"]
    spec = _spec(written)
    if not spec.encodes:
        raise FormatError(f"spec is {show(written)}, which encodes nothing and has no times. Leave out the line.")
    word("device", row["device"], ("gpu", "cpu"))
    nbytes = _number("bytes", row["bytes"])
    size = int(nbytes) if isinstance(nbytes, float) and nbytes.is_integer() else nbytes
    whole("bytes", size, "bytes of the uncompressed input")
    times = []
    for column in ("encode_us", "decode_us"):
        time_us = _number(column, row[column])
        number(column, time_us, "a time in microseconds")
        times.append(float(time_us))
    return (spec, row["device"]), int(size), times[0], times[1]


def _spec(written: str) -> Spec:
    if not written.startswith("{"):
        return spec_from_text(written)
    try:
        data = json.loads(written)
    except ValueError as error:
        raise FormatError(
            f"spec is {show(written)}, which is not JSON: {error}. In CSV a quote inside quotes is written twice. Or write "
            "the spec as in Python, such as QSGD(bits=4)."
        ) from error
    return spec_from_dict(data)


def _number(column: str, written: str) -> int | float:
    try:
        return int(written) if written.isdigit() else float(written)
    except ValueError:
        raise FormatError(
            f"{column} is {show(written)}: it must be a number, such as 12.5, without a unit. Correct it or leave out the line."
        ) from None


_SUFFIX = "_comp_overhead"
_SPECS: dict[str, Spec] = {"random": RandomK(ratio=0.01), "dgc": DGC(ratio=0.01), "efsignsgd": EFSignSGD(), "onebit": OneBit()}
_FP16, _ONE_LEVEL = 1, 2
_CONSTANT_BYTES = 4 * 2**20
_FORM = "gradwire.costs.imported describes the form. You can also write profile.json and costs.json by hand."


def import_file(path: str | os.PathLike[str], batch: int | None = None, device: str | None = None) -> Profile | Costs:
    """Read a profile or codec times from a file. The file of a profile has no batch and no device: `batch` and `device` are the
    profile's, by default 32 samples on a V100.

    Raises FormatError that names the file, also where codec times are given a batch or a device.
    """
    if os.fspath(path).lower().endswith(".csv"):
        source = printable(os.fspath(path), longest=4096)
        with under(f"{source}:"):
            _refuse_of_profile(batch=batch, device=device)
            return costs_from_csv(read_text(path), source)
    data, source = read(path)
    with under(f"{source}:"):
        if not isinstance(data, Mapping):
            raise FormatError(f"it holds {show(data)}, but it must hold an object with tensors or codec times. {_FORM}")
        if "tensors" in data:
            return profile_from(data, 32 if batch is None else batch, "V100" if device is None else device)
        _refuse_of_profile(batch=batch, device=device)
        return costs_from(data)


def _refuse_of_profile(**given: object) -> None:
    """Raises FormatError if a property of a profile is given for codec times."""
    for name, value in given.items():
        if value is not None:
            raise FormatError(
                f"it holds codec times, and {name} (--{name}) is {show(value)}, which only a profile has. Leave out {name}."
            )


def profile_from(data: Mapping[str, object], batch: int, device: str) -> Profile:
    """The profile of a file's data. batch: samples per rank and step; device: the processor, such as V100.

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
    source = data.get("source", "a file without source")
    return Profile(
        model=str(data.get("model", "imported")),
        batch=batch,
        device=device,
        made=Made(host=device, date="not recorded", command=f"imported from {source}"),
        tensors=tuple(tensors),
    )


def costs_from(data: Mapping[str, object]) -> Costs:
    """The GPU's codec times of a file's data. Encode is the time of both together minus decode.

    Raises FormatError that names the wrong entry.

    >>> costs = costs_from({"dgc_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]]})
    >>> [(codec.spec, codec.encode[0]) for codec in costs.codecs]
    [(Cast(dtype='float16'), (4194304, 4.0)), (DGC(), (4194304, 356.0))]
    """
    if not data:
        raise FormatError(f"it is empty, but it must hold at least one NAME{_SUFFIX}. {_FORM}")
    found: dict[Spec, CodecCosts] = {}
    for key, value in data.items():
        spec = _SPECS.get(key.removesuffix(_SUFFIX)) if key.endswith(_SUFFIX) else None
        if spec is None:
            known = ", ".join(name + _SUFFIX for name in _SPECS)
            raise FormatError(f"{show(key)} is no known compressor: it must be one of {known}. {_FORM}")
        with under(key):
            for each, column in ((Cast(), _FP16), (spec, _ONE_LEVEL)):
                both, decode = (_entry(value, row, column) for row in (0, 1))
                if decode > both:
                    raise FormatError(
                        f"[1][{column}] is {decode} us for decode alone, but [0][{column}], for encode and decode together, is "
                        f"{both}. Correct one of them."
                    )
                # constant up to the threshold, then proportional to the size
                curves = (((_CONSTANT_BYTES, us), (2 * _CONSTANT_BYTES, 2 * us)) for us in (both - decode, decode))
                codec = CodecCosts(spec=each, device="gpu", encode=next(curves), decode=next(curves))
                found.setdefault(each, codec)
    return Costs(codecs=tuple(found.values()))


def _entry(value: object, row: int, column: int) -> float:
    try:
        entry = value[row][column]  # type: ignore[index]
    except (TypeError, IndexError, KeyError):
        raise FormatError(f"{show(value)} has no [{row}][{column}]: it must be lists of 4 microseconds. {_FORM}") from None
    number(f"[{row}][{column}]", entry, "a time in microseconds")
    return float(entry)
