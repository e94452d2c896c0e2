"""The `pipelined` schedule with `shard_optimizer`: each rank steps its shard, and parameters are gathered (ZeRO stage 1;
Rajbhandari et al. 2020, section 5).

A step in this schedule:
1. backward. Lanes run the reduce phases. At its end the gate stays shut. What scripts find in `grad` is a stand-in, which says
   when it is used that no rank holds the whole mean gradient.
2. `optimizer.step()` waits for the reduce phases, steps this rank's shards, opens the gate and returns.
3. Lanes gather the stepped parameters beside the next forward. Whoever first uses a parameter waits for its bucket.
4. The next backward waits for all buckets before it begins. Where the script left out `step()`, it opens the gate first: shards
   are then gathered as they were. So a rank that leaves it out alone keeps the others waiting no longer than until its next
   backward, at whose end all hear of it and raise.
"""

import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

import torch

from gradwire.collectives import Group, Lane, Link, LinkError
from gradwire.engine.control import Report, State
from gradwire.engine.elementwise import why_not_sharded
from gradwire.engine.executor import Executor
from gradwire.engine.failure import RollCall
from gradwire.engine.later import looking, make_current, use_later
from gradwire.engine.pipelined import Pipelined
from gradwire.engine.shard_norm import clip_coefficient, norm_over_ranks
from gradwire.engine.shards import Shard, Shards
from gradwire.engine.splitting import why_none_later
from gradwire.engine.stepping import outermost, step_in_place_of
from gradwire.errors import StepStateError

__all__ = ["Sharded"]


