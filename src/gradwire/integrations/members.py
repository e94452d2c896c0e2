"""Members of a job that come and go: torchft's quorum, an exchange for each quorum, and the state that joiners get.

A member is one process with a whole replica of the model. Before a step it asks torchft's lighthouse for the quorum, the members
that make the step together. While the quorum stays, so does the exchange. Otherwise the members meet anew:

1. They reach the store of one of them, under the quorum's number, and make a group and an exchange there.
2. Members that are at the step already send their state to those that are not: weights, optimizer, step. No bytes are unpickled.
3. Residuals go on, multiplied by the old number of members over the new one. Joiners begin with zeros.

A member whose exchange fails leaves the group at once, so that the others' exchanges fail too, and asks for a new quorum.
"""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, TCPStore

from gradwire.errors import CommunicationError, DisagreementError, PlanError
from gradwire.exchange import Exchange, State, TensorMeta, is_alike
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.handover import MemberCard, MemberState, hand_over
from gradwire.transport import Group, LinkError, own_address, transfer

__all__ = ["Members"]

log = logging.getLogger(__name__)
_AGAIN_S = 0.2
"""Between two questions for a quorum of too few members."""


class Members:
    """This process among the members of a job."""

    def __init__(
        self,
        tensors: dict[str, TensorMeta],
        plan: Any,
        state: MemberState,
        lighthouse: str,
        min_replicas: int,
        timeout: timedelta,
    ) -> None:
        """lighthouse: the address of torchft's lighthouse. timeout: how long a wait for another member may take."""
        try:
            from torchft.coordination import ManagerClient, ManagerServer
        except ImportError as error:
            raise PlanError(
                "members that come and go need the package torchft, which is not installed: pip install 'gradwire[elastic]'."
            ) from error
        self._tensors, self._plan, self._state = tensors, plan, state
        self._min_replicas, self._timeout = min_replicas, timeout
        url = urlsplit(lighthouse if "://" in lighthouse else f"http://{lighthouse}")
        address = own_address(SimpleNamespace(host=url.hostname, port=url.port))
        host = f"[{address}]" if ":" in address else address
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._server = ManagerServer(
            replica_id=f"{address}-{self._store.port}",
            lighthouse_addr=f"{url.scheme}://{url.netloc}",
            hostname=host,
            bind=f"{host}:0",
            store_addr=f"{host}:{self._store.port}",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=timeout,
            quorum_retries=0,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=timeout)
        self.step = 0
        """Committed steps: the same on all members."""
        self.taking_part: set[int] = set()
        """The ranks of the members that joined before this step."""
        self.exchange: Exchange | None = None
        """The exchange of the present quorum; None before the first, and after a failure."""
        self._quorum_id, self._failures, self._took_part = -1, 0, False
        self._kept: tuple[State, int] = {}, 1
        """Residuals of the last exchange, and its number of members."""
        self._put_back: Callable[[], None] = lambda: None

    @property
    def rank(self) -> int:
        """This member's rank among the present members; 0 before the first quorum."""
        return self.exchange.group.rank if self.exchange is not None else 0

    @property
    def world_size(self) -> int:
        """The number of present members; 0 before the first quorum."""
        return self.exchange.group.world_size if self.exchange is not None else 0

    def meet(self) -> Exchange:
        """Return the exchange of the members that make the next step. Waits until there are enough. Raises CommunicationError
        where the lighthouse is not reached, DisagreementError where members run other models or plans."""
        while True:
            quorum = self._ask()
            if quorum.replica_world_size < self._min_replicas:
                time.sleep(_AGAIN_S)
                continue
            if quorum.quorum_id == self._quorum_id and self.exchange is not None and not quorum.heal:
                return self.exchange
            try:
                return self._meet(quorum)
            except (CommunicationError, LinkError, DisagreementError) as error:
                if isinstance(error, DisagreementError) and not self._took_part:
                    raise  # who joins with another model goes, and the others go on
                log.info("the members of quorum %d did not meet: %s", quorum.quorum_id, error)
                self._failures += 1
                self._part()

    def average(self, exchange: Exchange, fill: Callable[[], None]) -> bool:
        """Run a step of the exchange that `fill` fills. Returns whether it counts. If not, residuals are as before."""
        self.begin(exchange)
        fill()
        return self.end(exchange)

    def begin(self, exchange: Exchange) -> None:
        """Begin a step of the exchange."""
        self._put_back = exchange.keep_residuals()
        exchange.step = self.step
        exchange.begin()

    def end(self, exchange: Exchange) -> bool:
        """Wait for the step. Returns whether it counts. Raises the error of this member's own part: the others go on alone."""
        if exchange.finish_quietly():
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
        self.step, self._failures = self.step + 1, 0
        self.taking_part = set(range(self.world_size))

    def give_up(self) -> None:
        """Leave the group, also in the middle of a step: the others' step fails, and the next one has a new quorum."""
        self._failures += 1
        self._part(self._put_back)

    def leave(self) -> None:
        """Leave the job. The others go on."""
        self._part()
        self._server.shutdown()

    def _part(self, put_back: Callable[[], None] = lambda: None) -> None:
        """Leave the group, at once, and keep the residuals."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abort()
            put_back()
            self._kept = exchange.residuals.carried(), exchange.group.world_size

    def _ask(self) -> Any:
        try:
            return self._client._quorum(
                group_rank=0,
                step=self.step,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=timedelta(hours=1),
                init_sync=True,
                commit_failures=self._failures,
            )
        except Exception as error:
            raise CommunicationError(
                f"step {self.step}: torchft's lighthouse named no members that make the step: {error}. Start `gradwire "
                "lighthouse` where every member reaches it, and enough members."
            ) from error

    def _meet(self, quorum: Any) -> Exchange:
        """Make the exchange of a quorum. Residuals of the last one go on, or the state of another member is loaded."""
        self._part()
        self._quorum_id = quorum.quorum_id
        place = urlsplit(f"//{quorum.store_address}")
        with transfer():
            reached = TCPStore(place.hostname or "", place.port or 0, wait_for_workers=False, timeout=self._timeout)
        store = PrefixStore(f"quorum {quorum.quorum_id}", reached)
        group = Group.of_store(store, quorum.replica_rank, quorum.replica_world_size, self._timeout)
        exchange = self.exchange = Exchange(self._tensors, self._plan, group)
        exchange.go_on(self._kept[0], quorum.max_step, self._kept[1])
        alike = {key: value for key, value in exchange.residuals.carried().items() if is_alike(key)}
        data = to_bytes({"alike": alike, **self._state.save()}) if quorum.recover_dst_replica_ranks else b""
        card = MemberCard(quorum.heal or not self._took_part, dict.fromkeys(quorum.recover_dst_replica_ranks, len(data)))
        cards, got = exchange.lanes.control.submit(lambda link: hand_over(link, card, data)).result()
        if quorum.heal:
            state = from_bytes(got)
            exchange.go_on(state.pop("alike"), quorum.max_step, group.world_size)
            self._state.load(state)
        self.step = quorum.max_step
        self.taking_part = {rank for rank, each in enumerate(cards) if not each.joins}
        self._took_part = True
        log.info("step %d is made by %d members, of which this is number %d", self.step, group.world_size, group.rank)
        return exchange
