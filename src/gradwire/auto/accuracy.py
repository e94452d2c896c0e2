"""What each class of accuracy allows, and the policy that a run begins with."""

from collections.abc import Iterable, Sequence

from gradwire.core.checks import word
from gradwire.core.schedules import Delayed, Pipelined, Schedule
from gradwire.core.specs import QSGD, EFSignSGD, ErrorFeedback, Identity, PowerSGD, Spec, TopK
from gradwire.core.tensors import TensorInfo
from gradwire.errors import PlanError
from gradwire.planner.policy import Policy, Uniform
from gradwire.planner.rules import Where

__all__ = [
    "ACCURACIES",
    "SCHEDULES",
    "STEPS_FOR_ONE",
    "all_specs",
    "check_accuracy",
    "check_schedules",
    "first_policy",
    "policy_of",
    "schedules_of",
    "specs_of",
    "steps_for_one",
]

ACCURACIES = ("exact", "safe", "aggressive")
"""exact: nothing is encoded. safe: what ends within 3 % of plain DDP's loss on every job of docs/compressors.md. aggressive: what
is smaller too, where its steps are so much faster that a loss is reached sooner."""

SCHEDULES = ("backward", "pipelined", "delayed")
"""Those that may be allowed."""

# in the order of what they cost in accuracy there, the least first
_SAFE: tuple[Spec, ...] = (QSGD(bits=4), ErrorFeedback(QSGD(bits=2)))
_AGGRESSIVE: tuple[Spec, ...] = (PowerSGD(rank=4), EFSignSGD(), ErrorFeedback(TopK(0.01)))
STEPS_FOR_ONE = {PowerSGD(rank=4): 1.2, EFSignSGD(): 1.6, ErrorFeedback(TopK(0.01)): 2.0}
"""So many steps bring the loss as far as one of plain DDP: the geometric mean over the bench's three jobs, each at least 1, as
`python -m benchmarks losses` works it out. Of specs that are not here: 1."""
_EIGHT_BITS = QSGD(bits=8)
_SAFE_DELAYED = (Delayed(k=2), Delayed(k=2, correction=_EIGHT_BITS), Delayed(k=5), Delayed(k=5, correction=_EIGHT_BITS))
_ENCODED_DTYPES = ("float32", "bfloat16", "float16")


def check_accuracy(accuracy: str) -> str:
    """`accuracy` itself. Raises PlanError if it is no class."""
    word("accuracy", accuracy, ACCURACIES, error=PlanError)
    return accuracy


def check_schedules(schedules: Sequence[str]) -> tuple[str, ...]:
    """The words that were given. Raises PlanError for one that is none, and where "backward" is missing."""
    words = (schedules,) if isinstance(schedules, str) else tuple(schedules)
    for each in words:
        word("schedules", each, SCHEDULES, error=PlanError)
    if "backward" not in words:
        raise PlanError(
            f"schedules is {words!r}, without 'backward', in which plan='auto' begins and plain all-reduce runs. Write "
            f"schedules={('backward', *words)!r}, or pass a policy with the schedule you want."
        )
    return words


def schedules_of(accuracy: str, words: Sequence[str]) -> tuple[Schedule, ...]:
    """What these words allow beside `backward`, in the order of what it costs in accuracy: `pipelined` costs nothing."""
    found: list[Schedule] = [Pipelined()] if "pipelined" in words else []
    if "delayed" in words and accuracy != "exact":
        found += [*_SAFE_DELAYED, *([Delayed(k=None)] if accuracy == "aggressive" else [])]
    return tuple(found)


def specs_of(accuracy: str, tensors: Sequence[TensorInfo]) -> tuple[Spec, ...]:
    """What may be used beside uncompressed exchange on these tensors, in the order of what it costs in accuracy."""
    return all_specs(accuracy) if any(tensor.dtype in _ENCODED_DTYPES for tensor in tensors) else ()


def all_specs(accuracy: str) -> tuple[Spec, ...]:
    """What the class allows beside uncompressed exchange, in the same order."""
    return {"exact": (), "safe": _SAFE, "aggressive": _SAFE + _AGGRESSIVE}[accuracy]


def steps_for_one(specs: Iterable[Spec]) -> float:
    """How many steps with these specs do what one of plain DDP does: as many as with the most lossy.

    >>> steps_for_one([QSGD(bits=4), PowerSGD(rank=4)])
    1.2
    """
    return max((STEPS_FOR_ONE.get(spec, 1.0) for spec in specs), default=1.0)


def policy_of(spec: Spec, tensors: Sequence[TensorInfo]) -> Policy:
    """The spec for all that it can encode; the rest, and vectors, travel as they are."""
    if not spec.encodes:
        return Uniform(spec)
    others = sorted({tensor.dtype for tensor in tensors} - {*_ENCODED_DTYPES})
    return Policy(default=spec, rules=[(Where(dtype=dtype), Identity()) for dtype in others])


def first_policy(accuracy: str, tensors: Sequence[TensorInfo]) -> Policy:
    """What runs until something is decided: the smallest that is safe. What it keeps back goes over to what is chosen."""
    safe = [spec for spec in specs_of(accuracy, tensors) if spec in _SAFE]
    return policy_of(safe[-1] if safe else Identity(), tensors)
