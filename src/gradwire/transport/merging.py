"""Merges a few values of all ranks, as sums, maxima and bits, or gathers them, with few messages from each: control in log n.

Each rank merges along the rounds of `merge_rounds`. All ranks merge the parts in one order, so all get the same bits. Up to 16
ranks need one round: one hop, as in a direct exchange.
"""

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import NamedTuple

from gradwire.transport.link import Link, Pending, PendingBytes
from gradwire.transport.rounds import merge_rounds
from gradwire.transport.wire import DamagedError, transfer

_CHECK = struct.Struct("<I")


class MergedValues(NamedTuple):
    """Values that are merged over ranks. All ranks have as many of each."""

    bits: bytes = b""
    """Merged by or."""
    most: tuple[float, ...] = ()
    """Merged by the maximum."""
    sums: tuple[float, ...] = ()
    """Added in one order on all ranks."""

    def packed(self) -> bytes:
        """The values and a checksum."""
        raw = self.bits + struct.pack(f"<{len(self.most) + len(self.sums)}d", *self.most, *self.sums)
        return raw + _CHECK.pack(zlib.crc32(raw))

    def unpacked(self, raw: bytes) -> "MergedValues":
        """The values of another rank, which has as many. Raises ValueError where the checksum does not fit."""
        raw = _checked(raw)
        bits, most = len(self.bits), len(self.most)
        numbers = struct.unpack_from(f"<{most + len(self.sums)}d", raw, bits)
        return MergedValues(raw[:bits], numbers[:most], numbers[most:])

    @staticmethod
    def of_parts(parts: Sequence["MergedValues"]) -> "MergedValues":
        """The values of all parts.

        >>> MergedValues.of_parts([MergedValues(b"\x01", (3.0,), (1.0,)), MergedValues(b"\x04", (2.0,), (0.5,))])
        MergedValues(bits=b'\x05', most=(3.0,), sums=(1.5,))
        """
        bits = reduce(or_, (int.from_bytes(part.bits, "little") for part in parts)).to_bytes(len(parts[0].bits), "little")
        most, sums = zip(*(part.most for part in parts), strict=True), zip(*(part.sums for part in parts), strict=True)
        return MergedValues(bits, tuple(map(max, most)), tuple(map(sum, sums)))


def merge_over_ranks(link: Link, own: MergedValues, tag: int, begin: Callable[[], None] = lambda: None) -> MergedValues:
    """Merge the values of all ranks: equal bits on all of them. Collective, not on CUDA.

    begin: is called before anything is sent; what comes earlier is received meanwhile. Raises LinkError, DamagedError for bytes
    that changed on the way, and what `begin` raises.
    """
    rounds, expected = merge_rounds(link.rank, link.world_size), dict[int, PendingBytes]()
    for source in (source for each in rounds for source in each.sources if source != link.rank):
        with transfer(source):
            expected[source] = link.backend.receive_bytes(source, tag)
    begin()
    until, sends = time.monotonic() + link.timeout.total_seconds(), Sends(link)
    for each in rounds:
        sends.add(packed := own.packed(), each.targets, tag)
        parts = [
            own if source == link.rank else _arrived(own, source, expected[source], len(packed), until) for source in each.sources
        ]
        own = MergedValues.of_parts(parts)
    link.finish_later(sends)
    return own


def gather_over_ranks(link: Link, own: bytes, tag: int = 0) -> list[bytes]:
    """The bytes of all ranks, as many from each, in rank order, along the same rounds. Collective, not on CUDA. Raises LinkError,
    DamagedError for bytes that changed on the way."""
    packed = own + _CHECK.pack(zlib.crc32(own))
    size, known, sends = len(packed), packed, Sends(link)
    until = time.monotonic() + link.timeout.total_seconds()
    for each in merge_rounds(link.rank, link.world_size):
        counts = [end - start for start, end in pairwise(each.edges)]
        expected = list[PendingBytes | None]()
        for source in each.sources:
            with transfer(source):
                expected.append(None if source == link.rank else link.backend.receive_bytes(source, tag))
        sends.add(known, each.targets, tag)
        known = b"".join(
            known if under_way is None else _rows_arrived(size, source, under_way, count, until)
            for source, under_way, count in zip(each.sources, expected, counts, strict=True)
        )
    link.finish_later(sends)
    return [known[start : start + len(own)] for start in range(0, len(known), size)]


class Sends:
    """Messages that were sent, and are kept until they are."""

    def __init__(self, link: Link) -> None:
        self._link, self._under_way = link, list[tuple[int, Pending]]()

    def add(self, what: bytes, targets: Sequence[int], tag: int) -> None:
        """Send these bytes to these ranks. Raises LinkError."""
        for to in targets:
            with transfer(to):
                self._under_way.append((to, self._link.backend.send_bytes(what, to, tag)))

    def finish(self) -> None:
        """Wait until all are sent. Raises LinkError."""
        for to, sending in self._under_way:
            with transfer(to):
                sending.wait(self._link.timeout)


def _arrived(like: MergedValues, source: int, receiving: PendingBytes, size: int, until: float) -> MergedValues:
    raw = _awaited(source, receiving, size, until)
    try:
        return like.unpacked(raw)
    except ValueError as error:
        raise DamagedError(source, error) from error


def _rows_arrived(size: int, source: int, receiving: PendingBytes, count: int, until: float) -> bytes:
    """The bytes of so many ranks, of this size from each, with their checksums."""
    raw = _awaited(source, receiving, count * size, until)
    try:
        for start in range(0, len(raw), size):
            _checked(raw[start : start + size])
    except ValueError as error:
        raise DamagedError(source, error) from error
    return raw


def _awaited(source: int, receiving: PendingBytes, size: int, until: float) -> bytes:
    with transfer(source):
        receiving.wait(timedelta(seconds=max(0.0, until - time.monotonic())))
        if (came := len(receiving.bytes)) != size:
            raise ValueError(f"rank {source} sent {came} bytes where {size} were expected")
    return bytes(receiving.bytes)


def _checked(raw: bytes) -> bytes:
    """The bytes before their checksum. Raises ValueError where it does not fit."""
    told, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
    if zlib.crc32(told) != _CHECK.unpack(check)[0]:
        raise ValueError("the checksum of what ranks tell each other does not fit")
    return told
