"""The lighthouse of torchft, as one member asks it who makes the next step."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from gradwire.errors import CommunicationError, PlanError, StepStateError
from gradwire.integrations.handover import reach
from gradwire.integrations.meetings import meeting_name
from gradwire.integrations.member_watch import LighthouseLine, MemberWatch, url_of
from gradwire.transport import Group, own_address, start_store_thread

__all__ = ["Lighthouse", "NoQuorumError", "lighthouse_address", "load_torchft"]

_AGAIN_S = 0.2
"""Between two questions for a quorum of too few members."""
_SETTLE_S = 1.0
"""Between two questions before the first step. Members begin when nobody new came between them: later ones must catch up."""
_HEARTBEAT = timedelta(milliseconds=100)
_ASK_S = 60.0
"""For one request; then the next. If a request ends while its answer is on the way, the others count on a member that does not
know it. So this is long."""
_LOOK_S = 1.0
"""Between two looks whether the lighthouse ended: it never answers the requests that it had."""


def lighthouse_address(given: str | None) -> str:
    """The address of the lighthouse: the given one, or that of the environment. Raises StepStateError without one."""
    if found := given or os.environ.get("TORCHFT_LIGHTHOUSE"):
        return found
    raise StepStateError(
        'no lighthouse is named, which says who the members are. Start `gradwire lighthouse`, pass lighthouse="HOST:29510".'
    )


class NoQuorumError(CommunicationError):
    """The lighthouse named no members in time."""


def load_torchft() -> None:
    """Import torchft. Its log, of several lines a step, is off unless RUST_LOG is set. Raises PlanError without torchft."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it once, when it is imported
    try:
        import torchft.coordination  # noqa: F401
    except ImportError as error:
        raise PlanError(
            "members that come and go need the package torchft, which is not installed. Run: pip install 'torchft>=0.2'"
        ) from error


class Lighthouse:
    """This member's connection to the lighthouse, and the store where others reach this member."""

    def __init__(self, address: str, min_replicas: int, timeout: timedelta, patience_s: float) -> None:
        """min_replicas: the least members of a step. timeout: how long a wait for another member may take. patience_s: how long
        to wait for enough members. Raises PlanError without torchft, and for an address that is none."""
        load_torchft()
        self._url = url_of(address)
        self._min_replicas, self.timeout, self._patience_s = min_replicas, timeout, patience_s
        self._own_address = own_address(SimpleNamespace(host=self._url.hostname, port=self._url.port))
        self._host = f"[{self._own_address}]" if ":" in self._own_address else self._own_address
        self.store = TCPStore(self._own_address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        """The store of this member."""
        self.place = 0
        """The rank in this member, which exchanges with the same ranks of others."""
        self.store_address = f"{self._host}:{self.store.port}"
        self._server: Any = None
        self._watch = MemberWatch(())
        """Finds other members that end before all have met."""
        self._line = LighthouseLine(self._url.netloc)
        self._left = False
        self._client: Any = None

    def ask(self, step: int, failures: int) -> Any:
        """The quorum of the next step, once there are enough members. step: the steps that this member has made. failures: steps
        and meetings that failed since the last step that counts. Raises NoQuorumError, also where `leave` is called meanwhile."""
        until = time.monotonic() + self._patience_s
        known: set[str] = set()
        while True:
            left_s = until - time.monotonic()
            try:
                quorum = self._answer(max(min(left_s, _ASK_S), 0.001), step, failures)
            except Exception as error:
                if isinstance(error, TimeoutError) and left_s > _ASK_S:
                    continue
                raise NoQuorumError(
                    f"step {step}: torchft's lighthouse named no members that make the step within {self._patience_s:g} s: "
                    f"{error}. Either the lighthouse is not reached: start `gradwire lighthouse` where every member reaches it. "
                    f"Or fewer than {self._min_replicas} members are left, since the others ended: then end this one too. Or the "
                    "lighthouse's own `--min-replicas` is larger. Or a member is slower than `patience_s`."
                ) from error
            before, known = known, set(quorum.replica_ids)
            if quorum.replica_world_size < self._min_replicas:
                time.sleep(_AGAIN_S)
            elif quorum.max_step or known == before:
                return quorum
            else:
                time.sleep(_SETTLE_S)

    def _answer(self, timeout_s: float, step: int, failures: int) -> Any:
        """The answer to one request, which is made again where the lighthouse ended and another one is there. Raises what a
        request raises, ConnectionError where `leave` is called meanwhile."""
        if self._client is None:
            self._enter()
        self._line.finds_another()
        until = time.monotonic() + timeout_s
        answers = self._request(until, step, failures)
        while not self._left and time.monotonic() < until + _LOOK_S:
            try:
                answer = answers.get(timeout=_LOOK_S)
            except Empty:
                if self._line.finds_another():
                    answers = self._request(until, step, failures)
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer
        raise ConnectionError("this member left") if self._left else TimeoutError("the lighthouse gave no answer")

    def _request(self, until: float, step: int, failures: int) -> "SimpleQueue[Any]":
        """Ask in a thread. Returns where the answer comes, or the error."""
        answers: SimpleQueue[Any] = SimpleQueue()
        request = partial(
            self._client._quorum,
            group_rank=0,
            step=step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=max(until - time.monotonic(), 0.001)),
            init_sync=True,
            commit_failures=failures,
        )
        start_store_thread(partial(_put_answer, answers, request), "gradwire-quorum")
        return answers

    def group_of(self, quorum: Any) -> Group:
        """The group of the members of a quorum. Raises LinkError, also later where one of them ends before all have met."""
        self.end_watch()
        self._watch = MemberWatch([each for each in quorum.replica_ids if each != self.store_address])
        store = PrefixStore(f"{meeting_name(quorum)}/{self.place}", reach(quorum.store_address, self.timeout))
        return Group.of_store(store, quorum.replica_rank, quorum.replica_world_size, self.timeout, self._watch.check)

    def end_watch(self) -> None:
        """The members have met, or do not meet any more: whether others end is found by their exchange."""
        self._watch.close()

    def all_do(self, action: Callable[[], None]) -> None:
        """Do something on all ranks of this member. Raises what the action raises, also where it failed on another rank."""
        action()

    def all_agree(self, is_well: bool) -> bool:
        """Whether all ranks of this member say so. Collective in the member."""
        return is_well

    def leave(self) -> None:
        """Give no more signs of life, end the request that waits, and close the store: members that still wait for this one find
        that it is gone."""
        self._left = True
        vars(self).pop("store", None)
        self._line.close()
        if self._server is not None:
            self._server.shutdown()
        self._server = self._client = None  # whoever frees a server ends its requests

    def _enter(self) -> None:
        """Begin to give signs of life. From now on the others wait for this member, so not before it asks."""
        if self._left:
            raise ConnectionError("this member left")
        from torchft.coordination import ManagerClient, ManagerServer

        self._server = ManagerServer(
            replica_id=self.store_address,  # so that every member knows where the others are
            lighthouse_addr=f"{self._url.scheme}://{self._url.netloc}",
            hostname=self._host,
            bind=f"{self._host}:0",
            store_addr=self.store_address,
            world_size=1,
            heartbeat_interval=_HEARTBEAT,
            connect_timeout=self.timeout,
            quorum_retries=0,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=self.timeout)
        if self._left:  # meanwhile
            self.leave()
            raise ConnectionError("this member left")


def _put_answer(answers: "SimpleQueue[Any]", request: Callable[[], Any]) -> None:
    try:
        answers.put(request())
    except BaseException as error:  # a panic of torchft is no Exception, and somebody waits
        answers.put(error)
