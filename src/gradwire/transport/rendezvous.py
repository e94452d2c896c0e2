"""Connects a rank with others: it listens at one port, and every connection proves itself.

Each rank writes a card with its address into the rendezvous store. The higher rank of a pair calls the lower one, all pairs at
once. Both prove that they know the key of the group before either believes a byte. Whoever else connects is dropped; a stranger
who says nothing delays nobody.

Up to `AT_ONCE` ranks all connect with all, and nobody listens afterwards. Of more ranks a mesh has few connections at the start.
A thread then listens on: it connects with a rank when a lane first needs that rank, and answers the calls of others, whatever its
own lanes are doing. So no lane waits for another lane of another rank. Where the lower rank needs the connection first, it asks
the higher one for a call.
"""

import errno
import logging
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec

from gradwire._version import __version__
from gradwire.core import AT_ONCE, check_switches, peers_of, rows_of
from gradwire.errors import CommunicationError, DisagreementError, FormatError
from gradwire.kernels.cpu import available
from gradwire.transport.adapters import adapter_gbps
from gradwire.transport.addresses import own_address, why_too_few
from gradwire.transport.forks import close_in_child
from gradwire.transport.grid import SITE, site_name
from gradwire.transport.keys import PROOF_BYTES, JobKey
from gradwire.transport.rounds import merge_peers, neighbours
from gradwire.transport.store_waits import LOOK_S, Check, await_keys
from gradwire.transport.tls import OFF, Connected, Tls, TlsError, TlsOption, tls_of
from gradwire.transport.wire import LinkError

log = logging.getLogger(__name__)

Mesh = dict[int, Connected]
"""The connections of one purpose, by rank."""
CONTROL, HEARTBEATS = "control", "heartbeats"
"""The meshes of the control lane and for heartbeats. Heartbeats carry nothing secret, so they are never encrypted."""
_SHORT_US = 5_000
"""Microseconds of a round trip below which a connection is short: within a site."""
_ON_ITS_WAY = 2**23
"""Bytes that may be on their way to one end of a long connection, where the system allows it: 1 Gb/s for 67 ms."""
_BBR = "bbr"
_RTT_AT = 68
"""The place of the round trip in Linux's `tcp_info`, in bytes."""
_HELLO = struct.Struct("<I16s16s")
"""The rank that calls, the name of the mesh, and a nonce. A proof follows."""
_FRAME = 10
"""The version of what ranks connect and what a message looks like: 2 has checksums, 3 heartbeats, 4 rings, 5 proofs, 6
encryption, 7 few connections, 8 sites, 9 round trips, 10 checksums of models."""
_PATIENCE_S, _PATIENCE_A_RANK_S = 30.0, 0.2
"""For connections once all cards are there; less than half of the group's own timeout."""
_HELLO_S, _HURRIED_HELLO_S = 5.0, 0.5
"""For what whoever connects has to say; the second where many say nothing."""
_STRANGERS = 32
"""How many connections without a proof are held at once, beyond those of ranks."""

_REFUSED, _ASKS_S = "refused", 1.0
"""The place of the store for what a rank finds wrong with encryption, and how often a rank that waits looks there."""
_GRACE_S = 2.0
"""How long a lower rank waits for the call of a higher one before it asks for that. Ranks come to a new list one after another
where they share processors, and what they ask for takes as long as the connection itself."""
_CLONES = 4
"""How many connections to the store a rank has at most: its own, and clones for what waits by itself."""
_TRIES = 5
"""How often a rank is called that hangs up."""

Called = tuple[int, str]
"""The rank that is called, and the name of the mesh."""
Steps = Generator[int, None, bool]
"""One handshake: it yields the event that it waits for. Returns whether the connection is kept."""


class Card(msgspec.Struct):
    """One rank's address, versions and problems."""

    version: str
    frame: int
    machine: str = msgspec.field(name="node")
    meshes: list[str]
    """The connections that it wants at once."""
    host: str = ""
    port: int = 0
    nonce: str = ""
    gbps: float | None = None
    """The speed of its network adapters; None if it is not known."""
    site: str = ""
    """The name of its site; '' if it has none."""
    tls: str = OFF
    """How it encrypts connections."""
    no_wires: str = ""
    """Why it cannot run phases in C++."""
    problem: str = ""
    """Why it cannot connect at all."""


