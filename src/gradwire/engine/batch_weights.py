"""The weights of ranks in a mean: how many samples each rank's batch has (`Handle.weight`).

A rank sends its gradient g times n / u. Here n is its number of samples, and u is a number that all ranks know already. The
reports at the end of a step bring the n of all ranks, so all ranks then multiply the sum by u over the mean of n. The result is
the sum of n * g over the sum of n.

- In the first step ranks exchange n before they send, and u is its mean. So they do in each step of a plan with residuals: a
  residual is a part of earlier means, and the factor at the end would make it other than it was.
- Else u is the mean of n in the step before. Where batches do not change, nothing is multiplied at the end.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from gradwire.core import show
from gradwire.engine.control import NOT_WEIGHED, RankReports
from gradwire.errors import StepStateError
from gradwire.exchange import Exchange
from gradwire.transport import Link, MergedValues, merge_over_ranks


class BatchWeights:
    """The samples of this rank that were not part of a mean yet, and the scale of what ranks send."""

    def __init__(self) -> None:
        self.usual = 1.0
        """The number u, the same on all ranks."""
        self.running = NOT_WEIGHED
        """The weight of this rank in the step that runs, or ran last."""
        self._batch = NOT_WEIGHED
        """The samples since the last step."""
        self._parts: list[float] = []
        """The samples since the last exchange of each fragment, where ranks train alone."""
        self._units = 1.0
        """The u of the residuals."""
        self._part = 1.0
        """The weight of this rank in means if no rank's script gives weights. All ranks know all of them, and their mean is 1."""
        self._by_some = False
        """Whether the last step is void because only some ranks gave weights."""
        self._exchanged: Future[float] | None = None
        """The exchange of the samples before a step sends, while it is under way."""
        self._gave = False
        """Whether a rank gave a weight in the last step that counts; the same on all ranks."""

    @property
    def used(self) -> bool:
        """Whether this rank's script gives weights."""
        return max(self.running, self._batch, *self._parts) != NOT_WEIGHED

    @property
    def is_empty(self) -> bool:
        """Whether the script said that this rank has no samples since the last step."""
        return self._batch == 0

    def add(self, samples: object) -> None:
        """Add the samples of a batch. Raises StepStateError for anything but a finite number of at least 0."""
        try:
            count = float("nan") if isinstance(samples, (str, bytes)) else float(samples)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            count = math.nan
        if not 0 <= count < math.inf or isinstance(samples, bool):
            raise StepStateError(
                f"handle.weight({show(samples)}): a weight is this rank's number of samples or tokens, a finite number of at "
                "least 0. Pass 0 where the rank has no batch."
            )
        self._batch = _sum(self._batch, count)

    def watch_parts(self, count: int, part: float = 1.0) -> None:
        """Ranks train alone, and each of so many parts of the model has exchanges of its own. 0: each step is one exchange.

        part: the weight of this rank without weights of the script; the mean over ranks is 1.
        """
        self._part = part
        if len(self._parts) != count:
            self._parts = [NOT_WEIGHED] * count

    def local_step(self) -> None:
        """A rank that trains alone has made a step with its batch."""
        self._parts = [_sum(part, self._batch) for part in self._parts]
        self._batch = NOT_WEIGHED

    def begin(self, exchange: Exchange, part: int, weighs: bool) -> None:
        """A step of the exchange has begun, with nothing to send yet. The exchange multiplies what this rank sends. `weighs`:
        whether scripts may give weights in this schedule."""
        self._by_some = False
        self.running = self._parts[part] if self._parts else self._batch
        if self._units != self.usual:
            exchange.residuals.scale(self._units / self.usual)
            self._units = self.usual
        learns = self._exchanged is not None  # this rank left the step, and the others know u since then
        if weighs and (exchange.step == 0 or (self._gave and any(spec.state for spec in exchange.plan.specs))):
            own = 0.0 if self.running == NOT_WEIGHED else self.running
            self._exchanged = exchange.lanes.control.submit(partial(_mean_over_ranks, own=own, tag=exchange.lanes.first_tag))
            learns = self.running != NOT_WEIGHED
        if learns:
            with exchange.lanes.told("the weights of all ranks' batches", exchange.step):
                self._learn_usual()
        exchange.weigh(self._part if self.running == NOT_WEIGHED else self.running / self.usual)

    def _learn_usual(self) -> None:
        """Take the mean that ranks exchanged before the step for u. It is there when the reports of the step are."""
        if self._exchanged is not None:
            exchanged, self._exchanged = self._exchanged, None
            self.usual = self._units = exchanged.result() or 1.0

    def sent(self, part: int) -> None:
        """The samples of a part are under way."""
        self._parts[part] = NOT_WEIGHED

    def void(self, reports: RankReports) -> None:
        """The step does not count."""
        self._learn_usual()
        self._by_some = reports.weighed_by_some

    def not_sent(self, part: int) -> None:
        """The exchange of a part did not count: its next one has these samples too. Where only some ranks gave weights, all ranks
        forget the samples so far, so that they agree from the next step on."""
        if self._by_some:
            self._parts = [NOT_WEIGHED] * len(self._parts)
        else:
            self._parts[part] = _sum(self._parts[part], self.running)

    def settle(self, reports: RankReports) -> float:
        """Return the factor of the sums of a step that counts."""
        self._learn_usual()
        if not self._parts:
            self._batch = NOT_WEIGHED
        mean = reports.mean_samples
        self._gave = mean > 0
        if not mean:  # no rank gave a weight, or no rank has a sample and all sent zeros
            return 1.0
        factor = self.usual / mean
        self.usual = mean
        return factor

    def leave(self) -> None:
        """The script left a step in the middle: its batch is not learned from."""
        self._batch = 0.0 if self._parts and self._batch != NOT_WEIGHED else NOT_WEIGHED

    def state(self) -> list[float]:
        """The numbers that a resumed run needs. The second one is negative where no rank gave a weight in the last step."""
        units = self._units if self._gave else -self._units
        return [self.usual, units, *self._parts] if self.usual != 1 or self._gave or self.used else []

    def load(self, numbers: Sequence[float], own: bool, fewer: float) -> None:
        """Go on from what `state` returned. `own`: on this rank. `fewer`: the number of ranks then over that of now. As many
        samples on fewer ranks are more for each: u and the unit of residuals, means over ranks, become those of the new ranks."""
        self.usual, units, *parts = numbers or (1.0, -1.0)
        self._gave, self._units = units > 0, abs(units)
        if numbers:
            self.usual, self._units = fewer * self.usual, fewer * self._units
        self._batch = NOT_WEIGHED
        self._parts = parts if own and len(parts) == len(self._parts) else [NOT_WEIGHED] * len(self._parts)


def _mean_over_ranks(link: Link, own: float, tag: int) -> float:
    return merge_over_ranks(link, MergedValues(sums=(own,)), tag).sums[0] / link.world_size


def _sum(before: float, more: float) -> float:
    if NOT_WEIGHED in (before, more):
        return max(before, more)
    return before + more
