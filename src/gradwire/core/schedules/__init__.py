"""Schedules: when the phases of a bucket run. Frozen data for planner, simulator and engine.

Another package adds a schedule with one class: a frozen subclass of `Schedule` with a `kind` of its own. The class is an entry
point of the group `gradwire.schedules`, and its `engine` names the class that runs the schedule.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import msgspec

from gradwire.core import entry_points
from gradwire.core.checks import flags, freeze, near, number, show, under, whole, word
from gradwire.core.entry_points import SCHEDULES
from gradwire.core.schedules.base import Schedule
from gradwire.core.schedules.delayed import Delayed
from gradwire.core.specs.base import check_momentum
from gradwire.core.strict import convert
from gradwire.errors import FormatError, PlanError

__all__ = [
    "Backward", "Delayed", "LocalSteps", "Nesterov", "Pipelined", "Schedule", "as_schedule", "required_fields",
    "schedule_class", "schedule_kinds",
]  # fmt: skip


class Backward(Schedule, frozen=True, tag="backward"):
    """Both phases as soon as the bucket's gradients are ready: wait-free backpropagation."""

    engine: ClassVar[str] = "gradwire.engine.schedules.backward:BackwardSchedule"
    lends_gradients: ClassVar[bool] = True


class Pipelined(Schedule, frozen=True, tag="pipelined", repr_omit_defaults=True):
    """The reduce phase in backward, the gather phase in the next forward (DeAR).

    >>> Pipelined(), Pipelined(shard_optimizer=True)
    (Pipelined(), Pipelined(shard_optimizer=True))
    """

    omit_at_default: ClassVar[tuple[str, ...]] = ("shard_optimizer",)
    gathers_in_forward: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    lends_gradients: ClassVar[bool] = True

    shard_optimizer: bool = False
    """Whether each rank updates only its shard of every bucket and keeps only that shard of the optimizer's state. The gather
    phase then sends parameters in place of gradients (ZeRO stage 1; Rajbhandari et al. 2020, section 5). True: 1/ranks of the
    optimizer's state, the same bytes on the wire, no rank holds the whole mean gradient."""

    def __post_init__(self) -> None:
        flags(self, "shard_optimizer")

    @property
    def engine(self) -> str:
        if self.shard_optimizer:
            return "gradwire.engine.schedules.sharded:ShardedSchedule"
        return "gradwire.engine.schedules.pipelined:PipelinedSchedule"

    @property
    def shards_optimizer(self) -> bool:
        return self.shard_optimizer