class GroupMeeting:
    """The name and key on which ranks of a group agree, and the connections between them: none, unless a subclass makes them."""

    def __init__(self, name: str, key: JobKey, nodes: Sequence[str] = (), gbps: Sequence[float | None] = ()) -> None:
        self.name, self.key = name, key
        """The name is equal on all ranks and unlike that of any other meeting."""
        self.nodes = self.machines = list(nodes)
        """The name of each rank's node: its site, where there are several, or else its machine."""
        self.gbps = list(gbps)
        """The speed of each rank's network adapters, as far as it is known."""
        self.encrypts = False
        """Whether connections are encrypted. The same on all ranks."""

    @property
    def round_trip_us(self) -> float:
        """The round trip with the farthest rank of those that this rank is connected with, in microseconds."""
        return 0.0

    def why_no_wires(self) -> str:
        """Why C++ cannot run phases; '' if it can. The same on all ranks."""
        return "ranks of this group have no connections"

    def why_too_few(self, meshes: Sequence[str]) -> str:
        """Why this process cannot have these meshes, as far as they are not there yet; '' if it can."""
        return ""

    def connect(self, names: Sequence[str]) -> None:
        """Make the meshes of these names that are not there yet, at once; `mesh` gives them out. Collective. Raises LinkError."""

    def mesh(self, name: str) -> Mesh:
        """The connections of this name that are there from the start, by rank. The caller closes them."""
        return {}

    def reach(self, name: str, peers: Sequence[int]) -> Mesh:
        """Connect this mesh with more ranks. For the one thread that uses the mesh, which closes the connections.

        Raises LinkError, CommunicationError where descriptors are short."""
        return {}

    def start(self) -> None:
        """All ranks have made the lanes: connect from now on only with ranks that a lane needs, or no more if all are there."""

    def break_off(self) -> None:
        """Fail all waits for connections, here and on the other ranks. For any thread."""

    def close(self) -> None:
        """Connect no more, and close what nobody took."""


