"""The simulator, which turns plans into step times. Planners call it thousands of times.

Make one for a model and a cluster. It prices a plan's buckets, lays out all tasks, and runs the event loop until steps repeat.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from gradwire.core import (
    LINKS,
    Bucket,
    Cluster,
    Costs,
    Plan,
    Profile,
    Schedule,
    codes_on_cpu,
    lanes_of_pieces,
    launch_tasks,
    merge_levels,
)
from gradwire.costs import Price, PricedBucket, Prices
from gradwire.errors import PlanError
from gradwire.sim.events import (
    AWAITED,
    COMPUTE,
    INTER,
    INTRA,
    LAST,
    LATE,
    NOTHING,
    POOL,
    WHOLE_STEP,
    EventLoop,
    EventRun,
    SimTask,
    SimWork,
)
from gradwire.sim.rules import Rules, placed

LONGEST_US = 1e13
"""Limit of a task's length, in microseconds."""
FS_PER_US = 10**9
"""Femtoseconds of a microsecond. Times are whole femtoseconds inside the event loop."""
_FEWEST_CYCLES, _MOST_CYCLES = 5, 80
"""Number of simulated cycles of steps if steps overlap: doubled from the first to the second until steps repeat."""


class LightPlan(NamedTuple):
    """The part of a Plan that is simulated. Planners make one of each candidate."""

    buckets: Sequence[Bucket]
    launch: Sequence[tuple[int, str]]
    schedule: Schedule


class Label(NamedTuple):
    """The bucket, the chunk and the price of one task of a row."""

    bucket: int
    chunk: int
    place: int
    """Index of the task in the bucket's option."""
    price: Price


class Layout(NamedTuple):
    """One step of a plan, and the labels of its tasks."""

    work: SimWork
    labels: list[list[Label]]
    """The label of each task of each row."""
    priced: list[PricedBucket]
    """Prices of the buckets that the step exchanges."""


class SimulatedSteps(NamedTuple):
    """The result of simulating a plan."""

    layouts: list[Layout]
    """One for each kind of step, in the order of the steps, repeated."""
    run: EventRun
    steps: int
    """Number of simulated steps."""
    window: tuple[int, int]
    """Start and end of the last cycle of steps, in femtoseconds."""
    computes_from: int
    """Where the computation of these steps begins. Later than the window's start where exchanges fall behind."""
    cycle: int
    """Number of steps in a cycle."""
    steady: bool
    """Whether the last cycles took exactly the same time."""


