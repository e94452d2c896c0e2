"""Defines `parallelize`, which makes a handle from a model and a plan."""

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gradwire.api.handle import Handle
from gradwire.auto import AdaptiveBitsDriver, Auto, CorrectionPeriods, Tuning, is_auto
from gradwire.core import Plan, Spec, as_schedule, number, show, whole
from gradwire.engine import REGISTRY, Driver, Prepared, Session, check_optimizers, facts, prepare
from gradwire.errors import GradwireError, PlanError
from gradwire.plan import AdaptiveBits, Policy, Tuned
from gradwire.transport import LONGEST_S, SHORTEST_S, Group, Lanes, TlsOption, wanted_tls


def parallelize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    plan: Plan | Policy | Spec | AdaptiveBits | Tuned | str | os.PathLike[str] = "auto",
    process_group: dist.ProcessGroup | Group | None = None,
    drift_check_steps: int = 1000,
    accuracy: str | float = "safe",
    schedules: Sequence[str] = ("backward",),
    silence_s: float | None = None,
    tls: TlsOption = None,
) -> Handle:
    """Keep the gradients of `model` equal on all ranks of `process_group` (default: all ranks).

    The model is changed in place: nothing is wrapped, and no key of its `state_dict` changes. All ranks get the parameters and
    buffers of rank 0. They also get its optimizers' state of these parameters, unless each rank has its own: in the `local`
    schedule, and where the optimizer is sharded. From then on `grad` holds the mean gradient when `backward()` returns, and any
    optimizer can use it. In the `delayed` and `local` schedules `grad` stays this rank's own gradient.
    Collective: every rank of the group calls it at the same point.

    model: the model to train, on the device where it stays.
    optimizer: the optimizer, or several, that will step the model. The `backward` schedule checks it, and keeps its
    state the same on all ranks. Other schedules need it, because they decide when parameters are stepped.
    plan: how gradients are sent. "auto" measures the job, the links and the codecs in the first steps, keeps the fastest plan,
    and looks again when times change. It logs each decision in one line and keeps it in `handle.decision`. Other values: a spec
    for every tensor (`gw.QSGD(bits=4)`), a `gw.Policy`, a `gw.Plan`, the path of a plan's JSON file, `gw.AdaptiveBits()`, or
    `gw.Tuned(policy)`, which finds the best size of buckets.
    process_group: the ranks that train together.
    drift_check_steps: ranks compare checksums of their weights every so many steps. If these differ, all ranks raise
    DisagreementError with the first tensor that differs. 0: never.
    accuracy: what "auto" may choose from. "exact": no compression. "safe": also the specs whose measured loss on that number of
    ranks ended at most 1 % above that of exact sums (docs/measured.md): 2 to 8 bits, by the number
    of ranks. A number, such as 0.03: the same with that share of the loss. "aggressive": also PowerSGD, EF-SignSGD and Top-k 1 %.
    schedules: the schedules that "auto" may choose from: "backward", "pipelined", "delayed" and "local". The last two are never
    used with accuracy="exact". docs/schedules.md says what each asks of a script. "pipelined" costs no accuracy. "local" trains
    another model than DDP, and runs only if all others wait long for exchanges. If a schedule that is not allowed would be
    faster, the logged line says so.
    silence_s: a machine that gives no sign of life for so many seconds, 4 to 120, counts as dead, and the job ends with its
    name, 5 s later at the latest. A network that is away for less than that is survived. None: a sixtieth of the group's
    timeout, but 7 to 30 s.
    tls: whether TCP connections between ranks are encrypted (TLS 1.3). True: a key that rank 0 draws for the job proves who is a
    rank. The paths of three PEM files, `(certificate, key, authorities)`: certificates of your own prove it. None: what the
    variable GRADWIRE_TLS says. SECURITY.md says what each keeps out, and that torch's own connections stay as they are.

    Raises PlanError if the plan does not fit the model, or comes with `accuracy` or `schedules`, DisagreementError on all ranks
    if ranks differ in model, plan or version, StepStateError if the model is parallelized or torch.distributed not initialised.

    Example, in a script started by torchrun::

        torch.distributed.init_process_group("gloo")
        handle = gw.parallelize(model, optimizer, plan=gw.QSGD(bits=4))
    """
    device: torch.device | None = None
    driver: Driver | None = None
    prepared: Prepared | None = None
    problem: BaseException | None = None
    # other ranks wait for a rank with a wrong argument: it connects as most do, and tells them
    try:
        device = _device_of(model)
        _check_silence(silence_s)
    except BaseException as error:
        problem, silence_s = error, None
    try:
        wanted_tls(tls)
    except BaseException as error:
        problem, tls = error, None
    try:
        lanes = Lanes.of_handle(process_group, silence_s, tls, device)
    except GradwireError:
        if problem is not None:
            raise problem from None
        raise
    try:
        if problem is not None:
            raise problem
        what = "steps from one comparison of weights to the next, 0 for never"
        whole("drift_check_steps", drift_check_steps, what, error=PlanError)
        ranks, per_node = lanes.group.world_size, lanes.group.grid.ranks_per_node_if_even
        driver = _driver_of(plan, accuracy, schedules, ranks)
        prepared = prepare(model, driver.first_policy if driver else plan, ranks, per_node)
        optimizers = check_optimizers(optimizer, prepared)
        if driver is not None and prepared.plan.shards_optimizer:
            raise PlanError(
                f"plan is {show(plan)}, which changes buckets while training, and the schedule has shard_optimizer: shards of "
                "the optimizer's state would have to move between ranks. Pass the policy or a plan itself."
            )
        settings = {"drift_check_steps": repr(drift_check_steps), "driver": repr(driver)}
        settings |= facts(prepared, None, driver.later_specs if driver else ())
    except BaseException as error:
        prepared, problem, optimizers, settings = None, error, [], facts(None, error)
    try:
        lanes.open(settings, next(iter(prepared.parameters.values())).device if prepared is not None else None)
        if problem is not None:
            raise problem
        assert prepared is not None
        if prepared.plan.shards_optimizer:
            lanes.alone()  # they wait between backward and the optimizer's step, which may come after another handle's backward
        session = Session(model, prepared, optimizers, lanes, drift_check_steps)
    except BaseException as error:
        lanes.stop()
        failure = problem if problem is not None else error
        raise failure from failure.__cause__
    handle = Handle(session)
    session.driver = driver
    REGISTRY.add(model, prepared.parameters.values(), handle)
    _forget_compiled_code()
    return handle