class Rendezvous(GroupMeeting):
    """The place where ranks of a group connect. All ranks make one at the same point, and then the same meshes."""

    def __init__(
        self,
        name: str,
        key: JobKey,
        rank: int,
        world_size: int,
        store: Any,
        machine: str,
        timeout: timedelta,
        meshes: Sequence[str] = (),
        tls: TlsOption = None,
        check: Check | None = None,
    ) -> None:
        """Connects the `meshes` that all ranks want at once. Collective. `store`: with a prefix of this group's own. `check`:
        called while ranks wait for each other.

        Raises on all ranks: DisagreementError for versions that do not understand each other and where only some encrypt,
        CommunicationError where a rank cannot connect at all. Raises LinkError where a rank did not come or is not reached.
        """
        super().__init__(name, key)
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._meshes: defaultdict[str, Mesh] = defaultdict(dict)
        """The connections that nobody took yet."""
        self._known: set[Called] = set()
        """All connections that were ever made."""
        self._complete: set[str] = set()
        """The names of the meshes that have the connections of the start, and were not given out."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        """Answers and calls; None until `start`, and where all ranks connected at once."""
        self._bell: socket.socket | None = None
        """Wakes the thread."""
        self._calls: list[Called] = []
        """Whom the thread shall call."""
        self._errors: dict[int, LinkError] = {}
        """Why a rank could not be reached."""
        self._ended_by: Exception | None = None
        """The error that ended the thread."""
        self._is_closed = False
        self._round_trips_us: dict[int, float] = {}
        """The shortest round trip with each rank so far: a packet may wait behind others."""
        self._nonce = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._store, self._check = store, check
        self._tls: Tls | None = None
        card = Card(__version__, _FRAME, machine, list(meshes), nonce=self._nonce.hex())
        card.gbps, card.no_wires, card.site = adapter_gbps(), why_no_wires(), site_name()
        if world_size > 1:
            try:
                check_switches()
                self._listener = _listen(own_address(store))
                card.host, card.port = self._listener.getsockname()[:2]
                self._tls = tls_of(tls, key)
                self.encrypts = self._tls is not None
                card.tls = self._tls.facts if self._tls is not None else OFF
            except (OSError, FormatError) as error:
                card.problem = str(error).removesuffix(".")
            card.problem = card.problem or self.why_too_few(meshes)
        try:
            self._cards = self._exchange(card, store) if world_size > 1 else [card]
            self.machines, sites = [card.machine for card in self._cards], [card.site for card in self._cards]
            self.nodes = sites if len(set(sites)) > 1 else self.machines
            self.why_too_few(meshes)  # raises the soft limit again, now that the nodes are known
            self.gbps = [card.gbps for card in self._cards]
            self.connect([name for name in meshes if all(name in other.meshes for other in self._cards)])
        except BaseException:
            self.close()
            raise

    @property
    def round_trip_us(self) -> float:
        return max(self._round_trips_us.values(), default=0.0)

    def why_no_wires(self) -> str:
        return "; ".join(f"rank {rank}: {card.no_wires}" for rank, card in enumerate(self._cards) if card.no_wires)

    def why_too_few(self, meshes: Sequence[str]) -> str:
        # the rank that hosts the store has connections from all others, for each of their clones
        return why_too_few(sum(map(self._usual, set(meshes) - self._complete)), wanted=_CLONES * self._world_size)

    def _usual(self, name: str) -> int:
        """How many connections a mesh has with most plans: with the ranks at the same place of all nodes and those of its own, or
        with a row and a column of the grid."""
        if name in (CONTROL, HEARTBEATS) or self._world_size <= AT_ONCE:
            return len(self._first(name))
        on_nodes, usual = Counter(self.nodes).values(), peers_of(rows_of(self._world_size))
        if 1 < len(on_nodes) < self._world_size:
            usual = len(on_nodes) + max(on_nodes) - 2
        return max(usual, 8 + 2 * (self._world_size - 1).bit_length())

    def _first(self, name: str) -> set[int]:
        """The ranks with which a mesh connects at the start: those that it needs with every plan."""
        if name == HEARTBEATS:
            return neighbours(self._rank, self._world_size)
        everybody = set(range(self._world_size)) - {self._rank}
        if self._world_size <= AT_ONCE:
            return everybody
        return merge_peers(self._rank, self._world_size) if name == CONTROL else set()

    def mesh(self, name: str) -> Mesh:
        if name not in self._complete:
            self.connect([name])
        self._complete.discard(name)
        return self._meshes.pop(name, {})

    def connect(self, names: Sequence[str]) -> None:
        names = [name for name in names if name not in self._complete]
        if self._world_size == 1 or not names:
            return
        self._reach({(peer, name) for name in names for peer in self._first(name)})
        self._complete.update(names)

    def reach(self, name: str, peers: Sequence[int]) -> Mesh:
        wanted = {(peer, name) for peer in peers}
        with self._changed:
            missing = wanted - self._known
        if problem := why_too_few(len(missing)):
            raise CommunicationError(f"rank {self._rank} cannot connect with the ranks that the plan needs: {problem}.")
        if missing:
            self._reach(missing)
        with self._changed:
            if self._is_closed:
                raise LinkError(None, _shut_down())
            return {peer: self._meshes[name].pop(peer) for peer in peers}

    def _reach(self, wanted: Set[Called]) -> None:
        until = time.monotonic() + self._patience_s
        if self._thread is not None:
            with self._telling_all():
                self._await(wanted, until)
            return
        with _Handshakes() as handshakes, self._telling_all():
            for peer, name in sorted(wanted, reverse=True):
                if peer < self._rank:
                    self._begin_call(handshakes, peer, name)
            self._run(handshakes, wanted, until)

    @property
    def _patience_s(self) -> float:
        return min(_PATIENCE_S + _PATIENCE_A_RANK_S * self._world_size, 0.4 * self._timeout.total_seconds())

    def start(self) -> None:
        if self._world_size <= AT_ONCE or self._listener is None:
            self.close()
            return
        bell, self._bell = socket.socketpair()
        arguments = weakref.ref(self), self._listener, bell
        # a daemon: it must not keep the process alive
        self._thread = threading.Thread(target=_serve, args=arguments, name=f"gradwire-{self.name}-connections", daemon=True)
        weakref.finalize(self, _ring, self._bell)
        self._thread.start()
        close_in_child(self)

    def break_off(self) -> None:
        if self._bell is not None:
            self._is_closed = True
            _ring(self._bell)
            self._drop()

    def close(self) -> None:
        self.break_off()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        elif self._listener is not None:
            self._listener.close()
        self._listener = None
        self._drop()
        self._complete.clear()

    def _drop(self) -> None:
        with self._changed:
            for mesh in self._meshes.values():
                for connection in mesh.values():
                    connection.close()
            self._meshes.clear()
            self._changed.notify_all()

    def close_copies(self) -> None:
        """Close the copies in a forked process."""
        for each in (self._listener, self._bell, *(each for mesh in self._meshes.values() for each in mesh.values())):
            if each is not None:
                each.close()

    # ---- cards

    def _exchange(self, card: Card, store: Any) -> list[Card]:
        places = [f"card/{rank}" for rank in range(self._world_size)]
        try:
            store.set(places[self._rank], self.key.seal(places[self._rank], msgspec.json.encode(card).decode()))
            # where nobody checks, and the store waits no longer than the group, this would be one more round trip
            if self._check is not None or store.timeout > 2 * self._timeout:
                await_keys(store, places, self._timeout, self._check)
            sealed = [self.key.unseal(*both) for both in zip(places, map(bytes, store.multi_get(places)), strict=True)]
        except LinkError:
            raise
        except Exception as error:
            raise LinkError(None, error) from error
        if strangers := [rank for rank, words in enumerate(sealed) if words is None]:
            raise LinkError(strangers[0], ValueError(f"the store has a card of rank {strangers[0]} that no rank wrote"))
        cards = [msgspec.json.decode(words or "", type=Card) for words in sealed]
        _check(cards)
        return cards

    # ---- what is wrong with encryption

    @contextmanager
    def _telling_all(self) -> Iterator[None]:
        """Leave the words in the store if a connection cannot be encrypted. Who is refused gets an alert without a reason, and a
        third rank finds only that the others are gone: these take the words of the rank that refused."""
        try:
            yield
        except LinkError as error:
            is_known = isinstance(error.__cause__, TlsError)
            if is_known and "alert" not in str(error):
                with suppress(Exception):  # the store is gone, and each rank knows what it found itself
                    self._store.set(_REFUSED, self.key.seal(_REFUSED, f"rank {self._rank} says: {error}"))
                raise
            until = time.monotonic() + (_ASKS_S if is_known else 0.0)
            while not (found := self._found_by_others()) and time.monotonic() < until:
                time.sleep(0.02)
            if not found:
                raise
            words = TlsError(f"{error}; {found}" if is_known else found)
            raise LinkError(error.peer, words) from words

    def _found_by_others(self) -> str:
        """The words of a rank that refused to encrypt a connection; '' if there are none."""
        if self._tls is not None:
            with suppress(Exception):
                if self._store.check([_REFUSED]):
                    return self.key.unseal(_REFUSED, self._store.get(_REFUSED)) or ""
        return ""

    # ---- handshakes

    def _run(self, handshakes: "_Handshakes", wanted: Set[Called], until: float) -> None:
        """Connect as wanted, in this thread."""
        assert self._listener is not None
        higher, asks = sum(peer > self._rank for peer, _ in wanted), time.monotonic() + _ASKS_S
        while missing := wanted - self._known:
            ends = handshakes.drop_silent(_HURRIED_HELLO_S if handshakes.visitors >= _STRANGERS + higher else _HELLO_S)
            accepts = handshakes.visitors < _STRANGERS + higher and any(peer > self._rank for peer, _ in missing)
            if self._check is not None:
                self._check()
                ends = min(ends, time.monotonic() + LOOK_S)
            for connection in handshakes.go_on(self._listener if accepts else None, min(until, ends, asks)):
                handshakes.begin(connection, self._answer(connection), None)
            for peer, name in handshakes.hung_up():
                self._begin_call(handshakes, peer, name)
            for error in handshakes.failed():
                raise error
            if time.monotonic() > asks:
                if found := self._found_by_others():
                    raise LinkError(None, TlsError(found))
                asks = time.monotonic() + _ASKS_S
            if time.monotonic() > until:
                raise _too_late(missing, self._patience_s)

    def _await(self, wanted: Set[Called], until: float) -> None:
        """Wait until the thread has connected as wanted. Higher ranks are asked for a call after a grace: mostly they need the
        connection as well, and call by themselves."""
        began = time.monotonic()
        asks = min(began + _GRACE_S, (began + until) / 2)
        with self._changed:
            for peer, _ in wanted:
                self._errors.pop(peer, None)
            self._let_call(each for each in wanted if each[0] < self._rank)
            while missing := wanted - self._known:
                if self._is_closed:
                    raise LinkError(None, _shut_down())
                if self._ended_by is not None:
                    raise LinkError(None, self._ended_by)
                for peer, _ in missing:
                    if peer in self._errors:
                        raise LinkError(peer, self._errors[peer])
                now = time.monotonic()
                if now >= until:
                    raise _too_late(missing, self._patience_s)
                if now >= asks:
                    self._let_call(each for each in missing if each[0] > self._rank)
                    asks = until
                self._changed.wait(min(until, asks) - now)

    def _let_call(self, called: Iterable[Called]) -> None:
        """Let the thread call these."""
        self._calls += sorted(called)
        if self._bell is not None:
            _ring(self._bell)

    def _serve(self, handshakes: "_Handshakes", ready: Sequence[socket.socket], listener: socket.socket) -> float:
        """Go on with what is ready. Returns when the next visitor is to be dropped."""
        try:
            for connection in handshakes.go_on_with(ready, listener):
                handshakes.begin(connection, self._answer(connection), None)
        except LinkError as error:
            log.warning("nobody can connect with rank %d: %s", self._rank, error)
            time.sleep(_HURRIED_HELLO_S)
        with self._changed:
            calls, self._calls = self._calls, []
        for peer, name in [*handshakes.hung_up(), *calls]:
            if self._lacks(name, peer) and not handshakes.calls(peer, name):
                self._begin_call(handshakes, peer, name)
        crowded = handshakes.visitors >= _STRANGERS + self._world_size
        ends = handshakes.drop_silent(_HURRIED_HELLO_S if crowded else _HELLO_S)
        with self._changed:
            for failure in handshakes.failed():
                if failure.peer is not None:
                    self._errors[failure.peer] = failure
            self._changed.notify_all()
        return ends

    def _begin_call(self, handshakes: "_Handshakes", peer: int, name: str) -> None:
        try:
            connection = socket.socket(_family(self._cards[peer].host), socket.SOCK_STREAM)
        except OSError as error:
            handshakes.fail(peer, _with_cure(error))
            return
        handshakes.begin(connection, self._call(connection, peer, name), (peer, name))

    def thread_failed(self, error: Exception) -> None:
        """Fail all waits for connections, now and later: the thread has ended too early."""
        log.error("rank %d can connect with no more ranks: %s", self._rank, error, exc_info=error)
        with self._changed:
            self._ended_by = error
            self._changed.notify_all()

    def _lacks(self, name: str, peer: int) -> bool:
        return peer != self._rank and (peer, name) not in self._known

    def _call(self, connection: socket.socket, peer: int, name: str) -> Steps:
        """Call a lower rank, or ask a higher one for a call."""
        card = self._cards[peer]
        place = card.host, card.port
        # asked twice: over loopback it is connected by then, and nobody has to wait
        error = connection.connect_ex(place) and connection.connect_ex(place)
        if error in (errno.EINPROGRESS, errno.EALREADY):
            yield selectors.EVENT_WRITE
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, f"{os.strerror(error)} at {card.host} port {card.port}")
        hello = _HELLO.pack(self._rank, name.encode(), nonce := secrets.token_bytes(16))
        connection.send(hello + self._proof(b"call", bytes.fromhex(card.nonce), peer, hello))
        answer = yield from _read(connection, PROOF_BYTES)
        if not self.key.proves(answer, *self._parts(b"answer", nonce, peer, hello)):
            raise ConnectionError(f"whoever listens at {card.host} port {card.port} is no rank of this job")
        if peer < self._rank:
            yield from self._take(name, peer, connection, True)
        return peer < self._rank

    def _answer(self, connection: socket.socket) -> Steps:
        """Answer whoever called."""
        said = yield from _read(connection, _HELLO.size + PROOF_BYTES)
        hello, proof = said[: _HELLO.size], said[_HELLO.size :]
        peer, raw, nonce = _HELLO.unpack(hello)
        name = raw.rstrip(b"\0").decode(errors="replace")
        known = self.key.proves(proof, *self._parts(b"call", self._nonce, self._rank, hello))
        asks = peer < self._rank
        if not (known and peer < self._world_size and peer != self._rank and (asks or self._lacks(name, peer))):
            raise ConnectionError("this is no rank that has still to connect")
        connection.send(self._proof(b"answer", nonce, self._rank, hello))
        if asks:
            with self._changed:
                self._calls.append((peer, name))
        else:
            yield from self._take(name, peer, connection, False)
        return not asks

    def _parts(self, what: bytes, nonce: bytes, listening: int, hello: bytes) -> tuple[bytes, ...]:
        return what, self.name.encode(), nonce, listening.to_bytes(4, "little"), hello

    def _proof(self, what: bytes, nonce: bytes, listening: int, hello: bytes) -> bytes:
        return self.key.proof(*self._parts(what, nonce, listening, hello))

    def _take(self, name: str, peer: int, connection: socket.socket, calls: bool) -> Generator[int, None, None]:
        """Take a connection to a rank into its mesh, and encrypt it if ranks want that. `calls`: whether this rank called."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._round_trips_us[peer] = min(tune(connection), self._round_trips_us.get(peer, math.inf))
        if self._tls is None or name == HEARTBEATS:
            connection.setblocking(True)
            self._keep(name, peer, connection)
            return
        encrypted = self._tls.socket(connection, calls)
        try:
            yield from encrypted.handshake()
            exported = encrypted.exported()
            own, other = (b"tls call", b"tls answer") if calls else (b"tls answer", b"tls call")
            if calls:
                encrypted.send(self.key.proof(own, exported))
            # the caller's handshake ends before the other end has looked at the caller's certificate, so it waits for this
            if not self.key.proves((yield from _read(encrypted, PROOF_BYTES)), other, exported):
                raise TlsError("somebody who does not know the job's key is in between")
            if not calls:
                encrypted.send(self.key.proof(own, exported))
        except TlsError as error:
            words = f"the connection with rank {peer} cannot be encrypted: {error}"
            refused = TlsError(words)
            raise LinkError(peer, refused) from refused
        self._keep(name, peer, encrypted)

    def _keep(self, name: str, peer: int, connection: Connected) -> None:
        with self._changed:
            self._meshes[name][peer] = connection
            self._known.add((peer, name))


