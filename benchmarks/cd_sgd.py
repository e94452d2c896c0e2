"""Measures CD-SGD's corrections: losses and seconds of 2-bit thresholds with and without them, paired by seed.

    python -m benchmarks cd_sgd [--ranks 2 4] [--seeds 0 1 2] [--steps 300] [--only k=5] [--losses | --times]

Trains the transformer as `benchmarks.paired` says, with a fused AdamW: held-out losses at the end, at rates that fall to 0. Two
kinds of threshold (a fixed t, and one that each block sends with its codes), corrections every k steps or never, and sums that
come back uncompressed (the paper's pull) or encoded again. In comparison: the same without a schedule, and 2 bits with
feedback. Corrections are staggered. `--published` trains the paper's own form (`benchmarks.cd_sgd_published`).

*Seconds to loss*: the steps until the mean training loss of 20 steps is that of synchronous SGD before its rates fall (steps 131
to 150 of 300), times the measured step over 100 Mb/s. The warm-up counts with steps of synchronous SGD. Times are measured arm by
arm on emulated nodes of one rank each, whole periods; that part needs a quiet machine and network namespaces.

Writes benchmarks/results/cd_sgd.json after each training, and a table into docs/schedules_measured.md. Losses take an hour on two
ranks and two on four; times a quarter of an hour.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import gradwire as gw
from benchmarks import cd_sgd_published, markdown, paired
from benchmarks.common import RESULTS, collected, write, write_between
from benchmarks.paired import DESIGN, FALLING, PLAIN, REFERENCE, Arm, Training, differences, interval
from gradwire.bench.jobs import make_job
from gradwire.testbed import EmulatedCluster

PATH = RESULTS / "cd_sgd.json"
PAGE = Path(__file__).parent.parent / "docs" / "schedules_measured.md"
BEGIN, END = "<!-- cd_sgd: made by `python -m benchmarks cd_sgd` -->", "<!-- end of cd_sgd -->"
JOB, LINK = "transformer", "100mbit"
LOOKS = 1
WARMUP_STEPS = 15
WINDOW = 20
PERIOD = 20
"""Steps that are timed: whole periods of each k."""
T = 0.001
"""The fixed threshold: the mean magnitude of the transformer's first gradient, five times that of its twelfth."""
KINDS = {"fixed t": gw.TwoBit(threshold=T), "adaptive t": gw.TwoBit()}
PULLS = {"sums as they are": "CD-SGD", "sums encoded": "flat"}
EVERY: tuple[int | None, ...] = (None, 5, 2, 20, 10)
FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=2))


def named(kind: str, pull: str, k: int | None) -> str:
    """An arm's name."""
    return f"{kind}, {pull}, {'never' if k is None else f'k={k}'}"


def arms(warmup_steps: int) -> dict[str, Arm]:
    """All ways to train, the most wanted first."""

    def delayed(spec: gw.Spec, k: int | None, scheme: str = "flat") -> Arm:
        return Arm(gw.Uniform(spec, scheme=scheme, schedule=gw.Delayed(k, warmup_steps=warmup_steps)))

    return {
        REFERENCE: PLAIN[REFERENCE],
        "2 bits with feedback, no schedule": Arm(gw.Uniform(FEEDBACK, scheme="flat")),
        "2 bits with feedback, never": delayed(FEEDBACK, None),
        "2 bits with feedback, k=5": delayed(FEEDBACK, 5),
        **{
            f"{kind}, {pull}, no schedule": Arm(gw.Uniform(spec, scheme=scheme))
            for kind, spec in KINDS.items()
            for pull, scheme in PULLS.items()
        },
        **{
            named(kind, pull, k): delayed(spec, k, scheme)
            for k in EVERY
            for kind, spec in KINDS.items()
            for pull, scheme in PULLS.items()
        },
        "nothing encoded, k=1 (OD-SGD)": delayed(gw.Identity(), None),
    }


ARMS = arms(WARMUP_STEPS)


