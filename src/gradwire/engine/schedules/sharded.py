"""The `pipelined` schedule with `shard_optimizer`: each rank steps its shard, and parameters are gathered (ZeRO stage 1;
Rajbhandari et al. 2020, section 5).

A step in this schedule:
1. backward. Lanes run the reduce phases. At its end the gate stays shut. What scripts find in `grad` is a stand-in, which says
   when it is used that no rank holds the whole mean gradient.
2. `optimizer.step()` waits for the reduce phases, steps this rank's shards, opens the gate and returns.
3. Lanes gather the stepped parameters during the next forward. Whoever first uses a parameter waits for its bucket.
4. The next backward waits for all buckets before it begins. Where the script left out `step()`, it opens the gate first: shards
   are then gathered as they were. So a rank that leaves it out alone keeps the others waiting no longer than until its next
   backward, at whose end all learn of it and raise.
"""

import json
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from gradwire.core import Pipelined
from gradwire.engine.buffers import shared_parameters
from gradwire.engine.control import RankReports
from gradwire.engine.prepare import Prepared, check_one_optimizer
from gradwire.engine.reducer import Reducer, StepState, leave, told_to_all
from gradwire.engine.schedules.base import Closed, TrainingJob, Traits
from gradwire.engine.schedules.pipelined import (
    Gathers,
    PipelinedSchedule,
    clip_coefficient,
    norm_over_ranks,
    settle_before_backward,
    warn_once,
)
from gradwire.engine.torch_hooks.hooks import ModelHook
from gradwire.engine.torch_hooks.lazy_tensors import looking, make_current, use_later
from gradwire.engine.torch_hooks.optimizer_step import Stepping, outermost, step_in_place_of
from gradwire.engine.torch_hooks.settling import SettleFirst
from gradwire.engine.torch_hooks.splitting import in_order, part_of_state, why_none_later, why_not_sharded
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Exchange, Slot, check_sharded
from gradwire.transport import Link, broadcast_bytes, gather_bytes


