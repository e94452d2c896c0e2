"""The campaign over frameworks: who has the turn, and what its numbers are compared with."""

import threading
import time

import pytest

from benchmarks import framework_arms
from benchmarks.framework_arms import TURN_STEPS, WARMUP_STEPS, Turns
from benchmarks.frameworks import missed_by, rows_of


class Alone:
    """One rank."""

    def meet(self):
        pass


def test_one_arm_at_a_time_trains_and_the_order_rotates(monkeypatch):
    monkeypatch.setattr(framework_arms, "sent_by_interface", lambda: 0)
    seen, busy = [], threading.Lock()

    def arm(name):
        def train(steps, stepped):
            for _ in range(steps):
                assert busy.acquire(blocking=False), "two arms train at the same time"
                seen.append(name)
                time.sleep(0.001)
                busy.release()
                stepped()
            assert busy.acquire(blocking=False)  # the framework ends in the arm's own turn
            time.sleep(0.005)
            busy.release()

        return train

    turns = Turns(("a", "b", "c"), 2, Alone(), {"b": 9})
    turns.run({name: arm(name) for name in "abc"})
    warmup = {"a": WARMUP_STEPS, "b": 9, "c": WARMUP_STEPS}
    order = [*warmup.items()] + [(name, TURN_STEPS) for name in "abcbca"]
    assert seen == [name for name, steps in order for _ in range(steps)]
    assert turns.counted == 2 * TURN_STEPS
    assert all(len(us) == warmup[name] + 2 * TURN_STEPS and min(us) >= 1000 for name, us in turns.us.items())


@pytest.mark.parametrize(
    ("cell", "step_ms", "sent", "missed"),
    [
        ("transformers", {"floor": 400, "ddp": 1600, "gradwire": 480}, {}, []),
        ("lightning", {"floor": 400, "ddp": 1600, "gradwire": 520}, {}, ["lightning: 0.77 of what is possible"]),
        ("hook", {"floor": 400, "ddp": 1600, "hook": 550, "parallelize": 500}, {}, []),
        ("hook", {"floor": 400, "ddp": 1600, "hook": 600, "parallelize": 500}, {}, ["hook: the hook over parallelize"]),
        ("auto-gpt2-200mbit", {"floor": 4, "ddp": 9, "auto hook": 10, "auto": 9}, {}, ["over DDP is 0.900", "is 0.900"]),
        ("auto-gpt2-unlimited", {"floor": 4, "ddp": 9, "auto hook": 9, "auto": 8}, {}, []),
        ("hsdp", {"floor": 4, "native": 20, "gradwire": 8}, {"native": 100, "gradwire": 13}, []),
        ("hsdp", {"floor": 4, "native": 20, "gradwire": 11}, {"native": 100, "gradwire": 15}, ["bytes", "steps"]),
    ],
)
def test_goals(cell, step_ms, sent, missed):
    steps = {name: [ms * 1e3] * 6 for name, ms in step_ms.items()}
    found = {"cell": cell, "link": cell.rsplit("-", 1)[-1], "step_us": steps, "sent": dict.fromkeys(steps, 0) | sent}
    told = missed_by(found)
    assert len(told) == len(missed)
    assert all(words in each for words, each in zip(missed, told, strict=True))
    rows = {row[1]: row for row in rows_of(found)}
    assert rows["floor"][4].startswith("1.00") and f"{next(iter(step_ms.values()))} (" in rows["floor"][2]