def run(arguments: list[str]) -> int:
    """Measure what is missing, write the table."""
    if "--published" in arguments:
        return cd_sgd_published.run([each for each in arguments if each != "--published"])
    parser = paired.parser_of("cd_sgd", seeds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--losses", action="store_true", help="measure losses only")
    parser.add_argument("--times", action="store_true", help="measure times only")
    options = parser.parse_args(arguments)
    options.jobs = [f"{ranks} ranks" for ranks in options.ranks]
    chosen = paired.chosen(ARMS, options.only)
    about = {name: value for name, value in DESIGN.items() if name != "ranks"}
    about |= {"t": T, "warmup_steps": WARMUP_STEPS, "looks": LOOKS, "fused": True}
    if not options.times:
        paired.measure(PATH, options, chosen, _train, about)
    if not options.losses:
        for ranks in options.ranks:
            _time(ranks, chosen, again=options.again)
    result = json.loads(PATH.read_text())
    lines = table(result)
    print("\n".join(lines))
    write_between(PAGE, BEGIN, END, lines)
    return 0


def _train(job: str, seed: int, steps: int, names: Sequence[str]) -> dict[str, Any]:
    return paired.on_ranks("benchmarks.cd_sgd", JOB, seed, steps, names, world=int(job.split()[0]))


def _time(ranks: int, chosen: Sequence[str], again: bool) -> None:
    """Measure steps over the link, and write them after each arm."""
    job = f"{ranks} ranks"
    with EmulatedCluster(ranks, inter=LINK) as nodes:
        for name in chosen:
            result = json.loads(PATH.read_text()) if PATH.exists() else {}
            known = result.setdefault("step_ms", {}).setdefault(job, {})
            if name in known and not again:
                continue
            known[name] = collected(nodes, "benchmarks.cd_sgd", ("--time", name), f"{job}, {name}")["step_ms"]
            print(f"{job}, {name}: {known[name]:.1f} ms", flush=True)
            write(PATH, {key: value for key, value in result.items() if key != "made"}, quiet=True)


def smoothed(trained: Sequence[float]) -> list[float]:
    """The mean loss of the last `WINDOW` steps, from step `WINDOW` on, each no more than before.

    >>> smoothed([2.0] * 20 + [1.0] * 20)[::10]
    [2.0, 1.5, 1.0]
    """
    means = [statistics.fmean(trained[end - WINDOW : end]) for end in range(WINDOW, len(trained) + 1)]
    return list(accumulate(means, min))


def steps_to(loss: float, curve: Sequence[float]) -> int | None:
    """The first step after which a smoothed curve has a loss; None where it never has."""
    return next((WINDOW + at for at, mean in enumerate(curve) if mean <= loss), None)


def seconds_to(found: Mapping[str, Any], times: Mapping[str, float], name: str, steps: int) -> float | None:
    """Seconds until an arm has the loss that synchronous SGD has before its rates fall, in the mean over seeds; None where one
    never has it, or nothing was timed."""
    reference = found[REFERENCE]
    seconds = []
    for seed in found[name].keys() & reference.keys():
        goal = reference[seed]["curve"][int(steps * FALLING) - WINDOW]
        count = steps_to(goal, found[name][seed]["curve"])
        if count is None or name not in times:
            return None
        warmup = min(count, WARMUP_STEPS) if _warms_up(name) else 0
        seconds.append((warmup * times[REFERENCE] + (count - warmup) * times[name]) / 1000)
    return statistics.fmean(seconds) if seconds else None


def _warms_up(name: str) -> bool:
    return isinstance(ARMS[name].plan.schedule, gw.Delayed)


def table(result: Mapping[str, Any]) -> list[str]:
    """Markdown: a row for every number of ranks and arm."""
    rows = []
    for job, found in result.get("finals", {}).items():
        times = result.get("step_ms", {}).get(job, {})
        for name in ARMS:
            if name not in found or not (seeds := differences(found, name, "loss")):
                continue
            mean, width = interval(seeds)
            loss = "0" if name == REFERENCE else f"{mean:+.1%} ± {width:.1%}"
            seconds = seconds_to(found, times, name, result["steps"])
            shown = "-" if name not in times else "not reached" if seconds is None else f"{seconds:.0f}"
            step = f"{times[name]:.0f}" if name in times else "-"
            rows.append((job, name, len(seeds), loss, step, shown))
    head = ("ranks", "arm", "seeds", "held-out loss against S-SGD", "step over 100 Mb/s, ms", "seconds to loss")
    return markdown.table(head, rows, left=2)


# ---- on the ranks


def time_on_rank(name: str) -> None:
    """One of the processes: steps of one arm. Rank 0 prints their mean in milliseconds, whole periods after the warm-up."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    job, warmup_steps = make_job(JOB, 0), 2
    arm = arms(warmup_steps)[name]
    counted = PERIOD if _warms_up(name) else PERIOD // 2
    training = Training(arm, job, 0, 10 * PERIOD, fused=True)
    ends = []
    for step in range(warmup_steps + 2 + counted):
        training.step(step, job.batch(rank, world, step))
        ends.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    dist.barrier()
    training.handle.detach()
    if rank == 0:
        print(json.dumps({"step_ms": 1000 * statistics.fmean(gaps[-counted:])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "--time":
        time_on_rank(sys.argv[2])
    else:
        paired.train_on_rank(
            ARMS,
            sys.argv[1],
            int(sys.argv[2]),
            int(sys.argv[3]),
            json.loads(sys.argv[4]),
            looks=LOOKS,
            fused=True,
            also=lambda training: {"curve": [round(loss, 4) for loss in smoothed(training.trained)]},
        )
