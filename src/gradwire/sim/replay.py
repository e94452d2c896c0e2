"""Step times of many plans, each simulated only while it can be the shortest.

The timeline is that of `gradwire.sim.events` for the `backward` schedule without lanes, to the femtosecond. The two may differ
only around tasks of zero length. This simulation is faster because exchanges are not events: a link serves in launch order, so
the end of an exchange is known as soon as its begin is. Only compute and the CPU pool choose between tasks.

Launch order: exchange p of bucket i goes behind the first exchange of bucket i + skew * p. With skew 0 buckets go one after the
other. With skew 1 a bucket's second exchange goes behind the next bucket's first one: codecs and the other link work meanwhile.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from gradwire.sim.events import COMPUTE, INTER, INTRA, LATE, POOL
from gradwire.sim.native import ReplayProgram, TooLongError, native_line

NEVER = 1 << 80
"""Femtoseconds that no step takes."""
_PHASE_BITS = 2
MOST_LINK_TASKS = 2**_PHASE_BITS
"""The most link tasks of an option, so that launch keys differ."""
_MOST_PHASES = MOST_LINK_TASKS - 1
"""The index of the fourth link task, and the bits of a launch key that hold the index."""


class Replayed(NamedTuple):
    """A step that was simulated to its end."""

    step: int
    """Femtoseconds."""
    begins: list[int]
    """Time at which each bucket's first exchange began."""
    ends: list[int]
    """Time at which each bucket's last exchange ended."""

    def last_bubble(self) -> int:
        """Time at which the last bubble began; -1 without a bubble. In a bubble no exchange is open, and one begins later."""
        bubble, until = -1, NEVER
        for begin, end in sorted(zip(self.begins, self.ends, strict=True)):
            if begin > until:
                bubble = until
            until = end if until == NEVER else max(end, until)
        return bubble


def launch_key(bucket: int, phase: int, skew: int) -> int:
    """The place of a link task in the launch order: tasks are launched by ascending keys, and no two keys are equal."""
    return (bucket + skew * phase) << _PHASE_BITS | phase


class Replayer:
    """Simulates one model's steps.

    forward, gaps: femtoseconds of the forward, and between gradients in gradient-ready order. workers: number of workers of the
    CPU pool. native: whether to use the C++ library if it was built; the results are the same.
    """

    def __init__(self, forward: int, gaps: Sequence[int], workers: int = 1, native: bool = True) -> None:
        self.workers = workers
        self.after = list(accumulate(gaps, initial=forward))
        """Time at which each gradient would be ready if computation ran without interruption."""
        self.native = native_line(self.after, workers) if native else None

    def step(self, programs: Sequence[ReplayProgram], releases: Sequence[int], skew: int, limit: int = NEVER) -> int | None:
        """Femtoseconds of one step, or None if it takes longer than `limit`; arguments as of `run`."""
        if self.native is not None:
            try:
                return self.native.step(programs, releases, skew, limit)
            except TooLongError:
                pass  # Python's integers are unbounded
        replayed = self.run(programs, releases, skew, limit)
        return None if replayed is None else replayed.step

    def run(self, programs: Sequence[ReplayProgram], releases: Sequence[int], skew: int, limit: int = NEVER) -> Replayed | None:
        """Simulate one step. Returns None if the step takes longer than `limit`.

        releases: for each bucket the number of ready gradients that makes the bucket ready, ascending, from 1 on.
        """
        return _ReplayStep(self, programs, releases, skew, limit).run()


