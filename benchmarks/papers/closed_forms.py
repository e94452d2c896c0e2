"""Step times in closed form, as two papers give them: CD-SGD (equations 2 to 9) and DeAR (equations 3 to 9).

All times are microseconds of one step and at least 0. The papers' cases are written as max and min, which also covers the
equalities that the printed cases leave out. They are ideals: overlap is perfect, and nothing is fused, launched or jittered.
"""

from gradwire.core.checks import number, whole
from gradwire.errors import PlanError

__all__ = [
    "all_gather_us", "all_reduce_us", "bit_sgd_us", "cd_sgd_mean_us", "cd_sgd_saves_of_bit_sgd_us",
    "cd_sgd_saves_of_local_updates_us", "cd_sgd_staggered_us", "cd_sgd_us",
    "dear_saving_us", "dear_us", "local_update_us", "max_speedup", "reduce_scatter_us", "s_sgd_us", "wfbp_us",
]  # fmt: skip


def s_sgd_us(compute_us: float, exchange_us: float) -> float:
    """Synchronous SGD without any overlap: compute, then exchange. CD-SGD, equation 2."""
    _times(compute_us=compute_us, exchange_us=exchange_us)
    return compute_us + exchange_us


def wfbp_us(forward_us: float, backward_us: float, all_reduce_us: float) -> float:
    """Wait-free backpropagation, the exchange hidden under backward as far as it goes. DeAR, equation 8 (its baseline)."""
    _times(forward_us=forward_us, backward_us=backward_us, all_reduce_us=all_reduce_us)
    return forward_us + max(backward_us, all_reduce_us)


def local_update_us(compute_us: float, exchange_us: float) -> float:
    """Return the step of local updates: the exchange runs during the next step's compute. CD-SGD, equation 4."""
    _times(compute_us=compute_us, exchange_us=exchange_us)
    return max(compute_us, exchange_us)


def bit_sgd_us(compute_us: float, codec_us: float, compressed_us: float) -> float:
    """Synchronous SGD with a quantised exchange, without overlap. CD-SGD, equation 5."""
    _times(compute_us=compute_us, codec_us=codec_us, compressed_us=compressed_us)
    return compute_us + codec_us + compressed_us


def cd_sgd_us(
    step: int,
    correct_every: int | None,
    compute_us: float,
    exchange_us: float,
    codec_us: float,
    compressed_us: float,
    codec_on_compute_us: float = 0.0,
) -> float:
    """Step number `step` of CD-SGD. Equations 6 and 7, with codecs on the compute cores (docs/papers/cd-sgd.md).

    Each `correct_every`-th step, the first included, is a correction and exchanges uncompressed gradients; None never corrects.
    `codec_on_compute_us` is the part of the codec that runs on the compute cores, which the paper takes for none; it makes
    compute longer, not the exchange shorter.

    >>> cd_sgd_us(step=1, correct_every=5, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5)
    10.0
    """
    _times(compute_us=compute_us, exchange_us=exchange_us, codec_us=codec_us, compressed_us=compressed_us)
    whole("step", step, "the number of a step", error=PlanError)
    _check_correction(correct_every, codec_us, codec_on_compute_us)
    if correct_every is not None and step % correct_every == 0:
        return float(max(compute_us, exchange_us))
    return float(max(compute_us + codec_on_compute_us, codec_us + compressed_us))


def cd_sgd_saves_of_local_updates_us(
    step: int, correct_every: int | None, compute_us: float, exchange_us: float, codec_us: float, compressed_us: float
) -> float:
    """Return how much shorter a step of CD-SGD is than one of local updates. Equation 8; parameters as in `cd_sgd_us`.

    >>> cd_sgd_saves_of_local_updates_us(1, 5, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5)
    30.0
    """
    own_us = cd_sgd_us(step, correct_every, compute_us, exchange_us, codec_us, compressed_us)
    return local_update_us(compute_us, exchange_us) - own_us


def cd_sgd_saves_of_bit_sgd_us(
    step: int, correct_every: int | None, compute_us: float, exchange_us: float, codec_us: float, compressed_us: float
) -> float:
    """Return how much shorter a step of CD-SGD is than one of BIT-SGD. Equation 9; parameters as in `cd_sgd_us`. It may be below
    0 where a correction takes longer than a step of BIT-SGD.

    >>> cd_sgd_saves_of_bit_sgd_us(1, 5, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5)
    7.0
    """
    own_us = cd_sgd_us(step, correct_every, compute_us, exchange_us, codec_us, compressed_us)
    return bit_sgd_us(compute_us, codec_us, compressed_us) - own_us


