"""Codec times in CSV, from any tool that measured them, as costs.

The first line names the columns, in any order: spec, device, bytes, encode_us, decode_us. Each other line is one measured size:
bytes of the uncompressed input (4 an element), microseconds of one encode and of one decode. A spec is written as in Python or as
in JSON; a spec with a comma is quoted. Lines that are empty or begin with # do not count.

    spec,device,bytes,encode_us,decode_us
    "QSGD(bits=4, block=128)",gpu,4096,12.0,9.0
    "QSGD(bits=4, block=128)",gpu,4194304,40.5,25.0
"""

import csv
import json
from collections.abc import Iterator, Mapping

from gradwire.core import (
    CodecCosts,
    Costs,
    Made,
    Spec,
    near,
    number,
    show,
    spec_from_dict,
    spec_from_text,
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
        raise FormatError(
            f"there are no times in it. The first line must be {','.join(COLUMNS)}; a line for each size follows."
        )
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
