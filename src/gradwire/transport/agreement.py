"""Ranks compare model, plan and versions before the first exchange. If these differ, all ranks raise the same error."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from gradwire.core import error_words
from gradwire.errors import DisagreementError
from gradwire.kernels import crc32c
from gradwire.transport.link import Link
from gradwire.transport.wire import transfer

KERNELS = "bytes that kernels make of the same gradient"
"""The name of the fact in which ranks compare what their kernels encode."""
_CHECKED_BYTES = 2**20
"""Each so many bytes of a tensor have a checksum of their own. It finds every change of one number, and overlooks one in 2**32 of
other changes: that a model with other weights passes as the same, all its parts must be overlooked."""
_DIGEST_BYTES = 16
_LARGE_BYTES = 2**16
"""A tensor of so many bytes or more is sent from where it lies. Smaller ones are copied together: a message takes longer."""


_RAISED = "raised "


class Raised(str):
    """The words of an exception that a compressor raised. They stand in KERNELS in place of a digest."""

    error: Exception
    """The exception, on the rank where it was raised."""

    @classmethod
    def by(cls, error: Exception) -> "Raised":
        made = cls(_RAISED + error_words(error))
        made.error = error
        return made


class GathersBytes(Protocol):
    """A link on which ranks compare facts."""

    def gather(self, own: bytes, /) -> list[bytes]:
        """The bytes of every rank, of any length, in rank order. Collective."""
        ...


def agree(link: GathersBytes, facts: Mapping[str, Any], global_ranks: tuple[int, ...], number: float = 0.0) -> list[float]:
    """Raise DisagreementError on every rank unless all have the same facts. Facts are JSON, most telling first; collective.

    A rank that could not prepare puts why under "error", so that nobody waits for it. Returns the number of each rank, which may
    differ. A rank whose compressor raised, and did not on all ranks, raises that exception instead.
    """
    text = json.dumps(facts).encode()
    # facts name each tensor, and ranks may be many: only where these digests differ do all get the facts of all
    digest = "" if facts.get("error") else hashlib.sha256(text).hexdigest()
    everybody = [json.loads(each) for each in gather_bytes(link, json.dumps([digest, number]).encode())]
    if digest and all(each == digest for each, _ in everybody):
        return [told for _, told in everybody]
    others = [json.loads(each) for each in gather_bytes(link, text)]
    failed = [(rank, other["error"]) for rank, other in zip(global_ranks, others, strict=True) if other.get("error")]
    if failed:
        raise _stopped(failed)
    for rank, other in zip(global_ranks, others, strict=True):
        for key, value in others[0].items():
            if other.get(key) != value:
                if key == KERNELS:
                    _check_raised(facts, others, global_ranks)
                words = _told(key, global_ranks[0], value, rank, other.get(key))
                raise DisagreementError(words).about([global_ranks[0], rank])
    return [told for _, told in everybody]


def _check_raised(facts: Mapping[str, Any], others: Sequence[Mapping[str, Any]], global_ranks: Sequence[int]) -> None:
    """Raise the exception of this rank's compressor, or DisagreementError that names the ranks whose compressors raised. Does
    nothing if none did, or all alike."""
    for number, rows in enumerate(zip(*(other.get(KERNELS, ()) for other in others), strict=False)):
        named = zip(global_ranks, rows, strict=True)
        failed = [(rank, f"{name} {digest}") for rank, (name, digest) in named if digest.startswith(_RAISED)]
        if failed and any(row != rows[0] for row in rows):
            own = facts[KERNELS][number][1]
            raise own.error if isinstance(own, Raised) else _stopped(failed)


def _stopped(failed: Sequence[tuple[int, str]]) -> DisagreementError:
    words = "; ".join(f"rank {rank}: {error}" for rank, error in failed)
    return DisagreementError(f"all ranks stop, because some of them failed: {words}").about(rank for rank, _ in failed)


def _told(key: str, first_rank: int, first: Any, rank: int, other: Any) -> str:
    if isinstance(first, list) and isinstance(other, list):
        if len(first) != len(other):
            first, other = f"{len(first)} tensors", f"{len(other)} tensors"
        else:
            first, other = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    cure = "Start every rank with the same script, arguments and environment."
    if key == KERNELS:
        cure = "Install the same build of gradwire, with its C++ library, and the same torch on every rank."
    return (
        f"ranks disagree on the {key}: rank {first_rank} has {first}, rank {rank} has {other}. Gradients would be added "
        f"to the wrong ones or decoded wrongly. {cure}"
    )


def gather_bytes(link: GathersBytes, text: bytes) -> list[bytes]:
    """Every rank's bytes. Collective."""
    return link.gather(text)


