"""What a session saves, and how it takes up what another one saved."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from gradwire.core import Plan, printable
from gradwire.engine.schedules.base import KeepsState
from gradwire.engine.session import KeepsMeasurements, Session
from gradwire.engine.step_state import StepState
from gradwire.errors import StepStateError
from gradwire.exchange import Saved, added_up, read_state, split, warn_of_lost, write_state


def state_of(session: Session) -> dict[str, torch.Tensor]:
    """See `Handle.state_dict`."""
    _check_between_steps(session, "state_dict()")
    session.use_specs_of_now()  # `load_state` expects what these keep, and the last step may have landed only here
    of_schedule = session.schedule.state() if isinstance(session.schedule, KeepsState) else {}
    memory = session.exchange.memory.state() | of_schedule | _decided(session)
    return write_state(session.group, session.reducer.step, session.order, _digest_of(session, session.plan), memory)


def load_state(session: Session, state: Mapping[str, Any]) -> None:
    """See `Handle.load_state_dict`."""
    _check_between_steps(session, "load_state_dict()")
    saved = read_state(state, session.group)
    if sorted(saved.order) != sorted(session.order):
        raise ValueError(
            f"the state's order numbers {len(saved.order)} tensors, not each of the {len(session.order)} trainable ones of "
            "the model once: it was saved with another model, or other parameters of it were frozen."
        )
    plan = _plan_to_resume(session, saved)
    if saved.own and plan.schedule != session.plan.schedule:
        before = session.plan
        session.change_to(plan)
        try:
            return load_state(session, state)
        except ValueError:
            session.change_to(before)
            raise
    if saved.own and saved.plan != (digest := _digest_of(session, plan)):
        raise ValueError(
            f"the state was saved under plan {saved.plan[:16]}, and this handle runs plan {digest[:16]}: shards "
            "and residuals lie elsewhere. Parallelize with the policy or the plan of the run that saved it, and the model in "
            "the memory format that it had."
        )
    usable = plan == session.plan and not session.exchange.outdated(saved.step)
    exchange = session.exchange if usable else session.assemble(plan, saved.step)
    memory, extra = split(saved.memory[0] if saved.own else {})
    carried = {} if saved.own else added_up(split(each)[0] for each in saved.memory)
    if saved.own:
        exchange.memory.check(memory)
        _check_schedule(session, saved, extra)
        if isinstance(session.driver, KeepsMeasurements):
            session.driver.check(session, saved)
    else:
        exchange.memory.check_carried(carried)
        warn_of_lost(saved.missing, exchange.memory.names())
    session.use(exchange)
    session.order, session.order_known = saved.order, session.policy is not None
    if saved.own:
        exchange.memory.load(memory)
    else:
        exchange.memory.take_over(carried)
    session.reducer.step = saved.step
    if isinstance(session.schedule, KeepsState):
        session.schedule.load(saved, extra)
    if session.driver is not None:
        session.driver.resumed(session, saved)


def _check_between_steps(session: Session, method: str) -> None:
    """Settle. Raises StepStateError where a step is in hand or failed: residuals would be of one step, the count of another."""
    session.settle()
    reducer = session.reducer
    match reducer.state:
        case StepState.RUNNING | StepState.CLOSING:
            why = f"step {reducer.step} is in hand: some residuals are of this step, and others of the one before"
            cure = "Call it when backward() has returned; after an exception in backward call handle.reset() on all ranks first."
        case StepState.VOID:
            why = f"step {reducer.step} is void: {reducer.lanes.failure}"
            cure = "Call handle.reset() on all ranks first."
        case StepState.BROKEN:
            why = f"the handle failed: {reducer.lanes.failure}"
            cure = "Its residuals may be of half a step. Restart from the last checkpoint."
        case StepState.IDLE:
            return
    raise StepStateError(f"{method} was refused: {why}. {cure}")


def _check_schedule(session: Session, saved: Saved, extra: Mapping[str, torch.Tensor]) -> None:
    if isinstance(session.schedule, KeepsState):
        session.schedule.check(saved, extra)
    elif extra:
        raise ValueError(
            f"the state has {printable(next(iter(extra)))}, which this handle's schedule does not keep: it was saved under "
            "another one. Use the schedule it was saved with."
        )


def _decided(session: Session) -> dict[str, torch.Tensor]:
    """What a state keeps of a plan that nothing but this run knows."""
    if session.driver is None:
        return {}
    kept = {"decided": torch.frombuffer(bytearray(session.plan.to_json(None).encode()), dtype=torch.uint8)}
    if isinstance(session.driver, KeepsMeasurements):
        kept |= session.driver.state(session)
    return kept | {"searching": torch.tensor(1)} if session.driver.searching else kept


def _plan_to_resume(session: Session, saved: Saved) -> Plan:
    """The plan with which a state is taken up."""
    if session.driver is not None and saved.decided is not None:
        other = saved.decided.schedule != session.plan.schedule
        assert session.policy is not None
        own = session.plan_of(session.policy, saved.order)
        if why := session.driver.refuses(saved.decided, own) or (session.why_not(saved.decided) if other else ""):
            raise ValueError(f"the state was saved under a plan that this handle does not run: {why}")
        return saved.decided
    return session.plan if session.policy is None else session.plan_of(session.policy, saved.order)


def _digest_of(session: Session, plan: Plan) -> str:
    """Where shards and residuals lie: in the memory format, too, of tensors that have one of their own."""
    strides = {name: p.stride() for name, p in session.parameters.items() if not p.is_contiguous()}
    digest = plan.state_digest()
    return hashlib.sha256(f"{digest} {strides}".encode()).hexdigest() if strides else digest
