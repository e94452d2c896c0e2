"""A communication hook of DistributedDataParallel that averages gradients with `gw.Exchange`.

DDP calls the hook for each bucket, in the same order on all ranks. One exchange holds the gradients of all parameters by name.
Its lanes work while backward runs, and the hook of the last bucket waits for them."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradwire.auto import Auto, AutoDecision, is_auto
from gradwire.core import Plan, Spec, TensorInfo
from gradwire.engine import LossScale
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Exchange, ExchangeStats, TensorMeta, embeddings_of, info_of, plan_for, read_state
from gradwire.integrations.ddp_buckets import HeldBuckets, check_order, future_for, in_buckets
from gradwire.integrations.ddp_job import DDPJob
from gradwire.integrations.ddp_plans import ONE_EACH, PlanForDDP, averaged, bucket_sizes, checked, is_joining, model_of
from gradwire.integrations.groups import group_for
from gradwire.integrations.handles import resume_together
from gradwire.plan import Policy
from gradwire.record import Decision
from gradwire.record.recording import Recording
from gradwire.transport import Group, TlsOption

__all__ = ["DDPState", "bucket_sizes", "ddp_hook"]


class DDPState:
    """The exchange of one DDP model's gradients, and the state of its compressors.

    plan: "auto" measures the job, the links and the codecs in the first steps and keeps the fastest plan, as in `gw.parallelize`;
    give DDP `bucket_cap_mb=1`, so that little waits for a bucket to be full. Or a spec (`gw.QSGD(bits=4)` for every tensor), a
    `gw.Policy`, a `gw.Plan` or the path of a plan's JSON file, for the names of the model inside DDP. A policy's plan is made
    again when DDP has brought its buckets into gradient-ready order.
    accuracy: what "auto" may choose from: a class or a number, as in `gw.parallelize`.
    tls: whether the hook's connections are encrypted, as in `gw.parallelize`. DDP's own, at its start, stay as they are.
    process_group: for gradwire alone, with the ranks of DDP's group, such as one of gloo (docs/reference/gpu.md).
    Means are over all ranks of DDP's group, in `join()` too, for any `divide_by_initial_world_size`. With error feedback a
    parameter that no rank used in a step (`find_unused_parameters`) loses its residual. torch averages sparse gradients.
    Raises PlanError for a plan that DDP cannot run, and for `accuracy` with a plan that is not "auto". In backward the hook
    raises PlanError if the plan does not fit the model, StepStateError on all ranks where a GradScaler scaled the loss and a spec
    has its own magnitude, or votes in `join()`, DisagreementError if ranks differ, CommunicationError if a rank died or stalled.

    Example, in a script started by torchrun::

        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(gw.DDPState(), gw.ddp_hook)
    """

    def __init__(
        self,
        plan: PlanForDDP = "auto",
        accuracy: str | float = "safe",
        tls: TlsOption = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.plan: Plan | Policy | Spec | None = None if is_auto(plan, accuracy) else checked(plan)  # None: gradwire chooses
        self.accuracy, self.tls, self._given_group = accuracy, tls, process_group
        self._job, self._group = None, None  # type: DDPJob | None, Any  # once the model is found
        self._parameters: dict[str, torch.nn.Parameter] = {}  # by name, in the order of registration
        self._names, self._infos = dict[torch.Tensor, str](), dict[str, TensorInfo]()
        self._exchange, self._scale = None, LossScale()  # type: Exchange | None, LossScale
        self._order, self._order_known = list[str](), False  # names in the order for which the plan was made
        self._saved, self._came = dict[str, Any](), list[list[str]]()
        """A state that the next step begins with; names in the order of DDP's buckets, for the last step and for this one."""
        self._waiting, self._first = list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]](), HeldBuckets()

    def __reduce__(self) -> tuple[Any, ...]:
        return DDPState, (self.plan or "auto", self.accuracy, self.tls)  # a whole DDP model is saved; torch restores no hooks

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange one of DDP's buckets. The future gets the buffer, with mean gradients, after the step's last bucket."""
        return self._average(bucket) if self._job is not None else self._first.add(bucket, self._find_job, self._average)

    def _average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin(bucket)
        job, exchange, buffer = self._job, self._exchange, bucket.buffer()
        if job is None or exchange is None or buffer.is_sparse:
            done = allreduce_hook(self._group, bucket)
        else:
            names, gradients = [self._names[parameter] for parameter in bucket.parameters()], bucket.gradients()
            job.came(names, gradients, buffer.nbytes)
            exchange.ready_all(dict(zip(names, gradients, strict=True)))
            self._came[-1] += names
            done = future_for(buffer)
            self._waiting.append((done, buffer))
        if bucket.is_last() and job is not None and exchange is not None:
            began_s = time.perf_counter()
            exchange.wait()
            for future, means in self._waiting:
                future.set_result(means)
            self._waiting = []
            job.ended(time.perf_counter() - began_s)
            self._learn_order()
        return done

    @property
    def decision(self) -> AutoDecision | None:
        """The last decision of plan="auto"; its str() is one line of text. None before the first, and for any other plan."""
        driver = self._job.driver if self._job is not None else None
        return next(reversed(driver.decisions), None) if driver is not None else None

    def record(self, folder: str | os.PathLike[str], error_steps: int = 20, decision: Decision | None = None) -> Recording:
        """Record a training loop for `gradwire report`, as `Handle.record` does. Call it after `register_comm_hook`."""
        return Recording(self._find_job(), folder, error_steps, decision)

    def stats(self) -> ExchangeStats:
        """Statistics of this rank's exchange so far. Raises StepStateError before the first step."""
        if self._job is not None and self._exchange is not None:
            return self._job.stats()
        raise StepStateError("there are no statistics before the first step. Call stats() after a backward.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's step, plan and residuals, with keys `rank{r}/...`; empty before the first step. Call it between
        steps, and save those of all ranks. A run continues bit for bit from the second step (`static_graph`: the third) on."""
        if self._exchange is None:
            return dict(self._saved)
        state, names = self._exchange.state_dict(), list(self._parameters)
        key = next(key for key in state if key.endswith("/order"))
        state[key] = torch.tensor([names.index(name) for name in self._order])
        chosen = self._job.state() if self._job is not None else {}
        return state | {key.replace("order", field): value for field, value in chosen.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned: this rank's own state, or, with another number of ranks, the states of all ranks that
        saved, in one dictionary. Call it between steps, on every rank, after `register_comm_hook`; it sends nothing. Raises
        ValueError that names the mistake in the state; if it does not fit the plan, the next step raises ValueError."""
        self._find_job()
        group = Group.of(self._group)
        saved, names = read_state(state, group) if state else None, list(self._parameters)
        check_order(order := saved.order if saved is not None else [], len(names))
        for plan in (saved.decided, saved.chosen) if saved is not None and self.plan is None else ():
            if plan and (why := Auto(self.accuracy, ("backward",), group.world_size).refuses(plan, plan)):
                raise ValueError(f"the state was saved under a plan that this hook does not run: {why}")
        self._find_job().stop()
        self._exchange, self._scale, self._came, self._saved = None, LossScale(), [], dict(state)
        self._order, self._order_known = [names[at] for at in order], bool(order)

    def _begin(self, bucket: GradBucket) -> None:
        job, buffer, parameters = self._find_job(), bucket.buffer(), bucket.parameters()
        if not buffer.is_sparse and any(each not in self._names for each in parameters):
            raise StepStateError(f"this DDPState averages gradients of another DDP model. {ONE_EACH}")
        if buffer.dtype != parameters[0].dtype:
            raise PlanError(
                f"the hook got {buffer.dtype} for gradients of {parameters[0].dtype}: a hook around it, such as "
                "fp16_compress_wrapper, casts them. Register gw.ddp_hook alone; the spec gw.Cast() sends 16 bits."
            )
        if self._exchange is None and self._parameters:  # not all gradients are sparse
            self._order = self._order or list(self._parameters)[::-1]
            self._start()
        self._came = [*self._came[-1:], []]
        if self._exchange is not None:
            self._scale.follow(self._exchange, joining=is_joining(job.model, self._exchange))
            job.observers.begins()
            self._exchange.begin()

    def _start(self) -> None:
        """Make the exchange, and go on from the state that was loaded."""
        driver = Auto(self.accuracy, ("backward",), Group.of(self._group).world_size) if self.plan is None else None
        metas = {name: TensorMeta.of(self._parameters[name], self._infos[name].embedding) for name in self._order}
        plan: Any = self.plan if driver is None else driver.first_policy
        made = Exchange(metas, plan, self._group, self.tls)
        saved = read_state(self._saved, made.group) if self._saved else None
        decided = saved.decided if driver is not None and saved is not None else None
        resume_together(made, self._saved, {"gw.DDPState and its state": f"{driver!r}, {bool(saved and saved.own)}"}, decided)
        self._exchange, self._saved = made, {}
        (job := self._find_job()).run(made, driver)
        if driver is not None and saved is not None:
            driver.resumed(job, saved)

    def _learn_order(self) -> None:
        """Plan again in gradient-ready order, which is the second order of DDP's buckets and the same on all ranks."""
        exchange, came = self._exchange, self._came[-1]
        if exchange is None or self._order_known or self.plan is None or isinstance(self.plan, Plan) or self._came[0] == came:
            return
        self._order, self._order_known = came, True
        infos, grid = [self._infos[name] for name in came], exchange.group.grid
        exchange.change_to(plan_for(self.plan, infos, grid.world_size, grid.ranks_per_node_if_even)[0])

    def _find_job(self, parameters: Sequence[torch.Tensor] = ()) -> DDPJob:
        if self._job is None:
            model = model_of(self)
            self._group = group_for(self._given_group, model.process_group, "DDP")
            self._parameters = averaged(model.module, parameters or in_buckets(model))
            self._names = {parameter: name for name, parameter in self._parameters.items()}
            embeddings = embeddings_of(model.module)
            self._infos = {name: info_of(name, each, id(each) in embeddings) for name, each in self._parameters.items()}
            self._job = DDPJob(model, Group.of(self._group), self._parameters, [*self._infos.values()], self.plan)
        return self._job


def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook to register with DDP, together with a `DDPState`."""
    return state.average(bucket)
