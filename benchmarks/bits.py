"""Measures bits by tensor (CGX section 5): the bytes that the exact choice saves at equal error, and the losses with it.

    python -m benchmarks bits [--parts sizes losses] [--jobs transformer resnet] [--seeds 0 1 2 3 4] [--steps 300]

sizes: all three jobs are trained on the exact mean of two ranks' gradients, in one process. In a few steps errors are measured
as `gradwire.AdaptiveBits` does it. CGX's three rules choose bits within twice the error of 4 bits; the exact search then gets the
error that each of them really has as its budget, and bytes are compared. In addition: the bytes of the exact choice at twice the
error of 4 bits, over those of 4 bits; and what is left of them if every tensor may have another block, too.

losses: AdaptiveBits(alpha=2) and 4 bits for all, with and without error feedback, against S-SGD, as `benchmarks.paired` says.

All goes to benchmarks/results/bits.json at once, and is not measured again while it stands there (--again does); the tables are
written into docs/auto.md.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from benchmarks import convergence, paired
from benchmarks.common import RESULTS, write, write_between
from benchmarks.markdown import table
from benchmarks.paired import PLAIN, REFERENCE, Arm
from benchmarks.papers.bayes import bayes
from gradwire.auto.adaptive_bits import UNIFORM, sensitivities
from gradwire.auto.bit_errors import WIDTHS, measured
from gradwire.bench.jobs import make_job
from gradwire.core.tensors import TensorInfo
from gradwire.planner.bits import Sensitivity, error_budget, exact, kmeans, linear

PATH = RESULTS / "bits.json"
PAGE = Path(__file__).parent.parent / "docs" / "auto.md"
BEGIN, END = "<!-- bits: made by `python -m benchmarks bits` -->", "<!-- end of bits -->"
JOBS = ("transformer", "resnet", "mlp")
MEASURED = (10, 30, 60)
"""Steps whose gradients are measured."""
RANKS = 2
ALPHA = 2.0
BLOCK, OTHER_BLOCKS = 128, (32, 64, 256, 512, 1024)
BLOCKS = gw.AdaptiveBits(block=BLOCK, blocks=OTHER_BLOCKS)
RULES = {"kmeans": kmeans, "bayes": bayes, "linear": linear}
"""CGX's three rules."""
WANTED = {"transformer": 0.95}
"""Largest wanted median of a rule's bytes at its own error, by job; 1 for other jobs."""
ADAPTIVE = f"AdaptiveBits(alpha={ALPHA:g})"
ARMS = {
    REFERENCE: PLAIN[REFERENCE],
    ADAPTIVE: Arm(gw.AdaptiveBits(alpha=ALPHA), expected=True),
    "4 bits": Arm(gw.Policy(default=gw.QSGD(bits=4))),
    "4 bits, error feedback": Arm(gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=4)))),
    **{name: arm for name, arm in PLAIN.items() if name != REFERENCE},
}


def run(arguments: list[str]) -> int:
    """Measure, write results and page; 1 if the exact choice is not small enough, or what is learned with it is not near."""
    parser = paired.parser_of("bits", seeds=5)
    parser.add_argument("--parts", nargs="+", choices=("sizes", "losses"), default=["sizes", "losses"])
    options = parser.parse_args(arguments)
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    known.pop("made", None)
    sizes = known.setdefault("sizes", {})
    for job in JOBS if "sizes" in options.parts else ():
        if job not in sizes or options.again:
            sizes[job] = sizes_of(job)
            write(PATH, known)
    if "losses" in options.parts:
        chosen = paired.chosen(ARMS, options.only)
        train = partial(paired.on_ranks, "benchmarks.bits")
        known["finals"] = paired.measure(PATH, options, chosen, train, paired.DESIGN, given=measured_elsewhere(options.steps))
    lines = [*sizes_table(sizes), "", *losses_table(known.get("finals", {}))]
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return max(too_large(sizes), paired.verdict(known.get("finals", {}), ARMS))


# ---- sizes


def sizes_of(job_name: str) -> dict[str, dict[str, float]]:
    """Return the sizes by step: see `compare`."""
    torch.set_num_threads(1)
    job = make_job(job_name, seed=0)
    model = job.make_model(seed=0)
    optimizer = job.make_optimizer(model)
    named = dict(model.named_parameters())
    # vectors travel as they are
    infos = [TensorInfo(name, tuple(p.shape), "float32") for name, p in named.items() if p.dim() > 1]
    adaptive, found = BLOCKS, {}
    for step in range(max(MEASURED) + 1):
        means = {name: torch.zeros_like(p) for name, p in named.items()}
        rows = torch.zeros(len(infos), len(adaptive.ways(WIDTHS)) + 2, dtype=torch.float64)
        for rank in range(RANKS):
            model.zero_grad()
            job.loss(model, job.batch(rank, RANKS, step)).backward()
            gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
            if step in MEASURED:
                own = [measured(adaptive, i.name, gradients[i.name].reshape(-1), step, rank) for i in infos]
                rows += torch.tensor(own, dtype=torch.float64)
            for name, gradient in gradients.items():
                means[name] += gradient / RANKS
        if step in MEASURED:
            found[str(step)] = compare(sensitivities(adaptive, infos, rows.tolist()))
            print(f"{job_name}, step {step}: {found[str(step)]}", flush=True)
        for name, p in named.items():
            p.grad = means[name]
        optimizer.step()
    return found


