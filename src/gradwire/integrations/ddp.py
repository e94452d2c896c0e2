"""A communication hook of DistributedDataParallel that averages gradients with `gw.Exchange`.

DDP calls the hook for each bucket, in the same order on all ranks. One exchange holds the gradients of all parameters by name.
Its lanes work while backward runs, and the hook of the last bucket waits for them."""

import os
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.core import Backward, Plan, Spec, show
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Exchange, ExchangeStats, TensorMeta, embeddings_of, info_of, plan_for, read_state
from gradwire.integrations.handles import all_objects, resume_together
from gradwire.plan import Policy
from gradwire.transport import Group

__all__ = ["DDPState", "bucket_sizes", "ddp_hook"]
_ONE_EACH = "Call model.register_comm_hook(gw.DDPState(plan), gw.ddp_hook) once, with a state of its own for each model."
PlanForDDP: TypeAlias = Plan | Policy | Spec | str | os.PathLike[str]


class DDPState:
    """The exchange of one DDP model's gradients, and the state of its compressors.

    plan: a spec (`gw.QSGD(bits=4)` for every tensor), a `gw.Policy`, a `gw.Plan` or the path of a plan's JSON file, for the names
    of the model inside DDP. A policy's plan is made again when DDP has brought its buckets into gradient-ready order.
    Means are over all ranks of DDP's group, in `join()` too, for any `divide_by_initial_world_size`. With error feedback a
    parameter that no rank used in a step (`find_unused_parameters`) loses its residual. torch averages sparse gradients.
    Raises PlanError for a plan that DDP cannot run. In backward the hook raises PlanError if the plan does not fit the model,
    DisagreementError on all ranks if ranks differ, CommunicationError if a rank died or stalled.

    Example, in a script started by torchrun::

        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(gw.DDPState(plan=gw.QSGD(bits=4)), gw.ddp_hook)
    """

    def __init__(self, plan: PlanForDDP) -> None:
        self.plan = _checked(plan)
        self._parameters: dict[str, torch.nn.Parameter] = {}  # by name, in the order of registration
        self._names: dict[torch.Tensor, str] = {}
        self._embeddings: set[int] = set()
        self._group: Any = None  # DDP's group, once the model is found
        self._exchange: Exchange | None = None
        self._saved: dict[str, Any] = {}  # a state that the next step begins with
        self._order: list[str] = []  # names in the order for which the plan was made
        self._order_known = False
        self._came: list[list[str]] = []  # names in the order of DDP's buckets, for the last step and for this one
        self._waiting: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return DDPState, (self.plan,)  # a script saves the whole DDP model; torch restores no hooks

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange one of DDP's buckets. The future gets the buffer, with mean gradients, after the step's last bucket."""
        if bucket.index() == 0:
            self._begin(bucket)
        exchange, buffer = self._exchange, bucket.buffer()
        if exchange is None or buffer.is_sparse:
            done = allreduce_hook(self._group, bucket)
        else:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                exchange.ready(self._names[parameter], gradient)
                self._came[-1].append(self._names[parameter])
            done = torch.futures.Future[torch.Tensor](devices=[buffer.device] if buffer.is_cuda else None)
            self._waiting.append((done, buffer))
        if bucket.is_last() and exchange is not None:
            exchange.wait()
            for future, averaged in self._waiting:
                future.set_result(averaged)
            self._waiting = []
            self._learn_order()
        return done

    def stats(self) -> ExchangeStats:
        """Statistics of this rank's exchange so far. Raises StepStateError before the first step."""
        if self._exchange is not None:
            return self._exchange.stats()
        raise StepStateError("there are no statistics before the first step. Call stats() after a backward.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's step, plan and residuals, with keys `rank{r}/...`; empty before the first step. Call it between
        steps, and save the states of all ranks. A run continues bit for bit from the state after the second step (with
        `static_graph` the third) or a later one."""
        if self._exchange is None:
            return dict(self._saved)
        state, names = self._exchange.state_dict(), list(self._parameters)
        key = next(key for key in state if key.endswith("/order"))
        return {**state, key: torch.tensor([names.index(name) for name in self._order])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned: this rank's own state, or, with another number of ranks, the states of all ranks that
        saved, in one dictionary. Call it between steps, on every rank, after `register_comm_hook`; it sends nothing. Raises
        ValueError that names the mistake in the state; if it does not fit the plan, the next step raises ValueError."""
        self._find_model()
        names, order = list(self._parameters), read_state(state, Group.of(self._group)).order if state else []
        if order and sorted(order) != list(range(len(names))):
            raise ValueError(
                f"the state has {len(order)} tensors, and DDP averages {len(names)}: it was saved with another model, or other "
                "parameters were frozen. Load it into that model."
            )
        if self._exchange is not None:
            self._exchange.close()
        self._exchange, self._came, self._saved = None, [], dict(state)
        self._order, self._order_known = [names[at] for at in order], bool(order)

    def _begin(self, bucket: GradBucket) -> None:
        self._find_model()
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if not buffer.is_sparse and any(each not in self._names for each in parameters):
            raise StepStateError(f"this DDPState averages gradients of another DDP model. {_ONE_EACH}")
        if buffer.dtype != parameters[0].dtype:
            raise PlanError(
                f"the hook got {buffer.dtype} for gradients of {parameters[0].dtype}: a hook around it, such as "
                "fp16_compress_wrapper, casts them. Register gw.ddp_hook alone; the spec gw.Cast() sends 16 bits."
            )
        if self._exchange is None and self._parameters:  # not all gradients are sparse
            self._order = self._order or list(self._parameters)[::-1]
            made = self._make()
            resume_together(made, self._saved)
            self._exchange, self._saved = made, {}
        self._came = [*self._came[-1:], []]
        if self._exchange is not None:
            self._exchange.begin()

    def _make(self) -> Exchange:
        ordered = {name: self._parameters[name] for name in self._order}
        metas = {name: TensorMeta.of(each, id(each) in self._embeddings) for name, each in ordered.items()}
        return Exchange(metas, self.plan, self._group)

    def _learn_order(self) -> None:
        """Plan again in gradient-ready order, which is the second order of DDP's buckets and the same on all ranks."""
        before, came = self._exchange, self._came[-1]
        if before is None or self._order_known or isinstance(self.plan, Plan) or self._came[0] == came:
            return
        self._order, self._order_known = came, True
        self._exchange = self._make()
        self._exchange.residuals.take_over(before.residuals.carried())
        self._exchange.step = before.step
        before.close()

    def _find_model(self) -> None:
        """Search all objects once for the DDP model with this state: DDP gives a hook neither names nor its model."""
        if self._group is not None:
            return
        models = (each for each in all_objects() if issubclass(type(each), DistributedDataParallel))
        found = [each for each in models if any(state is self for _, state in vars(each).get("_comm_hooks", ()))]
        if len(found) != 1:
            raise StepStateError(f"this DDPState is registered with {len(found)} DDP models, and belongs to one. {_ONE_EACH}")
        self._group = found[0].process_group
        self._parameters = _averaged(found[0].module, found[0].parameters_to_ignore)
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._embeddings = embeddings_of(found[0].module)


def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook to register with DDP, together with a `DDPState`."""
    return state.average(bucket)


def bucket_sizes(model: torch.nn.Module, plan: PlanForDDP, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sizes for DDP's `bucket_cap_mb_list`, in MiB of gradients, with which DDP calls the hook when a plan's bucket is complete.

    model: the model that DDP will wrap. plan: as for `DDPState`. group: DDP's `process_group`. The sizes assume that gradients
    become ready in the reverse order of registration. With `find_unused_parameters` DDP uses the sizes in the wrong order: leave
    them out. Raises PlanError if the plan does not fit the model.

    Example: `model = DistributedDataParallel(model, bucket_cap_mb_list=gw.bucket_sizes(model, plan))`"""
    averaged = _averaged(model, getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    embeddings = embeddings_of(model)
    infos = [info_of(name, each, id(each) in embeddings) for name, each in averaged.items()][::-1]
    made, _ = plan_for(_checked(plan), infos, dist.get_world_size(group))
    place = {info.name: at for at, info in enumerate(infos)}
    ends = sorted({1 + max(place[name] for name in bucket.tensors) for bucket in made.buckets})
    return [sum(info.nbytes for info in infos[a:b]) / 2**20 for a, b in zip([0, *ends], ends, strict=False)]


def _checked(plan: Any) -> Plan | Policy | Spec:
    if isinstance(plan, (str, os.PathLike)) and plan != "auto":
        plan = Plan.load(plan)
    if not isinstance(plan, (Plan, Policy, Spec)) or getattr(plan, "schedule", Backward()) != Backward():
        raise PlanError(
            f"plan is {show(plan)}. In DDP it is a spec, a gw.Policy, a gw.Plan or a plan's file, with gw.Backward(): DDP "
            "decides when gradients are sent. Else write handle = gw.parallelize(model, optimizer, plan=...) in place of DDP."
        )
    return plan


def _averaged(model: torch.nn.Module, ignored: Collection[str]) -> dict[str, torch.nn.Parameter]:
    embeddings = (each for each in model.modules() if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
    sparse, named = {each.weight for each in embeddings if each.sparse}, model.named_parameters()
    return {name: each for name, each in named if each.requires_grad and name not in ignored and each not in sparse}
