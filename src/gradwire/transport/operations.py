"""The work of a phase as a list of operations that C++ runs in one call, without Python (csrc/api_exchange.cpp).

The list is made once, from the same works and transfers that Python would run one by one. It holds addresses, so whatever it
names must stay where it is.
"""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_char, c_double, c_int64, c_void_p
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from gradwire.errors import PayloadError
from gradwire.kernels.cpu import DTYPES, Call
from gradwire.kernels.reference.indices import DAMAGED

_CALL, _SEND, _RECEIVE, _FLUSH, _RECEIVE_ELEMENTS = range(5)
_MOST_ARGUMENTS = 10
_UNUSED, _WORDS = (0,) * _MOST_ARGUMENTS, 3 + _MOST_ARGUMENTS


class Operation(ctypes.Structure):
    """Twin of `Operation` in csrc/phase.hpp: words of 64 bits."""

    _fields_ = (("kind", c_int64), ("peer", c_int64), ("target", c_void_p), ("arguments", c_int64 * _MOST_ARGUMENTS))


class Outcome(ctypes.Structure):
    """Twin of `Outcome` in csrc/api_exchange.cpp."""

    _fields_ = (
        *(("operation", c_int64), ("peer", c_int64), ("damaged", c_int64)),
        *(("codec_seconds", c_double), ("words", c_char * 256)),
    )


def refused(words: str) -> Exception:
    """The error to raise when a kernel refused its arguments with these words."""
    if DAMAGED in words:
        return PayloadError(
            f"{words}: nothing was decoded. Ranks run different plans or versions, or the bytes were changed. Run the "
            "same plan and version on all ranks."
        )
    return RuntimeError(words)


class Operations:
    """A list of operations, and what it keeps alive."""

    def __init__(self) -> None:
        self._words = array("q")
        """The words of all operations."""
        self._keeps: list[Any] = []

    def release(self, memory: torch.Tensor) -> None:
        """Keep no use of this tensor's memory alive, only what was allocated for the list. The owner of the memory makes the list
        anew when it moves: engines count uses to see whether a script holds a part of it."""
        own = memory.untyped_storage().data_ptr()
        singly = (part for kept in self._keeps for part in (kept if isinstance(kept, tuple) else (kept,)))
        self._keeps = [p for p in singly if not isinstance(p, torch.Tensor) or p.untyped_storage().data_ptr() != own]

    def call(self, calls: Iterable[Call]) -> None:
        """Run kernels."""
        for function, words, keeps in calls:
            self._add(_CALL, 0, function, words)
            self._keeps.append(keeps)

    def send(self, to: int, part: Any, tag: int) -> None:
        """Begin to send a tensor, which must stay as it is until `flush`."""
        self._add(_SEND, to, part.data_ptr(), (part.nbytes, tag))
        self._keeps.append(part)

    def receive(self, source: int, part: Any, tag: int) -> None:
        """Wait until the tensor of another rank is there. It may be written from the begin of the list on."""
        self._add(_RECEIVE, source, part.data_ptr(), (part.nbytes, tag))
        self._keeps.append(part)

    def receive_elements(self, source: int, into: Any, tag: int, add: bool, dtype: Any = None) -> None:
        """Wait for elements of a rank, and copy or add them to a tensor as they arrive, without memory in between. `dtype`: in
        which they come. The tensor is not written before the list has come to this. Bytes that were changed on the way are
        found only when they are in the tensor."""
        dtype = into.dtype if dtype is None else dtype
        words = into.numel() * dtype.itemsize, tag, DTYPES[dtype], DTYPES[into.dtype], add
        self._add(_RECEIVE_ELEMENTS, source, into.data_ptr(), words)
        self._keeps.append(into)

    def flush(self) -> None:
        """Wait until sent tensors may be overwritten."""
        self._add(_FLUSH, 0, None, ())

    def _add(self, kind: int, peer: int, target: int | None, words: Sequence[int]) -> None:
        self._words.extend((kind, peer, target or 0, *words, *_UNUSED[len(words) :]))

    @cached_property
    def array(self) -> Any:
        """All of them, for C. No more may be added."""
        return (Operation * (len(self._words) // _WORDS)).from_buffer(self._words)

    @property
    def _kinds(self) -> Sequence[int]:
        return self._words[::_WORDS]

    @property
    def sends(self) -> int:
        return self._kinds.count(_SEND)

    @cached_property
    def peers(self) -> frozenset[int]:
        """The ranks of its messages. No more may be added."""
        peers = self._words[1::_WORDS]
        return frozenset(peer for kind, peer in zip(self._kinds, peers, strict=True) if kind not in (_CALL, _FLUSH))

    def spans(self, times: Sequence[float]) -> list[tuple[float, float]]:
        """Begin and end of each run of calls, by the times of every operation."""
        spans: list[tuple[float, float]] = []
        for at, (before, kind) in enumerate(pairwise([_FLUSH, *self._kinds])):
            if kind == _CALL:
                began, ended = times[2 * at], times[2 * at + 1]
                if before == _CALL:
                    spans[-1] = spans[-1][0], ended
                else:
                    spans.append((began, ended))
        return spans
