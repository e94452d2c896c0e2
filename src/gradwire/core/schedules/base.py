"""The base class of all schedules."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gradwire.core.specs import Spec


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The properties of a schedule that planner and simulator read. The defaults are those of wait-free backpropagation."""

    gathers_in_forward: ClassVar[bool] = False
    """Whether gather phases run during the next forward, in the order in which forward uses the layers."""
    needs_optimizer: ClassVar[bool] = False
    """Whether the schedule decides when the optimizer updates parameters."""
    costs_accuracy: ClassVar[bool] = False
    """Whether the trained model differs from plain DDP's even without compression."""
    sends_weights: ClassVar[bool] = False
    """Whether ranks train alone, and exchange the changes of their weights in place of gradients."""
    lends_gradients: ClassVar[bool] = False
    """Whether compressed gradients may be exchanged in the memory where autograd left them, without a copy in a bucket."""

    @property
    def engine(self) -> str:
        """The class that runs the schedule, as "module:Class". See `gradwire.engine.schedules.base`."""
        raise NotImplementedError(f"{type(self).__name__} does not say which class runs the schedule: define `engine`.")

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank updates only its shard of every bucket, and gather phases send parameters."""
        return False

    @property
    def hides_exchange(self) -> bool:
        """Whether whole exchanges run during the next step."""
        return False

    @property
    def sends_at_end(self) -> bool:
        """Whether all sending begins at the end of the backward."""
        return False

    @property
    def period(self) -> int:
        """The number of steps after which the schedule repeats."""
        return 1

    @property
    def exchanges(self) -> int:
        """The number of exchanges in a period. The engine counts each as a step."""
        return self.period

    @property
    def overlapped_steps(self) -> int:
        """Number of later steps that run during an exchange."""
        return 1 if self.hides_exchange else 0

    @property
    def unequal_steps(self) -> bool:
        """Whether ranks make different numbers of steps from one exchange to the next."""
        return False

    def begins_after(self, exchange: int, rank: int | None = None) -> int:
        """Number of steps after which an exchange, counted from 0, begins on a rank. Differs from `exchange + 1` only if ranks
        train alone. rank: None for the rank with the most steps."""
        return exchange + 1

    def sent_after(self, step: int, numels: Sequence[int]) -> Sequence[int]:
        """The buckets that are exchanged in this step of a period, counted from 0. `numels`: elements of all buckets."""
        return range(len(numels))

    @property
    def fewest_buckets(self) -> int:
        """The least number of buckets that the schedule needs. Policies make buckets small enough for it."""
        return 1

    @property
    def corrects(self) -> bool:
        """Whether some steps of each period send gradients with `correction` in place of the plan's specs."""
        return False

    def corrected(self, nbytes: Sequence[int]) -> list[tuple[int, ...]]:
        """For each step of a period, the buckets that it sends with `correction`. `nbytes`: the bytes of each bucket's gradients
        that the plan compresses."""
        return [tuple(range(len(nbytes))) if self.corrects else (), *[()] * (self.period - 1)]

    @property
    def correction(self) -> Spec | None:
        """The spec of a correcting step; None is the uncompressed gradient."""
        return None

    def with_k(self, k: int) -> "Schedule":
        """The schedule that corrects each bucket in every k-th step; for schedules with corrections only."""
        raise NotImplementedError(f"{type(self).__name__} corrects nothing, so it has no k.")

    @property
    def warmup_steps(self) -> int:
        """Synchronous steps at the start."""
        return 0

    @property
    def undecided(self) -> str:
        """The open decision that keeps a plan from having this schedule, and who decides it; '' if nothing is open."""
        return ""

    @property
    def word(self) -> str:
        """The name of the schedule, such as "pipelined"."""
        return str(self.__struct_config__.tag)
