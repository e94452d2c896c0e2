"""Compares exchanges over uneven links with their prices: one slow node, and uplinks slower than downlinks.

    python -m benchmarks uneven [--nodes 4] [--rate 400mbit] [--slow 100mbit] [--megabytes 2] [--repeats 5]

Needs network namespaces. Every pair of ranks exchanges directly, as gradwire's own exchanges do. The slow node is that of the
root. A prediction is the time of bytes on the wire without latencies.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, collected, write
from gradwire.core import Link
from gradwire.costs.collectives import flat_traffic
from gradwire.testbed import EmulatedCluster, parse_rate, permission_problem

WORDS = ("alltoall", "allgather", "gather", "broadcast")
_PAYLOAD = 1448 / 1514
"""The part of a rate that TCP has for payload."""
ROUNDS = 3
"""Number of rounds. The median of each exchange counts."""


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/uneven.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks uneven")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--slow", default="100mbit")
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if problem := permission_problem():
        print(f"uneven: not measured, {problem}")
        return 0
    held = round(options.megabytes * 2**20)
    quick, slow = (parse_rate(rate) / 1e9 * _PAYLOAD for rate in (options.rate, options.slow))
    even = Link(0.0, quick)
    # the links; of how many nodes rates change; what these receive then
    cases = {
        "all alike": ([even], 0, options.rate),
        "one slow node": ([even, Link(0.0, slow)], 1, options.slow),
        "slow uplinks": ([Link(0.0, quick, up_gbps=slow)], options.nodes, options.rate),
    }
    rows = []
    with EmulatedCluster(options.nodes, inter=options.rate) as cluster:
        for case, (links, changed, down) in cases.items():
            cluster.set_inter(options.rate)
            for node in range(changed):
                cluster.set_node(node, down, up=options.slow)
            found = collected(cluster, "benchmarks.uneven", (held, options.repeats), case, timeout=300.0)
            for word in WORDS:
                expected = flat_traffic(word, options.nodes, 1, "direct").time_us(held, even, *links) / 1e3
                rows.append({"links": case, "word": word, "predicted_ms": expected, "measured_ms": found[word]})
    show(rows)
    write(RESULTS / "uneven.json", {"megabytes": options.megabytes, "rows": rows})
    return 0


def show(rows: list[Mapping[str, object]]) -> None:
    """Print a table."""
    table = Table("links", "exchange", "predicted ms", "measured ms", "error")
    for row in rows:
        expected, measured = float(str(row["predicted_ms"])), float(str(row["measured_ms"]))
        error = f"{100 * (expected / measured - 1):+.1f} %"
        table.add_row(str(row["links"]), str(row["word"]), f"{expected:.1f}", f"{measured:.1f}", error)
    Console().print(table)


def sizes(word: str, rank: int, world_size: int, held: int) -> tuple[list[int], list[int]]:
    """Bytes that a rank sends to each rank, and receives from each; rank 0 is the root."""
    others = [other != rank for other in range(world_size)]
    whole = {"alltoall": held // world_size, "allgather": held}.get(word)
    if whole is not None:
        return [whole * other for other in others], [whole * other for other in others]
    at_root = [held * other * (rank == 0) for other in others]
    to_root = [held * (rank != 0) * (other == 0) for other in range(world_size)]
    return (at_root, to_root) if word == "broadcast" else (to_root, at_root)


def _rank(held: int, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    from gradwire.transport import Group, Link

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = Group.of(None).meet()
    found: dict[str, list[float]] = {word: [] for word in WORDS}
    link = Link(group, "uneven", torch.device("cpu"), group.timeout)
    for number, word in enumerate(WORDS * ROUNDS):
        sent, received = (
            [torch.zeros(size, dtype=torch.uint8) for size in way] for way in sizes(word, group.rank, group.world_size, held)
        )
        tags = range(100 * number, 100 * number + repeats + 1)
        exchanges = [link.expect(tag, received, checked=False) for tag in tags]
        dist.barrier()
        times = []
        for exchange in exchanges:
            began = time.perf_counter()
            exchange.send(sent)
            for source in range(group.world_size):
                exchange.wait(source)
            exchange.finish()
            times.append(time.perf_counter() - began)
        # one right after the other, so the mean of all but the first, which the bucket of the limit hides
        slowest = torch.tensor(1e3 * statistics.mean(times[1:]), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[word].append(slowest.item())
    if group.rank == 0:
        print(json.dumps({word: statistics.median(times) for word, times in found.items()}), flush=True)
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]))
