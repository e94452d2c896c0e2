"""Which bucket size to try next, from the throughput under those that were tried. Pure: talks to nobody.

Buckets consist of whole tensors, so most sizes make the same buckets as others: the search is over the different groupings. The
Bayesian search keeps some trials to try the best of them again, since the best of many noisy trials is often one that was lucky.

>>> from gradwire.core import Identity
>>> from gradwire.planner import Uniform
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
from typing import NamedTuple

from gradwire.errors import PlanError
from gradwire.planner.tuned import Tuned

__all__ = ["SizeSearch", "check_library", "spaced"]

XI = 0.1
"""How much better than the best a size should be to count as better, in units of the first trial's throughput (DeAR)."""
STOP = 0.01
"""The search ends when no size promises to be better than the best by more than this part of it."""
_SIZES = 64
"""Sizes that are looked at, evenly spaced on a logarithmic scale: 7 % from one to the next from 1 to 100 MB."""
AGAIN = 3
"""Trials that the Bayesian search keeps for what looks best, of ten or more; of fewer a third."""
LOOKS = 3
"""Trials of the best after which it is believed."""
_NOISE = 0.02
"""Deviation of a trial's throughput, in units of the first's."""
_OCTAVES, _VARIANCE = 1.0, 0.1
"""Of throughput as a function of the size's logarithm: how far one size tells of another, and how much sizes differ at least.
Fitted to few trials both go astray: the search ends after two or three that happen to be alike."""


class SizeSearch:
    """A search in progress.

    group: what tells the buckets of a size from those of another, such as the digest of the plan that it makes.
    """

    def __init__(self, tuned: Tuned, group: Callable[[int], Hashable]) -> None:
        self._tuned = tuned
        self.sizes = sorted({*spaced(tuned.low_bytes, tuned.high_bytes, _SIZES), tuned.start_bytes})
        self.groupings = {nbytes: group(nbytes) for nbytes in self.sizes}
        """By size."""
        self._rates: dict[Hashable, list[float]] = {}
        """Throughput in each trial of a grouping, in the order of their first trials."""
        self._with: dict[Hashable, int] = {}
        """The size with which a grouping was tried."""
        self._proposed = tuned.start_bytes
        self._next = _SEARCHES[tuned.search](self)

    @property
    def tried(self) -> int:
        """Trials so far."""
        return sum(map(len, self._rates.values()))

    @property
    def best(self) -> int:
        """The size with the highest throughput so far, by the mean of its trials."""
        return self._with[self._best]

    @property
    def _best(self) -> Hashable:
        return max(self._rates, key=self._rate)

    def _rate(self, grouping: Hashable) -> float:
        """Steps over the time they took in all trials."""
        return harmonic_mean(self._rates[grouping])

    def propose(self) -> int | None:
        """The size to try next; None when the search is over."""
        if self.tried == 0:
            return self._proposed
        if self.tried >= self._tuned.trials:
            return None
        proposed = next(self._next, None)
        self._proposed = proposed or self._proposed
        return proposed

    def took(self, rate: float) -> None:
        """Throughput under the size that was proposed last; any unit, above 0."""
        grouping = self.groupings[self._proposed]
        self._rates.setdefault(grouping, []).append(rate)
        self._with[grouping] = self._proposed

    def _new(self, sizes: Iterable[int]) -> Iterator[int]:
        """Those whose grouping is not known when their turn comes."""
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
            if max(found.improvement(best)) < STOP * best:
                break
            promises = found.improvement(best + XI)
            sizes = alike[left[promises.index(max(promises))]]
            yield sizes[len(sizes) // 2]
        while len(self._rates) > 1 and len(self._rates[self._best]) < LOOKS:
            yield self.best


_SEARCHES: Mapping[str, Callable[[SizeSearch], Iterator[int]]] = {
    "bayes": SizeSearch._bayes,
    "random": SizeSearch._random,
    "grid": SizeSearch._grid,
}


class _Predicted(NamedTuple):
    """What the Gaussian process says of places that were not tried."""

    means: Sequence[float]
    deviations: Sequence[float]

    def improvement(self, over: float) -> list[float]:
        """Expected improvement over a value, of each place."""
        return [_improvement(mean - over, std) for mean, std in zip(self.means, self.deviations, strict=True)]


def _improvement(gain: float, std: float) -> float:
    """The mean of the part above 0 of a normal number with this mean and deviation."""
    z = gain / max(std, 1e-12)
    return gain * (1 + math.erf(z / math.sqrt(2))) / 2 + std * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _predict(seen: Mapping[float, float], places: Sequence[float]) -> _Predicted:
    """`seen` are throughputs, in units of the first, by place: the logarithm of a size to base 2."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(_VARIANCE, (_VARIANCE, 1000.0)) * Matern(_OCTAVES, length_scale_bounds="fixed", nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=_NOISE**2)
    center = sum(seen.values()) / len(seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a variance at its bound, which few points make usual
        process.fit([[place] for place in seen], [rate - center for rate in seen.values()])
        means, deviations = process.predict([[place] for place in places], return_std=True)
    return _Predicted([float(mean) + center for mean in means], [float(std) for std in deviations])


def spaced(low: int, high: int, count: int) -> list[int]:
    """So many whole numbers from one to the other, evenly spaced on a logarithmic scale.

    >>> spaced(1, 100, 3)
    [1, 10, 100]
    """
    return [round(low * (high / low) ** (place / (count - 1))) for place in range(count)]


def check_library() -> None:
    """Load what the Gaussian process is computed with. Raises PlanError if it is missing."""
    try:
        import sklearn.gaussian_process  # noqa: F401
    except ImportError as error:
        raise PlanError(
            f"search is 'bayes', and scikit-learn, which it computes with, cannot be loaded ({error}). Run pip install "
            "scikit-learn on every node, or use search='random' or search='grid', which need nothing."
        ) from error
