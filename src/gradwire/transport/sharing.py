"""Lets wires between ranks of a machine pass messages through memory, where the system allows it (else TCP carries them)."""

import errno
import hmac
import json
import logging
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gradwire.core import SHARED_MEMORY, switch
from gradwire.transport.agreement import gather_bytes
from gradwire.transport.grid import Grid
from gradwire.transport.link import Link
from gradwire.transport.rings import Handles, Rings, memory_bytes, ring_bytes
from gradwire.transport.wire import Wire

log = logging.getLogger(__name__)

_HELLO = struct.Struct("<16sI")
"""A token of the listener, and the rank."""
_CREDENTIALS = struct.Struct("3i")
"""Linux's ucred: process, user, group."""
_PATIENCE_S = 10.0
_A_PAIR = 3
"""Descriptors that a pair of ranks shares on each lane."""


def share_memory_of_machines(control: Link, grid: Grid, wires: Sequence[Wire]) -> None:
    """Let the wires of all lanes pass messages through memory, on the machines where every rank can. Collective, on the control
    lane. grid: of machines."""
    if not wires or grid.nodes == grid.world_size:
        return
    offer = MemoryOffer(grid, len(wires), _until(control))
    try:
        card: dict[str, Any] = {"problem": _problem(offer.make), "address": offer.address.hex(), "token": offer.token.hex()}
        card["descriptors"] = _descriptor_limit()
        cards = [json.loads(raw) for raw in gather_bytes(control, json.dumps(card).encode())]
        problems = [card["problem"] for card in cards]
        together = [members for members in grid.members if len(members) > 1]
        if all(any(problems[rank] for rank in members) for members in together):
            _tell(grid, problems)
            return
        # half of what one user may have on the way: the other jobs of a user count too
        most = min(card["descriptors"] for card in cards) // 2
        for apart in distances_at_a_time(max(map(len, together)), _A_PAIR * len(wires), most):
            offer.until = _until(control)
            # a listener's queue holds what nobody has accepted yet: so all know who failed before anybody waits
            for step in (partial(offer.give, cards, apart), partial(offer.get, apart)):
                mine = {rank: problems[rank] for rank in grid.group("intra") if problems[rank]}
                own = problems[control.rank] or ("" if mine else _problem(step))
                problems = [raw.decode() for raw in gather_bytes(control, own.encode())]
        if not any(problems[rank] for rank in grid.group("intra")):
            offer.attach(wires)
        _tell(grid, problems)
    finally:
        offer.close()


def _until(control: Link) -> float:
    """When a turn ends, in seconds of time.monotonic."""
    return time.monotonic() + min(_PATIENCE_S, 0.2 * control.timeout.total_seconds())


def distances_at_a_time(ranks: int, each: int, most: int) -> list[range]:
    """Which distances between the ranks of a machine have a turn together, so that at most `most` descriptors are on their way at
    a time, where a pair has `each`. One distance at least has a turn.

    >>> distances_at_a_time(16, each=12, most=512)
    [range(1, 4), range(4, 8), range(8, 16)]
    """
    turns, first, pairs = [], 1, 0
    for apart in range(1, ranks):
        if pairs and (pairs + ranks - apart) * each > most:
            turns.append(range(first, apart))
            first, pairs = apart, 0
        pairs += ranks - apart
    return [*turns, range(first, ranks)]


