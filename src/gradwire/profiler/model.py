"""From what ranks recorded of their steps to a model's profile: medians and their spread. Talks to nobody."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.plan import CODEC_TASKS, Plan
from gradwire.core.profile import TensorProfile
from gradwire.core.tensors import TensorInfo
from gradwire.costs.prices import Prices

__all__ = ["ModelTimes", "launch_time_us", "model_times", "slowest"]


class ModelTimes(NamedTuple):
    """What was found of a model in training."""

    tensors: list[TensorProfile]
    """In gradient-ready order."""
    optimizer_us: float
    loaded_backward_us: float
    exchange_cpu_us: float
    """CPU time of a quiet step's exchange, all threads, codecs included."""


def slowest(rows: torch.Tensor) -> torch.Tensor:
    """Of rows (ranks, steps, columns) the latest rank's moment in each step and column: an exchange waits for all of them.
    NaN where no rank has it."""
    latest = torch.nan_to_num(rows, nan=-torch.inf).amax(0)
    return torch.where(latest.isinf(), torch.nan, latest)


def model_times(
    infos: Sequence[TensorInfo],
    modules: Sequence[Sequence[int]],
    quiet: torch.Tensor,
    loaded: torch.Tensor,
    entered: Sequence[int] | None = None,
) -> ModelTimes:
    """Times by tensor, in gradient-ready order.

    infos: the trainable tensors. modules: of each module the numbers of its own ones. entered: the modules in the order in which
    forward enters them; theirs by default. quiet, loaded: rows as
    `Recorder.rows` has them, (steps, columns). Gaps are differences of median moments, so that they add up to the median
    backward; forward times are medians, scaled so that they add up to the median forward. A tensor that never got a
    gradient is the last, with no gap. A module's forward counts for that tensor of it whose turn in forward comes last; if all of
    them are an earlier module's, too (tied weights), for the tensor of the module before it. Where no module was seen, all of
    forward counts for the last tensor, whose turn comes first.
    """
    count = len(modules)
    forward, began, ready = quiet[:, :count], quiet[:, count], quiet[:, count + 1 : -2]
    middle = _quantile(ready, 0.5)
    order = torch.argsort(torch.nan_to_num(middle, nan=torch.inf), stable=True).tolist()
    moments = torch.cat([began[:, None], ready[:, order]], 1)
    gaps = torch.diff(torch.cat([_quantile(began[:, None], 0.5), middle[order]])).clamp(min=0)
    gap_spread = _spread(torch.diff(moments, dim=1))
    whole_us = _known(_quantile(began[:, None], 0.5)[0])
    times_us, spreads_us = _scaled(forward, whole_us), _spread(forward).tolist()
    forward_us, forward_spread = [0.0] * len(order), [0.0] * len(order)
    for module, place in _places(modules, order, range(count) if entered is None else entered):
        forward_us[place] += times_us[module]
        forward_spread[place] += spreads_us[module]
    if not any(forward_us):
        forward_us[-1] = whole_us
    tensors = [
        TensorProfile(
            name=infos[index].name,
            shape=infos[index].shape,
            dtype=infos[index].dtype,
            backward_us=_known(gaps[place]),
            forward_us=forward_us[place],
            backward_iqr_us=_known(gap_spread[place]),
            forward_iqr_us=forward_spread[place],
        )
        for place, index in enumerate(order)
    ]
    last = torch.nan_to_num(loaded[:, count + 1 : -2], nan=-torch.inf).amax(1)
    return ModelTimes(
        tensors,
        optimizer_us=_known(_quantile(torch.cat([quiet, loaded])[:, -2:-1], 0.5)[0]),
        loaded_backward_us=_known(_quantile((last - loaded[:, count])[:, None], 0.5)[0]),
        exchange_cpu_us=_known(_quantile(quiet[:, -1:], 0.5)[0]),
    )


def launch_time_us(
    plan: Plan, tensors: Sequence[TensorProfile], cluster: Cluster, costs: Costs, exchange_cpu_us: float
) -> float:
    """What each exchange of the plan takes of the processor: the CPU time of a step's exchange without its codecs, evenly."""
    prices = Prices(tensors, cluster, costs, "direct")
    priced = [prices.of(bucket) for bucket in plan.buckets]
    exchanges = sum(each.pieces * len(bucket.link_tasks) for each, bucket in zip(priced, plan.buckets, strict=True))
    codec_us = sum(
        each.pieces * sum(price.us for price in each.tasks if price.task.partition(":")[0] in CODEC_TASKS)
        for each in priced
    )
    return max(0.0, exchange_cpu_us - codec_us) / max(1, exchanges)


def _scaled(forward: torch.Tensor, whole_us: float) -> list[float]:
    """Medians of the modules' times, so that they add up to the median forward."""
    middles = torch.nan_to_num(_quantile(forward, 0.5))
    total = middles.sum()
    return (middles * (whole_us / total) if total > 0 else middles).tolist()


def _places(
    modules: Sequence[Sequence[int]], order: Sequence[int], entered: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Each module and the place of its tensor whose gradient is ready first, which forward uses last, among those that are no
    earlier module's; where all are, the place of the module before it."""
    place, seen = 0, set[int]()
    for module in entered:
        new = [order.index(each) for each in modules[module] if each not in seen]
        place = min(new) if new else place
        seen.update(modules[module])
        yield module, place


def _quantile(rows: torch.Tensor, q: float) -> torch.Tensor:
    return torch.nanquantile(rows, q, dim=0) if rows.numel() else rows.new_zeros(rows.shape[1:])


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """Interquartile range of each column; 0 where there is nothing."""
    return torch.nan_to_num(_quantile(rows, 0.75) - _quantile(rows, 0.25))


def _known(value: torch.Tensor) -> float:
    """0 for what was never seen."""
    number = float(value)
    return number if number == number else 0.0
