"""Links from the output of nccl-tests: files of `all_reduce_perf` and its siblings as a cluster.

If all ranks of a file are on one host, the file measures the link inside a node. Else it measures the link between nodes, which
the ranks of a host share. A line with a latency and a rate is fitted to the out-of-place times. The reader checks the meaning of
the columns: bus bandwidth over algorithm bandwidth is a number that follows from the collective and the ranks.
"""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.core import Cluster, Link, Made, number, printable, read_text, show, under, whole
from gradwire.costs.fit import fit_link
from gradwire.errors import FormatError

_WORDS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""The word of the link task for each collective of nccl-tests."""
_RANK = re.compile(r"^#?\s*Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\b")
_NAMED = re.compile(rf"\b({'|'.join(_WORDS)})_perf\b")
_COLUMNS = ("size", "time", "algbw", "busbw")
_TOLERANCE = 0.05
_CHECKED_GBPS = 1.0
"""Least algorithm bandwidth, in GB/s, at which the columns are checked: smaller ones, with two digits, have too coarse ratios."""


class NcclRun(NamedTuple):
    """The measurement of one file."""

    collective: str
    """The collective's name in nccl-tests, such as all_reduce."""
    hosts: tuple[str, ...]
    ranks: int
    points: tuple[tuple[float, float], ...]
    """(bytes that a rank holds before, microseconds)."""

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // len(self.hosts)

    def link(self) -> tuple[Link, str]:
        """The measured link, and why the line through the times is a poor fit; '' for a good fit."""
        found, fit = fit_link(self.points, _WORDS[self.collective], self.ranks, ranks_per_node=self.ranks_per_node)
        return found, fit.problem


def cluster_from(paths: Sequence[str | os.PathLike[str]], collective: str | None = None) -> tuple[Cluster, list[str]]:
    """The cluster that the files measured, and a note on each poor fit.

    Each link may have one file of all_reduce and one file of another collective. Without the other file, all_reduce gives the
    times of all exchanges of its link. With it, all_reduce gives `Cluster.allreduce`, between nodes or inside a single node.
    collective: the collective of files that do not name theirs, such as all_reduce.

    Raises FormatError that names the file, the line, the value and the cure.
    """
    runs: dict[tuple[bool, bool], tuple[str, NcclRun]] = {}
    links: dict[tuple[bool, bool], Link] = {}
    problems = []
    for path in paths:
        source = printable(os.fspath(path), longest=4096)
        with under(f"{source}:"):
            run = read_nccl_tests(read_text(path), collective)
            key = len(run.hosts) > 1, run.collective == "all_reduce"
            if key in runs:
                raise FormatError(
                    f"it measures {run.collective} {'between nodes' if key[0] else 'inside a node'}, and {runs[key][0]} measures "
                    f"the same link by {runs[key][1].collective}. Leave out one of the files."
                )
            links[key], problem = run.link()
        runs[key] = source, run
        problems += [f"{source}: {problem}"] * bool(problem)
    if not runs:
        raise FormatError("there is no file. Name the output of nccl-tests, of one host, of several hosts, or of both.")
    between = any(several for several, _ in runs)
    _, main = next(run for (several, _), run in runs.items() if several == between)
    if between and main.ranks_per_node > 1 and not any(not several for several, _ in runs):
        raise FormatError(
            f"{len(main.hosts)} hosts have {main.ranks_per_node} ranks each, and no file measures the link inside a node. "
            "Add the output of a run on one host."
        )
    chosen = {several: links.get((several, False), links.get((several, True))) for several in (False, True)}
    allreduce = links.get((between, True)) if (between, False) in links else None
    some = chosen[between]
    assert some is not None
    hosts = dict.fromkeys(host for _, run in runs.values() for host in run.hosts)
    command = f"imported from {', '.join(source for source, _ in runs.values())}"
    cluster = Cluster(
        nodes=len(main.hosts),
        ranks_per_node=main.ranks_per_node,
        intra=chosen[False] or some,
        inter=chosen[True] or some,
        allreduce=allreduce,
        made=Made(host=", ".join(hosts), date="not recorded", command=command),
    )
    return cluster, problems


