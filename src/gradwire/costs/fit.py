"""Lines through measured times: time = alpha + beta * bytes, robust to outliers, with their residuals.

Sizes and times span decades, so residuals count relative to the measured time: else the largest sizes alone would decide, and
alpha would be noise. The line starts from the pair of points whose line has the least median residual (least median of
squares; Rousseeuw 1984), which up to half of the points cannot spoil. Points far from it are set aside as outliers, and the
others are fitted by least squares with alpha and beta of at least 0.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from gradwire.core.checks import number
from gradwire.core.cluster import Link
from gradwire.costs.collectives import group_traffic
from gradwire.errors import FormatError

__all__ = ["Fit", "fit_line", "fit_link"]

_FEWEST_POINTS = 3
_MOST_PAIRS_FROM = 100
"""Points from which pairs are made: beyond so many, evenly chosen ones."""


class Fit(NamedTuple):
    """A line through points (bytes, microseconds)."""

    alpha_us: float
    """Microseconds at 0 bytes."""
    us_per_byte: float
    points: tuple[tuple[float, float], ...]
    residuals_us: tuple[float, ...]
    """Measured minus fitted time, of every point."""
    outliers: tuple[int, ...]
    """Indices of the points that were set aside."""
    r2: float
    """The part of the times' variance that the line explains, of the points that are no outliers."""
    worst_relative_error: float
    """Largest |residual| / measured time of those points."""
    problem: str
    """What is wrong with the fit, in words; '' for a good one."""

    @property
    def gbps(self) -> float:
        """The rate that the slope is, in gigabits per second; infinite for a flat line."""
        return 8 / (self.us_per_byte * 1000) if self.us_per_byte else float("inf")

    def time_us(self, nbytes: float) -> float:
        """The fitted time."""
        return self.alpha_us + self.us_per_byte * nbytes


def fit_line(
    points: Sequence[tuple[float, float]],
    *,
    most_relative_error: float = 0.25,
    most_outliers: float = 0.25,
    outlier_at: float = 3.5,
) -> Fit:
    """Fit alpha and beta to points (bytes, microseconds), in any order; a size may occur several times.

    most_relative_error, most_outliers: beyond which the fit says that it is poor: the largest relative error of a point that
    counts, and the part of points set aside. outlier_at: set aside is what is so many standard deviations from the line,
    estimated from the median residual.
    Raises FormatError for fewer than 3 points, fewer than 2 sizes, or a time that is none.

    >>> fit = fit_line([(0, 5.0), (1000, 6.0), (2000, 7.0), (3000, 50.0), (4000, 9.0)])
    >>> round(fit.alpha_us, 6), round(fit.us_per_byte, 6), fit.outliers
    (5.0, 0.001, (3,))
    """
    points = [(float(nbytes), float(us)) for nbytes, us in points]
    for index, (nbytes, us) in enumerate(points):
        number(f"points[{index}][0]", nbytes, "bytes")
        number(f"points[{index}][1]", us, "a time in microseconds", positive=True)
    sizes = {nbytes for nbytes, _ in points}
    if len(points) < _FEWEST_POINTS or len(sizes) < 2:
        raise FormatError(
            f"there are {len(points)} points of {len(sizes)} sizes, and a line needs at least {_FEWEST_POINTS} points of "
            "2 sizes to say how well it fits. Measure more sizes."
        )
    start = _least_median(points)
    errors = [abs(us - start[0] - start[1] * nbytes) / us for nbytes, us in points]
    # 1.4826 * median is the standard deviation of normal residuals; never below what a clock can tell
    limit = outlier_at * max(1.4826 * median(errors), 1e-3)
    inside = [error <= limit for error in errors]
    kept = [point for point, keep in zip(points, inside, strict=True) if keep]
    alpha, beta = _least_squares(kept) if len({nbytes for nbytes, _ in kept}) > 1 else start
    return _judged(points, inside, alpha, beta, most_relative_error, most_outliers)


