"""An exchange that takes some of its buckets from another one, in the same flat buffers: a step that corrects a part of them."""

from collections.abc import Collection
from copy import copy

from gradwire.core import Plan
from gradwire.exchange.exchange import Exchange
from gradwire.exchange.executor import Executor
from gradwire.exchange.phases import share_memory
from gradwire.exchange.residual_store import Remembered


def mixed(usual: Exchange, others: Exchange, chosen: Collection[int], plan: Plan) -> Exchange:
    """The buckets of the usual exchange, but for the chosen ones, which are those of the others. `plan`: of these buckets.

    All three may run, one after another. Pieces may lie on other lanes in each of them: call `take_turn` before a step of one
    that did not run the last step.
    """
    made = copy(usual)
    made.plan = plan
    made._buckets = [(others if index in chosen else usual)._buckets[index] for index in range(len(plan.buckets))]
    made.slots = {slot.name: slot for buffers in made._buckets for slot in buffers.slots}
    made._executor = Executor(plan, made._buckets, made.lanes)
    made.residuals = Remembered(made._buckets)
    made.random = [*usual.random, *others.random]
    return made


def take_turn(exchange: Exchange) -> None:
    """Before a step of an exchange, if another one with some of its buckets ran the last step."""
    share_memory(exchange._executor.tasks, exchange._buckets)
