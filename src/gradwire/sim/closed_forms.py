"""Step times in closed form, as DeAR gives them (equations 6 and 7).

All times are microseconds of one step and at least 0. They are ideals: overlap is perfect, and nothing is fused, launched or
jittered. `benchmarks/closed_forms.py` has the papers' other equations.
"""

from gradwire.core.checks import number, whole
from gradwire.errors import PlanError

__all__ = ["dear_us", "max_speedup"]


def max_speedup(
    world_size: int, forward_us: float, backward_us: float, reduce_scatter_us: float, all_gather_us: float
) -> float:
    """Throughput of all ranks over that of one, at most, when exchanges overlap perfectly. DeAR, equation 6.

    The paper takes reduce-scatter and all-gather as gradient bytes over bandwidth each, without startup.

    >>> max_speedup(64, forward_us=100, backward_us=200, reduce_scatter_us=50, all_gather_us=50)
    64.0
    """
    whole("world_size", world_size, "ranks", low=1, error=PlanError)
    step_us = dear_us(forward_us, backward_us, reduce_scatter_us, all_gather_us)
    if not forward_us + backward_us:
        raise PlanError(
            "forward_us and backward_us are both 0: a rank that computes nothing has no throughput. Give measured times."
        )
    return world_size * (forward_us + backward_us) / step_us


def dear_us(forward_us: float, backward_us: float, reduce_scatter_us: float, all_gather_us: float) -> float:
    """DeAR: reduce-scatter under backward, all-gather under the next forward. DeAR, equation 7; the denominator of equation 6."""
    _times(
        forward_us=forward_us,
        backward_us=backward_us,
        reduce_scatter_us=reduce_scatter_us,
        all_gather_us=all_gather_us,
    )
    return max(forward_us, all_gather_us) + max(backward_us, reduce_scatter_us)


def _times(**times: float) -> None:
    for field, value in times.items():
        number(field, value, "a time in microseconds", error=PlanError)
