"""The options of measurements by the bench, and a measurement with a table of its own. No torch.

These are the options of `gradwire bench`, and those that it does not have: --intra, --turn, --alone-steps and --seed.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.campaigns.requests import RepositoryRequest
from gradwire.bench.names import MOST_DECIDING_STEPS, split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import BenchRun
from gradwire.bench.runner import emulation_problem, run_bench
from gradwire.bench.table import print_run

__all__ = ["JSON_HELP", "LINKS", "json_file", "measure", "options_parser", "request_from"]

LINKS = "100mbit,500mbit,1000mbit,unlimited"
JSON_HELP = "file for the results"


def options_parser(part: str, links: str = LINKS) -> argparse.ArgumentParser:
    """The options that all measurements by the bench take."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {part}")
    parser.add_argument("--jobs", default="transformer,mlp,resnet", help="comma-separated, as for `gradwire bench`")
    parser.add_argument("--links", default=links, help=f"comma-separated rates between nodes; default: {links}")
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes; default: 2")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks of each node; default: 1")
    parser.add_argument("--intra", help="rate inside each node, which all its ranks share, as behind a PCIe switch")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each method; default: 30")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each method before those; default: 5")
    parser.add_argument("--turn", type=int, default=5, help="steps that a method takes in one turn; default: 5")
    parser.add_argument("--seed", type=int, default=0, help="seed of the models and batches; default: 0")
    alone = "steps of one rank alone, for the scaling factor; 0: none; default: 100"
    parser.add_argument("--alone-steps", type=int, default=100, help=alone)
    parser.add_argument("--json", type=json_file, help=JSON_HELP)
    return parser


def json_file(text: str) -> Path:
    """The file of --json. Raises ArgumentTypeError if its folder does not exist."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist. Create it; nothing was measured.")
    return path


def request_from(options: argparse.Namespace, methods: Sequence[str], record: Path | None = None) -> RepositoryRequest:
    """The request that the options of `options_parser` describe."""
    return RepositoryRequest(
        jobs=split_names(options.jobs),
        links=split_names(options.links),
        methods=methods,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        intra=options.intra,
        steps=options.steps,
        warmup_steps=options.warmup,
        turn_steps=options.turn,
        deciding_steps=MOST_DECIDING_STEPS,
        alone_steps=options.alone_steps,
        seed=options.seed,
        record=record,
    )


def measure(
    part: str, arguments: Sequence[str], methods: Sequence[str], tables: Callable[[BenchRun], Iterable[tuple[Table, str]]]
) -> int:
    """Measure these methods as the arguments say. Print the tables, each with its text. Returns the exit status."""
    parser = options_parser(part)
    parser.add_argument("--record", type=Path, help="folder for records of runs, for `gradwire report`")
    options = parser.parse_args(arguments)
    request = request_from(options, methods, options.record)
    run = run_bench(request, emulation_problem(), ProgressView(Console(stderr=True)), options.json)
    return print_run(run, chain.from_iterable(tables(run)))
