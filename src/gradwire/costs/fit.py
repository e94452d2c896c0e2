"""Lines through measured times: time = alpha + beta * bytes, robust to outliers, with their residuals.

Sizes and times span decades, so residuals count relative to the measured time. Otherwise the largest sizes alone would decide,
and alpha would be noise. The fit starts from the line through two points with the least median residual (least median of
squares; Rousseeuw 1984): up to half of the points cannot spoil this line. Points far from the line are outliers. Least squares
fit the others, with alpha and beta of at least 0.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import msgspec

from gradwire.core import Link, Points, goes_around, number, whole
from gradwire.costs.collectives import Load, Traffic, flat_traffic, sum_traffic
from gradwire.errors import FormatError

_FEWEST_POINTS = 3
_MOST_PAIRS_FROM = 100
"""Most points from which pairs are made; of more points, this number is chosen evenly."""
_OUTLIER_AT = 3.5
"""Standard deviations from the line at which a point is an outlier. The median residual gives the standard deviation."""
_MOST_RELATIVE_ERROR, _MOST_OUTLIERS = 0.25, 0.25
"""Limits of a good fit: the largest relative error of a point that is not an outlier, and the share of outliers."""


class Fit(NamedTuple):
    """A line through points (bytes, microseconds)."""

    alpha_us: float
    """Microseconds at 0 bytes."""
    us_per_byte: float
    points: tuple[tuple[float, float], ...]
    outliers: tuple[int, ...]
    """Indices of the points far from the line; they do not count in the fit."""
    r2: float
    """The share of variance that the line explains, without outliers."""
    worst_relative_error: float
    """Largest |residual| / measured time, without outliers."""
    problem: str
    """Why the fit is poor; '' for a good one."""

    @property
    def gbps(self) -> float:
        """The slope as a rate in gigabits per second; infinite for a flat line."""
        return 8 / (self.us_per_byte * 1000) if self.us_per_byte else float("inf")


def fit_line(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit alpha and beta to points (bytes, microseconds), in any order; a size may occur several times.

    Raises FormatError for fewer than 3 points, fewer than 2 sizes, and a time that is not a positive number.

    >>> fit = fit_line([(0, 5.0), (1000, 6.0), (2000, 7.0), (3000, 50.0), (4000, 9.0)])
    >>> round(fit.alpha_us, 6), round(fit.us_per_byte, 6), fit.outliers
    (5.0, 0.001, (3,))
    """
    points = [(float(nbytes), float(us)) for nbytes, us in points]
    for index, (nbytes, us) in enumerate(points):
        number(f"points[{index}][0]", nbytes, "bytes")
        number(f"points[{index}][1]", us, "a time in microseconds", positive=True)
    sizes = sorted({nbytes for nbytes, _ in points})
    if len(points) < _FEWEST_POINTS or len(sizes) < 2:
        raise FormatError(
            f"there are {len(points)} points of {len(sizes)} sizes. A line needs at least {_FEWEST_POINTS} points of 2 sizes, or "
            "nothing tells how well it fits. Measure more sizes."
        )
    start = _least_median(points)
    errors = [abs(us - start[0] - start[1] * nbytes) / us for nbytes, us in points]
    # 1.4826 * median is the standard deviation of normal residuals; never below what a clock can tell
    limit = _OUTLIER_AT * max(1.4826 * median(errors), 1e-3)
    inside = [error <= limit for error in errors]
    reached = {nbytes for (nbytes, _), keep in zip(points, inside, strict=True) if keep}
    line = _least_squares([p for p, keep in zip(points, inside, strict=True) if keep]) if len(reached) > 1 else start
    residuals = [us - line[0] - line[1] * nbytes for nbytes, us in points]
    kept = [(us, r) for (_, us), r, keep in zip(points, residuals, inside, strict=True) if keep]
    mean = sum(us for us, _ in kept) / len(kept)
    spread = sum((us - mean) ** 2 for us, _ in kept)
    worst = max(abs(r) / us for us, r in kept)
    problems = []
    if worst > _MOST_RELATIVE_ERROR:
        at = max(range(len(points)), key=lambda i: abs(residuals[i]) / points[i][1] * inside[i])
        problems.append(
            f"{points[at][0]:.0f} bytes took {points[at][1]:.4g} us, and the line gives {points[at][1] - residuals[at]:.4g}: "
            "times do not follow one line, so keep the points themselves"
        )
    for end, edge in (("smallest", sizes[:2]), ("largest", sizes[-2:])):
        if reached.isdisjoint(edge):
            problems.append(f"the {end} sizes all lie far from the line: times bend, so keep the points themselves")
    outliers = tuple(index for index, keep in enumerate(inside) if not keep)
    if len(outliers) > _MOST_OUTLIERS * len(points):
        problems.append(f"{len(outliers)} of {len(points)} points lie far from the line: measure again, on a quiet machine")
    r2 = 1 - sum(r * r for _, r in kept) / spread if spread else 1.0
    return Fit(*line, tuple(points), outliers, r2, worst, "; ".join(problems))


