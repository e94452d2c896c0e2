"""`AdaptiveBits`, as a user writes it. `gradwire.auto` runs it."""

from collections.abc import Mapping, Sequence
from glob import escape
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from gradwire.core.checks import changed, freeze, number, whole, word
from gradwire.core.specs import QSGD, Spec
from gradwire.core.strict import Document
from gradwire.core.tensors import TensorInfo
from gradwire.errors import PlanError
from gradwire.planner.policy import Policy
from gradwire.planner.rules import Where, as_rule

BIT_RULES = ("exact", "kmeans", "linear")
"""exact: the fewest bytes that keep the budget. kmeans, linear: CGX's two rules (section 5), for comparison."""

if TYPE_CHECKING:
    RulesField: TypeAlias = Sequence[tuple[str | Where, Spec]]
else:
    RulesField = Any  # brought to one form by __post_init__


class AdaptiveBits(Document, frozen=True, kw_only=True):
    """QSGD with 2 to 8 bits by tensor, chosen again and again from errors measured on the gradients (CGX section 5).

    As `plan=` of `gradwire.parallelize`. Raises PlanError for a value outside its range.

    >>> AdaptiveBits(alpha=1.5)
    AdaptiveBits(alpha=1.5)
    """

    what: ClassVar[str] = "adaptive bits"
    remedy: ClassVar[str] = "Write it from the fields of gradwire.AdaptiveBits."
    omit_at_default: ClassVar[tuple[str, ...]] = ("rules", "blocks")

    alpha: float = 2.0
    """The error allowed, as a multiple of the error with 4 bits for every tensor. 1 or more; the paper uses 1.5 to 3. Larger:
    fewer bytes."""
    period: int = 200
    """Steps from one choice to the next. Fewer: closer to the gradients, more time spent on measuring."""
    rule: str = "exact"
    """One of BIT_RULES."""
    block: int = 128
    """Elements that share one scale."""
    blocks: Sequence[int] = ()
    """Other sizes of a tensor's blocks, for the rule exact. About 1 % fewer bytes at the same error, but more measurements, and
    more buckets: tensors with blocks of different sizes cannot share a bucket."""
    rules: RulesField = ()
    """As in `gradwire.Policy`: specs of chosen tensors, as ("*embed*", gw.ErrorFeedback(gw.TopK(0.01))). Vectors that no rule
    matches are not compressed."""

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "the error allowed, over that of 4 bits", error=PlanError)
        if self.alpha < 1:
            raise PlanError(
                f"alpha is {self.alpha}: not even 4 bits for every tensor keep this error. Give 1 or more; 2 is usual."
            )
        whole("period", self.period, "steps from one choice of bits to the next", low=2, error=PlanError)
        word("rule", self.rule, BIT_RULES, error=PlanError)
        freeze(self, "rules", "blocks")
        msgspec.structs.force_setattr(self, "rules", tuple(as_rule(i, rule) for i, rule in enumerate(self.rules)))
        self.ways((4,))
        if len({self.block, *self.blocks}) <= len(self.blocks):
            raise PlanError(f"blocks is {self.blocks} and block is {self.block}: a size occurs twice. Remove it.")
        if self.blocks and self.rule != "exact":
            raise PlanError(
                f"blocks is {self.blocks}, but the rule {self.rule!r} chooses bits only. Use rule='exact', or leave blocks out."
            )

    def __repr__(self) -> str:
        return f"AdaptiveBits({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"

    def ways(self, widths: Sequence[int]) -> tuple[QSGD, ...]:
        """The specs that a tensor may get with so many bits; those with `block` come first.

        >>> AdaptiveBits(blocks=(256,)).ways((2, 4))[2:]
        (QSGD(bits=2, block=256), QSGD(bits=4, block=256))
        """
        return tuple(QSGD(bits=bits, block=block) for block in (self.block, *self.blocks) for bits in widths)

    def policy_of(self, specs: Mapping[str, Spec]) -> Policy:
        """The policy that gives these tensors their specs, and all others the specs of `policy`."""
        return msgspec.structs.replace(
            self.policy, rules=(*((escape(name), spec) for name, spec in specs.items()), *self.rules)
        )

    def rules_match(self, tensor: TensorInfo) -> bool:
        """Whether a rule gives the tensor its spec."""
        return any((each if isinstance(each, Where) else Where(each)).matches(tensor) for each, _ in self.rules)

    @property
    def policy(self) -> Policy:
        """The policy before the first measurement: 4 bits for every tensor."""
        return Policy(default=self.ways((4,))[0], rules=self.rules)