class ShardedSchedule:
    """Reduce phases in backward, a step of this rank's shards, and gather phases that bring parameters."""

    traits = Traits(lanes_busy_between_steps=True, acts_before_gradients=True, learns_order=False, keeps_parameters=True)

    def __init__(self, reducer: Reducer, schedule: Pipelined, job: TrainingJob) -> None:
        self._reducer, self._gathers = reducer, Gathers(reducer, job.model, self._arrived)
        self._model, self._compiled_before = weakref.ref(job.model), job.compiled_before
        self._optimizer = weakref.ref(job.optimizers[0])
        self._shards: Shards | None = None
        self._exchange: weakref.ref[Exchange] | None = None
        """The one whose shards these are."""
        self._step_is_due = False
        """Whether a backward has ended and the script's `optimizer.step()` has not come: lanes wait at the gate."""
        self._left_out = False
        """Whether the script left out the step whose shards are gathered."""
        self._said: set[str] = set()
        self._stepping = Stepping(job.optimizers, self._step_asked_for)
        self._guard = SettleFirst(None, job.optimizers, ModelHook(self, ShardedSchedule._optimizer_is_seen))

    @staticmethod
    def check_optimizers(prepared: Prepared, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See `ScheduleClass`."""
        plan = prepared.plan
        for index, bucket in enumerate(plan.buckets):
            check_sharded(index, bucket)
        if len(plan.launch) - plan.gate < len(plan.buckets):
            raise PlanError(
                f"only {len(plan.launch) - plan.gate} of the plan's {len(plan.buckets)} gather phases come after its last reduce "
                "phase, and with shard_optimizer they bring what the optimizer makes of all sums. Launch all reduce phases first."
            )
        check_one_optimizer(
            optimizers,
            prepared,
            many="with shard_optimizer one step updates all weights",
            others="With shard_optimizer an optimizer steps shards of the model's parameters, and no other tensors",
        )
        if why := why_not_sharded(optimizers[0]):
            raise PlanError(
                f"the schedule has shard_optimizer, and {why}. Use gw.Pipelined() without it, or an optimizer that treats "
                "elements apart, as torch's SGD, Adam, AdamW, NAdam, RAdam, RMSprop and Adagrad do."
            )

    why_not = staticmethod(PipelinedSchedule.why_not)

    def check_exchange(self, exchange: Exchange) -> None:
        """See `ShardsOptimizer`."""
        optimizer = self._optimizer()
        if self._shards is None or self._is_ours(exchange) or optimizer is None:
            return
        if self._shards.has_state(optimizer):
            raise StepStateError(
                "the state puts the model's tensors in another order, and the optimizer's state is cut into shards of this one. "
                "Call load_state_dict() of the handle right after gw.parallelize, and load_optimizer_state_dict() after it."
            )

    def _is_ours(self, exchange: Exchange) -> bool:
        return self._exchange is not None and self._exchange() is exchange

    def attach(self) -> None:
        self._gathers.attach()
        reducer, optimizer = self._reducer, self._optimizer()
        if self._is_ours(reducer.exchange) or optimizer is None:
            return
        self._exchange = weakref.ref(reducer.exchange)
        self._shards = Shards(reducer.exchange, reducer.slots, reducer.parameters)
        self._shards.take_state(optimizer)
        self._of_bucket: dict[int, list[int]] = defaultdict(list)
        for index, gradient in enumerate(reducer.gradients):
            slot = gradient.slot
            self._of_bucket[slot.bucket].append(index)
            # of the right shape, and of no memory
            stand_in = torch.zeros((), dtype=slot.view.dtype, device=slot.view.device).expand(slot.view.shape)
            use_later(stand_in, partial(_refuse_to_show_gradient, slot.name))
            gradient.stand_in = stand_in

    def let_go(self) -> Callable[[], None]:
        return self._gathers.let_go()

    def detach(self) -> None:
        self._stepping.remove()
        self._guard.remove()
        self._gathers.forget()
        self._step_is_due = False
        for index, parameter in enumerate(self._reducer.living()):
            if parameter is not None:
                make_current(parameter)
                if self._is_stand_in(index, parameter):
                    parameter.grad = None
        optimizer = self._optimizer()
        if self._shards is None or optimizer is None:
            return
        if self._shards.has_state(optimizer) and self._reducer.group.world_size > 1:
            warnings.warn(
                f"this rank has only its shard of the state of {type(optimizer).__name__}, which detach() forgets. To go on "
                "without the handle call handle.optimizer_state_dict() on all ranks before, and load it into the optimizer.",
                stacklevel=4,
            )
        self._shards.forget_state(optimizer)

    def on_forward(self, module: torch.nn.Module) -> None:
        if not torch.is_grad_enabled():
            self.settle()
        # on a device buffers travel on the first lane, which waits at the gate for a step that was left out
        on_device = self._reducer.exchange.flats[0].device.type != "cpu"
        if on_device and self._step_is_due and module.training and torch.is_grad_enabled():
            self._gather_as_it_was()

    def after_forward(self, outputs: list[torch.Tensor]) -> None:
        """See `SeesBackward`."""
        settle_before_backward(self, outputs)

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        self.settle()
        reducer = self._reducer
        running = reducer.state is StepState.RUNNING
        if self._is_stand_in(index, parameter) and not (running and index in reducer.arrivals.came):
            words = (
                f"the gradient of {reducer.names[index]!r} from the last backward is still there when the next one begins, and "
                "would be added to: with shard_optimizer no rank holds all of it. Call optimizer.zero_grad() before each "
                "backward; to accumulate gradients use handle.no_sync() for all backwards but the last."
            )
            raise leave(reducer, words) if running else StepStateError(words)

    def on_begin(self) -> None:
        if self._step_is_due:
            self._gather_as_it_was()
        self.settle()
        self._reducer.begin(self._reducer.exchange)

    def _gather_as_it_was(self) -> None:
        """The script left out the step. Other ranks may have made it, so this one takes their shards too."""
        self._reducer.control.stepped, self._left_out = False, True
        self._gathers.await_sums()
        self._of_shards.take_weights()
        self._gather()
        self.settle()
        self._left_out = False

    def on_end(self, told: "Future[RankReports]") -> None:
        self._reducer.running.await_result(told)

    def on_closed(self, closed: Closed) -> None:
        for missing in closed.missing:
            parameter = self._reducer.parameters[missing.index]()
            if missing.used_anywhere and parameter is not None:
                parameter.grad = self._reducer.gradients[missing.index].stand_in
        self._gathers.exposed_s, self._step_is_due = closed.exposed_s, True

    def _is_stand_in(self, index: int, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is not None and parameter.grad is self._reducer.gradients[index].stand_in

    @partial(told_to_all, script_steps=True)
    def _step_asked_for(self, optimizer: torch.optim.Optimizer, whole: Callable[[], Any]) -> Any:
        with self._gathers.lock:
            self._reducer.lanes.check()
            self._check_gradients(optimizer)
            if not self._step_is_due:
                return whole()  # there is no gradient: its own business
            self._gathers.await_sums()
            shards = self._of_shards
            shards.take_weights()
            chosen = self._due_by_parameter()
            stepped = [shard for of_parameter in chosen.values() for shard in of_parameter]
            for shard in stepped:
                shard.weight.grad = shard.total.to(shard.weight.dtype)
            with outermost(self._reducer.exchange.flats[0].device):
                stand_ins = {own: [shard.weight for shard in shards] for own, shards in chosen.items()}
                step_in_place_of(optimizer, whole, stand_ins)
            for shard in stepped:
                shard.weight.grad = None
            self._gather()
            parameters = [parameter for parameter in self._reducer.living() if parameter is not None]
            if warn_once(self._said, why_none_later(parameters, self._model(), self._compiled_before), optimizer):
                self.settle()
                return None
            for slot, parameter in zip(self._reducer.slots, self._reducer.living(), strict=True):
                if parameter is not None:
                    use_later(parameter, partial(self._settle_bucket, slot.bucket))
        return None

    @property
    def _of_shards(self) -> "Shards":
        assert self._shards is not None
        return self._shards

    def _due_by_parameter(self) -> "dict[int, list[Shard]]":
        """The shards whose parameters have a gradient, by the parameter's id."""
        due: dict[int, list[Shard]] = defaultdict(list)
        for shard in self._of_shards.all:
            parameter = self._reducer.parameters[shard.index]()
            if parameter is not None and self._is_stand_in(shard.index, parameter):
                due[id(parameter)].append(shard)
        return due

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises StepStateError for a step that cannot be made of shards."""
        name = type(optimizer).__name__
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise StepStateError(_refusal(f"a GradScaler unscales gradients inside {name}.step"))
        index_of = {id(reference()): index for index, reference in enumerate(self._reducer.parameters)}
        with looking():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is None:
                    continue
                index = index_of.get(id(parameter))
                if index is None or not self._is_stand_in(index, parameter):
                    which = "a tensor" if index is None else repr(self._reducer.names[index])
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

    def _gather(self) -> None:
        """Let the lanes bring all ranks all shards."""
        self._step_is_due = False
        self._gathers.begin()
        self._reducer.running.open_gate()

    @told_to_all
    def _settle_bucket(self, bucket: int) -> None:  # tensors that wait keep the schedule alive by this method
        self._gathers.settle_bucket(bucket)

    def _arrived(self, bucket: int) -> None:
        with outermost(self._reducer.exchange.flats[bucket].device), torch.no_grad():
            for index in self._of_bucket[bucket]:
                if (parameter := self._reducer.parameters[index]()) is not None:
                    make_current(parameter)
                    # of a step that was left out weights are as they were when a graph was made that needs them now
                    weights = parameter.data if self._left_out else parameter
                    weights.copy_(self._reducer.slots[index].view)

    # ---- what needs all shards

    def clip_grad_norm_(self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        self._reducer.lanes.check()
        if not self._step_is_due:
            raise StepStateError(
                "clip_grad_norm_ was called when no gradient is there. With shard_optimizer call it after backward() and before "
                "optimizer.step(), on every rank."
            )
        power = float(norm_type)
        if not power > 0:
            raise StepStateError(_refusal(f"norm_type is {norm_type}: only norms above 0 can be joined from shards"))
        self._gathers.await_sums()
        totals = [shard.total for shards in self._due_by_parameter().values() for shard in shards]
        norm = norm_over_ranks(self._reducer, totals, power)
        assert norm is not None
        for total in totals:
            total.mul_(clip_coefficient(norm, max_norm))
        flat = self._reducer.exchange.flats[0]
        return torch.tensor(norm, dtype=flat.dtype, device=flat.device)

    def optimizer_state_dict(self, rank: int | None) -> dict[str, Any]:
        self.settle()
        optimizer, lanes = self._living_optimizer(), self._reducer.lanes
        lanes.await_queued()
        own_state = self._of_shards.own_state(optimizer)
        with lanes.told("the optimizer's state of all ranks", self._reducer.step):
            whole = lanes.control.submit(partial(self._of_shards.whole_state, own_state)).result()
        if rank is not None and rank != self._reducer.group.rank:
            return {}
        own = optimizer.state
        optimizer.state = defaultdict(dict, whole)
        try:
            with self._guard.passing(), looking():
                return optimizer.state_dict()
        finally:
            optimizer.state = own

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        self.settle()
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
            _refusal("in handle.join() ranks without batches do not step, so that the weights of their shards would stay")
        )

    def check_parameters(self, model: torch.nn.Module) -> None:
        trainable = {name: parameter for name, parameter in shared_parameters(model) if parameter.requires_grad}
        same = [id(parameter) for parameter in trainable.values()] == [id(parameter) for parameter in self._reducer.living()]
        if same and list(trainable) == self._reducer.names and self._reducer.converted() is None:
            return
        raise StepStateError(
            "trainable parameters were added, thawed, frozen, converted or replaced, and the optimizer's state is cut into "
            "shards of the model as it was. Save handle.optimizer_state_dict(), call handle.detach(), change the model, and "
            "parallelize again."
        )

    def settle(self) -> None:
        self._gathers.flush()


def _refusal(what: str) -> str:
    return f"{what}, and with shard_optimizer no rank holds a whole gradient. Use gw.Pipelined() without it."


def _refuse_to_show_gradient(name: str) -> NoReturn:
    raise StepStateError(
        f"the gradient of {name!r} was used, and with shard_optimizer each rank holds only its shard of the mean. If an "
        "optimizer that gw.parallelize did not get steps it, pass one optimizer with all parameters, in several param_groups. "
        "Clip with handle.clip_grad_norm_() and clear with zero_grad(set_to_none=True); a GradScaler, other clipping and "
        "whatever else reads gradients needs gw.Pipelined() without shard_optimizer."
    )


State = Mapping[str, Any]
"""The state that an optimizer keeps of one parameter."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A run of a parameter's elements."""

    index: int
    """The index of the parameter."""
    first: int
    """The first element."""
    weight: torch.nn.Parameter
    """One-dimensional, in the bucket's memory."""
    total: torch.Tensor
    """The mean gradient, in the dtype in which it was added."""


class _Entry(NamedTuple):
    """The facts of one value of a rank's optimizer state."""

    parameter: int
    first: int
    key: str
    dtype: str
    """The dtype of a tensor; '' for a plain value."""
    numel: int
    """Elements of a shard's tensor; 0 for one number that all shards of a parameter have alike."""
    value: Any
    """Where it is no tensor."""


class Shards:
    def __init__(
        self, exchange: Exchange, slots: Sequence[Slot], parameters: Sequence["weakref.ref[torch.nn.Parameter]"]
    ) -> None:
        """`slots` are those of the parameters, in the same order."""
        self._slots, self._parameters = list(slots), list(parameters)
        self.all: list[Shard] = []
        index_of = {id(slot): index for index, slot in enumerate(slots)}
        for slot, low, high, total in exchange.own_sums():
            weight = torch.nn.Parameter(exchange.flats[slot.bucket][low:high])
            self.all.append(Shard(index_of[id(slot)], low - slot.offset, weight, total))

    def take_weights(self) -> None:
        """Copy the parameters' present values into the shards."""
        for shard in self.all:
            if (parameter := self._parameters[shard.index]()) is not None:
                values = in_order(parameter.detach(), self._slots[shard.index].view)
                shard.weight.data.copy_(values[shard.first : shard.first + shard.weight.numel()])

    # ---- the optimizer's state

    def has_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer keeps something of a shard."""
        return any(shard.weight in optimizer.state for shard in self.all)

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state of whole parameters by the state of this rank's shards."""
        for index, reference in enumerate(self._parameters):
            parameter = reference()
            if parameter is None or parameter not in optimizer.state:
                continue
            state, like = optimizer.state.pop(parameter), self._slots[index].view
            for shard in self.all:
                if shard.index == index:
                    optimizer.state[shard.weight] = part_of_state(state, like, shard.first, shard.weight.numel())

    def forget_state(self, optimizer: torch.optim.Optimizer) -> None:
        for shard in self.all:
            optimizer.state.pop(shard.weight, None)

    def own_state(self, optimizer: torch.optim.Optimizer) -> "tuple[list[_Entry], list[torch.Tensor]]":
        """This rank's part of the state, and its tensors on the CPU. For the script's thread: on a device its stream has written
        them."""
        told, tensors = [], []
        for entry, value in self._entries(optimizer):
            told.append(entry)
            if entry.dtype:
                tensors.append(value.detach().cpu() if value.dim() else value.detach().cpu().clone())
        return told, tensors

    def whole_state(self, own: "tuple[list[_Entry], list[torch.Tensor]]", link: Link) -> dict[torch.Tensor, dict[str, Any]]:
        """Everybody's shards of the state joined, by parameter, on the CPU. Collective. Raises LinkError."""
        told, tensors = own
        rows = gather_bytes(link, json.dumps(told).encode())
        whole: dict[int, dict[str, Any]] = defaultdict(dict)
        for root, row in enumerate(rows):
            entries = [_Entry(*each) for each in json.loads(row)]
            arrived = tensors if root == link.rank else [_empty(entry) for entry in entries if entry.dtype]
            broadcast_bytes(link, arrived, root)
            values = iter(arrived)
            for entry in entries:
                self._put(whole[entry.parameter], entry, next(values) if entry.dtype else entry.value)
        parameters = [reference() for reference in self._parameters]
        return {p: whole[index] for index, p in enumerate(parameters) if p is not None and index in whole}

    def _entries(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Entry, Any]]:
        for shard in self.all:
            for key, value in optimizer.state.get(shard.weight, {}).items():
                if isinstance(value, torch.Tensor):
                    numel = value.numel() if value.dim() else 0
                    dtype = str(value.dtype).removeprefix("torch.")
                    yield _Entry(shard.index, shard.first, key, dtype, numel, None), value
                else:
                    yield _Entry(shard.index, shard.first, key, "", 0, value), value

    def _put(self, state: dict[str, Any], entry: _Entry, value: Any) -> None:
        if not entry.numel:
            state[entry.key] = value
            return
        like = self._slots[entry.parameter].view
        if entry.key not in state:
            state[entry.key] = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype)
        in_order(state[entry.key], like)[entry.first : entry.first + entry.numel].copy_(value)


def _empty(entry: _Entry) -> torch.Tensor:
    return torch.empty((entry.numel,) if entry.numel else (), dtype=getattr(torch, entry.dtype))
