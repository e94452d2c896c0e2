"""Do all ranks still have the same weights? Checksums that are cheap enough to compare every now and then."""

import hashlib
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradwire.transport import Group

_PIECE = 2**20
_END = b"\0"
_OWN_STEPS = 10
"""After so many steps of a script's own gradients weights are compared for the first time."""


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


class OwnSteps:
    """Compares weights between optimizer steps that no synchronised backward came before: those of gradients that a script
    computed itself, as by `torch.autograd.grad`.

    Such steps are not the same in number on all ranks, so no rank waits for another: each writes its checksums to the rendezvous
    store, and looks there for those of the others, when it makes such a step. A rank has one key, which is overwritten and never
    deleted: `get` would wait for a key that went after `check`.
    """

    def __init__(self, every: int, group: Group, name: str) -> None:
        self._every, self._group, self._name = every, group, name
        self._steps, self._written = 0, ""
        self._told = every == 0
        self._store: Any = None

    def synchronised(self) -> None:
        """A synchronised backward has ended."""
        self._steps = 0

    def step(
        self, weights: "Sequence[weakref.ref[torch.nn.Parameter]]", names: Sequence[str], after: int
    ) -> str | None:
        """An optimizer is about to step. `after`: the synchronised steps so far. Returns, once, what to warn the script of."""
        self._steps += 1
        if self._told or self._group.world_size == 1:
            return None
        try:
            if self._steps == min(_OWN_STEPS, self._every) or self._steps % self._every == 0:
                self._write(weights, f"{after}/{self._steps}")
            return self._differs(names) if self._written else None
        except (RuntimeError, struct.error):
            # the host of the store is gone, perhaps within an answer: whoever waits for a rank next says so, and this only looks
            self._told = True
            return None

    def _write(self, weights: "Sequence[weakref.ref[torch.nn.Parameter]]", at: str) -> None:
        if self._store is None:
            self._store = self._group.store(f"{self._name}/own-steps")
        self._sums = checksums(weight for reference in weights if (weight := reference()) is not None)
        self._store.set(str(self._group.rank), at.encode() + _END + struct.pack(f"<{len(self._sums)}Q", *self._sums))
        self._written = at

    def _differs(self, names: Sequence[str]) -> str | None:
        for rank, global_rank in enumerate(self._group.global_ranks):
            if rank == self._group.rank or not self._store.check([str(rank)]):
                continue
            at, _, packed = self._store.get(str(rank)).partition(_END)
            if at.decode() != self._written:
                continue
            sums = struct.unpack(f"<{len(self._sums)}Q", packed)
            index = next((i for i, (own, other) in enumerate(zip(self._sums, sums, strict=True)) if own != other), None)
            if index is not None:
                self._told = True
                return (
                    f"the weights of this rank and rank {global_rank} are not the same, after {self._steps} optimizer steps "
                    f"without a synchronised backward; the first tensor that differs is {names[index]!r}. gradwire averages "
                    "what backward() accumulates. Gradients that a script computes itself (torch.autograd.grad, p.grad = ...) "
                    "are each rank's own: call loss.backward(), or average them with gw.Exchange before the step."
                )
        return None


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