def compare(any_block: Sequence[Sensitivity]) -> dict[str, float]:
    """Bytes over bytes. any_block: tensors with all blocks, the usual one first.

    size: of the exact choice within ALPHA times the error of 4 bits, over 4 bits for all. blocks: of that with blocks by tensor,
    over it. kmeans, bayes, linear: of the exact choice at a rule's own error, over the rule's; proven: of how many of these four
    searches it is known that nothing smaller exists. kmeans_blocks: bytes of k-means with blocks by tensor over those without.
    """
    usual = slice(len(WIDTHS))
    tensors = [tensor._replace(sizes=tensor.sizes[usual], errors=tensor.errors[usual]) for tensor in any_block]
    budget = error_budget(tensors, UNIFORM, ALPHA)
    best = exact(tensors, budget)
    found = {
        "size": best.nbytes / sum(tensor.sizes[UNIFORM] for tensor in tensors),
        "blocks": exact(any_block, budget).nbytes / best.nbytes,
    }
    searches = [best]
    for name, rule in RULES.items():
        its = rule(tensors, budget)
        searches.append(exact(tensors, its.error))
        found[name] = searches[-1].nbytes / its.nbytes
    found["kmeans_blocks"] = kmeans(any_block, budget, ladder=BLOCKS.ladder(WIDTHS)).nbytes / kmeans(tensors, budget).nbytes
    return found | {"proven": sum(search.proven for search in searches)}


def median_of(steps: dict[str, dict[str, float]], measure: str) -> float:
    """Return the median over the measured steps of a job."""
    return statistics.median(found[measure] for found in steps.values())


def sizes_table(sizes: dict[str, Any]) -> list[str]:
    """Markdown: a row for every job and step, and one of medians. "-": not measured."""
    shown = {
        "size": "bytes over 4 bits",
        "kmeans": "over k-means at its error",
        "bayes": "over Bayes at its error",
        "linear": "over linear at its error",
        "blocks": "blocks by tensor, too",
        "kmeans_blocks": "k-means with blocks, over without",
    }
    rows = []
    for job, steps in sizes.items():
        measured_in_all = {each for each in shown if all(each in found for found in steps.values())}
        values = {step: {each: found[each] for each in measured_in_all} for step, found in steps.items()}
        values["median"] = {each: median_of(steps, each) for each in measured_in_all}
        for step, of_step in values.items():
            rows.append((job, step, *(f"{of_step[each]:.3f}" if each in of_step else "-" for each in shown)))
    return table(("job", "step", *shown.values()), rows)


def too_large(sizes: dict[str, Any]) -> int:
    """1 if the exact choice has more bytes than a rule at its error anywhere, or more than wanted in the median."""
    wrong = []
    for job, steps in sizes.items():
        for rule in RULES:
            if not all(rule in found for found in steps.values()):
                continue
            largest, median = max(found[rule] for found in steps.values()), median_of(steps, rule)
            if largest > 1 or median > WANTED.get(job, 1.0):
                wrong.append(
                    f"{job}: the exact choice has {median:.3f} of the bytes of {rule} in the median and {largest:.3f} at most; "
                    f"at most {WANTED.get(job, 1.0)} and 1 were wanted"
                )
    print("\n".join(wrong))
    return 1 if wrong else 0


# ---- losses


def measured_elsewhere(steps: int) -> dict[str, Any]:
    """Return the results of the benchmark `convergence` for trainings of the same length and design. Its arms of the
    same name are the same."""
    known = json.loads(convergence.PATH.read_text()) if convergence.PATH.exists() else {}
    same = {name for name, arm in ARMS.items() if convergence.ARMS.get(name) == arm}
    alike = known | paired.DESIGN | {"steps": steps} == known
    found = known.get("finals", {}) if alike else {}
    return {job: {name: seeds for name, seeds in arms.items() if name in same} for job, arms in found.items()}


def losses_table(finals: dict[str, Any]) -> list[str]:
    """Markdown: the table of `paired`, and what adaptive bits sent in these runs."""
    lines = paired.table(finals, ARMS) if finals else ["Losses are not measured yet."]
    for job, found in finals.items():
        if sizes := [seed["size"] for seed in found.get(ADAPTIVE, {}).values()]:
            lines += ["", f"{job}: {ADAPTIVE} sent {statistics.fmean(sizes):.3f} of the bytes of 4 bits in these runs."]
    return lines


if __name__ == "__main__":
    paired.train_on_rank(ARMS, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
