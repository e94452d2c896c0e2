"""Driver of `gw.Delayed(k="auto")`: chooses how often buckets are corrected, from the residuals of error feedback.

In one step of each period every rank adds up the squares of its residuals and of its own gradients. Ranks exchange the two
sums, and each rank finds the same k. The larger the residuals are relative to the gradients, the more often corrections come.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from gradwire.auto.decision import PlanDriver, say, unlike
from gradwire.auto.live import Live
from gradwire.core import FIRST_K, Plan, TensorInfo, as_schedule
from gradwire.engine import Session
from gradwire.errors import PlanError
from gradwire.plan import Policy

PERIOD = 200
"""Steps from one measurement to the next."""
MEASURED_AT = 20
"""The measured step of each period, counted without the warm-up. Residuals have grown by then."""
POSSIBLE = (2, 5, 10, 20, 50, 100)
"""The values of k to choose from. k = 1 is missing: it compresses nothing, so residuals would never change again."""
_LAG = 5.0
"""The largest k times residual, in units of a gradient. The paper advises k = 5, and its quantiser keeps back 0.7 to 1
gradients if these are normal and independent."""


def k_for(residual: float) -> int:
    """Return the k for a residual. residual: the norm of the residuals over the norm of the gradients.

    >>> [k_for(residual) for residual in (0.0, 0.2, 1.0, 2.4, 30.0)]
    [100, 20, 5, 2, 2]
    """
    return max((k for k in POSSIBLE if k * residual <= _LAG), default=POSSIBLE[0])


@dataclass(frozen=True)
class ChosenK:
    """The k that applies from `step` on, and the residual that led to it."""

    step: int
    k: int
    residual: float
    """Norm of the residuals of all ranks over the norm of their gradients."""

    def __str__(self) -> str:
        return (
            f"k={self.k} from step {self.step}: what error feedback keeps back is {self.residual:.2f} times as large as the "
            "gradients."
        )


class CorrectionPeriods(PlanDriver):
    """Driver of one handle with `gw.Delayed(k="auto")`."""

    def __init__(self, policy: Policy) -> None:
        """Raises PlanError if there is no residual to measure, or if a change of k would lose one."""
        if not any(spec.feedback for spec in (policy.default, *(spec for _, spec in policy.rules))):
            raise PlanError(
                f"k is 'auto', which looks at the residuals of error feedback, and {policy.default!r} keeps none. Wrap it in "
                "gw.ErrorFeedback(...), or give k a number."
            )
        correction = as_schedule(policy.schedule).correction
        if correction is not None and correction.feedback:
            raise PlanError(
                f"k is 'auto' and correction is {correction!r}: its residuals would be lost when k changes. Leave the "
                "error feedback of corrections out, or give k a number."
            )
        super().__init__(policy)
        self.policy = policy

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """Return the policy until the first measurement."""
        return msgspec.structs.replace(self.policy, schedule=as_schedule(self.policy.schedule).with_k(FIRST_K))

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Return why a saved plan cannot come from the policy with another k; '' if it can."""
        if plan.schedule.corrects and plan.schedule.period in POSSIBLE:
            plan = msgspec.structs.replace(plan, schedule=plan.schedule.with_k(FIRST_K))
        return unlike(plan, own)

    def finished(self, session: Session) -> None:
        """End a step, and choose k anew if a measurement is due."""
        live = Live(session)
        since = live.step - live.plan.schedule.warmup_steps
        if since > 0 and since % PERIOD == MEASURED_AT:
            self._choose(live, *live.merged((), squares(session)).sums)

    def _choose(self, live: Live, residuals: float, gradients: float) -> None:
        present = live.plan.schedule
        if not (gradients > 0 and math.isfinite(residuals) and math.isfinite(gradients)):
            if live.group.rank == 0:
                say(f"k={present.period} stays: the gradients of step {live.step} are zero or not finite.")
            return
        residual = math.sqrt(residuals / gradients)
        chosen = ChosenK(live.step, k_for(residual), residual)
        if live.group.rank == 0 and chosen.k != present.period:
            say(str(chosen))
        self.decide(chosen)
        live.change_to(msgspec.structs.replace(live.plan, schedule=present.with_k(chosen.k)))


@torch.no_grad()
def squares(session: Session) -> Sequence[float]:
    """Return two sums of squares: of this rank's residuals, and of its own gradients as parts of the mean."""
    kept = [value for key, value in session.exchange.residuals.carried().items() if key.startswith("residual/")]
    gradients = [parameter.grad for parameter in session.parameters.values() if parameter.grad is not None]
    own, parts = (math.fsum(float(each.float().square().sum()) for each in tensors) for tensors in (kept, gradients))
    return own, parts / session.group.world_size**2
