"""CGX's first approach to bits by tensor: Bayesian optimisation of the constrained problem (section 5).

The paper found that it "requires instance-specific tuning, adds additional parameters and leads to unstable results". So it is
here for comparison only: `python -m benchmarks bits` compares its bytes with the exact choice at the error of its own choice.
"""

import math
from collections.abc import Sequence

import numpy as np

from gradwire.planner.bits import Assignment, Sensitivity, repaired

__all__ = ["bayes"]

LOOKS = 80
"""Assignments that are tried."""
_CANDIDATES = 256
"""Assignments among which the next one is chosen: half at random, half with a few changes of the best one so far."""
_LENGTH = 0.5
"""Length scale of the Gaussian process, in differences of all tensors by the whole range of ways."""
_NOISE = 1e-6


def bayes(tensors: Sequence[Sensitivity], budget: float, looks: int = LOOKS, seed: int = 0) -> Assignment:
    """Search for the fewest bytes with a squared error of at most `budget`, by expected improvement under a Gaussian process.

    A point is the way of every tensor. Its value is its share of the most bytes, or, beyond the budget, 1 plus the logarithm of
    the error over the budget. The first points give all tensors the same way. At the end bits are raised until the budget holds,
    and lowered where it allows, as for the other rules. Raises PlanError if even the largest encodings lose more than the budget.
    """
    chance, ways = np.random.default_rng(seed), len(tensors[0].sizes)
    most = sum(max(tensor.sizes) for tensor in tensors)

    def value(chosen: np.ndarray) -> float:
        picked = [(tensor.sizes[way], tensor.errors[way]) for tensor, way in zip(tensors, chosen, strict=True)]
        error = math.fsum(lost for _, lost in picked)
        return sum(size for size, _ in picked) / most if error <= budget else 1 + math.log(min(error / max(budget, 1e-30), 1e3))

    points = [np.full(len(tensors), way) for way in range(ways)]
    values = [value(point) for point in points]
    while len(points) < looks:
        best = points[int(np.argmin(values))]
        anywhere = chance.integers(ways, size=(_CANDIDATES // 2, len(tensors)))
        changed = chance.random((_CANDIDATES // 2, len(tensors))) < 2 / len(tensors)
        near = np.where(changed, chance.integers(ways, size=changed.shape), best)
        candidates = np.vstack([anywhere, near])
        mean, spread = _predicted(np.array(points) / max(1, ways - 1), np.array(values), candidates / max(1, ways - 1))
        points.append(candidates[int(np.argmax(_improvement(min(values) - mean, spread)))])
        values.append(value(points[-1]))
    return repaired(tensors, [int(way) for way in points[int(np.argmin(values))]], budget)


def _predicted(points: np.ndarray, values: np.ndarray, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the Gaussian process at the candidates."""
    middle, scale = values.mean(), values.std() or 1.0
    inverse = np.linalg.inv(_kernel(points, points) + _NOISE * np.eye(len(points)))
    across = _kernel(candidates, points)
    left = 1 - np.einsum("ij,jk,ik->i", across, inverse, across)
    return middle + scale * (across @ inverse @ ((values - middle) / scale)), scale * np.sqrt(np.maximum(left, 1e-12))


def _kernel(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    squares: np.ndarray = ((left[:, None] - right) ** 2).mean(axis=2)
    return np.exp(-squares / (2 * _LENGTH**2))


def _improvement(gain: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Expected improvement where the mean improvement is `gain`."""
    ratio = gain / spread
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in ratio])
    improvement: np.ndarray = gain * below + spread * np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    return improvement
