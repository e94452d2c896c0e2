"""Writes docs/compressors.md, one row for every compressor, and tables in docs/options.md, schedules.md, local_steps.md and
reliability.md.

    python -m benchmarks page

Compressors come from the catalogue and from installed packages, collectives from `gradwire.core.collectives` and from installed
packages. Numbers come from compressors.json, losses.json, local-equal.json, local-equal-4.json and soak.json in
benchmarks/results; a dash was not measured yet.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.catalogue import ENTRIES, Entry
from benchmarks.common import RESULTS, between
from benchmarks.local_equal import equal_table, path_of
from benchmarks.losses import above_ddp
from benchmarks.markdown import table
from benchmarks.soak_page import soak_figures
from gradwire.core.files import write_whole
from gradwire.core.specs import ElementRun, example_specs
from gradwire.planner.listing import collective_rows, compressor_rows, schedule_rows

DOCS = Path(__file__).parent.parent / "docs"
PAGE, OPTIONS, SCHEDULES = DOCS / "compressors.md", DOCS / "options.md", DOCS / "schedules.md"
RELIABILITY, LOCAL = DOCS / "reliability.md", DOCS / "local_steps.md"
BEGIN, END = "<!-- made by `python -m benchmarks page` -->\n", "<!-- until here -->\n"
"""Around the tables of collectives, schedules and local steps, and the figures of the soak. Text behind END is kept, in the page
of compressors too."""
JOBS = {"transformer": "transformer", "resnet": "CNN"}

HEAD = """# Compressors

