"""Rings: memory that two ranks of a node share, so that their messages need no system call for each part (csrc/ring.hpp).

The memory has no name. It is gone with the last process that has it, however that ends. Its size is sealed, since a rank that
made it shorter would end the other one by SIGBUS.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

from gradwire.core import LANES

_HEAD_BYTES = 128
"""Twin of `Ring` in csrc/ring.hpp: its size. The bytes follow it."""
_ALL_RINGS, _LARGEST, _SMALLEST = 2**27, 2**20, 2**16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def ring_bytes(ranks: int, lanes: int = LANES) -> int:
    """The bytes that each ring of a node with so many ranks holds. Larger messages pass in parts. Pairs of ranks grow
    with the square of the ranks, so many ranks, and many lanes, have smaller rings: 128 MiB together, if the smallest do.

    >>> [ring_bytes(ranks) // 1024 for ranks in (2, 8, 9, 16, 17, 64)]
    [1024, 1024, 256, 256, 64, 64]
    >>> [ring_bytes(ranks, lanes=8) // 1024 for ranks in (2, 4, 8, 16, 17)]
    [1024, 1024, 256, 64, 64]
    """
    most = 1 << max(1, (ranks - 1).bit_length())  # ranks, as if they were a power of two
    each = _ALL_RINGS // (lanes * most * (most - 1))
    return min(_LARGEST, max(_SMALLEST, 1 << max(0, each.bit_length() - 1)))


def memory_bytes(capacity: int) -> int:
    """The memory of a pair of ranks on one lane: a ring of this capacity in each direction."""
    return 2 * (_HEAD_BYTES + capacity)


class Connection(ctypes.Structure):
    """Twin of `Connection` in csrc/phase.hpp."""

    _fields_ = (
        *(("fd", c_int64), ("out", c_void_p), ("into", c_void_p)),
        *(("bell", c_int64), ("peer_bell", c_int64), ("capacity", c_int64)),
        ("tls", c_void_p),
    )


@dataclass(frozen=True)
class Handles:
    """The descriptors that both ranks of a pair have open: the memory, and for each of them a bell that wakes it."""

    memory: int
    bells: tuple[int, int]
    """First that of the rank that made them."""

    @staticmethod
    def make(capacity: int) -> "Handles":
        """`capacity`: of each ring, a multiple of 64. Raises OSError where there is no memory or no descriptor left."""
        opened: list[int] = []
        try:
            opened.append(os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            # a lack of memory shows here, not by SIGBUS in a step
            os.posix_fallocate(opened[0], 0, memory_bytes(capacity))
            fcntl.fcntl(opened[0], fcntl.F_ADD_SEALS, _SEALS)
            opened += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
        except BaseException:
            for number in opened:
                os.close(number)
            raise
        return Handles(opened[0], (opened[1], opened[2]))

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The descriptors, in the order of the fields."""
        return self.memory, *self.bells

    def close(self) -> None:
        """Close the own copies."""
        for number in self.numbers:
            os.close(number)


class Rings:
    """The two rings of a pair of ranks on one lane, seen from one of them."""

    def __init__(self, handles: Handles, maker: bool, capacity: int) -> None:
        """Adopts the handles, unless it raises OSError. `maker`: whether this rank made them."""
        if fcntl.fcntl(handles.memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the memory's size is not sealed")
        self._memory = mmap.mmap(handles.memory, memory_bytes(capacity))
        os.close(handles.memory)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        places = (begin, begin + _HEAD_BYTES + capacity)
        self.addresses = places if maker else places[::-1]
        """The places of the ring that this rank writes, and of the ring that it reads."""
        self.bells = handles.bells if maker else handles.bells[::-1]
        """The bells of this rank and of the other rank."""
        self.capacity = capacity
        self._finalizer = weakref.finalize(self, _let_go, self._memory, self.bells)
        self._finalizer.atexit = False  # a thread may still run on it

    def close(self) -> None:
        """Let go of the memory. Nothing may run."""
        self._finalizer()


def _let_go(memory: mmap.mmap, bells: tuple[int, ...]) -> None:
    memory.close()
    for bell in bells:
        os.close(bell)
