"""Members of a job that come and go: torchft's quorum, an exchange for each quorum, and the state that joiners get.

A member is one process with a whole replica of the model. Before a step it asks torchft's lighthouse for the quorum, the members
that make the step together. While the quorum stays, so does the exchange. Otherwise the members meet anew:

1. They reach the store of one of them, under the quorum's name, and make a group and an exchange there.
2. Members that are at the step already give their state to those that are not: weights, optimizer, step. No bytes are unpickled.
   The others do not wait for it: a joiner catches up (`catch_up.py`). Only in step 0, and where members are islands, all wait.
3. Residuals go on; those of own gradients are multiplied by the old number of members over the new. Joiners begin with zeros.
4. Schedulers count iterations whose step failed, too. Who lost fewer than another member meets again, and gets the state of that.

A member whose exchange fails leaves the group at once, so that the others' exchanges fail too, and asks for a new quorum.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gradwire.errors import CommunicationError, DisagreementError
from gradwire.exchange import Exchange, State, TensorMeta, is_alike
from gradwire.integrations.catch_up import CatchUp, Means
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.handover import MemberCard, StateOffer, copied, fetch, hand_over, training_ranks
from gradwire.integrations.island_calls import LostRankError
from gradwire.integrations.meetings import meeting_name, quorum_key
from gradwire.integrations.member_state import MemberState
from gradwire.integrations.quorum import Lighthouse, NoQuorumError
from gradwire.integrations.rehearsal import rehearse
from gradwire.transport import LinkError

__all__ = ["Members"]

log = logging.getLogger(__name__)


class Members:
    """This process among the members of a job."""

    def __init__(
        self, tensors: dict[str, TensorMeta], plan: Any, state: MemberState, lighthouse: Lighthouse, catches_up: bool = True
    ) -> None:
        """catches_up: whether joiners catch up while the others make steps; the same on all members."""
        self._tensors, self._plan, self._state = tensors, plan, state
        self._lighthouse, self._catches_up = lighthouse, catches_up
        rehearse(tensors, plan, lighthouse.timeout)
        self.step, self.lost = 0, 0
        """Committed steps, and iterations of the script since that did not count: the same on members that are not behind."""
        self.parts, self.takes_part, self.begins = 0, False, False
        """The members whose gradients count in this step, 0 where all join; whether this is one of them; and whether all begin
        with this step, so that none of them has trained yet."""
        self.rank, self.world_size = 0, 0
        """This member's rank among the members that met last, and their number; 0 before the first quorum."""
        self.exchange: Exchange | None = None
        """The exchange of the present quorum; None before the first, and after a failure."""
        self._quorum: tuple[int, tuple[str, ...]] = -1, ()
        self._failures, self._took_part, self._lags = 0, False, False
        self._named: Any = None
        """A quorum that was named while this member caught up, and that it is to meet."""
        self._kept: tuple[State, int] = {}, 1
        """Residuals of the last exchange, and its number of members."""
        self._put_back: Callable[[], None] = lambda: None
        self._catch_up: CatchUp | None = None
        """The way to the step of the others; None where this member makes steps with them."""
        self._offer = StateOffer()

    @property
    def factor(self) -> float:
        """The factor of gradients before they are averaged, so that those of joiners count for nothing."""
        return 1.0 if not self.parts else self.world_size / self.parts if self.takes_part else 0.0

    @property
    def taking_part(self) -> int:
        """The members whose gradients count in this step, also where all join; 0 before the first quorum."""
        return self.parts or self.world_size

    @property
    def is_behind(self) -> bool:
        """Whether the others made steps that this member still has to make."""
        return self._catch_up is not None and self._catch_up.is_behind

    def meet(self) -> Exchange | Means:
        """Return the exchange of the members that make the next step, or the means of a step that the others have made. Waits for
        members. Raises CommunicationError where too few come, DisagreementError where members run other models or plans."""
        while True:
            try:
                if self._catch_up is not None:
                    if (means := self._catch_up.next()) is not None:
                        return means
                    self._catch_up = None
                quorum, self._named = self._named or self._lighthouse.ask(max(0, self.step - self._lags), self._failures), None
                if quorum_key(quorum) != self._quorum or self.exchange is None:
                    self._lighthouse.all_do(partial(self._meet, quorum))
                elif quorum.heal and quorum.max_step != self.step:  # in step 0 torchft lets all heal
                    raise LinkError(None, ConnectionError(f"the others are at step {quorum.max_step}, and this one is not"))
                else:
                    self.parts, self.takes_part = quorum.max_world_size, True
                if self.parts == self.world_size:
                    self._offer.withdraw()
                if self._catch_up is None:
                    assert self.exchange is not None
                    return self.exchange
            except (CommunicationError, LinkError, DisagreementError) as error:
                is_over = isinstance(error, (NoQuorumError, LostRankError))
                if is_over or (isinstance(error, DisagreementError) and not self._took_part):
                    raise  # who joins with another model goes, and the others go on
                log.info("the members of quorum %d did not meet: %s", self._quorum[0], error)
                self._failures += 1
                self._part()

    def begin(self, exchange: Exchange) -> None:
        self._put_back = exchange.keep_residuals()
        exchange.step = self.step
        exchange.begin()

    def end(self, exchange: Exchange) -> bool:
        """Wait for the step. Returns whether it counts. Raises the error of this member's own part: the others go on alone."""
        if self._lighthouse.all_agree(exchange.finish_quietly()):
            exchange.wait()
            self._put_back = lambda: None
            return True
        own = exchange.own_failure()
        self.give_up()
        if own is not None:
            raise own
        return False

    def commit(self) -> None:
        """The step counts and the weights hold it."""
        self.step, self.lost, self._failures, self.begins = self.step + 1, 0, 0, False

    def give_up(self) -> None:
        """Leave the group, also in the middle of a step: the others' step fails, and the next one has a new quorum."""
        self._failures += 1
        self._part(self._put_back)

    def leave(self) -> None:
        """Leave the job. The others go on."""
        catch_up, self._catch_up = self._catch_up, None
        self._part()
        self._lighthouse.leave()
        if catch_up is not None:
            catch_up.join()

    def _part(self, put_back: Callable[[], None] = lambda: None) -> None:
        """Leave the group, at once, and keep the residuals."""
        exchange, self.exchange = self.exchange, None
        catch_up, self._catch_up = self._catch_up, None
        if exchange is not None:
            exchange.abort()
            put_back()
            self._kept = ({}, 1) if catch_up is not None else (exchange.residuals.state(), exchange.group.world_size)
        if catch_up is not None:
            catch_up.join()
            self._named = catch_up.named
        self._lighthouse.end_watch()
        self._offer.withdraw()

    def _meet(self, quorum: Any) -> None:
        """Make the exchange of a quorum. Residuals of the last one go on, or the state of another member is loaded."""
        began_s, self._quorum = time.monotonic(), quorum_key(quorum)
        self._part()
        exchange = self.exchange = Exchange(self._tensors, self._plan, self._lighthouse.group_of(quorum))
        self.rank, self.world_size = exchange.group.rank, exchange.group.world_size
        exchange.go_on(self._kept[0], quorum.max_step, self._kept[1])
        self._kept = {}, 1
        waits, joiners = not self._catches_up or not quorum.max_step, quorum.recover_dst_replica_ranks
        key, data = f"state of {meeting_name(quorum)}", b""
        card = MemberCard(quorum.heal or not self._took_part, {}, at=None if quorum.heal else (self.step, self.lost))
        if joiners:
            alike = {key: value for key, value in exchange.residuals.state().items() if is_alike(key)}
            state = self._state.save()
            data = to_bytes({"alike": alike, **(state if waits else {})})
            card.sends = dict.fromkeys(joiners, len(data))
            if not waits:
                self._offer.begin(self._lighthouse.store, key, partial(to_bytes, copied(state)))
                card.store = self._lighthouse.store_address
        cards, got = exchange.lanes.control.submit(lambda link: hand_over(link, card, data)).result()
        self._lighthouse.end_watch()
        places = {each.at for each in cards if each.at is not None}
        step, lost = max(places, default=(quorum.max_step, 0))
        if len(places) > 1 or step != quorum.max_step:
            self._lags = (self.step, self.lost) < (step, lost)
            raise LinkError(None, ConnectionError(f"members are at different steps or lost iterations: {sorted(places)}"))
        training, self._failures = training_ranks(cards, quorum.max_step), 0
        self.parts, self.takes_part, self.begins = len(training), self.rank in training, all(each.joins for each in cards)
        if quorum.heal:
            state = from_bytes(got)
            exchange.go_on(state.pop("alike"), quorum.max_step, self.world_size)
            if not waits:
                donor = next(each for each in cards if self.rank in each.sends)
                ask = partial(self._lighthouse.ask, min(self.step, step - 1), 0)  # a step that others have made
                catch_up = self._catch_up = CatchUp(exchange, self._tensors, quorum, ask)
                state = from_bytes(fetch(donor.store, key, self._lighthouse.timeout, catch_up.check))
            self._state.load(state)
            if self._catch_up is not None:
                self._catch_up.state_came()
        self.step, self.lost, self._lags, self._took_part = step, lost, False, True
        log.info("step %d: rank %d of %d met all in %.2f s", self.step, self.rank, self.world_size, time.monotonic() - began_s)
