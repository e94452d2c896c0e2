"""Training with members that come and go, in an ordinary loop: `gw.elastic`. torchft's lighthouse says who the members are.

Each member is a process of its own with a whole replica, started by a torchrun of its own.

| file | what |
|---|---|
| `quorum.py` | the lighthouse, which names the members of a step |
| `members.py` | the exchange of each quorum, the state of joiners |
| `catch_up.py` | steps that a joiner makes again, while the others go on |
| `gradient_means.py` | the `backward` schedule: hooks on gradients and optimizers |
| `local_rounds.py` | the `local` schedule: rounds of outer gradients |
| `elastic_job.py` | what `gw.elastic` returns |
| `elastic_islands.py` | members of several ranks each |
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.auto import is_auto
from gradwire.core import Backward, Plan, number, show, whole
from gradwire.engine import REGISTRY
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import TensorMeta, embeddings_of, info_of
from gradwire.integrations.elastic_auto import ElasticAuto
from gradwire.integrations.elastic_islands import IslandLighthouse, LocalState, island_rounds
from gradwire.integrations.elastic_job import ElasticJob
from gradwire.integrations.gradient_means import GradientMeans
from gradwire.integrations.local_rounds import LocalRounds
from gradwire.integrations.member_state import state_of
from gradwire.integrations.members import Members
from gradwire.integrations.outer_steps import OuterSteps, check_rounds
from gradwire.integrations.quorum import Lighthouse, lighthouse_address
from gradwire.integrations.shards import reshard

__all__ = ["ElasticJob", "elastic"]


def elastic(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    plan: Any = "auto",
    accuracy: str | float = "safe",
    min_replicas: int = 2,
    lighthouse: str | None = None,
    also: Sequence[Any] = (),
    timeout_s: float = 60.0,
    patience_s: float = 900.0,
    island: dist.ProcessGroup | None = None,
) -> ElasticJob:
    """Train with members that come and go. Each is one process with a whole replica of the model.

    optimizer: of the model, or a list of several, which step after one backward and without closures.
    plan: "auto" measures the job and keeps the fastest plan, anew after each change of the members; `accuracy` is as in
    `gw.parallelize`. Or as in `gw.Exchange`, with the schedule `gw.Backward()` or `gw.LocalSteps(...)`; the plan is made again
    for each number of members.
    min_replicas: the least members of a step. With fewer the job waits.
    lighthouse: the address of `gradwire lighthouse`; None: the environment variable TORCHFT_LIGHTHOUSE.
    also: more objects that joiners get from another member, with `state_dict` and `load_state_dict`, such as a learning rate
    scheduler or a GradScaler.
    timeout_s: how long a wait for another member may take before the step is given up.
    patience_s: how long to wait for enough members before a step. Longer than the lighthouse's own `--patience`.
    island: the ranks of this member, where it is more than one process, with a backend for CPU tensors. The script averages
    gradients inside, with DDP or `fully_shard`, and islands train apart with `gw.LocalSteps`. All ranks make the same calls.

    A joiner gets weights, buffers, the optimizers' state and the step from another member, and catches up. A step whose exchange
    fails does not count: the members that are left go on with the next batch. Parameters without a gradient count as zeros.

    Raises PlanError without the package torchft, for other schedules, for a timeout of 0 or without end, and for `accuracy` with
    a plan that is not "auto"; StepStateError without an address, and for a model that a handle or another job trains. The job
    lives as long as the model, or until `leave()`. The training forward, or with local steps `optimizer.step()`, raises
    CommunicationError where members do not come within `patience_s`, StepStateError where a parameter was thawed, added or
    replaced. Backward raises StepStateError where a GradScaler scaled the loss and a spec has a magnitude of its own.

    Example, in a script that one torchrun on each machine starts::

        job = gw.elastic(model, optimizer, plan=gw.QSGD(bits=4), lighthouse="10.0.0.1:29510")
        while job.step < 1000:
            model(next_batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    number("timeout_s", timeout_s, "seconds that a wait for another member may take", positive=True, error=PlanError)
    whole("min_replicas", min_replicas, "the least members of a step", low=1, error=PlanError)
    reshard(model)
    if any(map(REGISTRY.owns, model.parameters())):
        raise StepStateError(
            "the model trains in a job, with a handle or on islands already: its gradients would be averaged twice. Call leave() "
            "of the job, or detach() of the handle or the islands, before."
        )
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    lighthouse = lighthouse_address(lighthouse)
    embeddings = embeddings_of(model)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    auto = None
    if is_auto(plan, accuracy):
        auto = ElasticAuto(model, [info_of(name, each, id(each) in embeddings) for name, each in named.items()], accuracy)
        plan = auto.plan
    elif isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(plan)
    schedule: Any = getattr(plan, "schedule", Backward())
    means: GradientMeans | LocalRounds
    exchanged: Mapping[str, torch.Tensor] = named
    others: list[Any] = [*(optimizers if island is None else map(LocalState, optimizers)), *also]
    state = state_of(model, () if schedule.word == "backward" else named, others)
    if island is not None:
        if schedule.word != "local":
            raise PlanError(f"islands train apart, so pass schedule=gw.LocalSteps(...): plan is {show(plan)}.")
        means, exchanged = island_rounds(model, optimizers, check_rounds(schedule), island)
    elif schedule.word == "backward":
        means = GradientMeans(model, named, optimizers, auto)
    elif schedule.word == "local":
        means = LocalRounds(model, OuterSteps(named, check_rounds(schedule)), optimizers, schedule)
    else:
        raise PlanError(
            f"members that come and go run the schedules backward and local, and plan has {show(schedule.word)}: what it leaves "
            "for the next step belongs to members that may be gone."
        )
    try:
        tensors = {name: TensorMeta.of(exchanged[name], id(named[name]) in embeddings) for name in reversed([*exchanged])}
        of_lighthouse = lighthouse, min_replicas, timedelta(seconds=timeout_s), patience_s
        reached = Lighthouse(*of_lighthouse) if island is None else IslandLighthouse(island, *of_lighthouse)
        state = means.state(state) if isinstance(means, LocalRounds) else state
        members = Members(tensors, plan, state, reached, catches_up=island is None)
    except BaseException:  # the model trains without a job
        means.detach()
        raise
    means.begin(members)
    job = ElasticJob(model, members, means, auto)
    REGISTRY.add(model, means.trained.parameters.values(), job)
    return job
