"""`AdaptiveBits` and `Tuned`: plans that are chosen on the live job. `gradwire.auto` runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from glob import escape
from typing import ClassVar

import msgspec

from gradwire.core import (
    QSGD,
    Backward,
    Document,
    ErrorFeedback,
    Spec,
    TensorInfo,
    as_schedule,
    changed,
    freeze,
    number,
    show,
    whole,
    word,
)
from gradwire.errors import PlanError
from gradwire.plan.policy import Policy, RulesField, ScheduleField, Where, as_rule
from gradwire.plan.schemes import check_scheme

BIT_RULES = ("exact", "time", "kmeans", "linear")
"""exact: the fewest bytes that keep the budget. time: the shortest predicted step that keeps the budget. kmeans, linear: CGX's
two rules (section 5), for comparison."""
SEARCHES = ("bayes", "random", "grid")
"""bayes: Bayesian optimisation. random: sizes drawn at random. grid: sizes spaced evenly. All on a logarithmic scale."""
_MB = 2**20


class AdaptiveBits(Document, frozen=True, kw_only=True):
    """QSGD with 2 to 8 bits by tensor, chosen again and again from errors measured on the gradients (CGX section 5).

    Pass it as `plan=` to `gradwire.parallelize`, with any schedule that lets buckets change. If an exchange also encodes the sum,
    as in two phases, the error of that encode counts too. Raises PlanError for a value outside its range.

    >>> AdaptiveBits(alpha=1.5)
    AdaptiveBits(alpha=1.5)
    """

    what: ClassVar[str] = "adaptive bits"
    remedy: ClassVar[str] = "Write it from the fields of gradwire.AdaptiveBits."
    omit_at_default: ClassVar[tuple[str, ...]] = ("rules", "blocks", "schedule", "scheme", "feedback", "accumulate")

    alpha: float = 2.0
    """The error allowed, over the error with 4 bits for every tensor. 1 or more; the paper uses 1.5 to 3. Larger: fewer bytes."""
    period: int = 200
    """Steps from one choice to the next. Fewer: closer to the gradients, more time spent on measuring."""
    rule: str = "exact"
    """One of BIT_RULES. exact: the fewest bytes; the bits follow from the gradients alone, so every run has the same bits. time:
    the shortest predicted step; bytes count as far as the step waits for them. For this rule gradwire measures the times of the
    job, its links and the compressors once, in two of the first steps; `state_dict()` holds the times. Only in the schedules
    backward and pipelined. kmeans, linear: CGX's own rules."""
    block: int = 128
    """Elements that share one scale."""
    blocks: Sequence[int] = ()
    """Other sizes of a tensor's blocks. The rule exact chooses any pair of bits and block: about 1 % fewer bytes at the same
    error, but more measurements, and more buckets: tensors with blocks of different sizes cannot share one. kmeans and linear
    give the least sensitive tensors the fewest bits in the largest blocks, and the most sensitive ones the most bits in the
    smallest blocks, as the paper does. Not for the rule time."""
    rules: RulesField = ()
    """Specs of chosen tensors, such as ("*embed*", gw.ErrorFeedback(gw.TopK(0.01))); see `gradwire.Policy.rules`. Vectors that no
    rule matches stay uncompressed."""
    schedule: ScheduleField = Backward()
    """The policy's schedule; see `gradwire.Policy.schedule`."""
    scheme: str | None = None
    """The policy's scheme; see `gradwire.Policy.scheme`."""
    feedback: bool = False
    """Whether to put `gradwire.ErrorFeedback` around each QSGD, which then rounds to nearest. Error feedback adds the error of an
    encode to the next gradient. Tensors keep their residuals when their bits change."""
    accumulate: int = 1
    """Steps whose gradients are added up before their errors are measured, as in CGX. More: less noise, and during these steps a
    copy of the gradients and of their means."""

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "the error allowed, over that of 4 bits", error=PlanError)
        if self.alpha < 1:
            raise PlanError(
                f"alpha is {self.alpha}: not even 4 bits for every tensor keep this error. Give 1 or more; 2 is usual."
            )
        whole("period", self.period, "steps from one choice of bits to the next", low=2, error=PlanError)
        word("rule", self.rule, BIT_RULES, error=PlanError)
        msgspec.structs.force_setattr(self, "schedule", as_schedule(self.schedule))
        whole("accumulate", self.accumulate, "steps of gradients added up", low=1, error=PlanError)
        if self.measured_steps > self.period:
            raise PlanError(
                f"accumulate is {self.accumulate} and schedule is {self.schedule!r}, so measuring takes {self.measured_steps} "
                f"steps, but period is {self.period}: there is no choice in each period. Make period longer, or accumulate fewer."
            )
        if self.rule == "time" and self.measured_steps == self.period:
            raise PlanError(
                f"rule is 'time' and accumulate is {self.accumulate}, so errors are measured in all {self.period} steps of each "
                "period: no step is left in which the times of the job can be measured. Make period longer, accumulate fewer, or "
                "use rule='exact'."
            )
        schedule = as_schedule(self.schedule)
        if self.rule == "time" and (schedule.hides_exchange or schedule.sends_weights):
            raise PlanError(
                f"rule is 'time' and schedule is {schedule!r}: no exchange of this schedule hides behind the backward that it "
                "sends, so every byte counts the same. Use rule='exact'."
            )
        if self.scheme is not None:
            check_scheme(self.scheme)
        if not isinstance(self.feedback, bool):
            raise PlanError(f"feedback is {show(self.feedback)}: it must be True or False.")
        freeze(self, "rules", "blocks")
        msgspec.structs.force_setattr(self, "rules", tuple(as_rule(i, rule) for i, rule in enumerate(self.rules)))
        self.ways((4,))
        if len({self.block, *self.blocks}) <= len(self.blocks):
            raise PlanError(f"blocks is {self.blocks} and block is {self.block}: a size occurs twice. Remove it.")
        if self.blocks and self.rule == "time":
            raise PlanError(
                f"blocks is {self.blocks}, but the rule 'time' chooses bits only. Use another rule, or leave blocks out."
            )

    def __repr__(self) -> str:
        return f"AdaptiveBits({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"

    @property
    def measured_steps(self) -> int:
        """Number of steps from the first measured one to the last. With fragments, every fragment must be measured."""
        return self.accumulate * as_schedule(self.schedule).fewest_buckets

    def spec(self, bits: int, block: int) -> QSGD | ErrorFeedback:
        """The spec of a tensor with `bits` bits, in blocks of `block` elements."""
        inner = QSGD(bits=bits, block=block)
        return ErrorFeedback(inner) if self.feedback else inner

    def ways(self, widths: Sequence[int]) -> tuple[QSGD | ErrorFeedback, ...]:
        """The specs that a tensor may get with these numbers of bits. Specs with `block` come first.

        >>> AdaptiveBits(blocks=(256,)).ways((2, 4))[2:]
        (QSGD(bits=2, block=256), QSGD(bits=4, block=256))
        """
        return tuple(self.spec(bits, block) for block in (self.block, *self.blocks) for bits in widths)

    def ladder(self, widths: Sequence[int]) -> tuple[int, ...]:
        """The ways that CGX's rules give to tensors, from the least sensitive to the most sensitive ones, as places in `ways`.
        Along it bits rise and blocks shrink.

        >>> adaptive = AdaptiveBits(block=128, blocks=(1024, 64), rule="kmeans")
        >>> [(way.bits, way.block) for way in (adaptive.ways((2, 4, 8))[place] for place in adaptive.ladder((2, 4, 8)))]
        [(2, 1024), (4, 128), (8, 64)]
        """
        blocks = (self.block, *self.blocks)
        falling = sorted(range(len(blocks)), key=lambda place: -blocks[place])
        last = max(1, len(widths) - 1)
        chosen = [falling[round(step * (len(blocks) - 1) / last)] for step in range(len(widths))]
        return tuple(block * len(widths) + step for step, block in enumerate(chosen))

    def policy_of(self, specs: Mapping[str, Spec]) -> Policy:
        """The policy that gives tensors the specs in `specs`, by name, and all other tensors the specs of `policy`."""
        return msgspec.structs.replace(self.policy, rules=(*((escape(name), spec) for name, spec in specs.items()), *self.rules))

    def rules_match(self, tensor: TensorInfo) -> bool:
        """Whether a rule gives the tensor its spec."""
        return any((each if isinstance(each, Where) else Where(each)).matches(tensor) for each, _ in self.rules)

    @property
    def policy(self) -> Policy:
        """The policy before the first measurement: 4 bits for every tensor."""
        return Policy(default=self.ways((4,))[0], rules=self.rules, schedule=self.schedule, scheme=self.scheme)