def _check(cards: Sequence[Card]) -> None:
    """Raise what all ranks raise where they cannot be a group."""
    for rank, other in enumerate(cards):
        if other.frame != cards[0].frame:
            raise DisagreementError(
                f"ranks disagree on the version of gradwire: rank 0 has {cards[0].version} (messages of form "
                f"{cards[0].frame}), rank {rank} has {other.version} (form {other.frame}). Install the same version on "
                "every rank."
            )
    if len(nowhere := [rank for rank, other in enumerate(cards) if not other.site]) not in (0, len(cards)):
        known = next(rank for rank, other in enumerate(cards) if other.site)
        raise DisagreementError(
            f"rank {nowhere[0]} names no site, and rank {known} is at {cards[known].site!r}, so nobody knows who is near to "
            f"whom. Set {SITE} on every rank, or on none."
        ).about(nowhere)
    if unable := [rank for rank, other in enumerate(cards) if other.problem]:
        more = f"; so do {len(unable) - 1} other ranks" if len(unable) > 1 else ""
        raise CommunicationError(f"no rank begins, since rank {unable[0]} says: {cards[unable[0]].problem}{more}.").about(unable)
    if unlike := [rank for rank, other in enumerate(cards) if other.tls != cards[0].tls]:
        raise DisagreementError(
            f"no rank begins, since ranks disagree on encryption: rank 0 has {cards[0].tls}, rank {unlike[0]} has "
            f"{cards[unlike[0]].tls}. Give all ranks the same tls=, the same GRADWIRE_TLS and the same CA file."
        ).about([0, *unlike])


