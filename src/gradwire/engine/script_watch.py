"""What a script does between backwards that bears on gradients: steps of optimizers, and the loss scale."""

import warnings
import weakref
from collections.abc import Callable

import torch

from gradwire.engine.drift import OwnSteps
from gradwire.engine.leaving import taken_in_backward
from gradwire.engine.reducer import Reducer
from gradwire.engine.torch_hooks.loss_scale import scale_of_this_backward, watch_scalers
from gradwire.engine.torch_hooks.stepped import hear, hear_no_more
from gradwire.exchange import Exchange


class ScriptWatch:
    """Refuses steps inside backward, warns of steps by gradients of the script's own, and scales residuals with the loss."""

    def __init__(self, reducer: Reducer, drift_check_steps: int) -> None:
        self._reducer = reducer
        self._own_steps = OwnSteps(drift_check_steps, reducer.group, reducer.lanes.name)
        self._stepped_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, str]] = (
            weakref.WeakKeyDictionary()
        )
        """By optimizer: its groups, how often the reducer was given parameters, and the name of one that it steps, or ''."""
        self._loss_scale: float | None = None
        """Of the last step whose loss a GradScaler scaled."""
        hear(self)
        watch_scalers()

    def stop(self) -> None:
        """Watch no more."""
        hear_no_more(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The script asks for a step of any optimizer of the process."""
        reducer, name = self._reducer, self._parameter_of(optimizer)
        if not name or not reducer.synchronise:
            return
        if torch._C._current_graph_task_id() != -1:
            raise taken_in_backward(reducer, name, type(optimizer).__name__)
        if reducer.schedule.traits.trains_alone:
            return
        if words := self._own_steps.step(reducer.parameters, reducer.names, reducer.step):
            warnings.warn(words, stacklevel=4)

    def _parameter_of(self, optimizer: torch.optim.Optimizer) -> str:
        groups, watched, name = self._stepped_by.get(optimizer, (0, 0, ""))
        now = len(optimizer.param_groups), self._reducer.watched
        if (groups, watched) != now:
            names = {id(each): name for name, each in zip(self._reducer.names, self._reducer.living(), strict=True)}
            stepped = (names.get(id(each)) for group in optimizer.param_groups for each in group["params"])
            name = next(filter(None, stepped), "")
            self._stepped_by[optimizer] = *now, name
        return name

    def begins(self, exchange: Exchange, settle: Callable[[], None]) -> None:
        """A backward begins. What was not sent yet of a loss of another scale takes up the new one."""
        scale, before = scale_of_this_backward(), self._loss_scale
        if scale is None:
            return
        self._loss_scale = scale
        if before is not None and scale != before:
            settle()
            exchange.residuals.scale(scale / before)

    def synchronised(self) -> None:
        """A synchronised backward has ended."""
        self._own_steps.synchronised()
