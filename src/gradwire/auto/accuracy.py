"""The specs and schedules that each accuracy class allows, and the first policy of a run."""

import math
from collections.abc import Iterable, Sequence

from gradwire.auto.measured_losses import COUNTS, EIGHT_BITS, FOUR_BITS, WEIGHTED_3, WEIGHTED_4, WEIGHTED_8, allowed
from gradwire.core import (
    ENCODED_DTYPES,
    QSGD,
    Delayed,
    EFSignSGD,
    ElementRun,
    ErrorFeedback,
    Identity,
    LocalSteps,
    Pipelined,
    PowerSGD,
    Schedule,
    Spec,
    TensorInfo,
    TopK,
    number,
    show,
    word,
)
from gradwire.errors import PlanError
from gradwire.plan import EMBEDDINGS, Policy, Uniform, Where

ACCURACIES = ("exact", "safe", "aggressive")
"""exact: nothing is encoded. safe: only specs whose held-out loss ended at most 1 % above that of exact sums on this number of
ranks, with an interval up to 1.5 % at most (docs/measured.md). aggressive: also specs that need more, but much faster steps for
the same loss. A number is the share of the loss in place of 1 %."""
SAFE_LOSS = 0.01
"""The most that a spec of the class "safe" may lose, as a share of the loss."""

SCHEDULES = ("backward", "pipelined", "delayed", "local")

# ordered by the rows of docs/measured.md, the most accurate first; so are schedules below
_MEASURED: tuple[Spec, ...] = (EIGHT_BITS, WEIGHTED_8, FOUR_BITS, WEIGHTED_4, WEIGHTED_3)
"""The specs that have rows for some number of ranks."""
_AGGRESSIVE: tuple[Spec, ...] = (WEIGHTED_3, PowerSGD(rank=4), EFSignSGD(), ErrorFeedback(TopK(0.01)))
STEPS_FOR_ONE = {PowerSGD(rank=4): 1.2, EFSignSGD(): 1.6, ErrorFeedback(TopK(0.01)): 2.0}
"""Steps needed for the progress of one step of plain DDP: the geometric mean over the bench's three jobs, each at least 1, by
`python -m benchmarks losses`. Other specs need 1."""
_DELAYED_SPECS: tuple[Spec, ...] = (ErrorFeedback(QSGD(bits=4)),)
"""The specs whose losses under `delayed` are in docs/schedules_measured.md (`python -m benchmarks convergence`)."""
_DELAYED_RANKS = 2
"""The largest number of ranks with such rows."""
_SAFE_DELAYED = tuple(Delayed(k, correction, stagger=correction is None) for k in (2, 5) for correction in (None, EIGHT_BITS))
"""The delayed schedules with measured losses in that file. It has no losses of staggered corrections in 8 bits."""
SPARSELOCO: Spec = ErrorFeedback(TopK(0.02, values=QSGD(bits=2)), decay=0.95)
LOCAL_SPECS: tuple[Spec, ...] = (QSGD(bits=4), ErrorFeedback(QSGD(bits=2)), SPARSELOCO)
"""The specs of outer gradients under `local`, the most accurate first (docs/local_steps.md)."""
EARLIER_SPECS: tuple[Spec, ...] = (ErrorFeedback(QSGD(bits=2)),)
"""Specs that "safe" or "aggressive" allowed in earlier releases, and that no class allows now. States have plans with them."""


def check_accuracy(accuracy: str | float) -> None:
    """Raises PlanError for an unknown accuracy class, and for a number that is no share of a loss."""
    if isinstance(accuracy, str):
        word("accuracy", accuracy, ACCURACIES, error=PlanError)
        return
    number("accuracy", accuracy, "the share of the loss that may be lost, such as 0.01", positive=True, error=PlanError)
    if accuracy >= 1:
        raise PlanError(f"accuracy is {show(accuracy)}: it is a share of the loss, below 1. Write 0.01 for 1 %.")