def _too_late(missing: Set[Called], patience_s: float) -> LinkError:
    ranks = sorted({peer for peer, _ in missing})
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    words = (
        f"no connection with {who} within {patience_s:.1f} s: a process or its machine stands still or is very busy, or a "
        "firewall drops what others send. Look for the cause with `gradwire doctor`. If ranks only need longer, pass a longer "
        f"timeout= to init_process_group: gradwire waits for a third of it, at most {_PATIENCE_S:.0f} s and {_PATIENCE_A_RANK_S} "
        "s for each rank"
    )
    return LinkError(ranks[0], TimeoutError(words))


def _with_cure(error: OSError) -> OSError:
    """The error of a socket that could not be opened, with what helps where descriptors are short."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return error
    words = f"{error.strerror}: no descriptor is left for a connection. Raise the limit on every rank (`ulimit -n`)"
    return OSError(error.errno, words)


def _shut_down() -> ConnectionError:
    return ConnectionError("the connections were shut down")


def _ring(bell: socket.socket) -> None:
    with suppress(OSError):  # the thread has ended
        bell.send(b"!", socket.MSG_DONTWAIT)


def _serve(of: "weakref.ref[Rendezvous]", listener: socket.socket, bell: socket.socket) -> None:
    """Call and answer, until the meeting is closed or nobody has it any more."""
    try:
        _serve_calls(of, listener, bell)
    except Exception as error:
        if (meeting := of()) is not None:
            meeting.thread_failed(error)


def _serve_calls(of: "weakref.ref[Rendezvous]", listener: socket.socket, bell: socket.socket) -> None:
    ready: Sequence[socket.socket] = ()
    with listener, bell, _Handshakes() as handshakes:
        handshakes.watch(bell)
        while (meeting := of()) is not None and not meeting._is_closed:
            ends = meeting._serve(handshakes, ready, listener)
            del meeting
            ready = handshakes.ready(listener, ends)
            if bell in ready:
                bell.recv(4096)
    if meeting is not None:
        meeting._drop()  # what was connected meanwhile


class _Handshakes:
    """Handshakes under way, in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, tuple[Steps, Called | None, float]] = {}
        """The steps of each connection, who is called, and when the connection began."""
        self._waits: dict[socket.socket, int] = {}
        """The event that each connection waits for. A selector that is asked for another one describes it in words."""
        self._listener: socket.socket | None = None
        """The listener that the selector watches."""
        self._tries: Counter[Called] = Counter()
        self._hung_up: list[Called] = []
        self._failed: list[LinkError] = []
        self.visitors = 0
        """How many of them have called and not yet proved who they are."""

    def __enter__(self) -> "_Handshakes":
        return self

    def __exit__(self, *error: object) -> None:
        for connection in list(self._open):
            self._end(connection)
            connection.close()
        self._selector.close()

    def begin(self, connection: socket.socket, steps: Steps, called: Called | None) -> None:
        """`called`: None for whoever called."""
        connection.setblocking(False)
        self._open[connection] = steps, called, time.monotonic()
        if called is None:
            self.visitors += 1
        else:
            self._tries[called] += 1
        self._step(connection)

    def hung_up(self) -> list[Called]:
        """Who is to be called again: among many strangers a rank that takes long may be dropped too."""
        found, self._hung_up = self._hung_up, []
        return found

    def failed(self) -> list[LinkError]:
        """The ranks that could not be called, or not encrypted with, since the last call."""
        found, self._failed = self._failed, []
        return found

    def fail(self, peer: int, error: OSError) -> None:
        """This rank cannot be called."""
        self._failed.append(_of(peer, error))

    def calls(self, peer: int, name: str) -> bool:
        """Whether this rank is being called."""
        return any(called == (peer, name) for _, called, _ in self._open.values())

    def watch(self, bell: socket.socket) -> None:
        """Wait for this one too."""
        self._selector.register(bell, selectors.EVENT_READ)

    def drop_silent(self, hello_s: float) -> float:
        """Drop whoever called and did not prove anything in `hello_s`. When the next one is due."""
        now = time.monotonic()
        began = {each: since for each, (_, called, since) in self._open.items() if called is None}
        for connection in [each for each, since in began.items() if since + hello_s <= now]:
            del began[connection]
            self._end(connection)
            connection.close()
        return min(began.values(), default=now + _PATIENCE_S) + hello_s

    def go_on(self, listener: socket.socket | None, until: float) -> Iterator[socket.socket]:
        """Wait for the next events, and go on. Yields who has called. Raises LinkError where nobody can be accepted."""
        yield from self.go_on_with(self.ready(listener, until), listener)

    def ready(self, listener: socket.socket | None, until: float) -> list[socket.socket]:
        """Wait for the next events."""
        if listener is not self._listener:
            if self._listener is not None:
                self._selector.unregister(self._listener)
            if listener is not None:
                self._selector.register(listener, selectors.EVENT_READ)
            self._listener = listener
        return [key.fileobj for key, _ in self._selector.select(max(0.0, until - time.monotonic()))]  # type: ignore[misc]

    def go_on_with(self, ready: Sequence[socket.socket], listener: socket.socket | None) -> Iterator[socket.socket]:
        """Go on with these. Yields who has called. Raises LinkError where nobody can be accepted."""
        for connection in ready:
            if connection in self._open:
                self._step(connection)
            if connection is not listener:
                continue
            try:
                for _ in range(_STRANGERS):
                    yield listener.accept()[0]
            except (BlockingIOError, ConnectionError):  # nobody more; somebody who left again
                pass
            except OSError as error:
                raise LinkError(None, _with_cure(error)) from error

    def _step(self, connection: socket.socket) -> None:
        steps, called, _ = self._open[connection]
        try:
            event = next(steps)
        except StopIteration as end:
            self._end(connection)
            if not end.value:
                connection.close()
            return
        except LinkError as error:
            self._end(connection)
            connection.close()
            self._failed.append(error)
            return
        except OSError as error:
            self._end(connection)
            connection.close()
            if called is not None and isinstance(error, ConnectionResetError) and self._tries[called] < _TRIES:
                self._hung_up.append(called)
            elif called is not None:
                self.fail(called[0], error)
            return
        if (before := self._waits.get(connection)) is None:
            self._selector.register(connection, event)
        elif event != before:
            self._selector.modify(connection, event)
        self._waits[connection] = event

    def _end(self, connection: socket.socket) -> None:
        _, called, _ = self._open.pop(connection)
        self.visitors -= called is None
        if self._waits.pop(connection, None) is not None:
            self._selector.unregister(connection)


