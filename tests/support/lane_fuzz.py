"""`make fuzz-threads`: ranks exchange gradients on wires for a while, under ThreadSanitizer.

    python tests/support/lane_fuzz.py [--seconds 60] [--ranks 3] [--seed 0]

Builds the kernels with -fsanitize=thread, then runs itself with the sanitizer's library loaded first. In each round the ranks
train under another plan, and in some rounds a thread of one rank ends the exchange in the middle. A report that has the
kernels in it is a failure, and so are ranks with different weights.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from sanitizers import run_again, use_library

OPTIONS = "die_after_fork=0:report_signal_unsafe=0:exitcode=0:history_size=4"
REPORTS = "GRADWIRE_FUZZ_REPORTS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if use_library():
        return 0 if sees_a_race() and fuzz(options.seconds, options.ranks, options.seed) else 1
    with tempfile.TemporaryDirectory() as folder:
        inside = {"TSAN_OPTIONS": f"{OPTIONS}:log_path={folder}/report", REPORTS: f"{folder}/report"}
        code = run_again("-fsanitize=thread", ["libtsan.so"], inside)
        reports = [part for path in Path(folder).iterdir() for part in path.read_text().split("=" * 18 + "\n")]
    ours = [report for report in reports if "_native.so" in report]
    print(f"{len(ours)} reports of ThreadSanitizer have the kernels in them, and {len(reports) - len(ours)} have not")
    print("\n".join(dict.fromkeys(ours)))
    return code or bool(ours)


def sees_a_race() -> bool:
    """Return whether the sanitizer finds two threads that decode into the same memory. Drops that report."""
    import torch

    from gradwire.kernels import cpu

    numel, shared = 2**20, 16  # few elements are written by both: each costs a look at two stacks
    payload, into = torch.zeros(2 * numel, dtype=torch.uint8), torch.zeros(2 * numel)
    parts = [into[:numel], into[numel - shared : 2 * numel - shared]]
    threads = [threading.Thread(target=cpu.cast_decode, args=(payload, torch.float16, False, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = Path(f"{os.environ[REPORTS]}.{os.getpid()}")
    if not (report.exists() and "_native.so" in report.read_text()):
        print("ThreadSanitizer does not see a race between two decodes: it does not work here", file=sys.stderr)
        return False
    report.unlink()
    return True


def fuzz(seconds: float, ranks: int, seed: int) -> bool:
    """Return whether ranks end all rounds with the same weights."""
    from worlds import World

    began, rounds, broken, world = time.monotonic(), 0, 0, None
    try:
        while time.monotonic() - began < seconds:
            if world is None:
                world = World(ranks)
            ends = world.run(one_round, seed + rounds, deadline_s=120.0)
            rounds += 1
            broken += ends[0] is None
            if len(set(ends)) > 1:
                print(f"round {rounds - 1}: ranks end with {ends}", file=sys.stderr)
                return False
    finally:
        if world is not None:
            world.close()
    print(f"{rounds} rounds of {ranks} ranks, {broken} of them broken off, in {time.monotonic() - began:.0f} s")
    return True


def one_round(seed: int) -> str | None:
    """Some steps under a plan. The digest of the weights; None where the exchange was broken off."""
    assert use_library() and os.environ["LD_PRELOAD"]
    import torch
    import torch.distributed as dist
    from worlds import Given, digest

    import gradwire as gw

    chance, rank = random.Random(seed), dist.get_rank()
    spec = chance.choice([gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2)), gw.TopK(0.05), gw.SignSGD(), gw.Cast()])
    schedule = chance.choice(["backward", "backward", "pipelined", "delayed"])
    chunk_bytes = chance.choice([0, 3000, 100_000])
    if schedule == "pipelined" and "alltoall" not in spec.schemes:
        schedule = "backward"
    ends = chance.random() < 0.2
    torch.manual_seed(seed)
    model = Given([chance.randrange(1, 200_000) for _ in range(chance.randint(1, 6))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(spec, schedule=schedule, bucket_bytes=chance.choice([10_000, 2**20]), chunk_bytes=chunk_bytes)
    handle = gw.parallelize(model, optimizer, plan=plan)
    assert handle.session.lanes.data[0].link.wire is not None
    end = None
    try:
        for step in range(6):
            if ends and step == 3 and rank == 0:
                end = threading.Timer(chance.random() * 0.01, handle.session.lanes.end, [gw.StepStateError("as ordered")])
                end.start()
            for _ in range(10**6 if ends and step == 5 else 1):
                model(model.random_gradients(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        handle.flush()
        return digest(model.parameters())
    except gw.GradwireError as error:
        if not ends:
            raise
        assert "as ordered" in str(error), error
        return None
    finally:
        if end is not None:
            end.join()
        handle.detach()


if __name__ == "__main__":
    sys.exit(main())
