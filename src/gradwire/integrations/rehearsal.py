"""A step of one rank alone. A joiner makes it before it asks for members: the others do not wait until its kernels are loaded."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore

from gradwire.errors import GradwireError, PlanError
from gradwire.exchange import Exchange, TensorMeta
from gradwire.transport import Group

__all__ = ["rehearse"]

log = logging.getLogger(__name__)


def rehearse(tensors: Mapping[str, TensorMeta], plan: Any, timeout: timedelta) -> None:
    """Make an exchange of these tensors, and one step with zeros. Raises PlanError for a plan with votes, and nothing else: what
    fails here fails again among members."""
    voting = None
    try:
        exchange = Exchange(tensors, plan, Group.of_store(HashStore(), 0, 1, timeout))
        voting = next((spec for spec in exchange.plan.specs if spec.votes), None)
        try:
            exchange.average_({name: each.zeros() for name, each in tensors.items()})
        finally:
            exchange.abort()
    except GradwireError as error:
        log.info("a step of this member alone failed: %s", error)
    if voting is not None:
        raise PlanError(
            f"the plan has {voting!r}, a vote of all members: zeros of those that join and catch up count as 1 in it. Use a spec "
            "with magnitudes, such as gw.EFSignSGD()."
        )