@dataclass(frozen=True)
class Tuned:
    """A policy whose `bucket_bytes` is found on the live job, by the throughput of real steps (DeAR, section IV-B).

    Pass it as `plan=` to `gradwire.parallelize`, with a policy of any specs and schedule. The rest of the policy stays unchanged.
    With the policy's `edge_bytes=100 * 2**20` all buckets are alike, as DeAR's are.

    Raises PlanError for a value outside its range.

    >>> from gradwire.core import Identity
    >>> from gradwire.plan.policy import Uniform
    >>> Tuned(Uniform(Identity(), schedule="pipelined"), trials=10).start_bytes
    26214400
    """

    policy: Policy
    """The policy that is tuned. Leave out its own `bucket_bytes`."""
    _: KW_ONLY
    search: str = "bayes"
    """One of SEARCHES. bayes needs scikit-learn: pip install scikit-learn."""
    trials: int = 20
    """Most trials, the first one included. More: closer to the best size, more steps under worse sizes. Sizes that make the same
    buckets count as one size. bayes uses its last trials to repeat the sizes that look best."""
    start_bytes: int = 25 * _MB
    """The first size. The job runs with it until the first trial."""
    low_bytes: int = _MB
    """The smallest size that may be tried."""
    high_bytes: int = 100 * _MB
    """The largest size that may be tried."""
    trial_steps: int = 10
    """Number of measured steps of a trial. More: less noise, longer trials."""
    discard_steps: int = 2
    """Number of steps at the start of a trial that do not count, since their memory is new."""
    seed: int = 0
    """Seed of the search's random choices. The same on all ranks."""

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
        """The policy with buckets of `nbytes` bytes."""
        return msgspec.structs.replace(self.policy, bucket_bytes=nbytes)
