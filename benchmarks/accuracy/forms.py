"""Defines forms: a spec, and what a training does around its exchange. A form is written `SPEC+OPTION+OPTION`.

>>> form_of("four+weights+warm20").weights
'exact'
>>> form_of("ErrorFeedback(QSGD(bits=3))").spec
ErrorFeedback(QSGD(bits=3, block=128, rounding='nearest'))
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

import gradwire as gw
from benchmarks.accuracy.levels import Levels
from benchmarks.accuracy.rivals import RIVALS
from gradwire.core import ElementRun, ErrorFeedback, Spec, innermost
from gradwire.core.specs import spec_from_text
from gradwire.core.specs.base import SpecField
from gradwire.errors import FormatError

__all__ = ["OPTIONS", "SPECS", "Form", "Warming", "form_of"]

SPECS: dict[str, Spec] = {
    "exact": gw.Identity(),
    "today2": gw.ErrorFeedback(gw.QSGD(bits=2)),
    "today3": gw.ErrorFeedback(gw.QSGD(bits=3)),
    "today4": gw.QSGD(bits=4),
    "feedback4": gw.ErrorFeedback(gw.QSGD(bits=4)),
    "weighted3": gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls"), weights=0.98, warm_up_steps=20),
    "weighted4": gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20),
    "weighted8": gw.ErrorFeedback(gw.QSGD(bits=3, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20),
    "three": gw.ErrorFeedback(Levels(3)),
    "four": gw.ErrorFeedback(Levels(4)),
    "eight": gw.ErrorFeedback(Levels(8)),
    "sixteen": gw.ErrorFeedback(Levels(16)),
    "three/four": gw.ErrorFeedback(Levels(3, 4)),
    "three/seven": gw.ErrorFeedback(Levels(3, 7)),
    "four/three": gw.ErrorFeedback(Levels(4, 3)),
    "four/eight": gw.ErrorFeedback(Levels(4, 8)),
    "three-64": gw.ErrorFeedback(Levels(3, block=64)),
    "three-32": gw.ErrorFeedback(Levels(3, block=32)),
    "four-64": gw.ErrorFeedback(Levels(4, block=64)),
    "four-256": gw.ErrorFeedback(Levels(4, block=256)),
    "eight-256": gw.ErrorFeedback(Levels(8, block=256)),
}
"""Short names of specs."""
OPTIONS = {
    "weights": "encode each element over the root of its mean square",
    "weights2": "the same with weights that are powers of two",
    "floorN": "the part in percent of a block's mean square that every weight has at least; 1",
    "halfN": "the steps in which old squares fade by half; 34",
    "warmN": "4 bits with feedback in the first N steps",
    "ef21": "encode the changes of gradients, and add up what was decoded",
    "diffs": "owners apply the optimizer, and encode the changes of weights",
    "decayN": "the percent of a residual that is kept",
    "nudged": "the first weights are a millionth larger: chance alone",
    "trial": "the first 15 steps send what those of `plan='auto'` may send before it stays with this spec",
}
"""What a training may do around its exchange, and how it is written."""

TRIAL = (3, 6, 9, 12, 15)
"""The steps in which `plan='auto'` begins another plan, if its trial is as long as it may be: three steps with the spec that it
begins with, four turns of three steps, and the rest with the plan that it chose."""
STEADY = 10**6
"""A step after any warm-up."""
SQUARE = ElementRun(2**20, 0, (1024, 1024))
"""The tensor whose bytes are told where no job is."""


class Warming(Spec, frozen=True):
    """Another spec in the first steps."""

    id: ClassVar[str] = "accuracy_warming"

    first: SpecField
    then: SpecField
    steps: int

    state: ClassVar[tuple[str, ...]] = ("residual",)
    touches_segments_only: ClassVar[bool] = True

    def at_step(self, step: int) -> Spec:
        spec: Spec = self.first if step < self.steps else self.then
        return spec

    @property
    def granularity(self) -> int:
        return max(self.first.granularity, self.then.granularity)

    @property
    def element_bits(self) -> int:
        return 0

    def payload_bytes(self, runs: Any, itemsize: int) -> int:
        return max(self.first.payload_bytes(runs, itemsize), self.then.payload_bytes(runs, itemsize))


class Form(NamedTuple):
    """One way to train."""

    spec: Spec
    """What the exchange runs after any warm-up."""
    weights: str = ""
    """exact or powers; empty: none."""
    floor: float = 0.01
    half_life: int = 34
    warm_up_steps: int = 0
    first: Spec = gw.ErrorFeedback(Levels(15))
    """The spec of the warm-up."""
    ef21: bool = False
    diffs: bool = False
    rival: str = ""
    """A way of another system to average, in place of the exchange."""
    nudged: bool = False
    trial: bool = False

    @property
    def turns(self) -> dict[int, Spec]:
        """The specs of a trial by the step that each begins with. As on trial, warm-ups are left out. The last spec stays."""
        late = self.spec.settled
        return dict(zip(TRIAL, (late, gw.QSGD(bits=4), gw.Identity(), late, self.planned), strict=True)) if self.trial else {}

    @property
    def planned(self) -> Spec:
        """The spec of the exchange's plan."""
        return Warming(self.first, self.spec, self.warm_up_steps) if self.warm_up_steps else self.spec

    def bytes_an_element(self, runs: Sequence[ElementRun] = (SQUARE,)) -> float:
        """Mean bytes of an element in the two encodes, after any warm-up. runs: the tensors, for specs that need their shapes."""
        numel = sum(each.numel for each in runs)
        if self.rival:
            return RIVALS[self.rival][1](runs) / numel
        inner = innermost(self.spec)
        if isinstance(inner, Levels):
            return sum(inner.bytes_of_blocks()) / (2 * inner.block)
        runs = [each._replace(bits=self.spec.element_bits) for each in runs]
        return self.spec.at_step(STEADY).payload_bytes(runs, 4) / numel


def form_of(text: str) -> Form:
    """Read a form. Raises FormatError naming the option that is none, SpecError for a spec that is none."""
    name, *options = text.split("+")
    form = Form(gw.Identity(), rival=name) if name in RIVALS else Form(SPECS[name] if name in SPECS else spec_from_text(name))
    for option in options:
        word, number = split.groups() if (split := re.fullmatch(r"([a-z]+)(\d*)", option)) else ("", "")
        if option in ("weights", "weights2"):
            form = form._replace(weights="exact" if option == "weights" else "powers")
        elif word == "floor" and number:
            form = form._replace(floor=int(number) / 100)
        elif word == "half" and number:
            form = form._replace(half_life=int(number))
        elif word == "warm" and number:
            form = form._replace(warm_up_steps=int(number))
        elif word == "decay" and number and isinstance(form.spec, ErrorFeedback):
            form = form._replace(spec=msgspec.structs.replace(form.spec, decay=int(number) / 100))
        elif option in ("ef21", "diffs", "nudged", "trial"):
            form = form._replace(**{option: True})
        else:
            raise FormatError(f"{option!r} in {text!r} is no option of a form: there are {', '.join(OPTIONS)}.")
    return form
