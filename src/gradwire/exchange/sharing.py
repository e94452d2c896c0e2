"""Lets wires between ranks of a node pass messages through memory, where the system allows it (else TCP carries them)."""

import errno
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gradwire.collectives import Grid, Link
from gradwire.collectives.rings import MEMORY_BYTES, Handles, Rings
from gradwire.collectives.wire import Wire
from gradwire.exchange.agreement import gather_bytes

log = logging.getLogger(__name__)

SWITCH = "GRADWIRE_SHARED_MEMORY"
"""Ranks of a node use TCP where this variable is `off` for one of them."""
_HELLO = struct.Struct("<16sI")
"""A token of the listener, and the rank."""
_PATIENCE_S = 10.0


def share_memory_of_nodes(control: Link, grid: Grid, wires: Sequence[Wire]) -> None:
    """Let the wires of all lanes pass messages through memory, on the nodes where every rank can. Collective, on the control
    lane."""
    if not wires or grid.nodes == grid.world_size:
        return
    until = time.monotonic() + min(_PATIENCE_S, 0.2 * control.timeout.total_seconds())
    offer = MemoryOffer(grid, len(wires), until)
    try:
        problems = _problems(control, offer.make)
        card = json.dumps({"address": offer.address.hex(), "token": offer.token.hex()})
        cards = [json.loads(raw) for raw in gather_bytes(control, card.encode())]
        # a listener's queue holds what nobody has accepted yet: so all know who failed before anybody waits
        for step in (lambda: offer.give(cards), offer.get):
            mine = {rank: problems[rank] for rank in grid.group("intra") if problems[rank]}
            problems = _problems(control, (lambda: None) if mine else step, problems)
        if not any(problems[rank] for rank in grid.group("intra")):
            offer.attach(wires)
        _tell(grid, problems)
    finally:
        offer.close()


def _problems(control: Link, step: Callable[[], None], before: Sequence[str] = ()) -> list[str]:
    """Do a step that may fail on some ranks; why it did, or a step `before`, by rank."""
    problem = before[control.rank] if before else ""
    try:
        step()
    except (OSError, AttributeError) as error:  # a system that lacks the call
        problem = str(error)
    return [raw.decode().strip() for raw in gather_bytes(control, problem.encode() or b" ")]


class MemoryOffer:
    """What a rank makes for the lower ranks of its node, and gets from the higher ones. The steps raise OSError."""

    def __init__(self, grid: Grid, lanes: int, until: float) -> None:
        self.address, self.token = b"\0gradwire-" + secrets.token_hex(8).encode(), secrets.token_bytes(16)
        self._rank, self._lanes, self._until = grid.rank, lanes, until
        self._mates = grid.group("intra")
        place = self._mates.index(grid.rank)
        self._lower, self._higher = self._mates[:place], self._mates[place + 1 :]
        self._made: dict[int, list[Handles]] = {}
        """For each lower rank: of each lane."""
        self._given: dict[int, list[Handles]] = {}
        """By each higher rank."""
        self._listener: socket.socket | None = None

    def make(self) -> None:
        """Listen, under a name that is in no folder, and make the memory."""
        if os.environ.get(SWITCH) == "off":
            raise OSError(f"{SWITCH} is off")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(len(self._mates))
        for peer in self._lower:
            lanes = self._made[peer] = []
            for _ in range(self._lanes):
                try:
                    lanes.append(Handles.make())
                except OSError as error:
                    raise OSError(error.errno, f"{error.strerror}. {self._needs}") from error

    @property
    def _needs(self) -> str:
        ranks, mib = len(self._mates), MEMORY_BYTES / 2**20
        pairs = self._lanes * ranks * (ranks - 1) // 2
        return (
            f"The {ranks} ranks of this node need {pairs * mib:.1f} MiB of shared memory ({mib:.1f} MiB for each of {pairs} "
            "pairs of lanes) and 3 descriptors a pair; see the container's limit of memory and `ulimit -a`"
        )

    def give(self, cards: Sequence[dict[str, str]]) -> None:
        """Give the lower ranks what was made for them."""
        for peer, lanes in self._made.items():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(max(0.1, self._until - time.monotonic()))
                connection.connect(bytes.fromhex(cards[peer]["address"]))
                hello = _HELLO.pack(bytes.fromhex(cards[peer]["token"]), self._rank)
                socket.send_fds(connection, [hello], [number for handles in lanes for number in handles.numbers])

    def get(self) -> None:
        """Get what the higher ranks made."""
        assert self._listener is not None
        while len(self._given) < len(self._higher):
            self._listener.settimeout(max(0.1, self._until - time.monotonic()))
            connection, _ = self._listener.accept()
            told, numbers = self._heard(connection)
            count, peer = 3 * self._lanes, _HELLO.unpack(told)[1] if len(told) == _HELLO.size else -1
            if told.startswith(self.token) and peer in self._higher and len(numbers) == count:
                lanes = zip(*[iter(numbers)] * 3, strict=True)
                self._given[peer] = [Handles(memory, (bell, other)) for memory, bell, other in lanes]
                continue
            for number in numbers:
                os.close(number)
            if told.startswith(self.token):  # else it was somebody else
                raise OSError(
                    errno.EMFILE, f"rank {peer} sent {count} descriptors and {len(numbers)} came. {self._needs}"
                )

    def _heard(self, connection: socket.socket) -> tuple[bytes, list[int]]:
        with connection, suppress(OSError):
            connection.settimeout(1.0)
            told, numbers, _, _ = socket.recv_fds(connection, _HELLO.size, 3 * self._lanes, socket.MSG_CMSG_CLOEXEC)
            return told, numbers
        return b"", []

    def attach(self, wires: Sequence[Wire]) -> None:
        """Let wires use it."""
        for shared, maker in ((self._made, True), (self._given, False)):
            for peer in list(shared):
                for wire, handles in zip(wires, shared.pop(peer), strict=True):
                    wire.share(peer, Rings(handles, maker))

    def close(self) -> None:
        """Close what no wire uses."""
        if self._listener is not None:
            self._listener.close()
        for handles in (each for shared in (self._made, self._given) for lanes in shared.values() for each in lanes):
            handles.close()


def _tell(grid: Grid, problems: Sequence[str]) -> None:
    """The first rank of a node says why its ranks use TCP."""
    mates = grid.group("intra")
    found = [f"rank {rank}: {problems[rank]}" for rank in mates if problems[rank]]
    if found and grid.rank == mates[0]:
        level = logging.INFO if all(SWITCH in each for each in found) else logging.WARNING
        log.log(level, "ranks %s share a node and no memory, so their messages go by TCP: %s", mates, "; ".join(found))