def _device_of(model: torch.nn.Module) -> torch.device | None:
    """The device of the handle's lanes; None for what is refused later."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((each.device for each in parameters if each.requires_grad), None)


def _check_silence(silence_s: float | None) -> None:
    if silence_s is None:
        return
    what = "seconds after which a silent machine counts as dead"
    number("silence_s", silence_s, what, error=PlanError)
    if not SHORTEST_S <= silence_s <= LONGEST_S:
        raise PlanError(
            f"silence_s is {silence_s}: it must be {what}, {SHORTEST_S:.0f} to {LONGEST_S:.0f}. With less a busy network looks "
            "dead, and kernels count no longer. Leave it out for the usual value."
        )


def _driver_of(
    plan: Plan | Policy | Spec | AdaptiveBits | Tuned | str | os.PathLike[str],
    accuracy: str | float,
    schedules: Sequence[str],
    ranks: int,
) -> Driver | None:
    """Return the driver that changes the plan in a running job, None if it stays. Raises PlanError for arguments without
    effect."""
    if is_auto(plan, accuracy, schedules):
        return Auto(accuracy, schedules, ranks)
    if isinstance(plan, AdaptiveBits):
        return AdaptiveBitsDriver(plan)
    if isinstance(plan, Tuned):
        return Tuning(plan)
    if isinstance(plan, Policy) and as_schedule(plan.schedule).undecided:
        return CorrectionPeriods(plan)
    return None


def _forget_compiled_code() -> None:
    """Drop code that torch.compile made before: it would run without the hooks made since."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"].get("ok"):
        dynamo.reset()
