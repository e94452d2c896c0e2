"""Compares direct exchanges with equal shards and with shards by uplinks, where one of four nodes sends at a quarter of the rate.

    python -m benchmarks shards [--rate 40mbit] [--slow 10mbit] [--megabytes 4.0] [--repeats 3]

Needs network namespaces. The payloads have 8 bits an element, and travel by all-to-all and all-gather. The least time is that
of the slowest node's bytes (`gradwire.planner.shards`). All ranks compare the bits of their sums.
"""

import argparse
import json
import sys
import time
from statistics import median

from benchmarks import markdown
from benchmarks.common import RESULTS, collected, write
from gradwire.planner.shards import least_us, shares_of
from gradwire.testbed import EmulatedCluster, parse_rate, permission_problem

NODES, SLOW_NODE = 4, 1
TENSORS = 16
NBYTES = 1 + 4 / 128
"""Bytes of an element in payloads: 8 bits, and a scale for each block."""
_PAYLOAD = 1448 / 1514
"""The part of a rate that TCP has for payload."""


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/shards.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks shards")
    parser.add_argument("--rate", default="40mbit")
    parser.add_argument("--slow", default="10mbit")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of gradient, of which payloads have 8 bits an element")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if problem := permission_problem():
        print(f"shards: not measured, {problem}")
        return 0
    numel = round(options.megabytes * 2**20) // 4 // TENSORS
    quick, slow = (parse_rate(rate) / 1e9 * _PAYLOAD for rate in (options.rate, options.slow))
    rates = [slow if node == SLOW_NODE else quick for node in range(NODES)]
    rows = []
    with EmulatedCluster(NODES, inter=options.rate) as cluster:
        cluster.set_node(SLOW_NODE, options.rate, up=options.slow)
        for name, shares in {"equal": (1,) * NODES, "by uplinks": shares_of(rates)}.items():
            given = json.dumps(shares)
            found = collected(cluster, "benchmarks.shards", (numel, options.repeats, given), name, timeout=300.0)
            least_ms = least_us(NBYTES * numel * (TENSORS - 0.5), rates, shares) / 1e3
            rows.append({"shards": name, "shares": shares, "least_ms": least_ms} | found)
    columns = ("shards", "least ms", "measured ms", "measured over least", "bits equal")
    cells = [
        (row["shards"], f"{row['least_ms']:.0f}", f"{row['ms']:.0f}", f"{row['ms'] / row['least_ms']:.2f}", row["equal"])
        for row in rows
    ]
    print("\n".join(markdown.table(columns, cells, left=1)))
    write(RESULTS / "shards.json", {"rate": options.rate, "slow": options.slow, "rows": rows})
    return 0


def _rank(numel: int, repeats: int, shares: list[int]) -> None:
    import msgspec
    import torch
    import torch.distributed as dist

    import gradwire as gw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [numel // 2, *[numel] * (TENSORS - 1)]  # lanes do not go in step: one reduces while the other gathers
    tensors = {f"w{at}": torch.zeros(size) for at, size in enumerate(sizes)}
    infos = [gw.TensorInfo(name, (tensor.numel(),), "float32") for name, tensor in tensors.items()]
    policy = gw.Uniform(gw.QSGD(bits=8), scheme="alltoall", bucket_bytes=2 * numel, edge_bytes=2 * numel)
    plan = msgspec.structs.replace(policy.plan(infos, world_size), shares=tuple(shares))
    exchange = gw.Exchange(tensors, plan)
    times = []
    for repeat in range(repeats + 1):
        generator = torch.Generator().manual_seed(1000 * repeat + rank)
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.numel(), generator=generator))
        dist.barrier()
        began = time.perf_counter()
        exchange.begin()
        for name in tensors:
            exchange.ready(name)
        exchange.wait()
        slowest = torch.tensor(1e3 * (time.perf_counter() - began), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(slowest.item())
    own = torch.cat([tensor.view(torch.int32).long() for tensor in tensors.values()])
    both = [own.clone(), own.clone()]
    dist.all_reduce(both[0], op=dist.ReduceOp.MIN)
    dist.all_reduce(both[1], op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"ms": median(times[1:]), "equal": bool(torch.equal(*both))}), flush=True)
    exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