def fit_link(points: Sequence[tuple[float, float]], word: str, ranks: int, routing: str = "ring") -> tuple[Link, Fit]:
    """The link between ranks, from times of one collective among them, and the fit that it comes from.

    points: (bytes that a rank holds before, microseconds). word: one of LINK_TASKS. routing: as in
    gradwire.costs.collectives. Raises FormatError for bad points, for one rank, and for times that do not grow with bytes.

    >>> link, fit = fit_link([(0, 60.0), (1000, 61.5), (2000, 63.0)], "allreduce", ranks=4)
    >>> round(link.alpha_us, 6), round(link.gbps, 6)  # 6 messages, 1.5 bytes on the wire for each
    (10.0, 8.0)
    """
    load = group_traffic(word, ranks, "inter", routing).inter
    if not load.messages:
        raise FormatError(
            f"ranks is {ranks}: one rank exchanges nothing, so there is no link to see. Measure with two."
        )
    fit = fit_line(points)
    if not fit.us_per_byte:
        raise FormatError(
            f"the times of {word} do not grow with bytes, from {min(points)} to {max(points)}, so they tell no rate. "
            "Measure larger sizes."
        )
    return Link(fit.alpha_us / load.messages, 8 * load.factor / (fit.us_per_byte * 1000)), fit


def _least_median(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line through two points whose median relative residual is least, with alpha and beta of at least 0."""
    stride = -(-len(points) // _MOST_PAIRS_FROM)
    best, least = (0.0, 0.0), float("inf")
    for (x1, t1), (x2, t2) in combinations(sorted(points)[::stride], 2):
        if x1 == x2:
            continue
        beta = max(0.0, (t2 - t1) / (x2 - x1))
        alpha = max(0.0, t1 - beta * x1)
        typical = median(abs(us - alpha - beta * nbytes) / us for nbytes, us in points)
        if typical < least:
            best, least = (alpha, beta), typical
    return best


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """alpha and beta, at least 0, with the least sum of squared relative residuals."""
    ones = [1 / us for _, us in points]
    sizes = [nbytes / us for nbytes, us in points]
    aa, ab, bb = _dot(ones, ones), _dot(ones, sizes), _dot(sizes, sizes)
    a, b = sum(ones), sum(sizes)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    through_zero, flat = (0.0, b / bb), (a / aa, 0.0)
    return min(through_zero, flat, key=lambda line: sum((1 - (line[0] + line[1] * x) / us) ** 2 for x, us in points))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def _judged(
    points: Sequence[tuple[float, float]],
    inside: Sequence[bool],
    alpha: float,
    beta: float,
    most_relative_error: float,
    most_outliers: float,
) -> Fit:
    residuals = [us - alpha - beta * nbytes for nbytes, us in points]
    outliers = tuple(index for index, keep in enumerate(inside) if not keep)
    kept = [(us, r) for (_, us), r, keep in zip(points, residuals, inside, strict=True) if keep]
    mean = sum(us for us, _ in kept) / len(kept)
    spread = sum((us - mean) ** 2 for us, _ in kept)
    unexplained = sum(r * r for _, r in kept)
    worst = max(abs(r) / us for us, r in kept)
    problems = []
    if worst > most_relative_error:
        at = max(range(len(points)), key=lambda i: abs(residuals[i]) / points[i][1] * inside[i])
        problems.append(
            f"at {points[at][0]:.0f} bytes {points[at][1]:.4g} us were measured and {points[at][1] - residuals[at]:.4g} "
            "fitted: times do not follow one line, so keep the points themselves"
        )
    sizes = sorted({nbytes for nbytes, _ in points})
    reached = {nbytes for (nbytes, _), keep in zip(points, inside, strict=True) if keep}
    for end, edge in (("smallest", sizes[:2]), ("largest", sizes[-2:])):
        if reached.isdisjoint(edge):
            problems.append(f"the {end} sizes all lie far from the line: times bend, so keep the points themselves")
    if len(outliers) > most_outliers * len(points):
        problems.append(
            f"{len(outliers)} of {len(points)} points lie far from the line: measure again, on a quiet machine"
        )
    return Fit(
        alpha,
        beta,
        tuple(points),
        tuple(residuals),
        outliers,
        1 - unexplained / spread if spread else 1.0,
        worst,
        "; ".join(problems),
    )