class Sharded(Pipelined):
    """Shards of the optimizer's state, and gathered parameters."""

    learns_order = False
    keeps_parameters = True

    def __init__(
        self,
        group: Group,
        control: Lane,
        roll_call: RollCall,
        drift_check_steps: int,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        compiled_before: int,
    ) -> None:
        self._shards: Shards | None = None
        self._step_is_due = False
        """From the end of a backward to the script's `optimizer.step()`: lanes wait at the gate."""
        super().__init__(group, control, roll_call, drift_check_steps, model, optimizers, compiled_before)
        self._optimizer = weakref.ref(optimizers[0])

    def check_executor(self, executor: Executor) -> None:
        optimizer = self._optimizer()
        if self._shards is None or executor is self.executor or optimizer is None:
            return
        if self._shards.has_state(optimizer):
            raise StepStateError(
                "the state puts the model's tensors in another order, and the optimizer's state is cut into shards of this one. "
                "Call load_state_dict() of the handle right after gw.parallelize, and load_optimizer_state_dict() after it."
            )

    def attach(self, executor: Executor, random: torch.Tensor) -> None:
        before = self.executor if self._shards is not None else None
        super().attach(executor, random)
        optimizer = self._optimizer()
        if executor is before or optimizer is None:
            return
        self._shards = Shards(executor.buckets, self.slots, self._parameters)
        self._shards.take_state(optimizer)
        self._of_bucket: dict[int, list[int]] = defaultdict(list)
        for index, slot in enumerate(self.slots):
            self._of_bucket[slot.bucket].append(index)
            # of the right shape, and of no memory
            stand_in = torch.zeros((), dtype=slot.view.dtype, device=slot.view.device).expand(slot.view.shape)
            use_later(stand_in, partial(_refuse_to_show_gradient, slot.name))
            slot.stand_in = stand_in

    def detach(self) -> None:
        optimizer = self._optimizer()
        super().detach()
        if self._shards is None or optimizer is None:
            return
        if self._shards.has_state(optimizer) and self.group.world_size > 1:
            warnings.warn(
                f"this rank has only its shard of the state of {type(optimizer).__name__}, which detach() forgets. To go on "
                "without the handle call handle.optimizer_state_dict() on all ranks before, and load it into the optimizer.",
                stacklevel=3,
            )
        self._shards.forget_state(optimizer)

    # ---- backward

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        super().before_gradient(index, parameter)
        if self._is_stand_in(index, parameter) and not (self._running and index in self._filled):
            words = self._not_cleared(index)
            raise self._leave(words) if self._running else StepStateError(words)

    def _begin_step(self) -> None:
        if self._step_is_due:
            self._gather_as_it_was()
        super()._begin_step()

    def _gather_as_it_was(self) -> None:
        """The script left out the step. Other ranks may have made it, so this one takes their shards too."""
        self.stepped = False
        self._await_sums()
        self._of_shards.take_weights()
        self._gather()
        self.flush()

    def _tell(self, state: State) -> "Future[list[Report]]":
        told = super()._tell(state)
        self.stepped = True  # what was left out is told once
        return told

    def _wait(self, told: "Future[list[Report]]") -> None:
        self.executor.await_result(told)

    def _fill_missing(self, index: int, parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
        if parameter is not None and self._is_stand_in(index, parameter):
            raise self._leave(self._not_cleared(index))
        return super()._fill_missing(index, parameter)

    def _settle(self, index: int, own: torch.Tensor | None, used_anywhere: bool) -> None:
        parameter = self._parameters[index]()
        if used_anywhere and parameter is not None:
            parameter.grad = self.slots[index].stand_in

    def _closed(self, exposed_s: float) -> None:
        self._exposed_s, self._step_is_due = exposed_s, True

    def _is_stand_in(self, index: int, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is not None and parameter.grad is self.slots[index].stand_in

    def _not_cleared(self, index: int) -> str:
        return (
            f"the gradient of {self.names[index]!r} from the last backward is still there when the next one begins, and would be "
            "added to: with shard_optimizer no rank holds all of it. Call optimizer.zero_grad() before each backward; to "
            "accumulate gradients use handle.no_sync() for all backwards but the last."
        )

    # ---- stepping

    def _step_asked_for(self, optimizer: torch.optim.Optimizer, whole: Callable[[], Any]) -> Any:
        with self._lock:
            self._check_usable()
            self._check_gradients(optimizer)
            if not self._step_is_due:
                return whole()  # there is no gradient: its own business
            self._await_sums()
            shards = self._of_shards
            shards.take_weights()
            chosen = self._due_by_parameter()
            stepped = [shard for of_parameter in chosen.values() for shard in of_parameter]
            for shard in stepped:
                shard.weight.grad = shard.total.to(shard.weight.dtype)
            with outermost(self.executor.buckets[0].flat.device):
                stand_ins = {own: [shard.weight for shard in shards] for own, shards in chosen.items()}
                step_in_place_of(optimizer, whole, stand_ins)
            for shard in stepped:
                shard.weight.grad = None
            self._gather()
            parameters = [parameter for parameter in self._living() if parameter is not None]
            if self._say(why_none_later(parameters, self._model(), self._compiled_before), optimizer):
                self.flush()
            else:
                self._use_parameters_later()
        return None

    @property
    def _of_shards(self) -> Shards:
        assert self._shards is not None
        return self._shards

    def _due_by_parameter(self) -> dict[int, list[Shard]]:
        """The shards whose parameters have a gradient, by the parameter's id."""
        due: dict[int, list[Shard]] = defaultdict(list)
        for shard in self._of_shards.all:
            parameter = self._parameters[shard.index]()
            if parameter is not None and self._is_stand_in(shard.index, parameter):
                due[id(parameter)].append(shard)
        return due

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises StepStateError for a step that cannot be made of shards."""
        name = type(optimizer).__name__
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise StepStateError(_refusal(f"a GradScaler unscales gradients inside {name}.step"))
        index_of = {id(reference()): index for index, reference in enumerate(self._parameters)}
        with looking():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is None:
                    continue
                index = index_of.get(id(parameter))
                if index is None or not self._is_stand_in(index, parameter):
                    which = "a tensor" if index is None else repr(self.names[index])
                    raise StepStateError(
                        _refusal(f"the gradient of {which} is not what the last backward left there, or not averaged")
                    )
                if not self._step_is_due:
                    raise StepStateError(
                        f"{name}.step() was called when no gradient was there for it: twice after one backward, or after a later "
                        "forward. With shard_optimizer gradients are gone after a step. Call step() once after each backward."
                    )
        if why := why_not_sharded(optimizer, tried=True):
            raise StepStateError(_refusal(why))

    def _await_sums(self) -> None:
        start = time.perf_counter()
        with self._failures_told():
            self.executor.await_gate()
        self._exposed_s += time.perf_counter() - start

    def _gather(self) -> None:
        """Let the lanes bring all ranks all shards."""
        self._step_is_due = False
        self._running_out.set()
        self._under_way = dict.fromkeys(self._order)
        self.executor.open_gate()

    def _use_parameters_later(self) -> None:
        for slot, parameter in zip(self.slots, self._living(), strict=True):
            if parameter is not None:
                use_later(parameter, partial(self._settle_bucket, slot.bucket))

    def _arrived(self, bucket: int) -> None:
        with outermost(self.executor.buckets[bucket].flat.device), torch.no_grad():
            for index in self._of_bucket[bucket]:
                if (parameter := self._parameters[index]()) is not None:
                    make_current(parameter)
                    # of a step that was left out weights are as they were when a graph was made that needs them now
                    weights = parameter if self.stepped else parameter.data
                    weights.copy_(self.slots[index].view)

    def before_forward(self, module: torch.nn.Module) -> None:
        super().before_forward(module)
        # on a device buffers travel on the first lane, which waits at the gate for a step that was left out
        on_device = self.executor.buckets[0].flat.device.type != "cpu"
        if on_device and self._step_is_due and module.training and torch.is_grad_enabled():
            self._gather_as_it_was()

    def _forget(self) -> None:
        super()._forget()
        self._step_is_due = False
        for index, parameter in enumerate(self._living()):
            if parameter is not None and self._is_stand_in(index, parameter):
                parameter.grad = None

    # ---- what needs all shards

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        self._check_usable()
        if not self._step_is_due:
            raise StepStateError(
                "clip_grad_norm_ was called when no gradient is there. With shard_optimizer call it after backward() and before "
                "optimizer.step(), on every rank."
            )
        power = float(norm_type)
        if not power > 0:
            raise StepStateError(_refusal(f"norm_type is {norm_type}: only norms above 0 can be joined from shards"))
        self._await_sums()
        totals = [shard.total for shards in self._due_by_parameter().values() for shard in shards]
        try:
            norm = norm_over_ranks(self.control, totals, power)
        except LinkError as error:
            raise self.broken("the norm of all gradients", error) from error
        assert norm is not None
        for total in totals:
            total.mul_(clip_coefficient(norm, max_norm))
        flat = self.executor.buckets[0].flat
        return torch.tensor(norm, dtype=flat.dtype, device=flat.device)

    def optimizer_state_dict(self, rank: int | None) -> dict[str, Any]:
        self.flush()
        optimizer = self._living_optimizer()
        shards = self._of_shards

        def join(link: Link) -> dict[torch.Tensor, dict[str, Any]]:
            return shards.whole_state(optimizer, link)

        try:
            whole = self.control.submit(join).result()
        except LinkError as error:
            raise self.broken("the optimizer's state of all ranks", error) from error
        if rank is not None and rank != self.group.rank:
            return {}
        own = optimizer.state
        optimizer.state = defaultdict(dict, whole)
        try:
            with self._guard.passing(), looking():
                return optimizer.state_dict()
        finally:
            optimizer.state = own

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        self.flush()
        optimizer = self._living_optimizer()
        with self._guard.passing():
            optimizer.load_state_dict(dict(state))
        self._of_shards.take_state(optimizer)

    def _living_optimizer(self) -> torch.optim.Optimizer:
        if (optimizer := self._optimizer()) is None:
            raise StepStateError("the optimizer that was passed to gw.parallelize is gone. Keep it.")
        return optimizer

    def _optimizer_is_seen(self) -> None:
        raise StepStateError(
            "each rank has only its shard of this optimizer's state: saved by one rank the rest would be lost. Call "
            "handle.optimizer_state_dict() on all ranks to save it, and handle.load_optimizer_state_dict() to load it. Add "
            "param_groups before gw.parallelize."
        )

    def check_join(self) -> None:
        raise StepStateError(
            _refusal(
                "in handle.join() ranks without batches do not step, so that the weights of their shards would stay"
            )
        )

    def check_parameters(self, model: torch.nn.Module) -> None:
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        same = [id(parameter) for parameter in trainable.values()] == [id(parameter) for parameter in self._living()]
        if same and list(trainable) == self.names and self.converted() is None:
            return
        raise StepStateError(
            "trainable parameters were added, thawed, frozen, converted or replaced, and the optimizer's state is cut into "
            "shards of the model as it was. Save handle.optimizer_state_dict(), call handle.detach(), change the model, and "
            "parallelize again."
        )


def _refusal(what: str) -> str:
    return f"{what}, and with shard_optimizer no rank holds a whole gradient. Use gw.Pipelined() without it."


def _refuse_to_show_gradient(name: str) -> NoReturn:
    raise StepStateError(
        f"the gradient of {name!r} was used, and with shard_optimizer each rank holds only its shard of the mean. Clip with "
        "handle.clip_grad_norm_() and clear with zero_grad(set_to_none=True); a GradScaler, other clipping and whatever else "
        "reads gradients needs gw.Pipelined() without shard_optimizer."
    )
