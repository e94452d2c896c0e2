"""Whether a resumed run may use the saved plan."""

from collections.abc import Collection

from gradwire.core.plan import Plan
from gradwire.core.specs import Spec

__all__ = ["unlike"]


def unlike(plan: Plan, own: Plan, ways: Collection[Spec] = ()) -> str:
    """Why a saved plan cannot come from the policy of the plan `own`; '' if it can. Buckets may differ, and specs in `ways` may
    replace each other.

    >>> from gradwire.core import QSGD, Identity, TensorInfo
    >>> from gradwire.planner.policy import Uniform
    >>> four, eight, plain = (
    ...     Uniform(spec).plan([TensorInfo("w", (10, 10), "float32")]) for spec in (QSGD(bits=4), QSGD(bits=8), Identity())
    ... )
    >>> unlike(eight, four, ways=(QSGD(bits=4), QSGD(bits=8)))
    ''
    >>> unlike(eight, plain)
    "'w' has QSGD(bits=8, block=128) in the saved plan and Identity() here. Load the state with the plan= that it was saved with."
    """
    cure = "Load the state with the plan= that it was saved with."
    if plan.schedule != own.schedule:
        return f"the saved plan has schedule {plan.schedule!r}, this run has {own.schedule!r}. {cure}"
    specs = {name: bucket.spec_of(name) for bucket in own.buckets for name in bucket.tensors}
    for bucket in plan.buckets:
        for name in bucket.tensors:
            saved, here = bucket.spec_of(name), specs.get(name)
            if saved != here and not (saved in ways and here in ways):
                return f"{name!r} has {saved!r} in the saved plan and {here!r} here. {cure}"
    return ""