class Nesterov(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer optimizer of `LocalSteps`: SGD with Nesterov momentum, computed as torch.optim.SGD(nesterov=True) does.

    The defaults are DiLoCo's values. `LocalSteps` does not use them by default.

    >>> Nesterov()
    Nesterov(lr=0.7, momentum=0.9)
    >>> Nesterov(radius=0.25)
    Nesterov(lr=0.7, momentum=0.9, radius=0.25)
    """

    omit_at_default: ClassVar[tuple[str, ...]] = ("radius",)

    lr: float = 0.7
    """Learning rate of the outer step. 1 with no momentum: the new global weights are the mean of the local ones."""
    momentum: float = 0.9
    """Momentum of the outer step, below 1. 0: plain SGD."""
    radius: float | None = None
    """A trust region: the most that a step ends away from the mean of the local weights, as a part of the way from the global
    weights to that mean. Less: nearer to the mean. None: as far as rate and momentum say. The length is that of all elements
    that a rank exchanges at a time. A step needs a copy of these gradients."""

    def __post_init__(self) -> None:
        number("lr", self.lr, "the learning rate of the outer step", positive=True)
        check_momentum(self.momentum, FormatError)
        if self.radius is not None:
            number("radius", self.radius, "the distance from the mean, as a part of the mean's own step", positive=True)

    def __repr__(self) -> str:
        region = "" if self.radius is None else f", radius={self.radius}"
        return f"Nesterov(lr={self.lr}, momentum={self.momentum}{region})"


SECOND_MOMENTS = "mean", "own"
_MEAN = Nesterov(lr=1.0, momentum=0.0)
"""The outer step with it makes the global weights the mean of the local ones."""


class LocalSteps(Schedule, frozen=True, tag="local", repr_omit_defaults=True):
    """Each rank trains alone; after every H-th step ranks average their changes of weights (DiLoCo; Douillard et al. 2023).

    The optimizer of the script steps a rank's own weights L with the rank's own gradients. W are the global weights, the same on
    all ranks. After every H-th step:

        W <- outer step by the mean over ranks of the (W - L) that were sent
        L <- L + mixing * (W - L)

    With `delay` the mean is sent while that many more steps compute, and with `fragments` each part of the model has an exchange
    of its own, at its own time in the period (Streaming DiLoCo; Douillard et al. 2025, section 2).

    By default W becomes the mean of the local weights. `LocalSteps.diloco` has an outer optimizer with momentum.

    The second moment of Adam and its kin is kept near that of the ranks' mean gradient, which it has in synchronous training. A
    rank's own gradients have more noise, and make steps shorter. Nothing is sent for it.

    >>> LocalSteps(every=100, outer=Nesterov(lr=0.4))
    LocalSteps(every=100, outer=Nesterov(lr=0.4, momentum=0.9))
    """

    omit_at_default: ClassVar[tuple[str, ...]] = ("fragments", "delay", "mixing", "steps_of_ranks")
    engine: ClassVar[str] = "gradwire.engine.schedules.local:LocalSchedule"
    needs_optimizer: ClassVar[bool] = True
    costs_accuracy: ClassVar[bool] = True
    sends_weights: ClassVar[bool] = True
    sends_at_end: ClassVar[bool] = True

    every: int = 30
    """Local steps from one exchange to the next (H). More: fewer bytes, ranks drift further apart."""
    outer: Nesterov = _MEAN
    """The optimizer of the global weights. The default makes them the mean of the local weights. Files always name it."""
    fragments: int = 1
    """Parts of the model that are exchanged apart, one after another in each period. More: a lower peak of bytes."""
    delay: int = 0
    """Local steps that run during an exchange before its mean is used. More: slower links are hidden, staler means."""
    mixing: float = 1.0
    """The share of the global weights in those of the next local step. 1: they alone. Less: a part of the rank's own stays."""
    steps_of_ranks: tuple[int, ...] = ()
    """For each rank its local steps from one exchange to the next; the largest is `every`. Fewer on a slow rank: nobody waits
    for it. Empty: `every` on all ranks. `with_shares` makes them of measured speeds."""
    second_moment: str = "mean"
    """Whose gradients the second moment of Adam, AdamW, NAdam and RAdam is of. "mean": the ranks' mean gradient, estimated after
    each local step from the rank's own first and second moment. "own": the rank's own gradient, as torch computes it, and what
    files without this field mean: gradwire 0.3 wrote them, and trained so."""

    def __post_init__(self) -> None:
        whole("every", self.every, "the local steps from one exchange to the next", low=1)
        word("second_moment", self.second_moment, SECOND_MOMENTS)
        if not isinstance(self.outer, Nesterov):
            raise FormatError(f"outer is {show(self.outer)}: it must be gw.Nesterov(lr=..., momentum=..., radius=...).")
        if self.outer == _MEAN:  # repr() leaves out a default by its identity
            msgspec.structs.force_setattr(self, "outer", _MEAN)
        freeze(self, "steps_of_ranks")
        for rank, steps in enumerate(self.steps_of_ranks):
            whole(f"steps_of_ranks[{rank}]", steps, "local steps of this rank, at most `every`", low=1, high=self.every)
        if max(self.steps_of_ranks, default=self.every) != self.every:
            raise FormatError(
                f"every and steps_of_ranks are {self.every} and {show(list(self.steps_of_ranks))}: the largest must be `every`."
            )
        fewest = min(self.steps_of_ranks, default=self.every)
        whole("fragments", self.fragments, "parts of the model, at most the local steps of each rank", low=1, high=fewest)
        what = "local steps beside an exchange, at most the local steps of each rank divided by fragments"
        whole("delay", self.delay, what, high=fewest // self.fragments)
        number("mixing", self.mixing, "the share of the global weights", positive=True)
        if self.mixing > 1:
            raise FormatError(f"mixing is {show(self.mixing)}: it must be a share, above 0 and at most 1.")

    @classmethod
    def diloco(cls, every: int = 500) -> "LocalSteps":
        """The values of DiLoCo (Douillard et al. 2023), whose outer optimizer has momentum.

        They need many ranks and a long run: the paper has 8 ranks, 500 steps between exchanges and more than 100 exchanges. In
        the long run an outer step counts 0.7 / (1 - 0.9) = 7 times what the ranks learned. In short runs, and with a small
        `every`, the loss ends above that of the mean of weights (docs/local_steps.md).

        >>> LocalSteps.diloco()
        LocalSteps(every=500, outer=Nesterov(lr=0.7, momentum=0.9), second_moment='own')
        """
        return cls(every, Nesterov(), second_moment="own")

    @classmethod
    def streaming(cls, every: int = 100, fragments: int = 8, delay: int = 5) -> "LocalSteps":
        """The values of Streaming DiLoCo (Douillard et al. 2025). Its outer gradients have 4 bits: `gw.QSGD(bits=4)`."""
        return cls(every, Nesterov(lr=0.4, momentum=0.9), fragments, delay, mixing=0.5, second_moment="own")

    @classmethod
    def sparseloco(cls, every: int = 30) -> "LocalSteps":
        """The values of SparseLoCo (Sarfi et al. 2025), where error feedback takes the place of outer momentum."""
        return cls(every, second_moment="own")

    def with_shares(self, shares: Sequence[float]) -> "LocalSteps":
        """Return the schedule in which each rank makes local steps in proportion to its share, and the one with the largest share
        makes `every`. `handle.decision.batch_share` has the shares that auto measured, and any numbers above 0 will do.

        With batches of equal size nobody then waits for a slow rank. A rank makes at least as many steps as `fragments` and
        `delay` need.

        >>> LocalSteps(every=30).with_shares([0.5, 0.25, 0.25])
        LocalSteps(steps_of_ranks=(30, 15, 15))
        """
        if not shares:
            raise FormatError("shares is []: each rank has a share.")
        for rank, share in enumerate(shares):
            number(f"shares[{rank}]", share, "the share of a rank", positive=True)
        fewest = self.fragments * max(1, self.delay)
        steps = (max(fewest, round(self.every * share / max(shares))) for share in shares)
        return msgspec.structs.replace(self, steps_of_ranks=tuple(steps))

    def steps_of(self, rank: int) -> int:
        """Return the local steps of a rank from one exchange to the next."""
        return self.steps_of_ranks[rank] if self.steps_of_ranks else self.every

    @property
    def hides_exchange(self) -> bool:
        return self.delay > 0

    @property
    def overlapped_steps(self) -> int:
        return self.delay

    @property
    def period(self) -> int:
        return self.every

    @property
    def exchanges(self) -> int:
        return self.fragments

    @property
    def fewest_buckets(self) -> int:
        return self.fragments

    @property
    def unequal_steps(self) -> bool:
        return len({*self.steps_of_ranks}) > 1

    def sent_after(self, step: int, numels: Sequence[int]) -> Sequence[int]:
        begins = [self.begins_after(place) - 1 for place in range(self.fragments)]
        return self.fragments_of(numels)[begins.index(step)] if step in begins else ()

    def begins_after(self, exchange: int, rank: int | None = None) -> int:
        every = self.every if rank is None else self.steps_of(rank)
        period, place = divmod(exchange, self.fragments)
        return period * every + (place + 1) * every // self.fragments

    def fragments_of(self, numels: Sequence[int]) -> list[range]:
        """The consecutive buckets of each fragment. All fragments have nearly the same number of elements.

        >>> LocalSteps(fragments=2).fragments_of([30, 10, 10, 30])
        [range(0, 2), range(2, 4)]
        """
        if len(numels) < self.fragments:
            raise PlanError(
                f"fragments is {self.fragments} and the plan has {len(numels)} buckets: a fragment is at least one bucket. Use "
                f"fragments={len(numels)}, or a policy with smaller buckets (bucket_bytes)."
            )
        ends, cuts = [0, *accumulate(numels)], [0]
        for left in range(self.fragments - 1, 0, -1):
            target = ends[-1] * (self.fragments - left) / self.fragments
            possible = range(cuts[-1] + 1, len(numels) - left + 1)
            cuts.append(min(possible, key=lambda cut: abs(ends[cut] - target)))
        return [range(*pair) for pair in pairwise([*cuts, len(numels)])]


_BY_WORD: dict[str, type[Schedule]] = {"backward": Backward, "pipelined": Pipelined, "delayed": Delayed, "local": LocalSteps}
"""All schedules by their tags; `schedule_class` adds those of other packages."""


def schedule_kinds() -> tuple[str, ...]:
    """The names of all schedules, with those of other packages."""
    return (*_BY_WORD, *(name for name in entry_points.names(SCHEDULES) if name not in _BY_WORD))


def schedule_class(kind: str) -> type[Schedule]:
    """The class of a schedule by its name. Raises FormatError with the package if the class cannot be loaded."""
    if kind not in _BY_WORD:
        _BY_WORD[kind] = entry_points.load(SCHEDULES, kind, lambda made: _usable(made, kind), FormatError)
    return _BY_WORD[kind]


def required_fields(kind: str) -> list[str]:
    """The fields of a schedule that have no default. Such a schedule cannot be made of its name alone."""
    return [field.name for field in msgspec.structs.fields(schedule_class(kind)) if field.required]


def _usable(made: Any, kind: str) -> type[Schedule]:
    if not (isinstance(made, type) and issubclass(made, Schedule) and made.__struct_config__.tag == kind):
        raise FormatError(f"{show(made)} is not a subclass of gradwire.core.schedules.Schedule with tag={kind!r}.")
    return made


def as_schedule(value: object) -> Schedule:
    """The schedule of a `Schedule`, of a name or of a JSON object. Raises FormatError for any other value.

    >>> as_schedule("backward"), as_schedule({"kind": "delayed", "k": 2})
    (Backward(), Delayed(k=2))
    """
    if isinstance(value, Schedule):
        fewest = f"fewest_buckets of {type(value).__name__}"
        whole(fewest, value.fewest_buckets, "the least number of buckets that the schedule needs", low=1)
        return value
    if isinstance(value, type) and issubclass(value, Schedule):
        raise FormatError(f"schedule is the class {value.__name__}: it must be an object. Write {value.__name__}(...).")
    kind = value.get("kind") if isinstance(value, Mapping) else value
    # to list other packages takes milliseconds, in every process
    if not isinstance(kind, str) or (kind not in _BY_WORD and kind not in schedule_kinds()):
        kinds = schedule_kinds()
        raise FormatError(
            f"schedule is {show(value)}: it must be Backward(), Pipelined(), Delayed(...) or LocalSteps(...), one of the words "
            f'{", ".join(kinds)}{near(kind, kinds)}, or in JSON an object such as {{"kind": "backward"}}.'
            f"{entry_points.absent(SCHEDULES, kind)}"
        )
    if isinstance(value, str):
        if missing := required_fields(kind):
            name = schedule_class(kind).__name__
            raise FormatError(
                f"schedule is {kind!r}, and {missing[0]} of {name} has no default. Write schedule={name}({missing[0]}=...), or "
                "give each field a default in the class."
            )
        return schedule_class(kind)()
    if kind == "local" and isinstance(value, Mapping):
        value = {"second_moment": "own", **value}
    with under("schedule"):
        return convert(value, schedule_class(kind))
