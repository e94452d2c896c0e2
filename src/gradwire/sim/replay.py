"""Steps of many plans that differ in few buckets: each is simulated only from where it differs, and only while it can win.

The timeline is that of `gradwire.sim.events` for the `backward` schedule without lanes, to the femtosecond; but for tasks that
take no time at all, around which compute may choose otherwise. It is faster because exchanges are not events: a link serves in
launch order, so the end of an exchange is known as soon as its begin is. Only compute and the CPU pool choose, and only they
are stepped.

Launch order: step p of bucket i goes behind step 0 of bucket i + skew * p. With skew 0 buckets go one after the other; with
skew 1 a bucket's second exchange goes behind the first one of the next, so that codecs and the other link work meanwhile.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from gradwire.sim.events import COMPUTE, INTER, INTRA, LATE, POOL
from gradwire.sim.native import TooLongError, native_line

__all__ = ["NEVER", "ReplayProgram", "Replayed", "Replayer", "launch_key"]

NEVER = 1 << 80
"""Femtoseconds that no step takes."""
_PHASE_BITS = 2
"""An option has at most four link tasks."""
_MOST_PHASES = 2**_PHASE_BITS - 1
"""The index of the last of them, and the bits of a key in which it stands."""
_KEY_BITS = 40
_KEY_MASK = 2**_KEY_BITS - 1


class ReplayProgram(NamedTuple):
    """The tasks of one bucket, on resources of `gradwire.sim.events`, in femtoseconds."""

    tasks: tuple[tuple[int, int, int, int], ...]
    """(resource, length, urgency, index of the link task whose turn counts for it)."""
    links: tuple[int, ...]
    """The link of each link task."""
    busy: tuple[int, int, int, int]
    """Femtoseconds on each resource."""
    codecs: int
    """Comp and Decomp tasks."""


class _State(NamedTuple):
    """All there is at the moment when a bucket gets ready, before it does anything."""

    now: int
    part: int
    finish: int
    ready: list[int]
    coming: list[tuple[int, int]]
    pool: list[tuple[int, int]]
    workers: list[int]
    free: list[int]
    begun: list[int]
    spent: list[int]
    waiting: dict[int, int]
    at: dict[int, int]


class Replayed(NamedTuple):
    """A step that was simulated to its end."""

    step: int
    """Femtoseconds."""
    states: list[_State]
    """One for each bucket; none if it was simulated in C++."""
    begins: list[int]
    """When each bucket's first exchange began."""
    ends: list[int]
    """When each bucket's last exchange ended."""

    def last_bubble(self) -> int:
        """When the last bubble began, -1 if there is none: no bucket's exchange was open then, and one begins later."""
        bubble, until = -1, NEVER
        for begin, end in sorted(zip(self.begins, self.ends, strict=True)):
            if begin > until:
                bubble = until
            until = end if until == NEVER else max(end, until)
        return bubble


def launch_key(bucket: int, phase: int, skew: int) -> int:
    """Where a link task stands in the launch order: tasks are launched by ascending keys, and no two are equal."""
    return (bucket + skew * phase) << _PHASE_BITS | phase


class Replayer:
    """Simulates one model's steps.

    forward, gaps: femtoseconds of the forward, and between gradients in gradient-ready order. workers: of the CPU pool.
    native: whether the C++ twin is used where it was built; its results are the same.
    """

    def __init__(self, forward: int, gaps: Sequence[int], workers: int = 1, native: bool = True) -> None:
        self.workers = workers
        self.after = list(accumulate(gaps, initial=forward))
        """When each gradient would be ready if there were nothing but computation."""
        self.native = native_line(self.after, workers) if native else None

    def step(
        self, programs: Sequence[ReplayProgram], releases: Sequence[int], skew: int, limit: int = NEVER
    ) -> int | None:
        """Femtoseconds of one step, or None if it takes longer than `limit`; arguments as of `run`."""
        if self.native is not None:
            try:
                return self.native.step(programs, releases, skew, limit)
            except TooLongError:
                pass  # Python's whole numbers have no end
        replayed = self.run(programs, releases, skew, limit)
        return None if replayed is None else replayed.step

    def run(
        self,
        programs: Sequence[ReplayProgram],
        releases: Sequence[int],
        skew: int,
        limit: int = NEVER,
        before: Replayed | None = None,
        changed: int = 0,
    ) -> Replayed | None:
        """One step, or None if it is certain to take longer than `limit`.

        releases: how many gradients must be there before each bucket is ready, ascending, from 1 on. before: the same step but
        for the programs of bucket `changed` and later ones; what happened before these could matter is taken from there.
        """
        first = max(0, changed - _MOST_PHASES * skew) if before is not None else 0
        return _ReplayStep(self, programs, releases, skew, limit).run(before, first)