def cd_sgd_mean_us(
    correct_every: int | None,
    compute_us: float,
    exchange_us: float,
    codec_us: float,
    compressed_us: float,
    codec_on_compute_us: float = 0.0,
) -> float:
    """Mean step of CD-SGD over one correction and the steps up to the next; parameters as in `cd_sgd_us`.

    >>> cd_sgd_mean_us(correct_every=5, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5)
    16.0
    >>> cd_sgd_mean_us(correct_every=5, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5, codec_on_compute_us=2)
    17.6
    """
    _check_correction(correct_every, codec_us, codec_on_compute_us)
    steps = range(1, 2) if correct_every is None else range(correct_every)
    times = (compute_us, exchange_us, codec_us, compressed_us, codec_on_compute_us)
    return sum(cd_sgd_us(step, correct_every, *times) for step in steps) / len(steps)


def cd_sgd_staggered_us(
    correct_every: int,
    compute_us: float,
    exchange_us: float,
    codec_us: float,
    compressed_us: float,
    codec_on_compute_us: float = 0.0,
) -> float:
    """A step of CD-SGD whose corrections are dealt out evenly to the steps of a period; parameters as in `cd_sgd_us`.

    Each step exchanges one part in `correct_every` of the gradient uncompressed, and compresses the rest.

    >>> cd_sgd_staggered_us(correct_every=2, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5)
    23.5
    >>> cd_sgd_staggered_us(correct_every=20, compute_us=10, exchange_us=40, codec_us=2, compressed_us=5)
    10.0
    """
    _times(compute_us=compute_us, exchange_us=exchange_us, codec_us=codec_us, compressed_us=compressed_us)
    _check_correction(correct_every, codec_us, codec_on_compute_us)
    usual = 1 - 1 / correct_every
    exchanges_us = usual * (codec_us + compressed_us) + exchange_us / correct_every
    return max(compute_us + usual * codec_on_compute_us, exchanges_us)


def reduce_scatter_us(world_size: int, elements: float, alpha_us: float, us_per_element: float) -> float:
    """Ring reduce-scatter of a vector over so many ranks. DeAR, equation 3; adding takes no time."""
    _ring(world_size, elements, alpha_us, us_per_element)
    return (world_size - 1) * (alpha_us + elements / world_size * us_per_element)


def all_gather_us(world_size: int, elements: float, alpha_us: float, us_per_element: float) -> float:
    """Ring all-gather of a vector of which each rank has its share. DeAR, equation 4."""
    _ring(world_size, elements, alpha_us, us_per_element)
    return (world_size - 1) * (alpha_us + elements / world_size * us_per_element)


def all_reduce_us(world_size: int, elements: float, alpha_us: float, us_per_element: float) -> float:
    """Ring all-reduce: both phases. DeAR, equation 5.

    >>> all_reduce_us(world_size=4, elements=1000, alpha_us=10, us_per_element=0.01)
    75.0
    """
    return reduce_scatter_us(world_size, elements, alpha_us, us_per_element) + all_gather_us(
        world_size, elements, alpha_us, us_per_element
    )


def max_speedup(world_size: int, forward_us: float, backward_us: float, reduce_scatter_us: float, all_gather_us: float) -> float:
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
    _times(forward_us=forward_us, backward_us=backward_us, reduce_scatter_us=reduce_scatter_us, all_gather_us=all_gather_us)
    return max(forward_us, all_gather_us) + max(backward_us, reduce_scatter_us)


def dear_saving_us(forward_us: float, all_gather_us: float) -> float:
    """Return DeAR's saving over wait-free backpropagation. DeAR, equation 9: backward takes twice forward, and both
    phases the same.

    Never more than forward.

    >>> [dear_saving_us(forward_us=10, all_gather_us=gather) for gather in (5, 15, 50)]
    [0, 5, 10]
    """
    _times(forward_us=forward_us, all_gather_us=all_gather_us)
    return min(max(0, all_gather_us - forward_us), forward_us)


def _times(**times: float) -> None:
    for field, value in times.items():
        number(field, value, "a time in microseconds", error=PlanError)


def _ring(world_size: int, elements: float, alpha_us: float, us_per_element: float) -> None:
    whole("world_size", world_size, "ranks", low=1, error=PlanError)
    number("elements", elements, "elements of the vector", error=PlanError)
    number("alpha_us", alpha_us, "the start of one message in microseconds", error=PlanError)
    number("us_per_element", us_per_element, "microseconds per element", error=PlanError)


def _check_correction(correct_every: int | None, codec_us: float, codec_on_compute_us: float) -> None:
    if correct_every is not None:
        whole("correct_every", correct_every, "steps from one correction to the next", low=1, error=PlanError)
    number("codec_us", codec_us, "a time in microseconds", error=PlanError)
    number("codec_on_compute_us", codec_on_compute_us, "a time in microseconds", error=PlanError)
    if codec_on_compute_us > codec_us:
        raise PlanError(
            f"codec_on_compute_us is {codec_on_compute_us}, and codec_us is {codec_us}: the part of the codec on the compute "
            "cores cannot be longer than the codec. Give at most codec_us."
        )