def most_loss(accuracy: str | float) -> float:
    """Return the share of the loss that a class allows to lose by measured rows.

    >>> most_loss("safe"), most_loss(0.03), most_loss("exact")
    (0.01, 0.03, 0.0)
    """
    return {"exact": 0.0, "safe": SAFE_LOSS}.get(accuracy, math.inf) if isinstance(accuracy, str) else accuracy


def check_schedules(schedules: Sequence[str]) -> tuple[str, ...]:
    """Return the schedules as a tuple. Raises PlanError for an unknown schedule, and if "backward" is missing."""
    words = tuple(schedules) if isinstance(schedules, Iterable) and not isinstance(schedules, str) else (schedules,)
    for each in words:
        word("schedules", each, SCHEDULES, error=PlanError)
    if "backward" not in words:
        raise PlanError(
            f"schedules={words!r} does not contain 'backward'. plan='auto' begins in this schedule and runs plain all-reduce in "
            f"it. Write schedules={('backward', *words)!r}, or pass a policy with the schedule that you want."
        )
    return words


def is_auto(plan: object, accuracy: str | float = "safe", schedules: Sequence[str] = ("backward",)) -> bool:
    """Return whether the plan is "auto", for which alone the accuracy class and the schedules say what may be chosen.

    Raises PlanError for an unknown class or schedule, and for any but the default ones with another plan.
    """
    check_accuracy(accuracy)
    words = check_schedules(schedules)
    if isinstance(plan, str) and plan == "auto":
        return True
    given = [f"accuracy={accuracy!r}"] * (accuracy != "safe") + [f"schedules={words!r}"] * (words != ("backward",))
    if given:
        raise PlanError(
            f"plan is {show(plan)}, and {' and '.join(given)} would have no effect: plan='auto' alone chooses from what they "
            "allow. Leave out plan=, or leave them out."
        )
    return False


def schedules_of(accuracy: str | float, words: Sequence[str], ranks: int) -> tuple[Schedule, ...]:
    """The schedules allowed in addition to `backward`, the most accurate first: `pipelined` costs no accuracy. `local` is not
    among them: `gradwire.auto.local` decides about it. The losses of `delayed` are measured on two ranks only."""
    found: list[Schedule] = [Pipelined()] if "pipelined" in words else []
    if "delayed" in words and (accuracy == "aggressive" or (most_loss(accuracy) >= SAFE_LOSS and ranks <= _DELAYED_RANKS)):
        found += [*_SAFE_DELAYED, *([Delayed(k=None)] if accuracy == "aggressive" else [])]
    return tuple(found)


def specs_of(accuracy: str | float, tensors: Sequence[TensorInfo], ranks: int) -> tuple[Spec, ...]:
    """The specs allowed for these tensors in addition to no compression, the most accurate first."""
    return all_specs(accuracy, ranks) if any(tensor.dtype in ENCODED_DTYPES for tensor in tensors) else ()


def with_embeddings(specs: Iterable[Spec]) -> tuple[Spec, ...]:
    """Return the specs, and the one that sends embeddings where one of the specs has no code for zero.

    >>> with_embeddings([EFSignSGD()])
    (EFSignSGD(), QSGD(bits=4, block=128))
    """
    found = tuple(specs)
    return found if all(spec.keeps_zeros for spec in found) else tuple(dict.fromkeys((*found, EMBEDDINGS)))