def fit_link(
    points: Sequence[tuple[float, float]],
    word: str,
    ranks: int,
    routing: str = "ring",
    ranks_per_node: int = 1,
    message_us: float | None = None,
) -> tuple[Link, Fit]:
    """Fit the link between ranks to times of one collective among them. Returns the link and the fit.

    The fit is of whole exchanges, or of single messages if the number of messages depends on the size: sums on wires.

    points: (bytes that a rank holds before, microseconds). word: one of LINK_TASKS. routing: as in
    gradwire.costs.collectives. ranks_per_node: number of ranks that share their node's inter link; if it equals `ranks`, the
    result is the link inside the node. message_us: as in `Link`; where times leave less for it, all messages wait.

    Raises FormatError for bad points, for one rank, and for times that do not grow with bytes.

    >>> link, fit = fit_link([(0, 60.0), (1000, 61.5), (2000, 63.0)], "allreduce", ranks=4)
    >>> round(link.alpha_us, 6), round(link.gbps, 6)  # 6 messages, 1.5 bytes on the wire for each
    (10.0, 8.0)
    """
    nodes = ranks // ranks_per_node
    small = flat_traffic(word, nodes, ranks_per_node, routing)
    large: Traffic | None = None
    if routing == "wires" and word == "allreduce":
        small, large = sum_traffic(word, nodes, ranks_per_node)
    load = small.inter if nodes > 1 else small.intra
    rounds = _rounds(small, nodes > 1)
    if not load.messages:
        raise FormatError(
            f"ranks is {ranks}: one rank exchanges nothing, so the times tell nothing about the link. Measure with 2 or more."
        )
    if message_us is not None:
        message_us = min(message_us, min(us for _, us in points) / load.messages)
    own = _in_turn(load, rounds, message_us)
    ring = own if large is None else _in_turn(large.inter, _rounds(large, True), message_us)
    ways = [ring if goes_around(nbytes, nodes, ranks) else own for nbytes, _ in points]
    whole_points, points = points, [(nbytes, us - further_us) for (nbytes, us), (_, further_us) in zip(points, ways, strict=True)]
    load, _ = own
    if large is not None:
        points = [(n * of.factor / of.messages, us / of.messages) for (n, us), (of, _) in zip(points, ways, strict=True)]
        load = Load(1, 1.0)
    fit = fit_line(points)
    if not fit.us_per_byte:
        raise FormatError(
            f"the times of {word} do not grow with bytes, from {min(points)} to {max(points)}, so the link's rate cannot be "
            "computed. Measure larger sizes."
        )
    alpha_us = fit.alpha_us / load.messages
    if message_us is not None and message_us > alpha_us:  # what was taken off for further messages were bytes
        link, fit = fit_link(whole_points, word, ranks, routing, ranks_per_node)
        return msgspec.structs.replace(link, message_us=link.alpha_us), fit
    return Link(alpha_us, 8 * load.factor / (fit.us_per_byte * 1000), message_us=message_us), fit


def _in_turn(load: Load, rounds: float, message_us: float | None) -> tuple[Load, float]:
    """The messages that wait for the message before, and microseconds of the others. Without the time of a message all wait."""
    return (load, 0.0) if message_us is None else (load._replace(messages=rounds), (load.messages - rounds) * message_us)


def _rounds(traffic: Traffic, between: bool) -> float:
    """Number of messages that wait for the message before, on the link between nodes or inside one."""
    load = traffic.inter if between else traffic.intra
    return load.messages if traffic.rounds is None else traffic.rounds[between]


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
    pairs = ((ones, ones), (ones, sizes), (sizes, sizes))
    aa, ab, bb = (sum(x * y for x, y in zip(left, right, strict=True)) for left, right in pairs)
    a, b = sum(ones), sum(sizes)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    through_zero, flat = (0.0, b / bb), (a / aa, 0.0)
    return min(through_zero, flat, key=lambda line: sum((1 - (line[0] + line[1] * x) / us) ** 2 for x, us in points))


def fit_points(samples: Sequence[tuple[int, float]], corners: Sequence[int]) -> Points:
    """Fit a curve of straight pieces: times at the corners (bytes, ascending), by least squares of relative residuals.

    samples: (bytes, microseconds); samples outside of the corners do not count. Each sample counts for its two nearest corners.
    Raises FormatError for a time that is not positive, and for a corner without a sample of its size.

    >>> curve = fit_points([(0, 1.0), (50, 2.0), (100, 3.0), (150, 3.0), (200, 3.0)], corners=[0, 100, 200])
    >>> [(nbytes, round(us, 9)) for nbytes, us in curve]
    [(0, 1.0), (100, 3.0), (200, 3.0)]
    """
    sizes = {nbytes for nbytes, _ in samples}
    missing = [corner for corner in corners if corner not in sizes]
    if missing or not corners:
        raise FormatError(
            f"corners are {list(corners)}, but no time was measured of {missing[:3]} bytes: the curve would be arbitrary "
            "there. Measure these sizes, or leave the corners out."
        )
    import numpy as np  # costs are read without numpy

    for index, (nbytes, us) in enumerate(samples):
        whole(f"samples[{index}][0]", nbytes, "bytes")
        number(f"samples[{index}][1]", us, "a time in microseconds", positive=True)
    inside, times = np.array([sample for sample in samples if corners[0] <= sample[0] <= corners[-1]]).T
    # how much each sample is of each corner, over the measured time
    shares = np.array([np.interp(inside, corners, corner) for corner in np.eye(len(corners))]) / times
    solved = np.linalg.solve(shares @ shares.T, shares @ np.ones(len(times)))
    return tuple((corner, max(0.0, float(us))) for corner, us in zip(corners, solved, strict=True))
