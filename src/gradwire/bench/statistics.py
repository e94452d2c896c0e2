"""Computes the numbers of a cell from the records of the ranks. Pure: no torch, no clock."""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gradwire.bench.names import UNLIMITED
from gradwire.bench.results import Alone, Cell, MethodRecord, StepTimes, WorkerRecord
from gradwire.record import Interval

FRAME_BYTES = 1514
FRAME_PAYLOAD_BYTES = 1448
"""Payload of an Ethernet frame of TCP over IPv4 with timestamps. FRAME_BYTES is the whole frame."""
RESAMPLES = 2000


def step_times(times_us: Sequence[float]) -> StepTimes:
    """Return median, minimum and spread. Needs at least one step."""
    times = np.asarray(times_us, dtype=np.float64)
    low, high = np.percentile(times, [10, 90])
    return StepTimes(
        median_us=float(np.median(times)),
        minimum_us=float(times.min()),
        p10_us=float(low),
        p90_us=float(high),
        mean_us=float(times.mean()),
        stdev_us=float(times.std(ddof=1)) if len(times) > 1 else 0.0,
        steps=len(times),
    )


def wire_us(planned_bytes: float, gbps: float | None) -> float:
    """Return the time that the bytes need on an idle link, in microseconds; 0 on an unlimited link.

    >>> round(wire_us(6_000_000, 0.5))
    100376
    """
    return 0.0 if gbps is None else planned_bytes * 8 / (gbps * 1e3) * FRAME_BYTES / FRAME_PAYLOAD_BYTES


def median_ratio(baseline_us: Sequence[float], times_us: Sequence[float]) -> Interval:
    """Return how many times faster than the baseline: the ratio of medians, with a 95 % percentile bootstrap interval."""
    generator = np.random.default_rng(0)

    def resampled_medians(values: Sequence[float]) -> NDArray[np.float64]:
        array = np.asarray(values, dtype=np.float64)
        return np.median(array[generator.integers(len(array), size=(RESAMPLES, len(array)))], axis=1)

    ratios = resampled_medians(baseline_us) / resampled_medians(times_us)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(ratio=float(np.median(baseline_us) / np.median(times_us)), low=float(low), high=float(high))


def alone_from(record: WorkerRecord) -> Alone:
    """Return T_1, from a record of the floor with one rank."""
    method = record.methods[0]
    alone = Alone(job=record.job, parameters=record.parameters, failure=method.failure)
    if method.failure is not None:
        return alone
    counted = record.warmup_steps, len(method.wall_us[0])
    backward_us = _mean_of_counted(method.backward_us, counted) if method.backward_us else None
    return replace(alone, step=step_times(_over_ranks(method)[slice(*counted)]), backward_us=backward_us)


