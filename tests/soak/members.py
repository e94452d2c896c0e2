"""Members of an elastic job that are killed, leave and join: `python -m soak.members --events 100`.

After each event the members that are left must go on within the timeout. All members must have equal weights after each step that
counts, and the last ones must keep no descriptor and no thread.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

from crowd import LEAST, START_S, Crowd
from elastic_member import PLANS, TIMEOUT_S
from interpreters import Interpreters

MOST = 4
"""Members at a time."""
ENDS = (None, 0, -signal.SIGKILL)
"""Exit codes of members that live, leave, or were killed."""


def come_and_go(interpreters: Interpreters, plan: str, events: int, seed: int = 0, size: int = MOST) -> dict[str, Any]:
    """Let so many random events happen to a job, and check what must hold. Returns what was seen."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gradwire-members-") as folder:
        crowd = Crowd(interpreters, plan, folder)
        try:
            crowd.await_steps([crowd.join() for _ in range(size)], 3, START_S)
            pauses, kinds = [], []
            for _ in range(events):
                kind = chance.choice(["killed", "leaves", "joins", "stalls"])
                living = crowd.living
                kind = "joins" if len(living) <= LEAST else "killed" if len(living) >= size and kind == "joins" else kind
                if kind == "joins":
                    crowd.await_steps([crowd.join()], 2, START_S)
                elif kind == "stalls":
                    stalled = chance.choice(living)
                    stalled.process.send_signal(signal.SIGSTOP)
                    time.sleep(chance.uniform(0.2, 3.0))
                    stalled.process.send_signal(signal.SIGCONT)
                else:
                    crowd.go(chance.choice(living), signal.SIGKILL if kind == "killed" else signal.SIGTERM)
                pauses.append(crowd.await_steps(crowd.living, chance.randint(1, 8), TIMEOUT_S + 2))
                kinds.append(kind)
                time.sleep(chance.random() * 0.1)
            ending = crowd.living
            crowd.finish()
            ended = [each.process.returncode for each in ending]
            last = {(each.steps[-1]["step"], each.steps[-1]["weights"]) for each in ending}
            return {
                "plan": plan,
                "events": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                "steps": max(step for step, _ in last),
                "ended": ended,
                "crashed": [each.process.returncode for each in crowd.all if each.process.returncode not in ENDS],
                "last": len(last),
                "unequal": crowd.unequal_steps(),
                "left": [each.end for each in ending if each.end is None or each.end["before"] != each.end["after"]],
                "longest pause, s": round(max(pauses, default=0.0), 2),
                "loss": sum(each.steps[-1]["loss"] for each in ending) / len(ending),
                "logs": crowd.logs() if any(each.process.returncode not in ENDS for each in crowd.all) else "",
            }
        finally:
            crowd.close()


def passed(seen: dict[str, Any]) -> bool:
    return not any(seen["ended"]) and not seen["crashed"] and seen["last"] == 1 and not seen["unequal"] and not seen["left"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.members")
    parser.add_argument("--events", type=int, default=100, help="of each plan")
    parser.add_argument("--plans", default="exact,4 bits,2 bits with feedback,local", help=f"of {', '.join(PLANS)}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    interpreters, good = Interpreters(), True
    try:
        for plan in options.plans.split(","):
            began = time.monotonic()
            seen = come_and_go(interpreters, plan, options.events, options.seed)
            good &= passed(seen)
            took = timedelta(seconds=round(time.monotonic() - began))
            print(f"{'passed' if passed(seen) else 'FAILED'} in {took}: {json.dumps(seen)}", flush=True)
    finally:
        interpreters.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
