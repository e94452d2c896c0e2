"""Code blocks of the documentation, and how they are run.

A comment before a block says what is done with it:

    <!-- file: train.py -->     the block is the content of that file
    <!-- run -->                the block is run: `sh` by bash, `python` as a script
    <!-- run: emulated -->      the same, where clusters can be emulated
    <!-- run: 2 ranks -->       a `python` block is run on two ranks, with a new `model`, `optimizer`, `loader` and `train`
    <!-- output -->             each line of the block is a line that a block above it printed; numbers may be others

Blocks of one page run in their order, in one folder, which has the repository's `examples`. A block without a comment is shown
only.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from interpreters import Interpreters
from script_ends import run_ranks

__all__ = ["Block", "blocks", "run_page", "unlike_output"]

ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_BLOCK = re.compile(r"^(?:<!-- (file|run|output)(?:: ([^>]*))? -->\n+)?```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RANKS = """
import itertools
import os
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

dist.init_process_group("gloo")
if dist.get_rank():  # the blocks of a page show what rank 0 prints
    sys.stdout = open(os.devnull, "w")


def fresh():
    torch.manual_seed(0)
    layers = {"embed": torch.nn.Linear(256, 1000), "act": torch.nn.ReLU(), "head": torch.nn.Linear(1000, 10)}
    model = torch.nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    random = torch.Generator().manual_seed(1 + dist.get_rank())
    loader = [torch.randn(16, 256, generator=random) for _ in range(50)]

    def train_one_step(batch):
        (model(batch) - batch[:, :10]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(steps):
        for batch in loader[:steps]:
            train_one_step(batch)

    return {**globals(), **locals()}


for block in BLOCKS:
    exec(block, fresh())
dist.destroy_process_group()
"""


class Block(NamedTuple):
    """One block of a page."""

    mark: str
    """file, run, output, or nothing."""
    about: str
    """The words after the mark."""
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All blocks of a page that begin at the margin."""
    return [Block(*(part or "" for part in found)) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def unlike_output(expected: str, printed: str) -> list[str]:
    """The lines of `expected` that no line of `printed` equals when all numbers count as equal."""
    lines = {_without_numbers(line) for line in printed.splitlines()}
    return [line for line in expected.splitlines() if _without_numbers(line) not in lines]


def run_page(interpreters: Interpreters, page: Path, folder: Path, emulates: bool) -> list[str]:
    """Run the blocks of a page in a folder. Returns what went wrong."""
    wrong: list[str] = []
    printed, skipped, waiting = "", False, list[str]()
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in [*blocks(page), Block("", "", "", "")]:
        ranks = block.mark == "run" and block.about == "2 ranks"
        if waiting and not ranks and block.mark != "output":
            printed, waiting = _run_ranks(interpreters, waiting, folder, wrong), []
        if ranks:
            waiting.append(block.text)
        elif block.mark == "file":
            (folder / block.about).write_text(block.text)
        elif block.mark == "run":
            skipped = block.about == "emulated" and not emulates
            if not skipped:
                command = ["bash", "-euc", block.text] if block.language == "sh" else [sys.executable, "-c", block.text]
                printed = _run(command, folder, wrong)
        elif block.mark == "output" and not skipped:
            if waiting:
                printed, waiting = _run_ranks(interpreters, waiting, folder, wrong), []
            wrong += [f"{line!r} was not printed, but: {printed}" for line in unlike_output(block.text, printed)]
    return wrong


def _run_ranks(interpreters: Interpreters, texts: list[str], folder: Path, wrong: list[str]) -> str:
    script = folder / "ranks_of_the_page.py"
    script.write_text(f"BLOCKS = {texts!r}\n{_RANKS}")
    done = run_ranks(interpreters, script, **_ENVIRONMENT)
    wrong += [f"{script.name} ended with {rank.returncode}: {rank.stdout}{rank.stderr}" for rank in done if rank.returncode]
    return done[0].stdout


def _run(command: list[str], folder: Path, wrong: list[str]) -> str:
    environment = os.environ | _ENVIRONMENT
    if "emulate" in command[-1]:
        del environment["GLOO_SOCKET_IFNAME"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode:
        wrong.append(f"{command[-1]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "0", line.strip())
