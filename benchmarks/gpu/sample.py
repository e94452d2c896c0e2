"""Stacks of the host's threads, a thousand times a second, while steps of BERT-large's size are queued with one rank."""

import sys
import threading
import time
from collections import Counter
from types import FrameType

from benchmarks.gpu.findings import MEASURED, Job
from benchmarks.gpu.training import LARGE_PLANS, free_port, init_group, large_backward, large_model, parallelized, synchronize

KEPT = 30
"""So many of the most frequent places are kept."""


class Sampler(threading.Thread):
    """Counts the places at which the other threads are."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.inside: Counter[str] = Counter()
        """Functions that a thread was in, or that called the one that it was in."""
        self.at: Counter[str] = Counter()
        """Lines that a thread was at."""
        self.samples = 0
        self._names: dict[int, str] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.001):
            self.samples += 1
            self._names |= {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
            for ident, frame in sys._current_frames().items():
                if ident != self.ident:
                    # threads of autograd have no Python thread
                    self._count(self._names.get(ident, "autograd"), frame)

    def _count(self, thread: str, frame: FrameType | None) -> None:
        places = set()
        at = True
        while frame is not None:
            place = f"{thread} {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"
            if at:
                self.at[f"{place}:{frame.f_lineno}"] += 1
            at = False
            places.add(place)
            frame = frame.f_back
        self.inside.update(places)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def run(job: Job) -> None:
    steps = 3 if job.small else 10
    init_group(job.device, 0, 1, free_port())
    model, x = large_model(job.device)

    def step() -> None:
        large_backward(model, x)()
        synchronize(job.device)
        model.zero_grad()

    for name, plan in LARGE_PLANS.items():
        if plan is None:
            continue
        with job.failures(name), parallelized(model, plan):
            for _ in range(2 if job.small else 4):
                step()
            sampler = Sampler()
            sampler.start()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            took = time.perf_counter() - began
            sampler.stop()
            places = {"at": sampler.at.most_common(KEPT), "inside": sampler.inside.most_common(KEPT)}
            job.write(name, MEASURED, samples=sampler.samples, ms_a_step=round(1e3 * took / steps, 1), **places)