def cells_from(record: WorkerRecord, link: str, gbps: float | None, ranks_per_node: int, alone: Alone | None) -> list[Cell]:
    good = {method.method: method for method in record.methods if method.failure is None}
    ranges = {name: method.counted or (record.warmup_steps, len(method.wall_us[0])) for name, method in good.items()}
    counted = {name: _over_ranks(method)[slice(*ranges[name])] for name, method in good.items()}
    compute_us = float(np.median(counted["floor"])) if "floor" in counted else None
    cells = []
    for method in record.methods:
        cells.append(Cell(job=record.job, link=link, gbps=gbps, method=method.method, failure=method.failure))
        if method.failure is not None:
            continue
        times = step_times(counted[method.method])
        planned = method.planned_bytes[0]
        # else the counter has what leaves the node, and the plan also what ranks of a node send each other
        comparable = ranks_per_node == 1 or record.ranks_per_interface > ranks_per_node
        sent = _mean_of_counted(method.sent_bytes, ranges[method.method]) / record.ranks_per_interface
        codec = None if None in method.codec_us else float(np.mean([us for us in method.codec_us if us is not None]))
        wire = wire_us(planned, gbps) if planned is not None and (ranks_per_node == 1 or link == UNLIMITED) else None
        ideal = max(compute_us, wire) if compute_us is not None and wire is not None else None
        reachable = compute_us is not None and wire is not None and codec is not None
        wrong = method.wrong_on_purpose
        scaling, scaling_stdev = _scaling(None if wrong else alone, times)
        gbps_alone = record.measured_gbps if ranks_per_node == 1 or link == UNLIMITED else None
        cells[-1] = replace(
            cells[-1],
            step=times,
            wrong_on_purpose=wrong,
            forward_us=_median_of_counted(method.forward_us, ranges[method.method]),
            backward_us=_median_of_counted(method.backward_us, ranges[method.method]),
            counted_bytes=sent,
            planned_bytes=planned,
            crossing_bytes=_sum(method.crossing_bytes),
            phases=method.phases,
            counted_over_planned=sent / planned if planned and comparable else None,
            cpu_us=_median_of_counted(method.cpu_us, ranges[method.method]),
            codec_us=codec,
            exposed_us=times.median_us - compute_us if compute_us is not None else None,
            ideal_us=ideal,
            attainable_us=max((compute_us or 0) + (codec or 0), wire or 0) if reachable else None,
            scaling_factor=scaling,
            scaling_factor_stdev=scaling_stdev,
            speedup_alone=None if scaling is None else record.world_size * scaling,
            max_speedup=None if wrong else _max_speedup(alone, record.world_size, planned, gbps_alone),
            measured_gbps=gbps_alone,
            speedup=None if wrong else _against_ddp(counted, method.method),
            step_us=_over_ranks(method),
            loss=[] if wrong else [float(loss) for loss in np.mean(method.loss, axis=0)],
            counted=ranges[method.method],
            decided=method.decided,
            held_out=method.held_out,
        )
    return cells


def _sum(of_ranks: Sequence[int | None]) -> int | None:
    """Return the sum over ranks; None where one is unknown."""
    known = [each for each in of_ranks if each is not None]
    return sum(known) if known and len(known) == len(of_ranks) else None


def _max_speedup(alone: Alone | None, world_size: int, planned_bytes: int | None, gbps: float | None) -> float | None:
    """Return S^max, DeAR's eq. 6, for `planned_bytes` per rank and step over such a link; None if a term is unknown.

    Compute is that of one rank alone. Forward includes the optimizer, which can step one bucket while the next is gathered. Each
    phase sends half of the bytes: uncompressed (n-1)/n of the gradients. The paper's m/B is the limit of many ranks.
    """
    if alone is None or alone.step is None or alone.backward_us is None or planned_bytes is None or gbps is None:
        return None
    phase_us = planned_bytes / 2 * 8 / (gbps * 1e3)
    forward_us = alone.step.mean_us - alone.backward_us
    return world_size * alone.step.mean_us / (max(forward_us, phase_us) + max(alone.backward_us, phase_us))


def _against_ddp(counted: Mapping[str, Sequence[float]], method: str) -> Interval | None:
    if method == "ddp":
        return Interval(ratio=1.0, low=1.0, high=1.0)
    return median_ratio(counted["ddp"], counted[method]) if "ddp" in counted else None


def _over_ranks(method: MethodRecord) -> list[float]:
    """Return the time of each step, the mean over ranks. A rank that is early in one step is late in the next, so the
    longest times add up to more than the elapsed time. The means do not."""
    return [float(us) for us in np.mean(method.wall_us, axis=0)]


def _median_of_counted(by_rank: list[list[float]], counted: tuple[int, int]) -> float | None:
    """Return the median over steps of the mean over ranks; None if it was not measured."""
    return float(np.mean([np.median(row[slice(*counted)]) for row in by_rank])) if by_rank else None


def _mean_of_counted(by_rank: Sequence[Sequence[float]], counted: tuple[int, int]) -> float:
    """Return the mean over steps and ranks. A median is wrong for bytes: a late read counts them in the next step."""
    return float(np.mean([row[slice(*counted)] for row in by_rank]))


def _scaling(alone: Alone | None, times: StepTimes) -> tuple[float | None, float | None]:
    """Return T_n / (n T_1) and its deviation, from the relative deviations of both step times."""
    if alone is None or alone.step is None:
        return None, None
    factor = alone.step.mean_us / times.mean_us
    return factor, factor * float(np.hypot(alone.step.stdev_us / alone.step.mean_us, times.stdev_us / times.mean_us))
