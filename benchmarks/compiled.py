"""torch.compile in each integration: the time of a step that communication still takes, over 200 Mb/s.

    python -m benchmarks compiled [--cells parallelize hook ..] [--rounds 8] [--again] [--out FOLDER]

A decoder of 7.1 million parameters trains on 2 nodes: eager, with its layers compiled one by one, and compiled as a whole, each
without communication and with gradwire (2 bits with feedback; in FSDP2 auto with parameters in 8 bits). All train in turns, in
one run (`benchmarks.framework_arms`). The time that is *not hidden* is the step with gradwire less the step without communication
of the same mode. *Wire* is the time of the bytes on the idle link.

A cell is written to CELL.json in benchmarks/results/compiled, or in --out, when it ends. Only cells without a file are measured,
unless --again. Needs network namespaces.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import framework_arms, markdown
from benchmarks.common import RESULTS, collected, write
from benchmarks.framework_arms import LENGTH, ROUNDED, WORDS, Cell
from benchmarks.frameworks import is_of_the_trainer
from gradwire.bench.jobs import GPT
from gradwire.bench.runner import emulation_problem
from gradwire.bench.statistics import median_ratio
from gradwire.testbed import EmulatedCluster

FOLDER = RESULTS / "compiled"
MBIT, MODES = 200, ("eager", "blocks", "whole")
FLOOR = "floor"
INTEGRATIONS: dict[str, tuple[Callable[..., None], str]] = {
    "parallelize": (framework_arms.hook, "parallelize"),
    "hook": (framework_arms.hook, "hook"),
    "fsdp2": (framework_arms.sharded, ROUNDED),
    "accelerate": (framework_arms.accelerate, "gradwire"),
    "transformers": (framework_arms.transformers, "gradwire"),
    "lightning": (framework_arms.lightning, "gradwire"),
}
"""The arms of each integration, and the name of the arm with gradwire."""
COLUMNS = "where", "compiled", "floor, ms", "step, ms (95 %)", "not hidden, ms", "wire, ms", "of what is possible (95 %)"


def run(arguments: list[str]) -> int:
    """Measure what is missing, and print all cells asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiled")
    parser.add_argument("--cells", nargs="+", choices=list(INTEGRATIONS), default=list(INTEGRATIONS))
    parser.add_argument("--rounds", type=int, default=8, help="of turns of 3 steps")
    parser.add_argument("--again", action="store_true", help="measure cells that have results, too")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the cells' results")
    options = parser.parse_args(arguments)
    rows: list[tuple[str, ...]] = []
    for cell in options.cells:
        path = options.out / f"{cell}.json"
        if options.again or not path.exists():
            if problem := emulation_problem():
                print(f"{cell}: not measured, {problem}")
                continue
            with EmulatedCluster(2, 1, inter=f"{MBIT}mbit") as cluster:
                module, words = "benchmarks.compiled", (cell, options.rounds)
                write(path, collected(cluster, module, words, cell, timeout=3600.0, hears=is_of_the_trainer))
        rows += rows_of(json.loads(path.read_text()))
    print("\n".join(markdown.table(COLUMNS, rows, left=2)))
    return 0


def rows_of(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each mode of a cell."""
    rows = []
    for mode in MODES:
        name, floor_name = (f"{mode} {way}" for way in (INTEGRATIONS[found["cell"]][1], FLOOR))
        us, floor_us = found["step_us"][name], found["step_us"][floor_name]
        own, share, floor_ms = median_ratio(us, [1e3]), median_ratio(floor_us, us), statistics.median(floor_us) / 1e3
        rows.append(
            (
                found["cell"],
                mode,
                f"{floor_ms:.0f}",
                f"{own.ratio:.0f} ({own.low:.0f} to {own.high:.0f})",
                f"{own.ratio - floor_ms:.0f}",
                f"{found['sent'][name] * 8 / MBIT / 1e3:.0f}",
                f"{share.ratio:.2f} ({share.low:.2f} to {share.high:.2f})",
            )
        )
    return rows


# ---- on the ranks


class Decoder(nn.Module):
    """The bench's decoder with the words of `framework_arms.Tokens`, called as a model of transformers is. It returns a loss."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.net = GPT(WORDS, LENGTH, width=256, layers=6, heads=8)
        for module in {"eager": [], "blocks": self.blocks, "whole": [self.net]}[mode]:
            module.compile()

    @property
    def blocks(self) -> nn.Sequential:
        return self.net.blocks

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits = self.net(input_ids)
        return CausalLMOutput(loss=functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def train(arms: Callable[..., None], way: str, steps: int, stepped: Callable[[], None]) -> None:
    """One arm: a mode, a space, and the name of an integration's arm."""
    mode, _, own = way.partition(" ")
    arms(own, steps, stepped, make=partial(Decoder, mode))


def main(cell: str, rounds: int) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes: this one has threads
    arms, way = INTEGRATIONS[cell]
    framework_arms.measure(
        cell, Cell(partial(train, arms), [f"{mode} {each}" for mode in MODES for each in (FLOOR, way)]), rounds
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
