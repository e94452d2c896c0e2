"""Bits that flip on the way from one rank to another."""

import socket
import threading
from contextlib import suppress
from typing import Any

import torch

__all__ = ["FlippingBackend", "FlippingWire"]


class FlippingWire:
    """A stage between a wire and its connection to a peer, which flips one bit of the sent bytes."""

    def __init__(self, wire: Any, peer: int) -> None:
        self.flip_at = -1
        """Position of the byte to change, counted from now on; -1 for none."""
        self._real, (near, self._far) = wire._sockets[peer], socket.socketpair()
        # a wire leaves there how many bytes of its last message were to come at once
        self._real.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        wire._sockets[peer] = near
        wire._connections[peer].fd = near.fileno()
        for source, target, flips in ((self._far, self._real, True), (self._real, self._far, False)):
            threading.Thread(target=self._pass_on, args=(source, target, flips), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, flips: bool) -> None:
        with suppress(OSError):
            while taken := bytearray(source.recv(2**16)):
                if flips and self.flip_at >= 0:
                    if self.flip_at < len(taken):
                        taken[self.flip_at] ^= 8
                    self.flip_at -= min(self.flip_at + 1, len(taken))
                target.sendall(taken)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class FlippingBackend:
    """A backend that flips one bit of one part that it sends."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._kept: list[torch.Tensor] = []
        self.at_part = -1
        """Number of the part to change, counted from now on; -1 for none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, parts: list[torch.Tensor], to: int, tag: int) -> Any:
        if tag < 2**32:
            if self.at_part == 0:
                changed = parts[0].clone()
                changed.view(torch.uint8)[5] ^= 8
                self._kept.append(changed)
                parts = [changed]
            self.at_part = max(-1, self.at_part - 1)
        return self._backend.send(parts, to, tag)