def _of(peer: int, cause: Exception) -> LinkError:
    error = LinkError(peer, cause)
    error.__cause__ = cause
    return error


def tune(connection: socket.socket) -> float:
    """Set up a connection for exchanges, by the time of its round trip. Returns that time in microseconds; 0 if it is unknown.

    A short one, to a rank of the same site: windows bound what is on its way, and not BBR's estimate of the rate. In an exchange
    a rank sends to several ranks at once, and each connection has a part of the link for some milliseconds. BBR takes this part
    for the rate of the network, and paces what follows: four nodes then use 0.85 of a link, and 0.97 by windows.

    A long one: much may be on its way to this end. Linux widens the window by itself only for a reader that takes every packet
    as it comes, and lanes read a good part of a message at once. It makes room for what a reader says that it waits for, and
    keeps that room. BBR runs where the system allows it: others halve their window for a lost packet, and for each round trip of
    a pause between two exchanges, and need several more to widen it again.
    """
    with suppress(OSError, AttributeError):  # not on every system
        (rtt_us,) = struct.unpack_from("<I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), _RTT_AT)
        if rtt_us >= _SHORT_US:
            for waits_for in (_ON_ITS_WAY, 1):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, waits_for)
            _take(connection, _BBR)
        elif _control_of(connection) == _BBR:
            _take(connection, "reno")
        return float(rtt_us)
    return 0.0


def long_control() -> str:
    """The congestion control of long connections on this machine, such as bbr; '' if it is unknown."""
    with suppress(OSError, AttributeError), socket.socket() as trial:  # not on every system
        _take(trial, _BBR)
        return _control_of(trial)
    return ""


def _control_of(connection: socket.socket) -> str:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _take(connection: socket.socket, control: str) -> None:
    """Choose this congestion control, if the system has and allows it."""
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())


def _read(connection: Connected, count: int) -> Generator[int, None, bytes]:
    got = b""
    while len(got) < count:
        try:
            more = connection.recv(count - len(got))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not more:
            raise ConnectionResetError("Connection closed by peer")
        got += more
    return got


def _listen(host: str) -> socket.socket:
    listener = socket.create_server((host, 0), family=_family(host), backlog=4096)
    listener.setblocking(False)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def why_no_wires() -> str:
    """Why this rank cannot run phases in C++; '' if it can."""
    return available() or ""
