"""Names of methods of the bench that do only a part of each step, wrong on purpose. No torch."""

from gradwire.bench.names import arguments_of
from gradwire.core.schedules import as_schedule
from gradwire.errors import FormatError
from gradwire.plan.policy import Policy

__all__ = ["EXCHANGE_ONLY", "WRONG_PREFIX", "check_part", "part_of_step"]

WRONG_PREFIX = "wrong-on-purpose:"
"""The prefix of methods that leave out a part of each step, to time the rest. They train wrongly."""
EXCHANGE_ONLY = "exchange-only"
PARTS = ("reduce-only", "gather-only", "compute-only", EXCHANGE_ONLY)


def part_of_step(name: str) -> tuple[str, str]:
    """Return the remaining part of the step, and the policy, of a method that is wrong on purpose.

    >>> part_of_step("wrong-on-purpose:reduce-only:qsgd4@pipelined")
    ('reduce-only', 'qsgd4@pipelined')
    """
    part, _, policy = name.removeprefix(WRONG_PREFIX).partition(":")
    return part, policy


def check_part(name: str) -> None:
    """Raise FormatError or SpecError for the name of a method that is wrong on purpose, and cannot be built."""
    part, policy = part_of_step(name)
    if part not in PARTS:
        raise FormatError(
            f"{part!r} is no part of a step that can run by itself. Write {WRONG_PREFIX}PART:POLICY, where PART is "
            f"{' or '.join(PARTS)}."
        )
    plan = arguments_of(policy)["plan"]
    if not isinstance(plan, Policy):
        raise FormatError(
            f"{part} of {policy[:300]!r}: its buckets are not known beforehand. Write a policy, such as qsgd4@pipelined."
        )
    if part != EXCHANGE_ONLY and as_schedule(plan.schedule).corrects:
        raise FormatError(
            f"{part} of {policy[:300]!r}: what is left out would only be left out of steps that correct nothing. Write "
            "@delayednone."
        )
