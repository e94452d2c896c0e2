"""Times encode and decode-and-add of every compressor as the engine calls them, compared with `copy_`; one thread.

    python -m benchmarks compressors [--megabytes 1 4 64] [--pairs 15] [--only TopK]
    python -m benchmarks compressors --beside "ErrorFeedback(QSGD(bits=2))" --only "scale='ls'" --pairs 101

Each is timed in turn with `copy_` between two warm float32 tensors of the same size, A B A B; the ratio is the median over
the pairs of copy time / codec time. GB/s count float32 elements at 4 bytes. PowerSGD's matrices are as square as the size
allows, its "encode" is both rounds and its "decode" what follows them. With --beside specs are timed in turn with another spec in
place of the copy, and docs/compressors.md gets the table.
"""

import argparse
import datetime
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import markdown
from benchmarks.catalogue import ENTRIES, Entry
from benchmarks.codec_calls import codec_calls
from benchmarks.common import RESULTS, write, write_between
from benchmarks.kernels import seconds
from gradwire.bench.names import parse_spec
from gradwire.core import Spec
from gradwire.core.provenance import processor_name
from gradwire.kernels import cpu

PAGE = Path(__file__).parents[1] / "docs" / "compressors.md"
BEGIN, END = "<!-- pairs: made by `python -m benchmarks compressors --beside` -->", "<!-- end of pairs -->"


class Row(NamedTuple):
    """One compressor at one size."""

    spec: str
    megabytes: int
    encode_gbps: float
    encode_ratio: float
    decode_gbps: float
    decode_ratio: float
    payload_bytes: int
    wanted: float | None
    """Wanted encode ratio; with `in_gbps`, wanted GB/s."""
    in_gbps: bool
    ok: bool


def measure(entry: Entry, megabytes: int, pairs: int) -> Row:
    numel = megabytes * 2**18
    source, target = torch.randn(numel), torch.zeros(numel)
    calls = codec_calls(entry.spec, numel)
    encode, size = calls.encode, calls.payload_bytes
    found: list[float] = []
    for call in (encode, calls.decode):
        copy = lambda: target.copy_(source)  # noqa: E731
        for warm_up in (encode, copy, call, copy, call):
            warm_up()
        times = [(seconds(copy), seconds(call)) for _ in range(pairs)]
        found.append(numel * 4e-9 / statistics.median(taken for _, taken in times))
        found.append(statistics.median(copied / taken for copied, taken in times))
    wanted = entry.encode
    if wanted is not None and not entry.gbps and entry.spec.state:
        wanted *= 0.6
    reached = found[0] if entry.gbps else found[1]
    ok = wanted is None or megabytes < 4 or reached >= wanted
    return Row(repr(entry.spec), megabytes, *found, size, wanted, entry.gbps, ok)


def beside(other: Spec, entries: Sequence[Entry], sizes: Sequence[int], pairs: int) -> list[str]:
    """Markdown: how many times as fast encodes and decodes are as those of another spec. Both are timed in turn."""
    rows = []
    for entry in entries:
        for megabytes in sizes:
            own, base = (codec_calls(spec, megabytes * 2**18) for spec in (entry.spec, other))
            with_learning = lambda own=own: (own.encode(), own.learn and own.learn())  # noqa: E731
            both = [(base.encode, own.encode), (base.encode, with_learning), (base.decode, own.decode)]
            ratios = [_times_as_fast(*each, pairs) if own.learn or each[1] is not with_learning else "" for each in both]
            rows.append((f"`{entry.spec!r}`", megabytes, *ratios))
    about = (
        f"Times as fast as `{other!r}`: the median of {pairs} pairs in turn, and where 80 % of them lie. One thread, "
        f"{processor_name()}, {datetime.date.today()}. Energies are those of elements with weights: once a step, for two encodes."
    )
    head = ("spec", "MB", "encode", "encode and energies", "decode and add")
    return [about, "", *markdown.table(head, rows, left=1)]


def _times_as_fast(base: Callable[[], object], own: Callable[[], object], pairs: int) -> str:
    for _ in range(3):
        base(), own()
    ratios = sorted(seconds(base) / seconds(own) for _ in range(pairs))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/compressors.json; 1 if one is slower than promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compressors")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 64])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the spec's name")
    parser.add_argument("--beside", type=parse_spec, help="a spec, with which others are timed in turn")
    options = parser.parse_args(arguments)
    if problem := cpu.available():
        print(f"the plain-torch reference is measured: {problem}")
    torch.set_num_threads(1)
    if options.beside is not None:
        chosen = [entry for entry in ENTRIES if options.only in repr(entry.spec)]
        if not chosen:
            parser.error(f"--only {options.only!r} is in the name of no spec, such as {ENTRIES[-1].spec!r}")
        lines = beside(options.beside, chosen, options.megabytes, options.pairs)
        print("\n".join(lines))
        write_between(PAGE, BEGIN, END, lines)
        return 0
    rows, console = [], Console(width=150)
    for megabytes in options.megabytes:
        table = Table(title=f"{megabytes} MB of float32, one thread: GB/s (ratio to copy_)", title_justify="left")
        for column in ("compressor", "encode", "wanted", "decode and add", "bytes an element"):
            table.add_column(column, justify="left" if column == "compressor" else "right")
        for entry in ENTRIES:
            if options.only not in repr(entry.spec):
                continue
            rows.append(row := measure(entry, megabytes, options.pairs))
            wanted = "" if row.wanted is None else f"{row.wanted:.2f}{' GB/s' if row.in_gbps else ''}"
            style = "" if row.ok else "bold red"
            encode = f"{row.encode_gbps:.2f} ({row.encode_ratio:.2f})"
            decode = f"{row.decode_gbps:.2f} ({row.decode_ratio:.2f})"
            table.add_row(row.spec, encode, wanted, decode, f"{row.payload_bytes / megabytes / 2**18:.3f}", style=style)
        console.print(table)
    slow = [row for row in rows if not row.ok]
    for row in slow:
        print(f"slower than promised: {row.spec} at {row.megabytes} MB")
    console.print(f"{processor_name()}, torch {torch.__version__}. Ratio 1.00: as fast as the copy.", style="dim")
    if not options.only:
        write(RESULTS / "compressors.json", {"torch": torch.__version__, "rows": [row._asdict() for row in rows]})
    return 1 if slow else 0