def all_have(link: Link, *parts: Sequence[torch.Tensor]) -> list[bool]:
    """For each part whether all ranks have the same values, to the bit, by their checksums. Tensors of any dtype and strides; the
    link is not one of CUDA. Collective, and the same on all ranks."""
    digests = list(zip(*map(_digests, gather_bytes(link, b"".join(map(_digest, parts)))), strict=True))
    return [len(set(each)) == 1 for each in digests]


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    own = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        values = bytes_of(tensor).cpu()
        own.update(len(values).to_bytes(8, "little"))
        for part in values.split(_CHECKED_BYTES):
            own.update(crc32c(part).to_bytes(4, "little"))
    return own.digest()


def _digests(together: bytes) -> list[bytes]:
    return [together[at : at + _DIGEST_BYTES] for at in range(0, len(together), _DIGEST_BYTES)]


def broadcast_bytes(link: Link, tensors: list[torch.Tensor], root: int = 0, piece_bytes: int = 32 * 2**20) -> None:
    """Give every rank the root's values of these tensors, in pieces of about `piece_bytes`. Any dtype and strides. Tensors are
    cut on a host-staged lane alone, which keeps page-locked memory as large as its largest message."""
    pending: list[torch.Tensor] = []
    nbytes = 0
    for at, tensor in enumerate(tensors):
        pending.append(tensor)
        nbytes += _nbytes(tensor)
        if at + 1 == len(tensors) or nbytes >= piece_bytes:
            _broadcast_together(link, pending, root, piece_bytes)
            pending, nbytes = [], 0


def _broadcast_together(link: Link, tensors: list[torch.Tensor], root: int, piece_bytes: int) -> None:
    with torch.no_grad():
        if link.takes_parts:
            _broadcast_in_place(link, tensors, root)
            return
        if link.rank == root:
            flat = torch.cat([bytes_of(tensor) for tensor in tensors])
        else:
            flat = torch.empty(sum(map(_nbytes, tensors)), dtype=torch.uint8, device=tensors[0].device)
        with transfer():
            for piece in [flat] if link.pinned is None else flat.split(piece_bytes):
                link.broadcast(piece, root).wait()
        if link.rank != root:
            copy_from(flat, tensors)


def _broadcast_in_place(link: Link, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Large tensors are sent and received where they lie, small ones together. Messages are the same on all ranks: what is not
    contiguous on a rank goes through a copy there."""
    parts, copies = list[torch.Tensor](), list[tuple[torch.Tensor, list[torch.Tensor]]]()
    for _, run in groupby(enumerate(tensors), lambda each: -1 if _nbytes(each[1]) < _LARGE_BYTES else each[0]):
        together = [tensor for _, tensor in run]
        if len(together) == 1 and (link.rank == root or together[0].is_contiguous()):
            parts.append(bytes_of(together[0]))
        elif link.rank == root:
            parts.append(torch.cat([bytes_of(tensor) for tensor in together]))
        else:
            parts.append(torch.empty(sum(map(_nbytes, together)), dtype=torch.uint8, device=together[0].device))
            copies.append((parts[-1], together))
    link.broadcast_parts(parts, root)
    for flat, together in copies:
        copy_from(flat, together)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as a flat uint8 tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_from(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Give the tensors the values that lie one after another in `flat` (uint8)."""
    at = 0
    for tensor in tensors:
        size = _nbytes(tensor)
        part = flat[at : at + size]
        if part.storage_offset() % tensor.element_size():  # the dtype's alignment does not allow a view
            part = part.clone()
        # through .data, since autograd would take a change between two forwards for a mistake of the script
        tensor.data.copy_(part.view(tensor.dtype).view(tensor.shape))
        at += size