def read_nccl_tests(text: str, collective: str | None = None) -> NcclRun:
    """Read one output of nccl-tests. Lines outside of the table, such as logs, do not count.

    Raises FormatError that names the line, the value and the cure.
    """
    if collective is not None and collective not in _WORDS:
        raise FormatError(f"the collective is {show(collective)}: it must be one of {', '.join(_WORDS)}.")
    hosts: dict[int, str] = {}
    columns: list[str] = []
    rows: list[tuple[int, dict[str, str]]] = []
    named: str | None = None
    for line, written in enumerate(text.splitlines(), 1):
        words = written.lstrip("# \t").split()
        if match := _RANK.match(written):
            rank = int(match[1])
            if rank in hosts:
                raise FormatError(
                    f"line {line}: rank {rank} is on {match[2]}, and an earlier line has a rank {rank} on {hosts[rank]}: several "
                    "runs in one file, or ranks that did not find each other (build nccl-tests with MPI=1). Keep one run."
                )
            hosts[rank] = match[2]
        elif words[:2] == ["size", "count"]:
            columns = words
        elif columns and words and words[0].isdigit() and not written.lstrip().startswith("#"):
            if len(words) != len(columns):
                raise FormatError(
                    f"line {line}: {show(written.strip())} has {len(words)} values, but the table has {len(columns)} columns. "
                    "The line is damaged or cut: correct it, or leave it out."
                )
            rows.append((line, dict(reversed([*zip(columns, words, strict=True)]))))  # the first of two: out-of-place
        elif match := _NAMED.search(written):
            named = named or match[1]
    if named is not None and collective is not None and named != collective:
        raise FormatError(f"it says that it is of {named}, but {collective} was asked for. Leave out --collective.")
    found = named or collective
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise FormatError(
            f"no line names the columns {', '.join(missing)}: this is no output of nccl-tests, or its heading is missing (size, "
            "count, type, ..). Save the whole output."
        )
    if found is None:
        raise FormatError(f"it does not name its collective. Say by --collective which of {', '.join(_WORDS)} ran.")
    _check_hosts(hosts)
    points = [_point(line, row, found, len(hosts)) for line, row in rows if row["size"] != "0"]
    return NcclRun(found, tuple(dict.fromkeys(hosts.values())), len(hosts), tuple(points))


def _check_hosts(hosts: dict[int, str]) -> None:
    if len(hosts) < 2:
        raise FormatError(
            f"{len(hosts)} lines say on which host a rank was ('#  Rank  0 .. on HOST device  0 ..'): links need 2 ranks or more."
            " Save the whole output of a run with several ranks."
        )
    if {*hosts} != {*range(len(hosts))}:
        gone = next(rank for rank in range(len(hosts)) if rank not in hosts)
        raise FormatError(f"rank {gone} has no line, though rank {max(hosts)} has one. Save the whole output.")
    names = [*hosts.values()]
    counts = {name: names.count(name) for name in names}
    if len({*counts.values()}) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise FormatError(
            f"hosts have different numbers of ranks ({shown}), and a cluster "
            "has nodes of equal size. Run nccl-tests with as many ranks on each host."
        )


def _point(line: int, row: dict[str, str], collective: str, ranks: int) -> tuple[float, float]:
    """The bytes that a rank holds, and microseconds."""
    values = {}
    for column in _COLUMNS:
        try:
            values[column] = float(row[column])
            number(column, values[column], "a number of nccl-tests", positive=column == "time")
        except (ValueError, FormatError):
            raise FormatError(
                f"line {line}: {column} is {show(row[column])}: it must be a number, above 0 for a time. Measure again, or leave "
                "the line out."
            ) from None
    whole(f"line {line}: size", int(row["size"]), "bytes")
    wanted = _bus_factor(collective, ranks)
    if values["algbw"] >= _CHECKED_GBPS:
        factor = values["busbw"] / values["algbw"]
        if abs(factor - wanted) > _TOLERANCE * wanted:
            raise FormatError(
                f"line {line}: busbw over algbw is {factor:.3g}, but for {collective} among {ranks} ranks it is {wanted:.3g}: "
                "the times are of another collective, or of other ranks. Correct --collective, or save the whole output."
            )
    held = values["size"] / ranks if collective == "all_gather" else values["size"]  # its size is that of all shards
    return held, values["time"]


def _bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines them."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)
