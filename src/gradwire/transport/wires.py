"""Connects the wires of all lanes, where every rank can run phases in C++ (else gloo carries gradients as well), and the
connections for heartbeats."""

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gradwire._version import __version__
from gradwire.kernels.cpu import available
from gradwire.transport.agreement import gather_bytes
from gradwire.transport.grid import Grid
from gradwire.transport.link import Link
from gradwire.transport.sharing import share_memory_of_nodes
from gradwire.transport.wire import Wire

log = logging.getLogger(__name__)

Mesh = dict[int, socket.socket]
"""The connections of a lane, by rank."""
_HELLO = struct.Struct("<16sII")
"""A token of the listener, the rank, and the lane."""
_FRAME = 4
"""The version of what ranks connect and what a message on a wire looks like: 2 has checksums, 3 heartbeats, 4 rings."""
_PATIENCE_S = 30.0
"""For connections; less than half of the group's own timeout, since the other ranks wait for the outcome."""
_HELLO_S = 1.0
"""For what whoever connects has to say."""


def connect_wires(control: Link, lanes: int, grid: Grid) -> tuple[list[Wire], Mesh]:
    """One wire for each lane, none where a rank has no C++ library; and the connections for heartbeats. Neither where a rank runs
    another version, or cannot be reached. Ranks of a node share memory. Collective, on the control lane."""
    token = secrets.token_bytes(16)
    listener = _listen(control, lanes)
    meshes: list[Mesh] = []
    try:
        own = _card(listener, token)
        cards = [json.loads(raw) for raw in gather_bytes(control, json.dumps(own).encode())]
        if listener is None or not all(_is_ours(card) for card in cards):
            return [], {}
        meshes = [{} for _ in range(1 + lanes if all(card["wires"] for card in cards) else 1)]
        until = time.monotonic() + min(_PATIENCE_S, 0.4 * control.timeout.total_seconds())
        # a listener's queue holds connections that nobody has accepted yet: so all know who failed before anybody waits
        for step in (partial(_connect, control, cards), partial(_accept, control, listener, token)):
            if problems := _problems(control, partial(step, meshes, until)):
                log.info("gloo carries gradients: %s", problems)
                return [], {}
        (beats, *connected), meshes = meshes, []
        made = [Wire(control.world_size, mesh, control.timeout.total_seconds()) for mesh in connected]
        share_memory_of_nodes(control, grid, made)
        return made, beats
    finally:
        for connection in (connection for mesh in meshes for connection in mesh.values()):
            connection.close()
        if listener is not None:
            listener.close()


def _problems(control: Link, step: Callable[[], None]) -> str:
    """Do a step that may fail on some ranks; why it did, on all of them."""
    problem = ""
    try:
        step()
    except OSError as error:
        problem = f"rank {control.rank}: {error}"
    everybody = [raw.decode().strip() for raw in gather_bytes(control, problem.encode() or b" ")]
    return "; ".join(filter(None, everybody))


def _listen(control: Link, lanes: int) -> socket.socket | None:
    host = control.own_host
    if host is None:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((host, 0), family=family, backlog=(1 + lanes) * control.world_size)
    return None


def _card(listener: socket.socket | None, token: bytes) -> dict[str, str | int]:
    """The addresses and versions of this rank; nothing if other ranks cannot reach it."""
    if listener is None:
        return {}
    host, port = listener.getsockname()[:2]
    plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP"  # else the script wants gloo's encryption
    able: dict[str, str | int] = {"version": __version__, "frame": _FRAME, "wires": available() is None and plain}
    return able | {"host": host, "port": port, "token": token.hex()}


def _is_ours(card: dict[str, str | int]) -> bool:
    return bool(card) and (card["version"], card.get("frame")) == (__version__, _FRAME)


def _connect(control: Link, cards: Sequence[dict[str, str]], meshes: list[Mesh], until: float) -> None:
    """Connect to the lower ranks."""
    for peer, card in enumerate(cards[: control.rank]):
        for lane, mesh in enumerate(meshes):
            mesh[peer] = socket.create_connection((card["host"], int(card["port"])), timeout=_left(until))
            mesh[peer].sendall(_HELLO.pack(bytes.fromhex(card["token"]), control.rank, lane))
            _prepare(mesh[peer])


def _accept(control: Link, listener: socket.socket, token: bytes, meshes: list[Mesh], until: float) -> None:
    """The higher ranks."""
    while sum(map(len, meshes)) < len(meshes) * (control.world_size - 1):
        listener.settimeout(_left(until))
        connection, _ = listener.accept()
        told = _hello(connection)
        if len(told) == _HELLO.size and told.startswith(token):
            _, peer, lane = _HELLO.unpack(told)
            meshes[lane][peer] = connection
            _prepare(connection)
        else:
            connection.close()  # somebody else


def _hello(connection: socket.socket) -> bytes:
    """Receive the hello of the other end, as far as it comes in time."""
    told, until = b"", time.monotonic() + _HELLO_S
    with suppress(OSError):
        while len(told) < _HELLO.size and (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (more := connection.recv(_HELLO.size - len(told))):
                break
            told += more
    return told


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _left(until: float) -> float:
    return max(0.1, until - time.monotonic())
