"""Members that come and go: torchft alone beside gw.elastic, over slow links, with the same kills at the same seconds.

    python -m benchmarks members [--links 100mbit 10mbit] [--arms ARM ...] [--seconds 120] [--seeds 0]

Four emulated nodes have a member each. Members of nodes 1, 2 and 3 are killed with SIGKILL, and start again some seconds later.
The member of node 0 saves the weights that all members share. They are evaluated after the run. A cell takes minutes more than
its seconds: members send their first weights over the link, and the seconds of local steps begin with the end of a round.

A cell is one line of benchmarks/results/members.jsonl, and is not measured again. A cell that fails has no line, and does not
keep the others from being measured. Needs network namespaces and torchft.

The table compares samples in equal time, and the seconds until the last loss of torchft was reached.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import markdown
from benchmarks.common import RESULTS
from benchmarks.members_node import MEMBERS
from benchmarks.members_worker import ARMS, JOB
from benchmarks.outer import read
from benchmarks.race import reached
from gradwire.bench.jobs import make_job
from gradwire.bench.runner import emulation_problem
from gradwire.testbed import EmulatedCluster
from gradwire.testbed.network import address_of

PATH = RESULTS / "members.jsonl"
AGAINST = {"elastic 2 bits": "torchft ddp", "elastic auto": "torchft ddp", "elastic local": "torchft diloco"}
"""The arm of torchft that each arm is compared with."""
HELD_OUT_SEED, HELD_OUT_BATCHES = 1_000, 32


def run(arguments: list[str]) -> int:
    """Measure what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks members")
    parser.add_argument("--links", nargs="+", default=["100mbit", "10mbit"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of training in a cell, after the first step")
    parser.add_argument("--kills", type=int, default=3, help="of members in a cell")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one more cell each")
    parser.add_argument("--start-s", type=float, default=600.0, help="the most seconds that a cell takes to begin")
    parser.add_argument("--out", type=Path, default=PATH)
    options = parser.parse_args(arguments)
    if (problem := emulation_problem()) is not None:
        print(f"not measured: {problem}")
        return 1
    known, failed = read(options.out), False
    for seed, link, arm in product(options.seeds, options.links, options.arms):
        cell = {"link": link, "arm": arm, "seed": seed, "seconds": options.seconds, "kills": options.kills}
        if any(all(done.get(key) == value for key, value in cell.items()) for done in known):
            continue
        try:
            known.append({**cell, **measured(link, arm, options.seconds, options.kills, options.start_s)})
        except ChildProcessError as error:
            print(f"not measured: {error}", flush=True)
            failed = True
            continue
        with options.out.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
        print(known[-1], flush=True)
    print("\n".join(table(known)))
    return int(failed)


def kills_of(seconds: float, count: int) -> list[tuple[float, int]]:
    """When members are killed, and on which nodes: evenly spaced, node after node, but never on node 0.

    >>> kills_of(100.0, 3)
    [(25.0, 1), (50.0, 2), (75.0, 3)]
    """
    return [(seconds * (number + 1) / (count + 1), 1 + number % (MEMBERS - 1)) for number in range(count)]


def measured(link: str, arm: str, seconds: float, kills: int, start_s: float) -> dict[str, Any]:
    """Train one cell. Returns its results. Raises ChildProcessError where the nodes fail, or do not end in time."""
    with tempfile.TemporaryDirectory(prefix="gradwire-members-") as name, EmulatedCluster(MEMBERS + 1, inter=link) as cluster:
        folder, course = Path(name), Course(Path(name), seconds, kills_of(seconds, kills))
        cluster.set_node(MEMBERS, "10gbit")  # the lighthouse
        command = [sys.executable, "-u", "-m", "benchmarks.members_node", name, arm, address_of(MEMBERS)]
        code = cluster.run(
            command, env={"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}, on_line=course.line, timeout=seconds + start_s
        )
        course.end()
        if code or not course.saved:
            raise ChildProcessError(f"{arm} over {link}: the nodes ended with exit code {code}, {len(course.saved)} evaluations.")
        curve = [
            {**{key: each[key] for key in ("s", "steps", "samples")}, "loss": round(loss_of(folder / f"{each['saved']}.pt"), 4)}
            for each in course.saved
        ]
    return {"date": datetime.now(UTC).date().isoformat(), "killed": course.killed, "starts": course.starts, "curve": curve}


class Course:
    """The course of one cell. Members begin when all are ready. From the first step on a thread kills some, and ends the cell."""

    def __init__(self, folder: Path, seconds: float, kills: Sequence[tuple[float, int]]) -> None:
        self._folder, self._seconds, self._kills = folder, seconds, list(kills)
        self._pids: dict[int, int] = {}
        """The member of each node."""
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._began_s = 0.0
        self.starts = 0
        """Starts of members."""
        self.killed: list[float] = []
        """When members were killed, in seconds."""
        self.saved: list[dict[str, Any]] = []
        """What node 0 wrote with each of its saved weights."""

    def line(self, rank: int, stream: str, line: str) -> None:
        """A line that a node wrote."""
        if stream != "stdout" or not line.startswith("{"):
            if line.strip() and "Warning" not in line:
                print(f"node {rank}: {line}", file=sys.stderr, flush=True)
            return
        found = json.loads(line)
        if "saved" in found:
            self.saved.append(found)
            return
        if "began" in found:  # once more where all members ended and began anew
            if not self._began_s:
                self._began_s = found["began"]
                self._thread.start()
            return
        self._pids[found["ready"]] = found["pid"]
        self.starts += 1
        if self.starts == MEMBERS:
            self._write("go", str(self._seconds))

    def end(self) -> None:
        """Wait until the cell is over."""
        if self._began_s:
            self._thread.join()

    def _go(self) -> None:
        began_s = self._began_s
        for at_s, node in self._kills:
            time.sleep(max(0.0, began_s + at_s - time.time()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[node], signal.SIGKILL)
                self.killed.append(round(time.time() - began_s, 2))
        time.sleep(max(0.0, began_s + self._seconds + 1.0 - time.time()))
        self._write("end", "")

    def _write(self, name: str, text: str) -> None:
        part = self._folder / f"{name}.part"
        part.write_text(text)
        part.rename(self._folder / name)


@torch.no_grad()
def loss_of(path: Path) -> float:
    """The held-out loss of saved weights."""
    torch.set_num_threads(1)  # threads that wait for each other take longer on a busy machine
    job = make_job(JOB, HELD_OUT_SEED)
    model = job.make_model(0)
    model.load_state_dict(torch.load(path), strict=False)
    model.eval()
    losses = [job.loss(model, job.batch(0, 1, number)).item() for number in range(HELD_OUT_BATCHES)]
    return sum(losses) / len(losses)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: each arm beside the arm of torchft with the same link, seed, seconds and kills."""
    keys = ("link", "seed", "seconds", "kills")
    by_arm = {(*(row[key] for key in keys), row["arm"]): row for row in rows}
    cells = []
    for (*about, arm), row in by_arm.items():
        last = row["curve"][-1]
        other = by_arm.get((*about, AGAINST.get(arm, "")))
        ratios = [""] * 4 if other is None else [AGAINST[arm], *_ratios(row, other)]
        cells.append((about[0], arm, last["steps"], f"{last['samples']:,}", f"{last['loss']:.3f}", *ratios))
    heads = ("link", "arm", "steps", "samples", "held-out loss", "against", "times the samples a second before a kill")
    return markdown.table((*heads, "times the samples", "times sooner at its last loss"), cells, left=2)


def _ratios(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Samples a second until the last evaluation before a kill, all samples, and the time to the last loss of the other arm."""
    before = [_rate_before(each) for each in (row, other)]
    own, goal = row["curve"][-1]["samples"], other["curve"][-1]
    times = [reached([(each["s"], each["loss"]) for each in arm["curve"]], goal["loss"]) for arm in (row, other)]
    return [
        f"{before[0] / before[1]:.1f}" if all(before) else "-",
        f"{own / goal['samples']:.1f}" if goal["samples"] else "-",
        f"{times[1] / times[0]:.1f}" if all(times) else "never",
    ]


def _rate_before(row: dict[str, Any]) -> float:
    """Samples a second until the last evaluation before the first kill; 0 where there is none."""
    first = min(row["killed"], default=row["seconds"])
    last = max((each for each in row["curve"] if each["s"] <= first), key=lambda each: each["s"], default=None)
    return last["samples"] / last["s"] if last else 0.0
