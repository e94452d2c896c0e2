"""The time that a join costs the other members, and its parts: `python -m soak.joins --links 100mbit --joins 5`.

Three members train on emulated nodes. A fourth one joins, makes some steps, and leaves, again and again. Each line that it
prints is about one link, in milliseconds. The cost of a join is the longest time between two steps of another member while the
fourth one joins, less the median. Needs torchft, and network namespaces where a link has a rate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from gradwire.bench.runner import emulation_problem
from gradwire.testbed import EmulatedCluster
from gradwire.testbed.network import address_of

OTHERS = 3
"""Members that stay. The next node has the joiner, and the last one the lighthouse."""
PORT = 29610
STEPS = 6
"""The steps of the others before each join."""
LEAVES_S = 2.0
"""From the joiner's last step until the others are alone again, with the lighthouse's silence."""
LOOPBACK = "loopback"
PARTS = (
    ("gradwire.integrations.members", "Members._part", "leave"),
    ("gradwire.integrations.quorum", "Lighthouse.group_of", "reach the store"),
    ("gradwire.transport.link", "Group.meet", "connect"),
    ("gradwire.exchange.exchange", "plan_for", "plan"),
    ("gradwire.exchange.exchange", "tensor_facts", "facts"),
    ("gradwire.transport.lanes", "Lanes.open", "agree and open lanes"),
    ("gradwire.exchange.exchange", "Exchange._build", "buffers"),
    ("gradwire.integrations.members", "to_bytes", "state to bytes"),
    ("gradwire.integrations.members", "hand_over", "cards"),
)
"""Where a meeting's time goes: module, function, and the name of the part."""
Row = dict[str, Any]


