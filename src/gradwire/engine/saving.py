"""The state of a session: how it is saved, and how another session loads it."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradwire.core import Plan, error_words, printable
from gradwire.engine.reducer import StepState
from gradwire.engine.schedules.base import KeepsState, ShardsOptimizer
from gradwire.engine.schedules.factory import traits_of
from gradwire.engine.session import Driver, Session
from gradwire.errors import StepStateError
from gradwire.exchange import (
    CORRECTION,
    SHARED,
    Exchange,
    Saved,
    added_up,
    outside_modes,
    packed_samples,
    read_state,
    split,
    warn_of_lost,
    write_state,
)
from gradwire.transport import gather_bytes

SET = "saved_by"
"""The key of a file's state with the name of the job that saved it, in bytes: files of one set have the same."""


@outside_modes
def state_of(session: Session) -> dict[str, torch.Tensor]:
    """See `Handle.state_dict`."""
    _check_between_steps(session, "state_dict()")
    session.use_specs_of_now()  # `load_state` expects what these keep, and the last step may have landed only here
    of_schedule = session.schedule.state() if isinstance(session.schedule, KeepsState) else {}
    samples = packed_samples(session.reducer.batches.state())
    memory = session.exchange.residuals.state() | of_schedule | samples | _decided(session)
    return write_state(session.group, session.reducer.step, session.order, _digest_of(session, session.plan), memory)


@outside_modes
def load_state(session: Session, read: Callable[[], Mapping[str, Any] | None]) -> bool:
    """See `Handle.load_state_dict`. Collective: all ranks load, or none does. Returns whether they did.

    read: returns this rank's state, or None if this rank has none. If no rank has one, nothing changes.

    Messages of later steps depend on the loaded states. So ranks compare the states first. If one rank fails, all raise.
    """
    _check_between_steps(session, "load_state_dict()")
    session.lanes.check()
    saved: Saved | None = None
    with _failing_together(session) as card:
        if (state := read()) is not None:
            saved = read_state(state, session.group)
            plan = _checked_plan(session, saved)
            card |= _card_of(saved, plan, bytes(state[SET].tolist()).decode() if SET in state else "")
    if saved is None:
        return False
    before, together = session.plan, _taken_together(saved, card["everybody"])
    if any(each["own"] for each in card["everybody"]) and plan.schedule != before.schedule:
        session.change_to(plan)
    try:
        with _failing_together(session):
            usable = plan == session.plan and not session.exchange.outdated(saved.step)
            exchange = session.exchange if usable else session.assemble(plan, saved.step)
            memory, extra = split(saved.memory[0] if saved.own else {})
            carried, dropped = ({}, []) if saved.own else _carried(saved, plan)
            if saved.own:
                exchange.residuals.check(memory)
                if isinstance(session.schedule, KeepsState):
                    session.schedule.check(saved, extra)
                elif extra:
                    raise ValueError(
                        f"the state has {printable(next(iter(extra)))}, which this handle's schedule does not keep: it was saved "
                        "under another one. Use the schedule it was saved with."
                    )
            else:
                exchange.residuals.check_carried(carried)
            if session.driver is not None:
                session.driver.check(session, together)
            if isinstance(session.schedule, ShardsOptimizer):
                session.schedule.check_exchange(exchange)
    except Exception:
        if session.plan.schedule != before.schedule:
            session.change_to(before)
        raise
    _warn(saved, exchange, dropped)
    session.use(exchange)
    session.order, session.order_known = saved.order, session.policy is not None and saved.step > 0
    if saved.own:
        exchange.residuals.load(memory)
    else:
        exchange.residuals.take_over(carried)
    session._script.loss_scale.forget()
    session._whereabouts.loaded()
    session.reducer.step = saved.step
    session.reducer.batches.load(saved.samples, saved.own, saved.ranks / session.group.world_size)
    if isinstance(session.schedule, KeepsState):
        session.schedule.load(together, extra)
    if session.driver is not None:
        session.driver.resumed(session, together)
    return True


