"""Jobs x links x methods, as `gradwire bench` measures them, with more options and more methods.

    python -m benchmarks methods [--jobs mlp] [--links 500mbit] [--methods floor,ddp,gradwire:qsgd4] [--turn 5] ...

The methods are those of `gradwire bench`, and two more kinds:

wrong-on-purpose:PART:POLICY    the policy with only a PART of each step (`benchmarks/campaigns/left_out.py`)
rival:NAME                      a method of another library (`benchmarks/campaigns/rivals.py`)
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.campaigns.measuring import options_parser, request_from
from gradwire.bench.names import GivenModel, split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import emulation_problem, run_bench
from gradwire.bench.table import print_run

__all__ = ["run"]

METHODS = "floor,ddp,ddp-2mb,ddp-fp16,ddp-powersgd,gradwire:qsgd4"


def run(arguments: list[str]) -> int:
    """Measure, and print one table per job. Returns 1 if a method failed."""
    parser = options_parser("methods")
    parser.add_argument("--methods", default=METHODS, help=f"comma-separated; default: {METHODS}")
    parser.add_argument("--model", help="any model, as MODULE:NAME of a class or function")
    parser.add_argument("--config", help="with --model: keywords for NAME, or for its config")
    parser.add_argument("--input", help="with --model: shape of a rank's batch, such as 8x3x64x64")
    parser.add_argument("--record", type=Path, help="folder for records of runs, for `gradwire report`")
    options = parser.parse_args(arguments)
    request = request_from(options, split_names(options.methods), options.record)
    problem = emulation_problem()
    if (given := GivenModel.of(options.model, options.config, options.input)) is not None:
        from gradwire.bench.models import ModelJob

        ModelJob(given)  # raises its errors once, before ranks start
        request = replace(request, jobs=[given.model], model=given)
    return print_run(run_bench(request, problem, ProgressView(Console(stderr=True)), options.json))