The list and this text are made by `python -m benchmarks page`; do not edit them. The numbers are for the settings shown. [The
API](reference/api.md#compressors) explains every field, [compression and error feedback](concepts/compression.md) the
ideas, and [extending](extending.md) how to add a compressor of your own.

- **Law**: what one encode and decode does to a gradient. `tests/unit/compressors/test_laws.py` measures it for every
  spec, dtype and odd sizes. *exact*: nothing is lost. *unbiased*: right on average over the random stream. *contractive*:
  the error is never larger than the gradient (at least the part δ of its squared norm is kept). *none*: right only with
  feedback or momentum. *feedback*: what is lost is sent in later steps.
- **Bytes**: bytes of the payload for each element of a large float32 tensor. Uncompressed an element has 4 bytes. Scales
  and indices are counted.
- **Memory**: bytes for each element that are kept between steps. The owner of a shard keeps as much of the shard again.
  With `residual_dtype="bfloat16"` in the policy a residual takes 2 bytes, with `"int8"` 1.02, and encoding takes longer.
- **Encode, decode**: GB/s of float32 at 4 and 64 MB on one thread. In brackets: the ratio to `copy_` between warm tensors
  (median of 15 interleaved pairs). With feedback the residual is read and written too.{machine}
- **Loss**: the mean loss of steps 281 to 300 of the bench's transformer and CNN on two ranks, beside plain DDP's, by
  `python -m benchmarks losses`. In brackets: the number of seeds. More than 3 % with feedback is in bold; - was not
  measured. DGC takes over the optimizer's momentum: AdamW has none, so on the transformer DGC is Top-k.
"""
COLUMNS = ("compressor", "law", "bytes", "memory", "encode", "decode and add", *(f"loss, {name}" for name in JOBS.values()),
           "from", "use it for")  # fmt: skip


def run(arguments: list[str]) -> int:
    """Write the page and the table."""
    write_whole(PAGE, whole_page() + END + PAGE.read_text().partition(END)[2])
    figures = soak_figures(_read("soak.json"))
    parts = {OPTIONS: collectives_table(), SCHEDULES: schedules_table(), RELIABILITY: figures}
    for path, made in (parts | {LOCAL: "\n".join(equal_table(_read(path_of(ranks).name)) for ranks in (2, 4))}).items():
        write_whole(path, between(path.read_text(), BEGIN, END, made))
    print(f"written to {PAGE}, {OPTIONS}, {SCHEDULES}, {LOCAL} and {RELIABILITY}")
    return 0


def whole_page() -> str:
    """The page of compressors, from the results in benchmarks/results."""
    return page(_read("compressors.json"), _read("losses.json"))


def collectives_table() -> str:
    """One row for each collective."""
    rows = [
        (f"`{row['name']}`", f"`{' '.join(row['tasks'])}`", ", ".join(row["phases"]), row["about"], row["package"])
        for row in collective_rows()
    ]
    lines = table(("`scheme=`", "tasks", "phases", "what it does", "package"), rows)
    return "\n".join(lines) + "\n"


def schedules_table() -> str:
    """One row for each schedule."""
    columns = ("exchange runs", "costs accuracy", "needs the optimizer", "about", "package")
    rows = [(f"`{row['kind']}`", *(row[column] for column in columns)) for row in schedule_rows()]
    return "\n".join(table(("`schedule=`", *columns), rows)) + "\n"


def page(speeds: dict[str, Any], losses: dict[str, Any]) -> str:
    """The page, from the two results; {} where there is none."""
    made = speeds.get("made", {})
    machine = f" Measured on {made['cpu']}, {made['date']}, `{made['command']}`." if made else ""
    lines = [HEAD.format(machine=machine), ""]
    lines += table(COLUMNS, [_cells(entry, speeds.get("rows", []), losses.get("finals", {})) for entry in [*ENTRIES, *_added()]])
    lines += ["", "PyTorch's own PowerSGD hook at rank 4, in the same runs: " + _hook(losses.get("finals", {})) + ".", ""]
    return "\n".join(line.rstrip("\n") for line in lines)


def _added() -> list[Entry]:
    """Compressors of other packages."""
    packages = {row["id"]: row["package"] for row in compressor_rows()}
    return [
        Entry(spec, packages[spec.id], (type(spec).__doc__ or "-").partition("\n")[0])
        for spec in example_specs()
        if packages[spec.id] != "gradwire"
    ]


def _cells(entry: Entry, rows: list[dict[str, Any]], finals: dict[str, Any]) -> list[str]:
    spec, numel = entry.spec, 2**22
    run = ElementRun(numel, spec.element_bits, (2**11, 2**11))
    law = spec.law.kind if spec.law.delta == 0 else f"{spec.law.kind}, δ = {spec.law.delta:g}"
    measured = {row["megabytes"]: row for row in rows if row["spec"] == repr(spec)}
    speed = [
        ", ".join(f"{measured[mb][f'{what}_gbps']:.1f} ({measured[mb][f'{what}_ratio']:.2f})" for mb in (4, 64))
        if {4, 64} <= measured.keys()
        else "-"
        for what in ("encode", "decode")
    ]
    return [
        f"`{spec!r}`",
        law + (", feedback" if spec.feedback else ""),
        f"{spec.payload_bytes([run], 4) / numel:.3f}",
        f"{4 * len(spec.state) + (5 if spec.element_weights else 0)}",
        *speed,
        *(_loss(entry, finals.get(job, {})) for job in JOBS),
        entry.source,
        entry.use,
    ]


def _loss(entry: Entry, found: dict[str, Any]) -> str:
    method = f"gradwire:{entry.spec!r}"
    if method not in found or "ddp" not in found:
        return "-" if entry.trains else "other learning rates"
    above, seeds = above_ddp(found, method), len(found[method].keys() & found["ddp"].keys())
    text = f"{above:+.1%} ({seeds})"
    return f"**{text}**" if above > 0.03 and entry.spec.feedback else text


def _hook(finals: dict[str, Any]) -> str:
    told = [
        f"{above_ddp(finals[job], 'ddp-powersgd'):+.1%} on the {name}"
        for job, name in JOBS.items()
        if {"ddp", "ddp-powersgd"} <= finals.get(job, {}).keys()
    ]
    return ", ".join(told) or "not measured yet"


def _read(name: str) -> dict[str, Any]:
    path = RESULTS / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