def _descriptor_limit() -> int:
    """The limit of descriptors that this process has open, which is also that of all that one user has on the way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**30 if limit == resource.RLIM_INFINITY else limit


def _problem(step: Callable[[], None]) -> str:
    """Do a step that may fail on some ranks; why it did, or ''."""
    try:
        step()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a system that lacks the call
        return str(error) or type(error).__name__
    return ""


class MemoryOffer:
    """The memory that a rank makes for the lower ranks of its machine, and gets from the higher ones. The steps raise OSError."""

    def __init__(self, grid: Grid, lanes: int, until: float) -> None:
        self.address, self.token = b"\0gradwire-" + secrets.token_hex(8).encode(), secrets.token_bytes(16)
        self._rank, self._lanes, self.until = grid.rank, lanes, until
        self._mates = grid.group("intra")
        self._place = place = self._mates.index(grid.rank)
        self._lower, self._higher = self._mates[:place], self._mates[place + 1 :]
        self._capacity = ring_bytes(len(self._mates), lanes)
        self._made: dict[int, list[Handles]] = {}
        """For each lower rank: of each lane."""
        self._mapped: dict[int, list[Rings]] = {}
        """Connections to each rank, to pass the handles on."""
        self._listener: socket.socket | None = None

    def make(self) -> None:
        """Listen, under a name that is in no folder, and make the memory."""
        if not switch(SHARED_MEMORY):
            raise OSError(f"{SHARED_MEMORY} is off")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(len(self._mates))
        for peer in self._lower:
            lanes = self._made[peer] = []
            for _ in range(self._lanes):
                try:
                    lanes.append(Handles.make(self._capacity))
                except OSError as error:
                    raise OSError(error.errno, f"{error.strerror}. {self._needs}") from error

    @property
    def _needs(self) -> str:
        ranks, mib = len(self._mates), memory_bytes(self._capacity) / 2**20
        pairs = self._lanes * ranks * (ranks - 1) // 2
        return (
            f"The {ranks} ranks of this node need {pairs * mib:.1f} MiB of shared memory ({mib:.1f} MiB for each of {pairs} "
            "pairs of lanes) and 3 descriptors a pair; see the container's limit of memory and `ulimit -a`"
        )

    def _at(self, peers: Sequence[int], apart: range) -> list[int]:
        """The ranks among `peers` that are so far from this one."""
        return [peer for peer in peers if abs(self._mates.index(peer) - self._place) in apart]

    def give(self, cards: Sequence[dict[str, Any]], apart: range) -> None:
        """Give the lower ranks at these distances what was made for them."""
        for peer in self._at(self._lower, apart):
            lanes = self._made[peer]
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(max(0.1, self.until - time.monotonic()))
                try:
                    connection.connect(bytes.fromhex(cards[peer]["address"]))
                except OSError as error:
                    raise OSError(
                        error.errno,
                        f"{error.strerror} by the Unix socket of rank {peer}. Ranks share memory inside one network namespace, "
                        "not from one container to another, nor where two machines have one host name",
                    ) from error
                if (user := _user_of(connection)) != os.geteuid():
                    raise OSError(errno.EPERM, f"rank {peer} is a process of user {user}, and this one of user {os.geteuid()}")
                hello = _HELLO.pack(bytes.fromhex(cards[peer]["token"]), self._rank)
                try:
                    socket.send_fds(connection, [hello], [number for handles in lanes for number in handles.numbers])
                except OSError as error:
                    raise self._with_cure(error, apart) from error
            self._map(peer, lanes, True)

    def _with_cure(self, error: OSError, apart: range) -> OSError:
        """The error of a message that could not be sent, with what helps where too many descriptors are on the way."""
        if error.errno != errno.ETOOMANYREFS:
            return error
        count, limit = _A_PAIR * self._lanes * sum(len(self._mates) - each for each in apart), _descriptor_limit()
        enough = 2 * max(count, limit)
        return OSError(
            error.errno,
            f"{error.strerror}. The {len(self._mates)} ranks of this node pass each other {count} descriptors at a time, and the "
            f"limit of descriptors, {limit}, holds for all that a user's processes have on the way, of other jobs too. Raise it "
            f"to at least {enough} on every rank (`ulimit -n {enough}`)",
        )

    def get(self, apart: range) -> None:
        """Get what the higher ranks at these distances made."""
        assert self._listener is not None
        while missing := [rank for rank in self._at(self._higher, apart) if rank not in self._mapped]:
            self._listener.settimeout(max(0.1, self.until - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                raise OSError(f"no memory came from ranks {missing} in time") from error
            told, numbers = self._received(connection)
            token, peer = _HELLO.unpack(told) if len(told) == _HELLO.size else (b"", -1)
            count, known = _A_PAIR * self._lanes, hmac.compare_digest(token, self.token)
            if known and peer in missing and len(numbers) == count:
                lanes = zip(*[iter(numbers)] * _A_PAIR, strict=True)
                self._map(peer, [Handles(memory, (bell, other)) for memory, bell, other in lanes], False)
                continue
            for number in numbers:
                os.close(number)
            if known:  # else it was somebody else
                raise OSError(errno.EMFILE, f"rank {peer} sent {count} descriptors and {len(numbers)} came. {self._needs}")

    def _received(self, connection: socket.socket) -> tuple[bytes, list[int]]:
        """Receive the bytes and descriptors that a process of the same user sent; none from others."""
        with connection, suppress(OSError):
            if _user_of(connection) == os.geteuid():
                connection.settimeout(1.0)
                told, numbers, _, _ = socket.recv_fds(connection, _HELLO.size, _A_PAIR * self._lanes, socket.MSG_CMSG_CLOEXEC)
                return told, numbers
        return b"", []

    def _map(self, peer: int, lanes: list[Handles], maker: bool) -> None:
        """Before ranks agree, since address space may be short too."""
        self._made[peer], mapped = lanes, self._mapped.setdefault(peer, [])
        while lanes:
            mapped.append(Rings(lanes[0], maker, self._capacity))
            del lanes[0]

    def attach(self, wires: Sequence[Wire]) -> None:
        """Let wires use it. They connect with a rank when a list first needs it: the connection shows that it lives."""
        for peer, mapped in self._mapped.items():
            for wire, rings in zip(wires, mapped, strict=True):
                wire.share(peer, rings)
        self._mapped = {}

    def close(self) -> None:
        """Close what no wire uses."""
        if self._listener is not None:
            self._listener.close()
        for handles in (each for lanes in self._made.values() for each in lanes):
            handles.close()
        for rings in (each for mapped in self._mapped.values() for each in mapped):
            rings.close()
        self._made, self._mapped = {}, {}


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _tell(grid: Grid, problems: Sequence[str]) -> None:
    """The first rank of a machine says why its ranks use TCP."""
    mates = grid.group("intra")
    found = [f"rank {rank}: {problems[rank]}" for rank in mates if problems[rank]]
    if found and grid.rank == mates[0]:
        words = (
            f"ranks {', '.join(map(str, mates))} share a machine and no memory, so their messages go by TCP: {'; '.join(found)}."
        )
        if all(SHARED_MEMORY in each for each in found):
            log.info("%s", words)
        else:
            log.warning("%s TCP takes longer. %s=off keeps this quiet.", words, SHARED_MEMORY)
