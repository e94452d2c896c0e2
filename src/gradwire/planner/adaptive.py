"""Bits by tensor that follow the gradients: what a user asks for. The engine of it is in `gradwire.auto`."""

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

__all__ = ["BIT_RULES", "AdaptiveBits"]

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
    """The error allowed: so many times that of 4 bits for every tensor, on the same gradients. 1 or more; the paper uses 1.5 to
    3. Larger: fewer bytes."""
    period: int = 200
    """Steps from one choice to the next. Fewer: closer to the gradients, more time spent on measuring."""
    rule: str = "exact"
    """One of BIT_RULES."""
    block: int = 128
    """Elements that share one scale."""
    blocks: Sequence[int] = ()
    """Other sizes that a tensor's blocks may have instead, with the rule exact. About 1 % fewer bytes at the same error; but more
    to measure, and more buckets, since tensors with blocks of two sizes cannot share one."""
    rules: RulesField = ()
    """As in `gradwire.Policy`: tensors that get a spec of their own, as ("*embed*", gw.ErrorFeedback(gw.TopK(0.01))). Vectors
    that no rule matches travel as they are."""

    def __post_init__(self) -> None:
        number("alpha", self.alpha, "the error allowed, over that of 4 bits", error=PlanError)
        if self.alpha < 1:
            raise PlanError(f"alpha is {self.alpha}: 4 bits themselves have error 1. Write 1 or more; 2 is usual.")
        whole("period", self.period, "steps from one choice of bits to the next", low=2, error=PlanError)
        word("rule", self.rule, BIT_RULES, error=PlanError)
        freeze(self, "rules", "blocks")
        msgspec.structs.force_setattr(self, "rules", tuple(as_rule(i, rule) for i, rule in enumerate(self.rules)))
        self.ways((4,))
        if len({self.block, *self.blocks}) <= len(self.blocks):
            raise PlanError(f"blocks is {self.blocks} beside block {self.block}: one size is there twice. Remove it.")
        if self.blocks and self.rule != "exact":
            raise PlanError(
                f"blocks is {self.blocks} with the rule {self.rule!r}, which chooses bits alone. Use rule='exact', or leave "
                "blocks out."
            )

    def __repr__(self) -> str:
        return f"AdaptiveBits({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"

    def spec(self, bits: int) -> QSGD:
        """What a tensor with so many bits gets."""
        return QSGD(bits=bits, block=self.block)

    def ways(self, widths: Sequence[int]) -> tuple[QSGD, ...]:
        """All that a tensor may get with so many bits: those with `block` first.

        >>> AdaptiveBits(blocks=(256,)).ways((2, 4))[2:]
        (QSGD(bits=2, block=256), QSGD(bits=4, block=256))
        """
        return tuple(QSGD(bits=bits, block=block) for block in (self.block, *self.blocks) for bits in widths)

    def policy_of(self, specs: Mapping[str, Spec]) -> Policy:
        """What gives each of these tensors its spec, and others what `policy` does."""
        return msgspec.structs.replace(
            self.policy, rules=(*((escape(name), spec) for name, spec in specs.items()), *self.rules)
        )

    def rules_match(self, tensor: TensorInfo) -> bool:
        """Whether the tensor gets a spec of its own."""
        return any((each if isinstance(each, Where) else Where(each)).matches(tensor) for each, _ in self.rules)

    @property
    def policy(self) -> Policy:
        """What runs until something is measured: 4 bits for every tensor."""
        return Policy(default=self.spec(4), rules=self.rules)
