"""Records the moments of training steps, by hooks on an ordinary training loop.

A step lasts from one forward of the model to the next. *Quiet* and *loaded* steps alternate. In quiet steps all sends wait
until the last gradient is ready; in loaded steps exchanges run as usual. Both give the same sums, so training is not affected.
"""

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradwire.core import Plan, ProcessorNeed
from gradwire.engine import GradientHooks, Observer, Session, compiled, tensors_in
from gradwire.profiler.clock import Clock
from gradwire.transport import LanesObserver

WARMUP_STEPS = 3
"""Number of steps that are not measured: they allocate memory, and the plan is made again after the first one."""


@dataclass
class _RecordedStep:
    """The moments of one step."""

    quiet: bool
    began: Any
    need: ProcessorNeed
    """At the begin."""
    modules: list[tuple[int, Any]] = field(default_factory=list)
    """The number of each module, and the start of its forward."""
    backward: Any = None
    in_backward: bool = False
    """Whether an output of the step's last forward has a gradient."""
    ready: dict[int, Any] = field(default_factory=dict)
    finished: Any = None
    ended: Any = None
    needed_s: float = 0.0
    """Seconds from the begin to the last gradient for which a processor was needed."""


class Recorder(Observer, LanesObserver):
    """Records the steps of a parallelized model until `remove`, or until `wanted` steps have ended."""

    compares = True

    def __init__(self, session: Session, steps: int) -> None:
        model, parameters = session.model, session.parameters
        assert model is not None
        self.names = list(parameters)
        self.wanted = WARMUP_STEPS + 2 * steps
        self.batch = 1
        self.plan: Plan | None = None
        """The plan of the first measured step."""
        self.clock = Clock(next(iter(parameters.values())).device)
        self._session, self._model = session, weakref.ref(model)
        self.steps: list[_RecordedStep] = []
        numbers = {id(parameter): index for index, parameter in enumerate(parameters.values())}
        self.modules: list[list[int]] = []
        """The indices of each module's own parameters. Empty for a compiled model: hooks would break its graph."""
        uncompiled = torch.compiler.disable  # torch.compile would compile the hooks anew in every step
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(uncompiled(self._before_forward), with_kwargs=True),
            model.register_forward_hook(uncompiled(self._after_forward)),
        ]
        for module in model.modules() if not any(map(compiled, model.modules())) else ():
            own = [numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers]
            if own:
                enter = partial(self._enter, len(self.modules))
                self._hooks.append(module.register_forward_pre_hook(enter))
                self.modules.append(own)
        self._gradients = GradientHooks(self, None, Recorder._ready, parameters.values())
        session.reducer.observers.add(self)
        session.lanes.observe(self)

    @property
    def seen(self) -> int:
        """Number of finished steps, warm-up included."""
        return sum(step.finished is not None for step in self.steps)

    @property
    def entered(self) -> list[int]:
        """Modules in the order in which the last step entered them, then the others."""
        seen = dict.fromkeys(number for number, _ in self.steps[-1].modules) if self.steps else {}
        return [*seen, *(number for number in range(len(self.modules)) if number not in seen)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._gradients.remove()
        self._session.reducer.observers.remove(self)
        self._session.lanes.observe(self, on=False)

    def rows(self, quiet: bool) -> torch.Tensor:
        """Return a row of microseconds, float64, for each quiet or loaded step after the warm-up.

        Columns: for each module the time from the start of its forward (for the first, of the step) to the next module's start;
        from the start of the step to the start of backward, and to each gradient; from the end of the exchange to the next step;
        the time until the last gradient for which a processor was needed. NaN if something did not happen.
        """
        chosen = [step for step in self.steps[WARMUP_STEPS:] if step.quiet == quiet and step.finished is not None]
        return torch.tensor([self._row(step) for step in chosen], dtype=torch.float64)

    def _row(self, step: _RecordedStep) -> list[float]:
        us, never = partial(self.clock.us, step.began), float("nan")
        backward = us(step.backward)
        forward = [0.0 for _ in self.modules]
        begins = [0.0, *(us(moment) for _, moment in step.modules[1:]), backward]
        for (module, _), begin, end in zip(step.modules, begins, begins[1:], strict=False):
            forward[module] += end - begin
        ready = [us(step.ready[index]) if index in step.ready else never for index in range(len(self.names))]
        optimizer = never if step.ended is None else self.clock.us(step.finished, step.ended)
        return [*forward, backward, *ready, optimizer, 1e6 * step.needed_s]

    def _before_forward(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        if module is not self._model() or not torch.is_grad_enabled():
            return
        if self.steps and self.steps[-1].finished is None:
            return  # another forward of the same step
        if self.steps:
            self.steps[-1].ended = self.clock.mark()
        if len(self.steps) == self.wanted:
            self.remove()
            return
        if len(self.steps) == WARMUP_STEPS:
            self.plan = self._session.plan
        shapes = [tensor.shape for tensor in tensors_in((inputs, named))]
        self.batch = max(1, shapes[0][0]) if shapes and shapes[0] else 1
        quiet = len(self.steps) >= WARMUP_STEPS and (len(self.steps) - WARMUP_STEPS) % 2 == 0
        self.holds = quiet
        self.steps.append(_RecordedStep(quiet, self.clock.mark(), ProcessorNeed.now()))

    def _enter(self, number: int, module: torch.nn.Module, inputs: Any) -> None:
        step = self._running()
        if step is not None and torch._C._current_graph_task_id() == -1:  # else recomputed in backward
            step.modules.append((number, self.clock.mark()))

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        step = self._running()
        if step is None or module is not self._model() or not torch.is_grad_enabled():
            return
        step.backward, step.in_backward = self.clock.mark(), False

        def begin(gradient: torch.Tensor) -> None:
            if not step.in_backward:  # another forward of the same step may have an output too
                step.backward, step.in_backward = self.clock.mark(), True

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # on a parameter the hook would stay
                tensor.register_hook(begin)

    def _ready(self, index: int, parameter: torch.nn.Parameter, accumulated: torch.Tensor | None) -> None:
        step = self._running()
        if step is not None:
            step.ready[index] = self.clock.mark()
            step.needed_s = ProcessorNeed.now().since(step.need)

    def finished(self, exposed_s: float) -> None:
        step = self._running()
        if step is not None:
            step.finished = self.clock.mark()
            self.holds = False

    def _running(self) -> _RecordedStep | None:
        """Return the current step if it is not finished; else None."""
        return self.steps[-1] if self.steps and self.steps[-1].finished is None else None