class _ReplayStep:
    now: int
    part: int
    finish: int
    over: int
    """What the step takes at least."""
    begins: list[int]
    ends: list[int]

    def __init__(
        self, line: Replayer, programs: Sequence[ReplayProgram], releases: Sequence[int], skew: int, limit: int
    ) -> None:
        self.after, self.workers = line.after, line.workers
        self.programs, self.releases, self.skew, self.limit = programs, releases, skew, limit
        self.last_key = launch_key(len(programs) - 1, _MOST_PHASES, max(1, skew))
        # no step is over before a resource has done all that is left for it
        self.total = [sum(resource) for resource in zip(*(program.busy for program in programs), strict=True)]
        self.total[COMPUTE] += self.after[-1] - self.after[0]

    def run(self, before: Replayed | None, first: int) -> Replayed | None:
        if before is None:
            self._begin()
        else:
            self._restore(before, first)
        releases, after, ready, coming, pool = self.releases, self.after, self.ready, self.coming, self.pool
        self.over = 0
        self.left = [all_of_it - spent for all_of_it, spent in zip(self.total, self.spent, strict=True)]
        self.due = [self._due(link, begun) for link, begun in enumerate(self.begun)]
        states = [] if before is None else before.states[:first]
        count, last, following = len(self.programs), len(after) - 1, first
        while self.over <= self.limit:
            while following < count and releases[following] == self.part:
                states.append(self._state())
                self.at[following] = -1
                self._next(following, self.now)
                following += 1
            now, part = self.now, self.part
            while pool and pool[0][0] <= now:
                self._take_in_pool()
            while coming and coming[0][0] <= now:
                heappush(ready, heappop(coming)[1])
            if ready and (ready[0] >> _KEY_BITS < LATE or part == last):
                self._take()
            elif part < last:
                # as many parts as nothing can come between
                until = releases[following] if following < count else last
                if coming or pool:
                    due = min(queue[0][0] for queue in (coming, pool) if queue)
                    until = min(until, max(part + 1, bisect_left(after, due - now + after[part])))
                self._spend(COMPUTE, after[until] - after[part])
                self.part = until
            elif coming or pool:
                self.now = min(queue[0][0] for queue in (coming, pool) if queue)
            else:
                break
        step = max(self.finish, self.now)
        return Replayed(step, states, self.begins, self.ends) if max(step, self.over) <= self.limit else None

    def _begin(self) -> None:
        self.now, self.part, self.finish = self.after[0], 0, 0
        self.ready: list[int] = []
        """Urgency and key of tasks that compute can do."""
        self.coming: list[tuple[int, int]] = []
        """The same with when they will be there."""
        self.pool: list[tuple[int, int]] = []
        """When tasks of the pool are there, and their keys."""
        self.free_workers = [0] * self.workers
        self.free, self.begun, self.spent = [0] * 4, [-1] * 4, [0] * 4
        """By link: when it is free, and the key of the last exchange begun. By resource: what it has done."""
        self.waiting: dict[int, int] = {}
        """When exchanges that wait for their turn were ready, by key."""
        self.at: dict[int, int] = {}
        """The task of each bucket under way."""
        self.begins, self.ends = [0] * len(self.programs), [0] * len(self.programs)

    def _restore(self, before: Replayed, first: int) -> None:
        """All as it was when bucket `first` got ready."""
        state = before.states[first]
        self.now, self.part, self.finish = state.now, state.part, state.finish
        self.ready, self.coming, self.pool = state.ready[:], state.coming[:], state.pool[:]
        self.free_workers = state.workers[:]
        self.free, self.begun, self.spent = state.free[:], state.begun[:], state.spent[:]
        self.waiting, self.at = state.waiting.copy(), state.at.copy()
        self.begins, self.ends = before.begins[:], before.ends[:]

    def _state(self) -> _State:
        return _State(
            self.now,
            self.part,
            self.finish,
            self.ready[:],
            self.coming[:],
            self.pool[:],
            self.free_workers[:],
            self.free[:],
            self.begun[:],
            [all_of_it - left for all_of_it, left in zip(self.total, self.left, strict=True)],
            self.waiting.copy(),
            self.at.copy(),
        )

    def _spend(self, resource: int, length: int) -> None:
        """Compute works on."""
        self.now += length
        self.left[resource] -= length
        self.over = max(self.over, self.now + self.left[resource])

    def _take(self) -> None:
        """Compute does what comes first of what is ready."""
        key = heappop(self.ready) & _KEY_MASK
        bucket = (key >> _PHASE_BITS) - self.skew * (key & _MOST_PHASES)
        self._spend(COMPUTE, self.programs[bucket].tasks[self.at[bucket]][1])
        self._next(bucket, self.now)

    def _take_in_pool(self) -> None:
        """A worker of the pool does what was ready first."""
        ready, key = heappop(self.pool)
        bucket = (key >> _PHASE_BITS) - self.skew * (key & _MOST_PHASES)
        length = self.programs[bucket].tasks[self.at[bucket]][1]
        end = max(ready, heappop(self.free_workers)) + length
        heappush(self.free_workers, end)
        self._next(bucket, end)

    def _next(self, bucket: int, now: int) -> None:
        """The bucket goes on with its next task: `now` its last one ended."""
        program, at = self.programs[bucket], self.at[bucket] + 1
        if at == len(program.tasks):
            self.finish = max(self.finish, now)
            self.over = max(self.over, now)
            del self.at[bucket]
            return
        self.at[bucket] = at
        resource, _, urgency, phase = program.tasks[at]
        key = (bucket + self.skew * phase) << _PHASE_BITS | phase
        if resource == COMPUTE:
            heappush(self.coming, (now, urgency << _KEY_BITS | key))
        elif resource == POOL:
            heappush(self.pool, (now, key))
        else:
            self.waiting[key] = now
            if key == self.due[resource]:
                self._serve(resource)

    def _serve(self, link: int) -> None:
        """The link does all that is its turn and there."""
        while (key := self.due[link]) in self.waiting:
            phase = key & _MOST_PHASES
            bucket = (key >> _PHASE_BITS) - self.skew * phase
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
            self.begun[link] = key
            self.due[link] = self._due(link, key)
            self._next(bucket, end)

    def _due(self, link: int, key: int) -> int:
        """The key of the link's task after this one; one that no task has if there is none."""
        if link not in (INTRA, INTER):
            return -1
        programs, skew, count = self.programs, self.skew, len(self.programs)
        while key < self.last_key:
            key += 1
            phase = key & _MOST_PHASES
            bucket = (key >> _PHASE_BITS) - skew * phase
            if 0 <= bucket < count:
                links = programs[bucket].links
                if phase < len(links) and links[phase] == link:
                    return key
        return -1
