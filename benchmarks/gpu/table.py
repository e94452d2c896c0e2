"""The table that a run prints at its end."""

from collections import Counter
from typing import Any

from benchmarks.gpu.findings import ABORTED, DIFFERS, FAILED, MEASURED, NEAR, PASSED, SKIPPED

OUTCOMES = (PASSED, NEAR, DIFFERS, FAILED, SKIPPED, MEASURED)
SHOWN = 20
"""So many findings that differ or failed are listed."""


def summary(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The lines of the table, and whether anything differs, failed or was aborted."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["section"], Counter())[row["outcome"]] += 1
    lines = ["", f"{'section':<10}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES)]
    for section, of_section in counts.items():
        cells = "".join(f"{of_section[outcome] or '-':>10}" for outcome in OUTCOMES)
        lines.append(f"{section:<10}{cells}{'  aborted' if of_section[ABORTED] else ''}")
    wrong = [row for row in rows if row["outcome"] in (DIFFERS, FAILED, ABORTED)]
    if wrong:
        lines += ["", "what differs, failed or was aborted:"]
        lines += [f"  {row['section']}, {row['what']}: {reason_of(row)}" for row in wrong[:SHOWN]]
        lines += [f"  and {len(wrong) - SHOWN} more"] * (len(wrong) > SHOWN)
    return [*lines, *ratios(rows)], bool(wrong)


def reason_of(row: dict[str, Any]) -> str:
    """What is wrong, in a line. For a section that was aborted also the last line that it printed."""
    keys = ("why", "error", "relative", "equal_on_ranks", "exit_status", "largest_difference")
    found = next((str(row[key]) for key in keys if row.get(key)), row["outcome"])
    printed = str(row.get("printed", "")).splitlines()[-1:]
    return " ".join(": ".join([found, *printed]).split())[:150]


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Speed as a part of a copy's, for each spec and size."""
    speeds = {(row["spec"], row["mb"], row["call"]): row["ratio"] for row in rows if row["section"] == "speed" and "ratio" in row}
    if not speeds:
        return []
    sizes = sorted({mb for _, mb, _ in speeds}, reverse=True)
    heads = [f"{mb} MB" for mb in sizes]
    width = max(len(spec) for spec, _, _ in speeds)
    lines = ["", "speed as a part of a copy's, encode and decode-and-add:"]
    lines.append(" " * width + "".join(f"{head:>14}" for head in heads))
    for spec in dict.fromkeys(spec for spec, _, _ in speeds):
        pairs = [[speeds.get((spec, mb, call)) for call in ("encode", "decode and add")] for mb in sizes]
        cells = [" ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in pair) for pair in pairs]
        lines.append(f"{spec:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    return lines
