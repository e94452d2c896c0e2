"""The figures of docs/reliability.md, from the summary that `make soak` writes."""

from typing import Any

from benchmarks.markdown import table

NOT_YET = "Not measured yet: `make soak` writes the summary.\n"


def soak_figures(summary: dict[str, Any]) -> str:
    """Describe the last soak: the checks that held, and the number of trials of each pair of a kind and a schedule.
    summary: soak.json, or {} if there is none."""
    if "pairs" not in summary:
        return NOT_YET
    rows: list[tuple[str, object]] = [
        ("faults, and how many trials passed", f"{summary['faults']}, {summary['passed_faults']}"),
        (
            "fewest trials of a pair of a kind and a schedule",
            min(cell[0] for row in summary["pairs"].values() for name, cell in row.items() if name != "ddp hook"),
        ),
        ("resumed runs that were compared with an uninterrupted one, and were equal bit for bit", summary["compared"]),
    ]
    rows += [(f"not compared: {why}", count) for why, count in sorted(summary["not_comparable"].items())]
    if again := summary.get("started_again"):
        rows.append(
            ("trials whose ranks were started again: the machine was too busy for the first step, before any fault", again)
        )
    for kind, found in summary["kinds"].items():
        if late := found.get("error_after_s"):
            words = f"{late['median']} s in the median, {late['max']} s at most"
            rows.append((f"{kind}: the last survivor's error, after the fault", words))
    for run in summary["endurance"]:
        rows += [
            (f"steps under auto on {run['ranks']} ranks", run["steps"]),
            ("comparisons of weights by checksums in these steps", run["drift_checks"]),
            ("growth of resident memory in these steps", f"{run['memory_growth_bytes'] / 1e6:.2f} MB"),
        ]
    head = (
        f"`{summary['command']}`, {summary['date']}, {summary['machine']}; {summary['seconds']} s. The group's timeout was "
        f"{summary['group_timeout_s']:g} s.\n"
    )
    schedules = list(dict.fromkeys(name for row in summary["pairs"].values() for name in row))
    counts = [(kind, *(row.get(name, ["-"])[0] for name in schedules)) for kind, row in summary["pairs"].items()]
    parts = [
        head,
        "\n".join(table(("what", "found"), rows, left=1)),
        "",
        "Trials by kind of fault and schedule:",
        "",
        "\n".join(table(("fault", *schedules), counts, left=1)),
    ]
    return "\n".join(parts) + "\n"
