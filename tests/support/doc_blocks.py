"""Code blocks of the documentation, and how they are run.

A comment before a block says what is done with it:

    <!-- file: train.py -->     the block is the content of that file
    <!-- run -->                the block is run: `sh` by bash, `python` as a script. If each line of an `sh` block is
                                `gradwire ...` or `torchrun --standalone --nproc-per-node N SCRIPT ...`, all these
                                programs start with torch loaded, without bash and torchrun
    <!-- run: bash -->          the block is run by bash, whatever its programs are
    <!-- run: emulated -->      the block is run where clusters can be emulated
    <!-- run: 2 ranks -->       a `python` block is run on two ranks, with a new `model`, `optimizer`, `loader` and `train`
    <!-- output -->             each line of the block is a line that a block above it printed; numbers may be others

Blocks of one page run in their order, in one folder, which has the repository's `examples`. A block without a comment is shown
only.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
_TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node"]
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
                printed = _run_block(interpreters, block, folder, wrong)
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


_OF_A_SHELL = {*"\\|&;<>$`#*"}
"""What a shell alone understands."""


def _run_block(interpreters: Interpreters, block: Block, folder: Path, wrong: list[str]) -> str:
    """Run a block of Python or of a shell. Returns what it printed."""
    environment = os.environ | _ENVIRONMENT
    if "emulate" in block.text:
        del environment["GLOO_SOCKET_IFNAME"]
    options = {"cwd": folder, "env": environment, "timeout": 240.0}
    plain = block.language == "sh" and not set(block.text) & _OF_A_SHELL
    lines = [shlex.split(line) for line in block.text.splitlines()] if plain else []
    if lines and block.about != "bash" and all(map(_starts_a_known_program, lines)):
        done = [program for line in lines for program in _programs(interpreters, line, options)]
    else:
        command = ["bash", "-euc", block.text] if block.language == "sh" else [sys.executable, "-c", block.text]
        done = [subprocess.run(command, capture_output=True, text=True, **options)]
    wrong += [f"{each.args} ended with {each.returncode}: {each.stdout}{each.stderr}" for each in done if each.returncode]
    return "".join(each.stdout for each in done)


def _starts_a_known_program(line: list[str]) -> bool:
    alone = line[:1] == ["gradwire"] and line[1:2] != ["emulate"]  # its ranks load torch, but it does not
    return alone or (line[:3] == _TORCHRUN and len(line) > 4 and line[4][0] != "-")


def _programs(interpreters: Interpreters, line: list[str], options: dict[str, Any]) -> list["subprocess.CompletedProcess[str]"]:
    """The ends of the programs that a line starts."""
    if line[0] == "gradwire":
        return [interpreters.run([sys.executable, Path(sys.executable).with_name("gradwire"), *line[1:]], **options)]
    size, script, *arguments = line[3:]
    return run_ranks(interpreters, options["cwd"] / script, *arguments, size=int(size), **_ENVIRONMENT)


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "0", line.strip())