class Simulator:
    """Simulates plans for one model on one cluster; `gradwire.sim.timeline` has an example."""

    def __init__(self, profile: Profile, cluster: Cluster, costs: Costs, rules: Rules | None = None) -> None:
        self.profile, self.rules = profile, rules or Rules()
        launch_us = (cluster.launch_us or 0.0) if self.rules.lanes else None
        self.prices = Prices(profile.tensors, cluster, costs, self.rules.routing, self.rules.decode_calls, launch_us=launch_us)
        self._one_link = INTRA if cluster.nodes == 1 else INTER
        self._codec_on, self.workers = placed(self.rules, profile, cluster)
        """`Rules.codec_on`, and the number of tasks that the CPU pool does at the same time."""
        shared = self.rules.lanes and self._codec_on == "own thread" and cluster.ranks_per_processor > 1
        self._script_part = (profile.processor_part or 0.0) if shared else 0.0
        """The part of the computation's time in which scripts keep a processor that ranks share, so that codecs wait."""
        self.reports = 0
        """Femtoseconds from the last task of an exchange until all reports are there (`Rules.reports`)."""
        if self.rules.reports and self.rules.lanes and cluster.is_far:
            link = cluster.inter if cluster.nodes > 1 else cluster.intra
            self.reports = fs_of(merge_levels(cluster.world_size) * link.alpha_us)
        self.resource = cache(self._resource)
        """The resource of a task, such as comp:gpu or allgather:inter."""
        tensors = profile.tensors
        self._numels = {tensor.name: tensor.numel for tensor in tensors}
        self._nbytes = {tensor.name: tensor.nbytes for tensor in tensors}
        self._position = {tensor.name: index for index, tensor in enumerate(tensors)}
        # forward uses the tensors in the reverse order of backward
        forward = [fs_of(tensor.forward_us or 0.0) for tensor in reversed(tensors)]
        self.optimizer = fs_of(profile.optimizer_us or 0.0)
        """Femtoseconds of the optimizer. A simulated step begins with the optimizer, which waits for the exchange."""
        forward[0] += self.optimizer
        self._lengths = [*forward, *(fs_of(tensor.backward_us) for tensor in tensors)]

    def step_us(self, plan: Plan | LightPlan) -> float:
        """Microseconds of one step in the long run; for schedules with a period, the mean over one period.

        Only `simulate` checks that the plan is for this model. Raises PlanError for an option or a codec without a price.
        """
        outcome = self.outcome(plan, record=False)
        return (outcome.window[1] - outcome.window[0]) / outcome.cycle / FS_PER_US

    def outcome(self, plan: Plan | LightPlan, record: bool) -> SimulatedSteps:
        """Simulate until steps repeat; `record` keeps every task of every resource."""
        layouts = self._layouts(plan)
        works, cycle, rules = [layout.work for layout in layouts], len(layouts), self.rules
        overlaps = plan.schedule.gathers_in_forward or plan.schedule.hides_exchange
        lag = 1 + plan.schedule.overlapped_steps
        cycles = _FEWEST_CYCLES if overlaps else 1
        lanes, workers = rules.lanes > 0, self.workers
        reports = 0 if plan.schedule.gathers_in_forward else self.reports
        least = _least(works, workers) if overlaps else 0
        while True:
            steps = cycle * cycles
            loop = EventLoop(works, steps, lag=lag, lanes=lanes, workers=workers, record=record, reports=reports)
            done = loop.run()
            if not overlaps:
                return SimulatedSteps(layouts, done, steps, (0, max(done.computed[-1], done.exchanged[-1])), 0, cycle, True)
            ends, exchanged = done.computed[cycle - 1 :: cycle], done.exchanged[cycle - 1 :: cycle]
            # exchanges must repeat too: they may fall behind for many steps before the computation has to wait. The last
            # exchange differs from the others, as no further step runs during it
            rhythms = {after - before for times in (ends[-4:], exchanged[-5:-1]) for before, after in pairwise(times)}
            # nor is a rhythm steady in which a link or a core would have more to do than time: it still has gaps, which shrink
            steady = len(rhythms) == 1 and min(rhythms) >= least
            if steady or cycles >= _MOST_CYCLES:
                first = len(ends) - 2 if steady else len(ends) // 2 - 1
                spanned = cycle * (len(ends) - 1 - first)
                # an exchange that falls behind by little at a time lets the computation wait much later than here
                window = (min(ends[first], ends[-1] - least * (spanned // cycle)), ends[-1])
                return SimulatedSteps(layouts, done, steps, window, ends[first], spanned, steady)
            cycles *= 2

    def _layouts(self, plan: Plan | LightPlan) -> list[Layout]:
        schedule = plan.schedule
        tensors = self.profile.tensors if schedule.gathers_in_forward else ()
        if missing := [tensor.name for tensor in tensors if tensor.forward_us is None]:
            raise PlanError(
                f"{len(missing)} of {len(tensors)} tensors of the profile have no forward_us, {missing[0]!r} first. "
                "The pipelined schedule gathers in the next forward, so the simulation needs forward times. Profile the model's "
                "forward, or use the backward schedule."
            )
        priced = [self.prices.of(bucket) for bucket in plan.buckets]
        if not schedule.corrects:
            numels = [sum(self._numels[name] for name in bucket.tensors) for bucket in plan.buckets]
            sent = [tuple(schedule.sent_after(step, numels)) for step in range(schedule.period)]
            layouts = {chosen: self._layout(plan, priced, chosen) for chosen in set(sent)}
            return [layouts[chosen] for chosen in sent]
        if schedule.correction is None:
            corrected = [self.prices.uncompressed(bucket) for bucket in plan.buckets]
        else:
            changed = [msgspec.structs.replace(bucket, spec=bucket.specs_with(schedule.correction)) for bucket in plan.buckets]
            corrected = [self.prices.of(bucket) for bucket in changed]
        nbytes = [sum(self._nbytes[name] for name in bucket.compressed) for bucket in plan.buckets]
        chosen_in = schedule.corrected(nbytes)
        of_chosen = {
            chosen: self._layout(plan, [(corrected if i in chosen else priced)[i] for i in range(len(priced))])
            for chosen in set(chosen_in)
        }
        return [of_chosen[chosen] for chosen in chosen_in]

    def _layout(self, plan: Plan | LightPlan, priced: list[PricedBucket], chosen: Collection[int] | None = None) -> Layout:
        """The layout of one step that exchanges these buckets; None: all."""
        sent = range(len(priced)) if chosen is None else chosen
        count = len(self._position)
        waits = [NOTHING] * (2 * count)
        releases: list[list[int]] = [[] for _ in range(2 * count)]
        for index in sent:
            bucket = plan.buckets[index]
            positions = [self._position[name] for name in bucket.tensors]
            at_end = plan.schedule.sends_at_end
            releases[2 * count - 1 if at_end else count + max(positions)].append(index)
            if plan.schedule.gathers_in_forward:
                for position in positions:
                    waits[count - 1 - position] = index
        if not plan.schedule.gathers_in_forward:
            waits[0] = WHOLE_STEP
        rows, labels = self._rows([entry for entry in plan.launch if entry[0] in sent], priced)
        if self._script_part:
            rows.append(self._script(releases))
        pieces = [bucket.pieces if index in sent else 0 for index, bucket in enumerate(priced)]
        work = SimWork(self._lengths, waits, releases, rows, pieces)
        return Layout(work, labels, [priced[index] for index in sent])

    def _rows(
        self, launch: Sequence[tuple[int, str]], priced: list[PricedBucket]
    ) -> tuple[list[list[SimTask]], list[list[Label]]]:
        segments = [_segments(bucket.tasks) for bucket in priced]
        lanes = self.rules.lanes
        order = launch_tasks(
            _launched(launch, [len(phases) for phases in segments]), [bucket.pieces for bucket in priced], skew=not lanes
        )
        places = {entry: place for place, entry in enumerate(order)}
        if lanes:
            apart = [at for at, bucket in enumerate(priced) if codes_on_cpu([price.task for price in bucket.tasks])]
            row_of = lanes_of_pieces(order, lanes, apart, self.rules.offload_lanes)
            count = lanes + self.rules.offload_lanes
        else:
            row_of = {piece: row for row, piece in enumerate(dict.fromkeys(entry[:2] for entry in order))}
            count = len(row_of)
        rows: list[list[SimTask]] = [[] for _ in range(count)]
        labels: list[list[Label]] = [[] for _ in range(count)]
        for place, (bucket, chunk, phase) in enumerate(order):
            row = row_of[bucket, chunk]
            following = places.get((bucket, chunk, phase + 1))
            tasks = priced[bucket].tasks
            for index in segments[bucket][phase]:
                task = self.task(tasks, index, place, following)
                gate, ends = bucket if index == 0 else -1, bucket if index == len(tasks) - 1 else -1
                rows[row].append(task._replace(gate=gate, ends=ends))
                labels[row].append(Label(bucket, chunk, index, tasks[index]))
        return rows, labels

    def _script(self, releases: Sequence[Sequence[int]]) -> list[SimTask]:
        """The scripts' work on a processor that ranks share: when a bucket is ready, that since the bucket before."""
        row, computed = [], 0
        for length, released in zip(self._lengths, releases, strict=True):
            computed += length
            if released:
                row.append(SimTask(POOL, round(self._script_part * computed), 0, gate=released[0]))
                computed = 0
        return row

    def task(self, tasks: Sequence[Price], index: int, place: int, following: int | None) -> SimTask:
        """One task of a piece; place, following: launch positions of its link task and of the piece's next link task."""
        word, us, decode = tasks[index].task, tasks[index].us, self.rules.decode
        order, urgency = place, AWAITED
        if word.startswith("decomp"):
            if following is not None:
                order = following
            else:
                urgency = LATE if decode == "after backward" else LAST
            if decode in ("none", "with encode"):
                us = 0.0
        if tasks[index].cpu_us or (tasks[index].free_us and self.rules.lanes):
            free, cpu = fs_of(tasks[index].free_us), fs_of(tasks[index].cpu_us)
            return SimTask(self.resource(word), fs_of(us), order, urgency, free=free, cpu=cpu, cpu_on=self.resource("launch:cpu"))
        encodes = [at for at, p in enumerate(tasks) if p.task.startswith("comp")] if decode == "with encode" else []
        if encodes and index == encodes[0]:
            us += sum(price.us for price in tasks if price.task.startswith("decomp"))
        return SimTask(self.resource(word), fs_of(us), order, urgency)

    def _resource(self, task: str) -> int:
        where = task.partition(":")[2]
        if where in LINKS:
            return INTRA if where == "intra" else self._one_link
        return COMPUTE if where == self.rules.device and self._codec_on == "compute" else POOL


def _least(works: Sequence[SimWork], workers: int) -> int:
    """Lower bound of a cycle of these steps: the time of the busiest resource. The CPU pool does `workers` tasks at once."""
    busy = [sum(sum(work.lengths) for work in works), 0, 0, 0]
    for work in works:
        for row in work.rows:
            for task in row:
                busy[task.resource] += task.length - task.free
                busy[task.cpu_on] += task.cpu
    busy[POOL] = -(-busy[POOL] // workers)
    return max(busy)


def fs_of(us: float) -> int:
    """Microseconds as femtoseconds. Raises PlanError for a task that is longer than any step."""
    if us > LONGEST_US:
        raise PlanError(
            f"one task of a step would take {us:.3g} us, more than 100 days: a time in the profile or the costs, or a rate in "
            "the cluster, is wrong by many powers of ten. Measure it again, or correct the file."
        )
    return round(us * FS_PER_US)


def _segments(tasks: Sequence[Price]) -> list[list[int]]:
    """Indices of a bucket's tasks, cut after each link task and the decode that follows. A lane does one segment at a time."""
    segments: list[list[int]] = [[]]
    sent = False
    for index, price in enumerate(tasks):
        what, _, where = price.task.partition(":")
        if sent and what not in ("decomp", "put"):
            segments.append([])
            sent = False
        segments[-1].append(index)
        sent = sent or where in LINKS
    return segments


def _launched(launch: Sequence[tuple[int, str]], phases: Sequence[int]) -> Sequence[tuple[int, str]]:
    """The launch order; corrections with fewer phases run bucket by bucket."""
    buckets = Counter(bucket for bucket, _ in launch)
    if all(phases[bucket] == count for bucket, count in buckets.items()):
        return launch
    return [(bucket, "") for bucket in buckets for _ in range(phases[bucket])]