@contextmanager
def _failing_together(session: Session) -> Iterator[dict[str, Any]]:
    """Run work of this rank, which may fill in the card that is yielded, and then exchange cards with all ranks. Afterwards
    `card["everybody"]` has the cards of all ranks, in order. If the work fails on a rank, that rank raises its own error, and
    the others raise ValueError with the words of that error."""
    card: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        yield card
    except Exception as error:
        problem = error
        card["error"] = error_words(error)
    ranks = session.group.global_ranks
    everybody = card["everybody"] = _exchanged(session, card) if len(ranks) > 1 else [dict(card)]
    if problem is not None:
        raise problem
    for rank, each in zip(ranks, everybody, strict=True):
        if "error" in each:
            raise ValueError(f"rank {rank} could not load its state, so no rank loads one: {each['error']}")
    _check_alike(everybody, ranks)


def _exchanged(session: Session, card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send this rank's card to all ranks. Returns all cards, in the order of ranks."""
    rows = told_by_all(session, json.dumps(card).encode(), "all ranks to compare the states that they load")
    return [json.loads(row) for row in rows]


def told_by_all(session: Session, own: bytes, what: str) -> list[bytes]:
    """The bytes of all ranks, in their order, between steps. Collective. what: what a rank waits for, in an error."""
    session._whereabouts.enter()  # handles may cross here
    with session.lanes.told(what, session.reducer.step):
        rows: list[bytes] = session.lanes.control.submit(partial(gather_bytes, text=own)).result()
    session._whereabouts.leave(beside=True)
    return rows


_LOCAL_STEPS = "number of local steps"


def _card_of(saved: Saved, plan: Plan, job: str) -> dict[str, Any]:
    """The parts of a state that must be equal on all ranks, or that decide what ranks do together."""
    decided = " and ".join(plan.digest() for plan in (saved.decided, saved.chosen) if plan is not None)
    order = hashlib.sha256(repr(list(saved.order)).encode()).hexdigest()[:16]  # all ranks get the cards of all
    alike = {"step": saved.step, "order": order, "plan": decided, "search": saved.searching, "job": job}
    if saved.own and not plan.schedule.unequal_steps:
        alike[_LOCAL_STEPS] = saved.local_steps
    return {"alike": alike, "own": saved.own, "measuring": bool(saved.measuring)}


def _check_alike(cards: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raises ValueError, with the same words on all ranks, unless all ranks or none have a state, of one step and one plan."""
    found = [(rank, card["alike"]) for rank, card in zip(ranks, cards, strict=True) if "alike" in card]
    if not found:
        return
    (first, state), without = found[0], sorted(set(ranks) - {rank for rank, _ in found})
    if without:
        raise ValueError(
            f"rank {without[0]} found no state to load, and rank {first} found one of step {state['step']}. Ranks would go on "
            f"with different steps and plans. Give rank {without[0]} the file that it saved, or the files of all ranks: on "
            "several nodes use a folder that all of them share. To begin without residuals load no state on any rank."
        )
    first_of: dict[str, tuple[int, Any]] = {}
    for rank, alike in found:
        for what, value in alike.items():
            first, expected = first_of.setdefault(what, (rank, value))
            if value != expected:
                lag = ", or a rank left out local steps" if what == _LOCAL_STEPS else ""
                raise ValueError(
                    f"the {what} in rank {first}'s state is {printable(str(expected))}, and in rank {rank}'s "
                    f"{printable(str(value))}: these were not saved together{lag}. Load the states of one checkpoint."
                )


def _taken_together(saved: Saved, cards: Sequence[Mapping[str, Any]]) -> Saved:
    """The state for what ranks do together. If a rank has not its own, none goes on with a decision or a measurement."""
    own = all(card["own"] for card in cards)
    if own and all(card["measuring"] for card in cards):
        return saved
    return saved._replace(own=own, measuring=b"", measured={})


def _checked_plan(session: Session, saved: Saved) -> Plan:
    """The plan with which a state is taken up. Raises ValueError unless the state is of this model and this plan."""
    if sorted(saved.order) != sorted(session.order):
        raise ValueError(
            f"the state's order numbers {len(saved.order)} tensors, not each of the {len(session.order)} trainable ones of "
            "the model once: it was saved with another model, or other parameters of it were frozen. Freeze the same ones before "
            "gw.parallelize. Or load no state on any rank, and residuals begin at zero."
        )
    _check_sizes(session, saved)
    plan = _plan_to_resume(session, saved)
    if saved.own and saved.plan != (digest := _digest_of(session, plan)):
        raise ValueError(
            f"the state was saved under plan {saved.plan[:16]}, and this handle runs plan {digest[:16]}: shards "
            "and residuals lie elsewhere. Parallelize with the policy or the plan of the run that saved it, and a model with "
            "tensors of the same sizes, in the memory format that they had. Defaults of policies changed between releases: write "
            "scheme=, bucket_bytes= and so on as they were."
        )
    return plan


def _check_sizes(session: Session, saved: Saved) -> None:
    """Raises ValueError if the state has another number of elements of a tensor than the model."""
    numels = {name: parameter.numel() for name, parameter in session.parameters.items()}
    for key, value in (item for memory in saved.memory for item in memory.items()):
        name = key.split("/", 2)[2]
        factors = key.removeprefix(CORRECTION).startswith(f"{SHARED}/")
        if not factors and value.numel() != numels.get(name, value.numel()):
            raise ValueError(
                f"{printable(key)} has {value.numel()} elements where the model's tensor has {numels[name]}: the state was saved "
                "with another model. Make the model as the run that saved the state did. Or load no state on any rank, and "
                "residuals begin at zero."
            )


def _carried(saved: Saved, plan: Plan) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Add up what ranks had not sent yet. Returns what this plan takes of it, and the names of the tensors of which it takes
    nothing: of all, if one of the two schedules sends gradients, and the other one changes of weights."""
    carried = added_up(split(each)[0] for each in saved.memory)
    if (saved.local_steps is not None) == traits_of(plan.schedule).trains_alone:
        return carried, []
    return {}, list(dict.fromkeys(key.partition("/")[2] for key in carried))


def _warn(saved: Saved, exchange: Exchange, dropped: Sequence[str]) -> None:
    """Warn of what a state does not bring along: residuals of ranks that are missing, or those of the tensors of these names."""
    if not dropped:
        warn_of_lost(saved.missing, exchange.residuals.names())
        return
    schedule, kinds = exchange.plan.schedule, ("gradients", "changes of weights")
    now, before = kinds[::-1] if traits_of(schedule).trains_alone else kinds
    more = f" and {len(dropped) - 1} more tensors" if len(dropped) > 1 else ""
    warnings.warn(
        f"the state was saved in a schedule that sends {before}, and this handle's schedule, {schedule.word}, sends {now}: what "
        f"was not sent yet of {dropped[0]!r}{more} is dropped, and residuals begin at zero. To keep it, resume with the schedule "
        "that saved the state.",
        stacklevel=4,
    )


def _check_between_steps(session: Session, method: str) -> None:
    """Settle. Raises StepStateError where a step is in hand or failed: residuals would be of one step, the count of another.
    Raises CommunicationError if sums of the last step never arrived."""
    session.settle()
    reducer = session.reducer
    if reducer.state is StepState.IDLE:
        session.lanes.check_queued()
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


def _decided(session: Session) -> dict[str, torch.Tensor]:
    """The fields of a state for a plan that nothing but this run knows."""
    if session.driver is None:
        return {}
    return state_of_decision(session.plan, session.driver) | session.driver.state(session)


def state_of_decision(plan: Plan, driver: Driver) -> dict[str, torch.Tensor]:
    """The fields of a rank's state for a plan that runs because a driver chose it, or tries it."""
    plans = {"decided": plan} | ({"chosen": driver.chosen} if driver.chosen is not None else {})
    kept = {field: torch.frombuffer(bytearray(each.to_json(None).encode()), dtype=torch.uint8) for field, each in plans.items()}
    return kept | ({"searching": torch.tensor(1)} if driver.searching and driver.chosen is None else {})


def _plan_to_resume(session: Session, saved: Saved) -> Plan:
    """The plan with which a state is taken up."""
    if session.driver is not None and saved.decided is not None:
        assert session.policy is not None
        own = session.plan_of(session.policy, saved.order)
        for plan in (saved.decided, saved.chosen or saved.decided):
            other = plan.schedule != session.plan.schedule
            if why := session.driver.refuses(plan, own) or (session.why_not(plan) if other else ""):
                raise ValueError(f"the state was saved under a plan that this handle does not run: {why}")
        return saved.decided
    return session.plan if session.policy is None else session.plan_of(session.policy, saved.order)


def _digest_of(session: Session, plan: Plan) -> str:
    """Where shards and residuals lie: in the memory format, too, of tensors that have one of their own."""
    strides = {name: p.stride() for name, p in session.parameters.items() if not p.is_contiguous()}
    digest = plan.state_digest(session.group.world_size)
    return hashlib.sha256(f"{digest} {strides}".encode()).hexdigest() if strides else digest
