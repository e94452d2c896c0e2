"""Computes a model's profile from the recorded steps of all ranks: medians and their spread. Pure: no communication."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gradwire.core import ALL_REDUCE, CODEC_TASKS, Cluster, Costs, Plan, TensorInfo, TensorProfile
from gradwire.costs import Prices


class ModelTimes(NamedTuple):
    """The times of a model in training."""

    tensors: list[TensorProfile]
    """The tensors in gradient-ready order."""
    optimizer_us: float
    loaded_backward_us: float
    processor_part: float
    """The part of forward and backward in quiet steps for which a processor was needed (`gradwire.core.ProcessorNeed`)."""


def slowest(rows: torch.Tensor) -> torch.Tensor:
    """Return the maximum over ranks, because an exchange waits for the slowest one. NaN if no rank has a value.

    rows: (ranks, steps, columns).
    """
    latest = torch.nan_to_num(rows, nan=-torch.inf).amax(0)
    return torch.where(latest.isinf(), torch.nan, latest)


def model_times(
    infos: Sequence[TensorInfo],
    modules: Sequence[Sequence[int]],
    quiet: torch.Tensor,
    loaded: torch.Tensor,
    entered: Sequence[int] | None = None,
) -> ModelTimes:
    """Compute times by tensor, in gradient-ready order.

    infos: the trainable tensors. modules: the indices of each module's own tensors. quiet, loaded: rows of `Recorder.rows`,
    (steps, columns). entered: the modules in the order of forward; None for the order of `modules`.

    Backward times are differences of median moments, which add up to the median backward. Forward times are medians, scaled to
    add up to the median forward. A tensor without gradients is last, with time 0. The forward of a module counts for its tensor
    that forward uses last, or, if all its tensors belong to earlier modules (tied weights), for the tensor of the module before.
    Without modules all of forward counts for the last tensor.
    """
    count = len(modules)
    forward, began, ready = quiet[:, :count], quiet[:, count], quiet[:, count + 1 : -2]
    middle = _quantile(ready, 0.5)
    order = torch.argsort(torch.nan_to_num(middle, nan=torch.inf), stable=True).tolist()
    moments = torch.cat([began[:, None], ready[:, order]], 1)
    gaps = torch.diff(torch.cat([_quantile(began[:, None], 0.5), middle[order]])).clamp(min=0)
    gap_spread = _spread(torch.diff(moments, dim=1))
    whole_us = _known(_quantile(began[:, None], 0.5)[0])
    middles = torch.nan_to_num(_quantile(forward, 0.5))
    total = middles.sum()
    times_us = (middles * (whole_us / total) if total > 0 else middles).tolist()
    spreads_us = _spread(forward).tolist()
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
            embedding=infos[index].embedding,
        )
        for place, index in enumerate(order)
    ]
    last = torch.nan_to_num(loaded[:, count + 1 : -2], nan=-torch.inf).amax(1)
    computing_us = torch.nan_to_num(ready, nan=-torch.inf).amax(1)
    return ModelTimes(
        tensors,
        optimizer_us=_known(_quantile(torch.cat([quiet, loaded])[:, -2:-1], 0.5)[0]),
        loaded_backward_us=_known(_quantile((last - loaded[:, count])[:, None], 0.5)[0]),
        processor_part=_known(_quantile((quiet[:, -1] / computing_us)[:, None], 0.5)[0]),
    )


def launch_time_us(plan: Plan, tensors: Sequence[TensorProfile], cluster: Cluster, costs: Costs, exchange_cpu_us: float) -> float:
    """Return the CPU time of one exchange in microseconds: the time of a step's exchanges without codecs and without the
    CPU times of links, divided by their number. All-reduces over a link with a measured CPU time are left out."""
    prices = Prices(tensors, cluster, costs, "wires", launch_us=0.0)
    exchanges, other_us = 0, 0.0
    for bucket in plan.buckets:
        priced = prices.of(bucket)
        measured = [price for price in priced.tasks if price.cpu_us and (price.task,) == ALL_REDUCE]
        exchanges += priced.pieces * (len(bucket.link_tasks) - len(measured))
        codecs_us = sum(price.us for price in priced.tasks if price.task.startswith(CODEC_TASKS))
        other_us += priced.pieces * (codecs_us + sum(price.cpu_us for price in priced.tasks))
    return max(0.0, exchange_cpu_us - other_us) / exchanges if exchanges else 0.0


def _places(modules: Sequence[Sequence[int]], order: Sequence[int], entered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return for each module the place of the tensor that forward uses last, without tensors of earlier modules. If
    there is none, return the place of the module before."""
    place, seen = 0, set[int]()
    for module in entered:
        new = [order.index(each) for each in modules[module] if each not in seen]
        place = min(new) if new else place
        seen.update(modules[module])
        yield module, place


def _quantile(rows: torch.Tensor, q: float) -> torch.Tensor:
    return torch.nanquantile(rows, q, dim=0) if rows.numel() else rows.new_zeros(rows.shape[1:])


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """Return the interquartile range of each column; 0 for an empty column."""
    return torch.nan_to_num(_quantile(rows, 0.75) - _quantile(rows, 0.25))


def _known(value: torch.Tensor) -> float:
    """Return the number, or 0 for NaN."""
    number = float(value)
    return number if number == number else 0.0