def measured(link: str, plan: str, layers: int, joins: int) -> list[Row]:
    """Let the fourth member join so often. Returns what all members wrote."""
    rows: list[Row] = []

    def line(rank: int, stream: str, text: str) -> None:
        if stream == "stdout" and text.startswith("{"):
            rows.append(json.loads(text))
        elif text.strip() and "Warning" not in text:
            print(f"node {rank}: {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="gradwire-joins-") as folder:
        words = [folder, plan, str(layers), str(joins)]
        command = [sys.executable, "-u", "-m", "soak.joins", "--node"]
        environment = {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        if link == LOOPBACK:
            on_loopback([*command, "127.0.0.1", *words], environment, line)
        else:
            with EmulatedCluster(OTHERS + 2, inter=link) as cluster:
                cluster.set_node(OTHERS + 1, "10gbit")
                cluster.run([*command, address_of(OTHERS + 1), *words], env=environment, on_line=line, timeout=600.0)
    return rows


def on_loopback(command: list[str], environment: dict[str, str], line: Callable[[int, str, str], None]) -> None:
    """Run all nodes as processes of this machine."""

    def read(rank: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for text in process.stdout:
            line(rank, "stdout", text)

    environment = os.environ | environment | {"GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(OTHERS + 2)
    ]
    reading = [threading.Thread(target=read, args=each) for each in enumerate(nodes)]
    for each in reading:
        each.start()
    for process in nodes:
        process.wait(600.0)
    for each in reading:
        each.join()


def row_of(link: str, rows: Sequence[Row]) -> Row:
    """The times of a link in milliseconds: of a step, of a join, and of the parts of a meeting in which somebody joins."""
    joins = [each for each in rows if "joined" in each]
    steps = {rank: [each["at_s"] for each in rows if each.get("rank") == rank and "step" in each] for rank in range(OTHERS)}
    gaps = {rank: list(pairwise(times)) for rank, times in steps.items()}
    alone = [
        after - before for each in gaps.values() for before, after in each if not any(_meets(before, after, j) for j in joins)
    ]
    step_s, costs, slower = statistics.median(alone), [], []
    for join in joins:
        during = {rank: [b - a for a, b in each if join["asks"] < b < join["joined"]] for rank, each in gaps.items()}
        costs.append(max(max(each, default=0.0) for each in during.values()) - step_s)
        slower.append(max(sum(each) - len(each) * step_s for each in during.values()))
    meetings = [each for each in rows if each.get("members") == OTHERS + 1 and "parts" in each]
    found = {"link": link, "joins": len(joins), "step": step_s, "join": statistics.median(costs), "longest": max(costs)}
    found["until it trains"] = statistics.median(slower)
    for who, own in (
        ("others", [each for each in meetings if not each["joins"]]),
        ("joiner", [e for e in meetings if e["joins"]]),
    ):
        for part in dict.fromkeys(part for each in own for part in each["parts"]):
            found[f"{who}: {part}"] = statistics.median(each["parts"].get(part, 0.0) for each in own)
    return {name: round(1e3 * value, 1) if isinstance(value, float) else value for name, value in found.items()}


def _meets(before: float, after: float, join: Row) -> bool:
    """Whether a member joined or left between two steps of another one."""
    return bool(after > join["asks"] and before < join["joined"] + LEAVES_S)


# ---- one node


def node(address: str, folder: str, plan: str, layers: str, joins: str) -> None:
    """Serve the lighthouse, or train."""
    end, steps, rank = Path(folder) / "end", Path(folder) / "steps", int(os.environ["RANK"])
    if rank > OTHERS:
        serve(end, address)
        return
    import torch

    import gradwire as gw

    torch.set_num_threads(1)
    measure_parts(rank)
    plans = {"exact": gw.Identity(), "4 bits": gw.QSGD(bits=4), "auto": "auto"}
    plans["2 bits with feedback"] = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"))

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(int(layers))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        job = gw.elastic(model, optimizer, plan=plans[plan], min_replicas=2, lighthouse=f"{address}:{PORT}", timeout_s=60)
        return model, optimizer, job

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Any) -> None:
        before = job.step
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.step != before:
            say(rank=rank, step=job.step, at_s=time.time())

    if rank < OTHERS:
        trained = start()
        while not end.exists():
            step(*trained)
            if rank == 0 and trained[2].taking_part == trained[2].world_size == OTHERS:
                (Path(folder) / "part").write_text(str(trained[2].step))
                (Path(folder) / "part").rename(steps)
        os._exit(0)
    for _ in range(int(joins)):
        await_steps(steps, STEPS)
        if (joiner := os.fork()) == 0:  # a process that has no kernel warm yet, as a joiner has not
            trained = start()
            asks = time.time()
            while trained[2].taking_part <= OTHERS:
                step(*trained)
            step(*trained)
            say(joined=time.time(), asks=asks)
            trained[2].leave()
            os._exit(0)
        os.waitpid(joiner, 0)
        time.sleep(LEAVES_S)
    end.touch()
    os._exit(0)


def serve(end: Path, address: str) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind=f"{address}:{PORT}", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    while not end.exists():
        time.sleep(0.1)
    lighthouse.shutdown()


def await_steps(file: Path, more: int) -> None:
    """Wait until the others have made so many steps more, all together."""
    while not file.exists():
        time.sleep(0.05)
    until = int(file.read_text()) + more
    while int(file.read_text()) < until:
        time.sleep(0.05)


def measure_parts(rank: int) -> None:
    """Write the times of the parts of each meeting from now on."""
    from gradwire.integrations.members import Members

    times: dict[str, float] = {}
    for module, path, part in PARTS:
        owner: Any = import_module(module)
        *within, name = path.split(".")
        for each in within:
            owner = getattr(owner, each)
        setattr(owner, name, timed(getattr(owner, name), part, times))
    meet = Members._meet

    def met(self: Members, quorum: Any) -> None:
        times.clear()
        began, before = time.perf_counter(), self._took_part
        meet(self, quorum)
        at_once = not (quorum.heal or not before)
        if at_once:
            times["all"] = time.perf_counter() - began
        say(rank=rank, members=quorum.replica_world_size, joins=not at_once, parts=times)

    Members._meet = met  # type: ignore[method-assign]


def timed(function: Callable[..., Any], part: str, times: dict[str, float]) -> Callable[..., Any]:
    def call(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given, **options)
        finally:
            times[part] = times.get(part, 0.0) + time.perf_counter() - began

    return call


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.joins")
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, "100mbit"])
    parser.add_argument("--plan", default="4 bits", choices=["exact", "4 bits", "2 bits with feedback", "auto"])
    parser.add_argument("--layers", type=int, default=4, help="a million parameters each")
    parser.add_argument("--joins", type=int, default=5)
    options = parser.parse_args()
    if options.links != [LOOPBACK] and (problem := emulation_problem()) is not None:
        print(f"no slow link can be emulated here: {problem}", file=sys.stderr)
        return 1
    for link in options.links:
        print(json.dumps(row_of(link, measured(link, options.plan, options.layers, options.joins))), flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--node"]:
        node(*sys.argv[2:])
    else:
        sys.exit(main())
