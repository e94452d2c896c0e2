"""The data of the `delayed` schedule: when a bucket is corrected, and what the local update is."""

from collections.abc import Sequence
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from gradwire.core.checks import flags, numbers, show, whole, word
from gradwire.core.schedules.base import Schedule
from gradwire.core.specs import Spec, as_spec
from gradwire.errors import FormatError

if TYPE_CHECKING:
    OptionalSpec = Spec | None
else:
    OptionalSpec = Any


FIRST_K = 5
"""The default k, which the paper advises. With k="auto" it holds until residuals are measured."""
LOCAL_STEPS = ("optimizer", "sgd")
"""optimizer: the step that the optimizer would make next if the rank's own gradient were the mean. sgd: the rate times the
gradient, as in the paper, whatever the optimizer is."""


class Delayed(Schedule, frozen=True, tag="delayed", repr_omit_defaults=True):
    """A local update now, the global update one step later (OD-SGD, CD-SGD; Yu et al., sections 2.2 and 3.2).

    W(i) are the global weights after step i-1. L(i) are a rank's own weights, on which step i computes its gradient g(i):

        L(i+1) = W(i) - local_lr * g(i)
        W(i+1) = W(i) - update(mean over ranks of the sent g(i))

    The exchange of step i runs while step i+1 computes. Steps are counted from 0 after the warm-up. In every k-th step a bucket
    is corrected: its gradient is sent uncompressed, or with the `correction` spec. `stagger` says whether these are other
    steps for other buckets. `k=1` is OD-SGD; `Delayed(k=None, local_update=False)` is BIT-SGD.

    >>> Delayed(k=2, correction={"id": "qsgd", "bits": 8})
    Delayed(k=2, correction=QSGD(bits=8, block=128))
    """

    omit_at_default: ClassVar[tuple[str, ...]] = (
        "correction",
        "flush",
        "warmup_steps",
        "local_lr",
        "local_update",
        "stagger",
        "local_ratio",
        "local_step",
        "warmup_lands",
    )
    engine: ClassVar[str] = "gradwire.engine.schedules.delayed:DelayedSchedule"
    needs_optimizer: ClassVar[bool] = True
    costs_accuracy: ClassVar[bool] = True

    k: int | Literal["auto"] | None = FIRST_K
    """Each bucket is corrected in every k-th step. Smaller: closer to plain SGD, more bytes; None: never corrects. "auto":
    `gradwire.parallelize` chooses it from the residuals of the live job, again and again; a plan has a number."""
    correction: OptionalSpec = None
    """The spec of a correction step; None sends the uncompressed gradient. Fewer bits: fewer bytes, more error."""
    flush: bool = False
    """Whether a correction also sends the residual. True: less lag, a larger jump at corrections. False: the residual waits
    for the next compressed step, as in the paper."""
    warmup_steps: int = 0
    """Synchronous, uncompressed steps at the start. More: closer to plain SGD, no overlap."""
    local_lr: float | None = None
    """Rate of the local update; None: the param_group's, times `local_ratio`. 0: the next step has global weights, one behind."""
    local_update: bool = True
    """Whether there is a local update. False: the next step waits for the exchange, and no communication is hidden."""
    stagger: bool = True
    """Whether the corrections of a period are dealt out to its steps, bucket by bucket, so that all steps send about as many
    bytes. False: every k-th step corrects all buckets, as in the paper, and is longer than the others."""
    local_ratio: float = 1.0
    """The local update's learning rate over the param_group's current one, so that it follows schedulers of the optimizer."""
    local_step: str = "optimizer"
    """One of LOCAL_STEPS."""
    warmup_lands: bool = True
    """Whether the last warm-up step is synchronous too. False: its exchange already runs during the next step, which computes on
    a local update, as in the paper's Algorithm 1."""

    def __post_init__(self) -> None:
        if self.k is not None and self.k != "auto":
            whole("k", self.k, "the steps from one correction to the next, or null", low=1)
        if self.correction is not None:
            msgspec.structs.force_setattr(self, "correction", as_spec("correction", self.correction))
        flags(self, "flush", "local_update", "stagger", "warmup_lands")
        whole("warmup_steps", self.warmup_steps, "synchronous steps at the start")
        numbers(self, "the learning rate of the local update, or null", "local_lr")
        numbers(self, "the local update's learning rate over the param_group's", "local_ratio", positive=True)
        word("local_step", self.local_step, LOCAL_STEPS)
        if self.local_lr is not None and self.local_ratio != 1:
            raise FormatError(
                f"local_lr is {show(self.local_lr)} and local_ratio is {show(self.local_ratio)}: a rate and a part of another "
                "rate for one update. Give one of the two."
            )
        if self.flush and self.k is None:
            raise FormatError(
                "flush is true and k is null: corrections send the residuals, and without k there are none. Give k."
            )
        if self.local_lr is not None and not self.local_update:
            raise FormatError(
                f"local_lr is {show(self.local_lr)} and local_update is false: without a local update the rate has no effect. "
                "Leave local_lr out."
            )

    @classmethod
    def cd_sgd(
        cls, k: int | None = FIRST_K, warmup_steps: int = 0, local_lr: float | None = None, local_ratio: float = 1.0
    ) -> "Delayed":
        """CD-SGD as published (Yu et al., Algorithm 1): every k-th step corrects the whole gradient, and the local update is
        plain SGD. Its sums come back uncompressed: `scheme="CD-SGD"` of a policy.

        It is for SGD, and the local rate must be tuned: the paper has an eighth, a quarter and four times the global rate. With
        Adam's rates the local step is a thousandth of the global one.

        >>> Delayed.cd_sgd(k=2)
        Delayed(k=2, stagger=False, local_step='sgd', warmup_lands=False)
        """
        return cls(
            k,
            warmup_steps=warmup_steps,
            local_lr=local_lr,
            stagger=False,
            local_ratio=local_ratio,
            local_step="sgd",
            warmup_lands=False,
        )

    def lands(self, step: int) -> bool:
        """Whether a step, counted with the warm-up, is synchronous: the next one computes on the global weights."""
        return not self.local_update or step < self.warmup_steps - (not self.warmup_lands)

    @property
    def every(self) -> int | None:
        """k as a number or None."""
        return FIRST_K if self.k == "auto" else self.k

    @property
    def undecided(self) -> str:
        if self.k != "auto":
            return ""
        return "k is 'auto', which is chosen on a live job. Pass the policy itself to gw.parallelize, or give k a number."

    def with_k(self, k: int) -> "Delayed":
        return msgspec.structs.replace(self, k=k)

    @property
    def hides_exchange(self) -> bool:
        return self.local_update

    @property
    def sends_at_end(self) -> bool:
        return not self.local_update

    @property
    def period(self) -> int:
        return self.every or 1

    @property
    def corrects(self) -> bool:
        return self.k is not None

    def corrected(self, nbytes: Sequence[int]) -> list[tuple[int, ...]]:
        """See `Schedule`. Staggered: assigns the largest bucket first, each to the step that has the fewest bytes.

        >>> Delayed(k=3).corrected([40, 30, 20, 10, 0]), Delayed(k=3, stagger=False).corrected([40, 30])
        ([(0,), (1,), (2, 3)], [(0, 1), (), ()])
        """
        if not (self.stagger and self.corrects):
            return super().corrected(nbytes)
        shares: list[list[int]] = [[] for _ in range(self.period)]
        lightest = [(0, step) for step in range(self.period)]
        for index in sorted(range(len(nbytes)), key=lambda index: -nbytes[index]):
            if nbytes[index]:
                held, step = lightest[0]
                shares[step].append(index)
                heapreplace(lightest, (held + nbytes[index], step))
        return [tuple(sorted(share)) for share in shares]
