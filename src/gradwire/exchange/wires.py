"""Connects the wires of all lanes, where every rank can run phases in C++; else gloo carries gradients as well."""

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from gradwire._version import __version__
from gradwire.collectives import Link
from gradwire.collectives.wire import Wire
from gradwire.exchange.agreement import gather_bytes
from gradwire.kernels.cpu import available

log = logging.getLogger(__name__)

_HELLO = struct.Struct("<16sII")
"""A token of the listener, the rank, and the lane."""
_PATIENCE_S = 30.0
"""For connections; at most the group's own timeout."""


def connect_wires(control: Link, lanes: int) -> list[Wire]:
    """One wire for each lane; none where a rank has no C++ library, runs another version, or cannot be reached. Collective, on
    the control lane."""
    token = secrets.token_bytes(16)
    listener = _listen(control, lanes)
    try:
        own = _card(listener, token)
        cards = [json.loads(raw) for raw in gather_bytes(control, json.dumps(own).encode())]
        if not all(card and card["version"] == __version__ for card in cards):
            return []
        assert listener is not None
        meshes, problem = None, ""
        try:
            meshes = _mesh(control, listener, token, cards, lanes)
        except OSError as error:
            problem = f"rank {control.rank}: {error}"
        problems = [raw.decode() for raw in gather_bytes(control, problem.encode() or b" ")]
        if any(each.strip() for each in problems):
            log.info("gloo carries gradients: %s", "; ".join(each for each in problems if each.strip()))
            for mesh in meshes or ():
                for connection in mesh.values():
                    connection.close()
            return []
        assert meshes is not None
        return [Wire(control.world_size, mesh, control.timeout.total_seconds()) for mesh in meshes]
    finally:
        if listener is not None:
            listener.close()


def _listen(control: Link, lanes: int) -> socket.socket | None:
    host = control.own_host
    plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP"  # else the script wants gloo's encryption
    if available() is not None or host is None or not plain:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((host, 0), family=family, backlog=lanes * control.world_size)
    return None


def _card(listener: socket.socket | None, token: bytes) -> dict[str, str | int]:
    """What a rank tells of itself; nothing where it has no wires."""
    if listener is None:
        return {}
    host, port = listener.getsockname()[:2]
    return {"version": __version__, "host": host, "port": port, "token": token.hex()}


def _mesh(
    control: Link, listener: socket.socket, token: bytes, cards: Sequence[dict[str, str]], lanes: int
) -> list[dict[int, socket.socket]]:
    """Of each lane the connections by rank. Every rank connects to the lower ones and hears the higher ones."""
    until = time.monotonic() + min(_PATIENCE_S, control.timeout.total_seconds())
    meshes: list[dict[int, socket.socket]] = [{} for _ in range(lanes)]
    try:
        for peer in range(control.rank):
            for lane in range(lanes):
                card = cards[peer]
                connection = socket.create_connection((card["host"], int(card["port"])), timeout=_left(until))
                meshes[lane][peer] = connection
                connection.sendall(_HELLO.pack(bytes.fromhex(card["token"]), control.rank, lane))
        missing = lanes * (control.world_size - 1 - control.rank)
        while missing:
            listener.settimeout(_left(until))
            connection, _ = listener.accept()
            connection.settimeout(_left(until))
            told = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(told) != _HELLO.size or told[:16] != token:
                connection.close()  # somebody else
                continue
            _, peer, lane = _HELLO.unpack(told)
            meshes[lane][peer] = connection
            missing -= 1
    except BaseException:
        for mesh in meshes:
            for connection in mesh.values():
                connection.close()
        raise
    for mesh in meshes:
        for connection in mesh.values():
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return meshes


def _left(until: float) -> float:
    return max(0.1, until - time.monotonic())
