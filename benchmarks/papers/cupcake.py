"""Cupcake's own search (section 4.2, Algorithm 1), repaired, as a reference. `gradwire.planner.fusion.optimal` is what to use.

As printed the algorithm cannot be run: lines 9 and 31 name one variable twice, and no plan of one bucket is ever compared.
Here (docs/papers/cupcake.md) every whole plan is compared with the best so far when it is formed, also the one of each call's
line 9, which makes the local best of a call superfluous; Main is the call for no tensors, so that one bucket is a candidate;
what is empty costs nothing; the search begins with two buckets of equally many tensors, as the text proposes, and only a better
plan replaces one.

Both prunings are proven for affine costs only. Where fusing costs more than it saves, as with encode times that are flat up to
some size and then rise steeply, the encode of a merged rest is no lower bound, and regrouping is not free.
"""

import math
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.costs.prices import AffineCost
from gradwire.errors import PlanError
from gradwire.planner.partition import Fusion, FusionCosts, prefix_sums, step_of

__all__ = ["Search", "algorithm_1"]

_MOST = 600
"""Tensors; the search calls itself for each, and Python allows a thousand nested calls."""


class Search(NamedTuple):
    """The result of a search, and its cost."""

    fusion: Fusion
    calls: int
    """Number of calls of FindOptFusion."""
    finished: bool
    """False if the time was over first: then `fusion` is only the best so far."""


def algorithm_1(
    backward_us: Sequence[float],
    nbytes: Sequence[float],
    costs: FusionCosts,
    *,
    pruning_1: bool = True,
    pruning_2: bool = True,
    seconds: float = math.inf,
) -> Search:
    """Search all partitions but those that the two prunings exclude.

    Pruning 1 leaves out a bucket if even with the most favourable rest the step is longer than the best so far; pruning 2 lets a
    bucket take every tensor that is encoded before the link is free. Warns where they are not proven: then the plan may not
    be the best. `seconds` are of CPU time. Raises PlanError above 600 tensors.
    """
    tensors = len(nbytes)
    if tensors > _MOST:
        raise PlanError(
            f"there are {tensors} tensors, and Algorithm 1 takes at most {_MOST}: its time is exponential. Use "
            "`gradwire.planner.fusion.optimal`."
        )
    if (pruning_1 or pruning_2) and not _proven(costs):
        warnings.warn(
            "the prunings of Cupcake's Algorithm 1 are proven for affine costs without an exposed decode that grows with the "
            "bucket; its plan may not be the best. Compare with benchmarks.papers.oracle.pareto.",
            stacklevel=2,
        )
    search = _Algorithm1(prefix_sums(backward_us), prefix_sums(nbytes), costs, pruning_1, pruning_2, seconds)
    search.find((), 0.0, 0.0)
    boundaries = search.best.boundaries
    step_us = step_of(boundaries, search.ready_us, search.total_bytes, costs)
    return Search(Fusion(boundaries, step_us), search.calls, finished=time.process_time() < search.deadline)


def _proven(costs: FusionCosts) -> bool:
    used = (costs.encode, costs.exchange, costs.decode)
    return all(isinstance(cost, AffineCost) for cost in used) and (costs.decoding == "lumped" or costs.decode.us_per_byte == 0)


class _Algorithm1:
    def __init__(
        self,
        ready_us: list[float],
        total_bytes: list[float],
        costs: FusionCosts,
        pruning_1: bool,
        pruning_2: bool,
        seconds: float,
    ) -> None:
        self.ready_us, self.total_bytes, self.costs = ready_us, total_bytes, costs
        self.pruning_1, self.pruning_2 = pruning_1, pruning_2
        self.deadline = time.process_time() + seconds
        self.tensors = len(ready_us) - 1
        self.calls = 0
        halves = tuple(end for end in (self.tensors // 2, self.tensors) if end)
        self.best = Fusion(halves, step_of(halves, ready_us, total_bytes, costs))

    def find(self, ends: tuple[int, ...], comp_us: float, link_us: float) -> None:
        """FindOptFusion: buckets with these ends are encoded at `comp_us` and exchanged at `link_us`."""
        self.calls += 1
        start = ends[-1] if ends else 0
        delay_us = link_us - comp_us
        whole_us = max(link_us, comp_us + self._compute_us(start, self.tensors)) + self._exchange_us(start, self.tensors)
        whole_us += self.costs.after(self.total_bytes[-1] - self.total_bytes[start])
        if whole_us < self.best.step_us:
            self.best = Fusion((*ends, self.tensors), whole_us)
        first = start + 1
        if self.pruning_2:
            while first < self.tensors and self._compute_us(start, first + 1) <= delay_us:
                first += 1
        for end in range(first, self.tensors):
            if time.process_time() >= self.deadline:
                return
            if self.pruning_1 and comp_us + self._favourable_us(start, end, delay_us) > self.best.step_us:
                continue
            encoded_us = comp_us + self._compute_us(start, end)
            self.find((*ends, end), encoded_us, max(link_us, encoded_us) + self._exchange_us(start, end))

    def _compute_us(self, start: int, end: int) -> float:
        """B + h of the tensors from `start` to `end` - 1, fused."""
        size = self.total_bytes[end] - self.total_bytes[start]
        return self.ready_us[end] - self.ready_us[start] + self.costs.of_compute(size)

    def _exchange_us(self, start: int, end: int) -> float:
        """g of them."""
        exchange_us: float = self.costs.exchange(self.total_bytes[end] - self.total_bytes[start])
        return exchange_us

    def _favourable_us(self, start: int, end: int, delay_us: float) -> float:
        """Lines 19 to 22: what the step takes from `comp_us` on, at least, if the next bucket has these tensors."""
        compute_us = self._compute_us(start, end)
        hidden_us = compute_us + self._compute_us(end, self.tensors)
        exposed_us = max(compute_us, delay_us) + self._exchange_us(start, end) + self._exchange_us(end, self.tensors)
        return max(hidden_us, exposed_us)
