"""Chooses the next bucket size to try, from the throughput in earlier trials. Pure: no communication.

Buckets consist of whole tensors, so many sizes make the same buckets: the search is over the different groupings. The Bayesian
search keeps some trials to repeat the best groupings, since the best of many noisy trials was often only lucky.

>>> from gradwire.core import Identity
>>> from gradwire.plan import Uniform
>>> search = SizeSearch(Tuned(Uniform(Identity()), search="grid", trials=3), lambda nbytes: nbytes > 2**22)
>>> while (nbytes := search.propose()) is not None:
...     search.took(1.0 if nbytes > 2**22 else 2.0)
>>> search.best <= 2**22, search.tried
(True, 2)
"""

import math
import random
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import harmonic_mean

from gradwire.errors import PlanError
from gradwire.plan import Tuned

XI = 0.1
"""The improvement that the search looks for, in units of the first trial's throughput (DeAR)."""
STOP = 0.01
"""The search ends when the expected improvement of every size is at most this part of the best throughput."""
_SIZES = 64
"""The number of sizes, evenly spaced on a logarithmic scale."""
AGAIN = 3
"""Trials that the Bayesian search keeps to repeat the best groupings. If there are fewer than ten trials, it keeps a third."""
LOOKS = 3
"""The search ends after so many trials of the best grouping."""
_NOISE = 0.02
"""Standard deviation of a trial's throughput, in units of the first trial's throughput."""
_OCTAVES, _VARIANCE = 1.0, 0.1
"""Length scale (octaves of size) and least variance of the process. Fits to few trials would end the search too early."""


class SizeSearch:
    """Search for the bucket size with the highest throughput.

    group: maps a size to a value that identifies its buckets, such as the digest of the plan.
    """

    def __init__(self, tuned: Tuned, group: Callable[[int], Hashable]) -> None:
        self._tuned = tuned
        self.sizes = sorted({*spaced(tuned.low_bytes, tuned.high_bytes, _SIZES), tuned.start_bytes})
        self.groupings = {nbytes: group(nbytes) for nbytes in self.sizes}
        """The grouping of each size."""
        self._rates: dict[Hashable, list[float]] = {}
        """Throughput in each trial of a grouping, in the order of the first trials."""
        self._with: dict[Hashable, int] = {}
        """The size of each grouping's last trial."""
        self._proposed = tuned.start_bytes
        self._next = {"bayes": self._bayes, "random": self._random, "grid": self._grid}[tuned.search]()

    @property
    def tried(self) -> int:
        """Number of trials so far."""
        return sum(map(len, self._rates.values()))

    @property
    def best(self) -> int:
        """The size with the highest throughput so far, by the mean of its trials."""
        return self._with[self._best]

    @property
    def _best(self) -> Hashable:
        return max(self._rates, key=self._rate)

    def _rate(self, grouping: Hashable) -> float:
        """Return the throughput over all trials of a grouping."""
        return harmonic_mean(self._rates[grouping])

    def propose(self) -> int | None:
        """Return the size to try next; None when the search is over."""
        if self.tried == 0:
            return self._proposed
        if self.tried >= self._tuned.trials:
            return None
        proposed = next(self._next, None)
        self._proposed = proposed or self._proposed
        return proposed

    def took(self, rate: float) -> None:
        """Add the throughput of the last proposed size, in any unit, above 0."""
        grouping = self.groupings[self._proposed]
        self._rates.setdefault(grouping, []).append(rate)
        self._with[grouping] = self._proposed

    def _new(self, sizes: Iterable[int]) -> Iterator[int]:
        """Yield sizes with a grouping that has no trial yet when their turn comes."""
        return (nbytes for nbytes in sizes if self.groupings[nbytes] not in self._rates)

    # ---- searches: sizes in the order in which they are to be tried

    def _grid(self) -> Iterator[int]:
        last, count = len(self.sizes) - 1, max(2, self._tuned.trials - 1)
        yield from self._new(self.sizes[round(last * place / (count - 1))] for place in range(count))

    def _random(self) -> Iterator[int]:
        yield from self._new(random.Random(self._tuned.seed).sample(self.sizes, len(self.sizes)))

    def _bayes(self) -> Iterator[int]:
        alike: dict[Hashable, list[int]] = {}
        for nbytes in self.sizes:
            alike.setdefault(self.groupings[nbytes], []).append(nbytes)
        middle = {grouping: math.log2(sizes[0] * sizes[-1]) / 2 for grouping, sizes in alike.items()}
        last_new = self._tuned.trials - min(AGAIN, self._tuned.trials // 3)
        while (left := [grouping for grouping in alike if grouping not in self._rates]) and self.tried < last_new:
            first = self._rate(next(iter(self._rates)))
            seen = {middle[grouping]: self._rate(grouping) / first for grouping in self._rates}
            best, found = max(seen.values()), _predict(seen, [middle[grouping] for grouping in left])
            if max(_improvement(mean - best, std) for mean, std in found) < STOP * best:
                break
            promises = [_improvement(mean - best - XI, std) for mean, std in found]
            sizes = alike[left[promises.index(max(promises))]]
            yield sizes[len(sizes) // 2]
        while len(self._rates) > 1 and len(self._rates[self._best]) < LOOKS:
            yield self.best


def _improvement(gain: float, std: float) -> float:
    """Return the expected improvement: the mean of max(0, x) for a normal x of mean `gain` and deviation `std`."""
    z = gain / max(std, 1e-12)
    return gain * (1 + math.erf(z / math.sqrt(2))) / 2 + std * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _predict(seen: Mapping[float, float], places: Sequence[float]) -> list[tuple[float, float]]:
    """Return mean and deviation of the throughput at each place, from the trials `seen`. A place is log2 of a size."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(_VARIANCE, (_VARIANCE, 1000.0)) * Matern(_OCTAVES, length_scale_bounds="fixed", nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=_NOISE**2)
    center = sum(seen.values()) / len(seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few points often put the variance at its bound
        process.fit([[place] for place in seen], [rate - center for rate in seen.values()])
        means, deviations = process.predict([[place] for place in places], return_std=True)
    return [(float(mean) + center, float(std)) for mean, std in zip(means, deviations, strict=True)]


def spaced(low: int, high: int, count: int) -> list[int]:
    """Return `count` whole numbers from `low` to `high`, evenly spaced on a logarithmic scale.

    >>> spaced(1, 100, 3)
    [1, 10, 100]
    """
    return [round(low * (high / low) ** (place / (count - 1))) for place in range(count)]


def check_library() -> None:
    """Load scikit-learn, which computes the Gaussian process. Raises PlanError if scikit-learn is missing."""
    try:
        import sklearn.gaussian_process  # noqa: F401
    except ImportError as error:
        raise PlanError(
            f"search='bayes' needs scikit-learn, which cannot be loaded ({error}). Run pip install scikit-learn on every "
            "node, or use search='random' or search='grid'."
        ) from error