def all_specs(accuracy: str | float, ranks: int) -> tuple[Spec, ...]:
    """The specs that the class allows in addition to no compression on this number of ranks, the most accurate first.

    Of those with feedback, and of those without, it is the smallest.

    >>> all_specs("safe", ranks=4) == (FOUR_BITS, WEIGHTED_4), all_specs("safe", ranks=16) == (WEIGHTED_8, FOUR_BITS)
    (True, True)
    >>> all_specs(0.015, ranks=4) == (FOUR_BITS, WEIGHTED_3)
    True
    >>> all_specs("safe", ranks=100), all_specs(0.004, ranks=2)
    ((QSGD(bits=8, block=128),), (QSGD(bits=4, block=128),))
    """
    if accuracy == "aggressive":
        return (FOUR_BITS, WEIGHTED_4, *_AGGRESSIVE)
    found = [spec for spec in _MEASURED if allowed(spec, ranks, most_loss(accuracy))]
    smallest = [min((spec for spec in found if spec.feedback == kind), key=_size, default=None) for kind in (False, True)]
    return tuple(spec for spec in found if spec in smallest)


def _size(spec: Spec) -> int:
    """The bytes of a large tensor."""
    return spec.payload_bytes([ElementRun(2**20, spec.element_bits)], 4)


def ever_allowed(accuracy: str | float) -> tuple[Spec, ...]:
    """The specs that the class allows on some number of ranks, and those that it allowed in earlier releases."""
    earlier = EARLIER_SPECS if most_loss(accuracy) >= SAFE_LOSS else ()
    return tuple(dict.fromkeys([*(spec for ranks in COUNTS for spec in all_specs(accuracy, ranks)), *earlier]))


def ever_scheduled(accuracy: str | float, words: Sequence[str]) -> tuple[Schedule, ...]:
    """The schedules of `schedules_of` on some number of ranks."""
    return schedules_of(accuracy, words, _DELAYED_RANKS)


def later_specs(accuracy: str | float, words: Sequence[str], ranks: int) -> tuple[Spec, ...]:
    """All specs that may ever run, corrections too."""
    schedules, specs = schedules_of(accuracy, words, ranks), all_specs(accuracy, ranks)
    trained_alone = [LocalSteps()] if "local" in words else []
    found = [*specs, *(spec for each in [*schedules, *trained_alone] for spec in specs_under(each, specs))]
    corrections = [each.correction for each in schedules if each.correction is not None]
    return tuple(dict.fromkeys(with_embeddings([*found, *corrections])))


def steps_for_one(specs: Iterable[Spec]) -> float:
    """Return how many steps with these specs bring the progress of one step of plain DDP. The most lossy spec decides.

    >>> steps_for_one([QSGD(bits=4), PowerSGD(rank=4)])
    1.2
    """
    return max((STEPS_FOR_ONE.get(spec, 1.0) for spec in specs), default=1.0)


def specs_under(schedule: Schedule, specs: Sequence[Spec]) -> tuple[Spec, ...]:
    """Return those of `specs` that may run under this schedule: the specs with measured losses in the docs.

    >>> specs_under(Delayed(k=5), specs_of("safe", [TensorInfo("w", (4, 4), "float32")], ranks=2))
    (ErrorFeedback(QSGD(bits=4, block=128, rounding='nearest')),)
    """
    if not schedule.costs_accuracy:
        return tuple(specs)
    if schedule.sends_weights:
        return LOCAL_SPECS if specs else ()
    return _DELAYED_SPECS if specs else ()


def policy_of(spec: Spec, tensors: Sequence[TensorInfo]) -> Policy:
    """Return a policy with this spec for tensors of a dtype that can be encoded, except vectors. Others stay uncompressed."""
    if not spec.encodes:
        return Uniform(spec)
    others = sorted({tensor.dtype for tensor in tensors} - {*ENCODED_DTYPES})
    return Policy(default=spec, rules=[(Where(dtype=dtype), Identity()) for dtype in others])


def first_policy(accuracy: str | float, tensors: Sequence[TensorInfo], ranks: int) -> Policy:
    """The policy until the first decision: the smallest spec of the class that has rows of losses."""
    safe = [spec for spec in specs_of(accuracy, tensors, ranks) if spec in _MEASURED]
    return policy_of(min(safe, key=_size, default=Identity()), tensors)
