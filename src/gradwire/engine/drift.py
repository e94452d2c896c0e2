"""Do all ranks still have the same weights? Checksums that are cheap enough to compare every now and then."""

import hashlib
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

_PIECE = 2**20


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A 64-bit number for each tensor: its words, each times an odd number that depends on its place, added up.

    Equal bits give equal numbers. Another value of any single word gives another number, and so does an exchange of two
    words unless by chance. Works on the tensor's device, in pieces of 1M words.
    """
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    return [int(total) % 2**64 for total in sums]


class DriftWatch:
    """Compares weights every so many steps; 0 is never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sums: list[int] = []

    def due(self, step: int) -> bool:
        """Whether weights are compared in this step."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def digest(self, weights: "Sequence[weakref.ref[torch.nn.Parameter]]") -> int:
        """One 64-bit number for all of them."""
        self._sums = checksums(weight for reference in weights if (weight := reference()) is not None)
        return int.from_bytes(hashlib.blake2b(self.packed(), digest_size=8).digest(), "little")

    def difference(self, packed: Mapping[int, bytes], names: Sequence[str], step: int) -> str:
        """What differs, in words. `packed`: what `packed()` gave on each rank that trained, by global rank."""
        words = self._words()
        sums = {rank: words.unpack(raw) for rank, raw in packed.items()}
        first, *others = sums
        index, other = next(
            (index, other)
            for index in range(len(names))
            for other in others
            if sums[other][index] != sums[first][index]
        )
        return (
            f"the weights of rank {first} and rank {other} are not the same any more, found in step {step}; the first "
            f"tensor that differs is {names[index]!r}. Ranks train different models since the last check, at most "
            f"{self._every} steps ago. Look for code that changes weights on one rank only (loading, clamping, averaging, "
            "random layers without a common seed), or for faulty memory; restart from a checkpoint."
        )

    def packed(self) -> bytes:
        """The checksums of the last digest."""
        return self._words().pack(*self._sums)

    def _words(self) -> struct.Struct:
        return struct.Struct(f"<{len(self._sums)}Q")


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.contiguous().reshape(-1).view(torch.uint8)
    if words.numel() % 4 == 0 and words.storage_offset() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), device=tensor.device)
        total += (piece * (2 * place + 1)).sum()
    return total
