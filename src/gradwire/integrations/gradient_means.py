"""The `backward` schedule among members that come and go: means of gradients, and steps that may not count."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from gradwire.engine import LossScale, ModelHook, StepHook, in_reentrant_backward, kept_nodes, leave_hooks_behind
from gradwire.errors import StepStateError
from gradwire.exchange import Exchange
from gradwire.integrations.catch_up import Means
from gradwire.integrations.elastic_auto import ElasticAuto
from gradwire.integrations.members import Members
from gradwire.integrations.optimizer_turns import OptimizerTurns
from gradwire.integrations.trained import StepWatch, TrainedParameters

__all__ = ["GradientMeans"]


class GradientMeans:
    """Averages gradients while backward computes them.

    A training forward begins a step with the members of the quorum. `optimizer.step()` makes the step count. Where the exchange
    failed, gradients are zeros, for what reads them, such as a GradScaler. `optimizer.step()` then makes them None, so that
    optimizers change nothing.

    A joiner makes steps that the others have made with their means, until it has caught up.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        auto: ElasticAuto | None = None,
    ) -> None:
        """auto: chooses plans; None: the plan of the script runs."""
        self._members: Members | None = None
        self._auto, self._exposed_s, self._scale = auto, 0.0, LossScale()
        self._parameters, self.trained = dict(parameters), TrainedParameters(model)
        self._turns = OptimizerTurns(optimizers)
        self.is_paused = False
        """Whether backwards average nothing."""
        self._met: Exchange | None = None
        """The exchange of the step that a forward began."""
        self._due: Means | None = None
        """The means of the step that a forward began, if the others have made it."""
        self._sends = self._averaged = self._failed = False
        act = GradientMeans
        leave_hooks_behind(model)
        self._hooks: list[Any] = [model.register_forward_pre_hook(ModelHook(self, act._before_forward))]
        for name, parameter in parameters.items():
            arrived = ModelHook(self, lambda self, parameter, name=name: self._arrived(name, parameter))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
        self._nodes = kept_nodes(parameters.values())
        self._hooks.append(StepWatch.of_members(self.trained, optimizers))
        self._hooks += [each.register_step_pre_hook(StepHook(self, act._before_step)) for each in optimizers]
        self._hooks += [each.register_step_post_hook(StepHook(self, act._after_step)) for each in optimizers]

    def begin(self, members: Members) -> None:
        """Train among these members."""
        self._members = members

    @property
    def members(self) -> Members:
        """The members. Raises AssertionError before `begin`."""
        assert self._members is not None
        return self._members

    def detach(self) -> None:
        """Leave the model and the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []
        if self._auto is not None:
            self._auto.close()

    def _before_forward(self, model: torch.nn.Module, inputs: object) -> None:
        if not (model.training and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        if self._sends:  # an exception left the last backward
            self._sends, self._met = False, None
            self.members.give_up()
        if self._averaged:  # not all optimizers stepped after it, as where a GradScaler skips a step
            self._end()
        self._meet()

    def _meet(self) -> None:
        """Find the exchange of this step, whose members have equal weights, or the step's means."""
        if self._met is None and self._due is None:
            self.trained.check()
            found = self.members.meet()
            self._met, self._due = (found, None) if isinstance(found, Exchange) else (None, found)

    def _begin(self) -> None:
        self._meet()
        change = self._scale.change(self._met.plan.specs if self._met is not None else ())
        if self._met is not None:
            if change.is_any and self._all_train:  # who catches up knows no scale, and keeps some values as the others do
                self._met.residuals.follow(change.factor, change.left_out)
            if self._auto is not None:
                self._auto.use(self._met, self._all_train)
            self.members.begin(self._met)

    @property
    def _all_train(self) -> bool:
        """Whether no member of the step catches up."""
        return self.members.parts in (0, self.members.world_size)

    def _arrived(self, name: str, parameter: torch.nn.Parameter) -> None:
        """A gradient is accumulated. The optimizer's step averages what no backward does."""
        if self.is_paused or (self._met is None and self._due is None):
            return
        if not self._sends:
            if in_reentrant_backward():
                return
            if self._averaged:
                raise StepStateError(
                    "a second backward began after the gradients of this step were averaged, and members that join do not expect "
                    "another exchange. Call all backwards but the last inside `with job.no_sync():`, or add up the losses."
                )
            self._sends = True
            self._begin()
            Variable._execution_engine.queue_callback(self._finish)
        if self._met is not None:
            self._send(self._met, name, parameter)
            if self._auto is not None:
                self._auto.came(name, parameter.grad)

    @torch.no_grad()
    def _send(self, exchange: Exchange, name: str, parameter: torch.nn.Parameter) -> None:
        factor = self.members.factor
        if _is_left_alone(parameter):
            exchange.ready(name, torch.zeros_like(parameter))
            return
        if parameter.grad is None or factor == 0.0:
            parameter.grad = torch.zeros_like(parameter)
        elif factor != 1.0:
            parameter.grad.mul_(factor)
        exchange.ready(name, parameter.grad)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: average what is left, and wait."""
        self._sends, self._averaged = False, True
        if self._met is None:
            assert self._due is not None
            self._set_gradients(self._due)
            return
        for name, parameter in self._parameters.items():
            if self._met.slots[name] not in self._met.sent:
                self._send(self._met, name, parameter)
        began_s = time.perf_counter()
        if not self.members.end(self._met):
            self._failed = True
            self.members.lost += 1
            self._set_gradients({name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()})
        self._exposed_s = time.perf_counter() - began_s

    def _set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if not _is_left_alone(parameter):
                parameter.grad = gradients[name]

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self._turns.has(optimizer):  # again, without a training forward
            self._end()
        self._turns.check(optimizer, [*arguments, *named.values()])
        if not self._averaged:
            self._begin()
            self._finish()
        if self._failed:
            for parameter in self._parameters.values():
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The step counts with the first optimizer; the others take the gradients of the same step."""
        if self._turns.note(optimizer) and not self._failed:
            self.members.commit()
            if self._auto is not None and self._met is not None:
                self._auto.ended(self.members, self._exposed_s)
        if self._turns.is_over:
            self._end()

    def _end(self) -> None:
        """The next step begins."""
        self._met = self._due = None
        self._averaged = self._failed = False
        self._turns.end()


def _is_left_alone(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter was frozen after the start: a gradient of zeros would let an optimizer's weight decay move it."""
    return parameter.grad is None and not parameter.requires_grad
