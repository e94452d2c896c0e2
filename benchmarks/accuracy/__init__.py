"""Measures what a codec costs in learning: held-out loss over that of exact sums in percent, paired by seed, on several jobs.

    python -m benchmarks accuracy --jobs transformer,cnn,tied --ranks 2,4,8,16 --specs today2,four+weights --seeds 5 --out FILE

One process trains one model as any number of ranks would (`benchmarks.accuracy.training`), so 16 ranks need no 16 processes.
Each training is one line of JSON in the file, written when the training ends. A training that is in the file is not repeated.
The table has the mean over seeds with its 95 % interval by Student's t, and the witness values: the energy of what was applied
over that of the exact mean, and the norms of residuals and of the applied error over the norm of the exact mean. With
`--against FORM` it compares with that form in place of exact sums.

`--specs` are forms (`benchmarks.accuracy.forms`): a spec as in Python, or a short name, and what is done around the exchange.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import markdown
from benchmarks.accuracy.forms import OPTIONS, SPECS, form_of
from benchmarks.accuracy.frontier import compared, write_frontier
from benchmarks.accuracy.jobs import JOBS, job_of
from benchmarks.accuracy.rivals import RIVALS
from benchmarks.accuracy.training import train
from benchmarks.paired import interval
from gradwire.bench.names import split_names

__all__ = ["REFERENCE", "run", "table"]

REFERENCE = "exact"
STEPS = 200
KEYS = "job", "ranks", "form", "seed", "steps"
"""The fields that name a training."""


def run(arguments: list[str]) -> int:
    """Train what is not in the file yet, and print the table."""
    words = [f"  {name:<12}{spec!r}" for name, spec in SPECS.items()]
    words += [f"  {name:<12}of another system" for name in RIVALS]
    words += [f"  +{name:<11}{what}" for name, what in OPTIONS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks accuracy",
        epilog="forms:\n" + "\n".join(words),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", default="transformer,tied,cnn", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--specs", default="exact,today2", help="forms with commas between them; exact is always trained")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON, to which trainings are added")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--against", default=REFERENCE, help="the form that losses in the table are compared with")
    parser.add_argument("--frontier", action="store_true", help="only write loss and bytes into docs/compressors.md")
    options = parser.parse_args(arguments)
    if options.frontier:
        write_frontier(read(options.out))
        return 0
    forms = list(dict.fromkeys([REFERENCE, *split_names(options.specs)]))
    cells = [
        dict(zip(KEYS, (job, int(ranks), form, seed, options.steps), strict=True))
        for seed, job, ranks, form in product(range(options.seeds), options.jobs.split(","), options.ranks.split(","), forms)
    ]
    for cell in cells:  # mistakes come before hours of training
        form_of(cell["form"]), job_of(cell["job"], 0)
    torch.set_num_threads(1)
    for cell in () if options.table else cells:
        if any(all(done[key] == cell[key] for key in KEYS) for done in read(options.out)):
            continue
        job, form = job_of(cell["job"], cell["seed"]), form_of(cell["form"])
        found = cell | train(job, form, cell["seed"], cell["ranks"], cell["steps"])
        with options.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{cell['job']}, {cell['ranks']} ranks, seed {cell['seed']}, {cell['form']}: {found['loss']:.4f}", flush=True)
    print("\n".join(table([each for each in read(options.out) if each["steps"] == options.steps], options.against)))
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The trainings of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(trainings: Sequence[dict[str, Any]], reference: str = REFERENCE) -> list[str]:
    """Markdown: a row for every job, number of ranks and form that has seeds of the reference."""
    rows = []
    for job, ranks in dict.fromkeys((each["job"], each["ranks"]) for each in trainings):
        found = [each for each in trainings if (each["job"], each["ranks"]) == (job, ranks)]
        for form in dict.fromkeys(each["form"] for each in found):
            both = compared(found, form, reference)
            if not both or form == reference:
                continue
            mean, width = interval([percent for _, percent in both])
            loss = f"{mean:+.2f} ± {width:.2f}" if len(both) > 1 else f"{mean:+.2f}"
            witness = [_mean(each[name] for each, _ in both) for name in ("sent_energy", "residual_norm", "error_norm")]
            rows.append((mean, [job, ranks, form, f"{form_of(form).bytes_an_element():.3f}", len(both), loss, *witness]))
        rows.sort(key=lambda row: (list(JOBS).index(row[1][0]), row[1][1], row[0]))
    head = ["job", "ranks", "form", "bytes", "seeds", f"loss over {reference}, %", "sent energy", "residual", "error"]
    return markdown.table(head, [row for _, row in rows], left=3)


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.2f}"
