"""Curves of straight pieces through measured times, by least squares: what costs.json holds of a codec.

Sizes span decades, so residuals count relative to the measured time, as in `gradwire.costs.fit`. Between two corners the curve
is straight, so each sample speaks for the two corners beside it and the equations are tridiagonal.
"""

from collections.abc import Sequence

from gradwire.core.checks import number, whole
from gradwire.core.costs import Points
from gradwire.errors import FormatError

__all__ = ["fit_points"]


def fit_points(samples: Sequence[tuple[int, float]], corners: Sequence[int]) -> Points:
    """The times at the corners (bytes, ascending) for which the curve comes nearest to the samples (bytes, microseconds).

    Samples outside of the corners are not used. Raises FormatError for times that are none, and for a corner of whose size
    there is no sample.

    >>> curve = fit_points([(0, 1.0), (50, 2.0), (100, 3.0), (150, 3.0), (200, 3.0)], corners=[0, 100, 200])
    >>> [(nbytes, round(us, 9)) for nbytes, us in curve]
    [(0, 1.0), (100, 3.0), (200, 3.0)]
    """
    sizes = {nbytes for nbytes, _ in samples}
    missing = [corner for corner in corners if corner not in sizes]
    if missing or not corners:
        raise FormatError(
            f"corners are {list(corners)}, and no time was measured of {missing[:3]} bytes: nothing would hold the curve "
            "there. Measure these sizes, or leave the corners out."
        )
    diagonal, beside, right = [0.0] * len(corners), [0.0] * len(corners), [0.0] * len(corners)
    for index, (nbytes, us) in enumerate(samples):
        whole(f"samples[{index}][0]", nbytes, "bytes")
        number(f"samples[{index}][1]", us, "a time in microseconds", positive=True)
        if not corners[0] <= nbytes <= corners[-1]:
            continue
        low = max(at for at, corner in enumerate(corners) if corner <= nbytes)
        high = min(low + 1, len(corners) - 1)
        part = (nbytes - corners[low]) / (corners[high] - corners[low]) if high > low else 0.0
        weight = 1 / us**2
        diagonal[low] += weight * (1 - part) ** 2
        right[low] += weight * (1 - part) * us
        if part:
            diagonal[high] += weight * part**2
            right[high] += weight * part * us
            beside[low] += weight * part * (1 - part)
    return tuple(zip(corners, _solved(diagonal, beside, right), strict=True))


def _solved(diagonal: list[float], beside: list[float], right: list[float]) -> list[float]:
    """Gauss on a symmetric tridiagonal matrix; times below 0 become 0."""
    for at in range(1, len(diagonal)):
        factor = beside[at - 1] / diagonal[at - 1]
        diagonal[at] -= factor * beside[at - 1]
        right[at] -= factor * right[at - 1]
    solution = [0.0] * len(diagonal)
    following = 0.0
    for at in reversed(range(len(diagonal))):
        following = solution[at] = (right[at] - beside[at] * following) / diagonal[at]
    return [max(0.0, value) for value in solution]
