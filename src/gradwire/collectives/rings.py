"""Rings: memory that two ranks of a node share, so that their messages need no system call for each part (csrc/ring.hpp).

The memory has no name. It is gone with the last process that has it, however that ends.
"""

import ctypes
import mmap
import os
import sys
import weakref
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

RING_BYTES = 2**20
"""A ring holds so much. Larger messages pass in parts."""
_HEAD_BYTES, _CAPACITY_AT = 192, 128
"""Twins of `Ring` in csrc/ring.hpp: its size, and where it has its capacity."""
MEMORY_BYTES = 2 * (_HEAD_BYTES + RING_BYTES)
"""The memory of a pair of ranks on one lane: a ring in each direction."""


class Connection(ctypes.Structure):
    """Twin of `Connection` in csrc/phase.hpp."""

    _fields_ = (
        *(("fd", c_int64), ("out", c_void_p), ("into", c_void_p)),
        *(("bell", c_int64), ("peer_bell", c_int64)),
    )


@dataclass(frozen=True)
class Handles:
    """What both ranks of a pair have open: the memory, and for each of them a bell that wakes it."""

    memory: int
    bells: tuple[int, int]
    """First that of the rank that made them."""

    @staticmethod
    def make() -> "Handles":
        """Raises OSError where there is no memory or no descriptor left."""
        opened: list[int] = []
        try:
            opened.append(os.memfd_create("gradwire"))
            os.posix_fallocate(opened[0], 0, MEMORY_BYTES)  # memory that is short is told here, not by SIGBUS in a step
            for ring in (0, MEMORY_BYTES // 2):
                os.pwrite(opened[0], RING_BYTES.to_bytes(8, sys.byteorder), ring + _CAPACITY_AT)
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

    def __init__(self, handles: Handles, maker: bool) -> None:
        """Takes the handles over, unless it raises OSError. `maker`: whether this rank made them."""
        memory = mmap.mmap(handles.memory, MEMORY_BYTES)
        os.close(handles.memory)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        places = (begin, begin + MEMORY_BYTES // 2)
        self.addresses = places if maker else places[::-1]
        """Of the ring that this rank writes, and of the one that it reads."""
        self.bells = handles.bells if maker else handles.bells[::-1]
        """Of this rank, and of the other one."""
        self._finalizer = weakref.finalize(self, _let_go, memory, self.bells)
        self._finalizer.atexit = False  # a thread may still run on it

    def close(self) -> None:
        """Let go of the memory. Nothing may run."""
        self._finalizer()


def _let_go(memory: mmap.mmap, bells: tuple[int, ...]) -> None:
    memory.close()
    for bell in bells:
        os.close(bell)
