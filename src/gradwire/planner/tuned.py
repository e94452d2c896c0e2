"""A size of buckets that is tuned on the live job: what a user asks for. The engine of it is in `gradwire.auto`."""

from dataclasses import KW_ONLY, dataclass

import msgspec

from gradwire.core.checks import show, whole, word
from gradwire.errors import PlanError
from gradwire.planner.policy import Policy

SEARCHES = ("bayes", "random", "grid")
"""bayes: Bayesian optimisation. random: sizes drawn at random. grid: sizes spaced evenly. All on a logarithmic scale."""
_MB = 2**20


@dataclass(frozen=True)
class Tuned:
    """A policy whose `bucket_bytes` is found on the live job, by the throughput of real steps (DeAR, section IV-B).

    As `plan=` of `gradwire.parallelize`, with a policy of any specs and schedule. All else of the policy stays as it is, its
    `edge_bytes` too: with `edge_bytes=100 * 2**20` all buckets are alike, as DeAR's are. Raises PlanError for a value outside its
    range.

    >>> from gradwire.core import Identity
    >>> from gradwire.planner.policy import Uniform
    >>> Tuned(Uniform(Identity(), schedule="pipelined"), trials=10).start_bytes
    26214400
    """

    policy: Policy
    """What is tuned. Its own `bucket_bytes` must be left out."""
    _: KW_ONLY
    search: str = "bayes"
    """One of SEARCHES. bayes needs scikit-learn: pip install scikit-learn."""
    trials: int = 20
    """Trials at most, the first one included. More: closer to the best, more steps under worse sizes. Sizes that make the same
    buckets are one; bayes keeps a few trials to try again what looks best."""
    start_bytes: int = 25 * _MB
    """The size that is tried first, and that runs until then."""
    low_bytes: int = _MB
    """The smallest size that may be tried."""
    high_bytes: int = 100 * _MB
    """The largest."""
    trial_steps: int = 10
    """Steps of a trial that count. More: less noise, longer trials."""
    discard_steps: int = 2
    """Steps before these that do not count: memory is new."""
    seed: int = 0
    """Of what is random in a search. The same on all ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise PlanError(
                f"policy is {show(self.policy)}, a {type(self.policy).__name__}: what is tuned is the bucket_bytes of a policy. "
                "Write gw.Tuned(gw.Uniform(spec, schedule=...))."
            )
        if self.policy.bucket_bytes is not None:
            raise PlanError(
                f"bucket_bytes of the policy is {self.policy.bucket_bytes}, and it is what is tuned. Leave it out, and write "
                f"start_bytes={self.policy.bucket_bytes} to begin with it."
            )
        word("search", self.search, SEARCHES, error=PlanError)
        whole("trials", self.trials, "sizes that are tried", low=1, error=PlanError)
        whole("low_bytes", self.low_bytes, "the smallest size of a bucket", low=1, error=PlanError)
        whole("high_bytes", self.high_bytes, "the largest size of a bucket", low=self.low_bytes + 1, error=PlanError)
        limits = {"low": self.low_bytes, "high": self.high_bytes}
        whole("start_bytes", self.start_bytes, "the size that is tried first", **limits, error=PlanError)
        whole("trial_steps", self.trial_steps, "steps of a trial that count", low=1, error=PlanError)
        whole("discard_steps", self.discard_steps, "steps of a trial that do not count", error=PlanError)
        whole("seed", self.seed, "a seed", high=2**32 - 1, error=PlanError)

    def with_bytes(self, nbytes: int) -> Policy:
        """The policy with buckets of so many bytes."""
        return msgspec.structs.replace(self.policy, bucket_bytes=nbytes)