class _ReplayStep:
    def __init__(self, line: Replayer, programs: Sequence[ReplayProgram], releases: Sequence[int], skew: int, limit: int) -> None:
        self.after, self.programs, self.releases, self.skew, self.limit = line.after, programs, releases, skew, limit
        self.last_key = launch_key(len(programs) - 1, _MOST_PHASES, max(1, skew))
        self.left = [sum(resource) for resource in zip(*(program.busy for program in programs), strict=True)]
        """Work that each resource has still to do. The step does not end before."""
        self.left[COMPUTE] += self.after[-1] - self.after[0]
        self.now, self.part, self.finish = self.after[0], 0, 0
        self.over = 0
        """Lower bound of the step."""
        self.ready: list[tuple[int, int]] = []
        """Urgency and key of tasks that compute can do."""
        self.coming: list[tuple[int, int, int]] = []
        """Time, urgency and key of tasks that compute can do from that time on."""
        self.pool: list[tuple[int, int]] = []
        """Time and key of tasks that the pool can do from that time on."""
        self.free_workers = [0] * line.workers
        self.free = {INTRA: 0, INTER: 0}
        """Time at which each link is free."""
        self.due = {link: self._due(link, -1) for link in self.free}
        """The key of each link's next task."""
        self.waiting: dict[int, int] = {}
        """Time at which each exchange that waits for its turn was ready, by key."""
        self.at: dict[int, int] = {}
        """The task of each bucket under way."""
        self.begins, self.ends = [0] * len(programs), [0] * len(programs)

    def run(self) -> Replayed | None:
        releases, after, ready, coming, pool = self.releases, self.after, self.ready, self.coming, self.pool
        count, last, following = len(self.programs), len(after) - 1, 0
        while self.over <= self.limit:
            while following < count and releases[following] == self.part:
                self.at[following] = -1
                self._next(following, self.now)
                following += 1
            now, part = self.now, self.part
            while pool and pool[0][0] <= now:
                self._take_in_pool()
            while coming and coming[0][0] <= now:
                heappush(ready, heappop(coming)[1:])
            if ready and (ready[0][0] < LATE or part == last):
                bucket = self._bucket(heappop(ready)[1])
                self._compute(self.programs[bucket].tasks[self.at[bucket]][1])
                self._next(bucket, self.now)
            elif part < last:
                # as many parts as run without interruption
                until = releases[following] if following < count else last
                if coming or pool:
                    due = min(queue[0][0] for queue in (coming, pool) if queue)
                    until = min(until, max(part + 1, bisect_left(after, due - now + after[part])))
                self._compute(after[until] - after[part])
                self.part = until
            elif coming or pool:
                self.now = min(queue[0][0] for queue in (coming, pool) if queue)
            else:
                break
        step = max(self.finish, self.now)
        return Replayed(step, self.begins, self.ends) if max(step, self.over) <= self.limit else None

    def _bucket(self, key: int) -> int:
        bucket: int = (key >> _PHASE_BITS) - self.skew * (key & _MOST_PHASES)
        return bucket

    def _compute(self, length: int) -> None:
        self.now += length
        self.left[COMPUTE] -= length
        self.over = max(self.over, self.now + self.left[COMPUTE])

    def _take_in_pool(self) -> None:
        """A worker of the pool does the task that was ready first."""
        ready, key = heappop(self.pool)
        bucket = self._bucket(key)
        end = max(ready, heappop(self.free_workers)) + self.programs[bucket].tasks[self.at[bucket]][1]
        heappush(self.free_workers, end)
        self._next(bucket, end)

    def _next(self, bucket: int, now: int) -> None:
        """Queue the bucket's next task; its last one ended at `now`."""
        program, at = self.programs[bucket], self.at[bucket] + 1
        if at == len(program.tasks):
            self.finish = max(self.finish, now)
            self.over = max(self.over, now)
            del self.at[bucket]
            return
        self.at[bucket] = at
        resource, _, urgency, phase = program.tasks[at]
        key = launch_key(bucket, phase, self.skew)
        if resource == COMPUTE:
            heappush(self.coming, (now, urgency, key))
        elif resource == POOL:
            heappush(self.pool, (now, key))
        else:
            self.waiting[key] = now
            if key == self.due[resource]:
                self._serve(resource)

    def _serve(self, link: int) -> None:
        """The link does its due tasks, as far as they are ready."""
        while (key := self.due[link]) in self.waiting:
            bucket, phase = self._bucket(key), key & _MOST_PHASES
            program = self.programs[bucket]
            begin = max(self.waiting.pop(key), self.free[link])
            length = program.tasks[self.at[bucket]][1]
            end = self.free[link] = begin + length
            self.left[link] -= length
            self.over = max(self.over, end + self.left[link])
            if phase == 0:
                self.begins[bucket] = begin
            if phase == len(program.links) - 1:
                self.ends[bucket] = end
            self.due[link] = self._due(link, key)
            self._next(bucket, end)

    def _due(self, link: int, key: int) -> int:
        """The key of the link's next task after this one; -1 if there is none."""
        while key < self.last_key:
            key += 1
            bucket, phase = self._bucket(key), key & _MOST_PHASES
            if 0 <= bucket < len(self.programs):
                links = self.programs[bucket].links
                if phase < len(links) and links[phase] == link:
                    return key
        return -1
