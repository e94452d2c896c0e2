"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from typing import TYPE_CHECKING, Any

from gradwire.collectives.codec_state import Memory, share_scratch
from gradwire.collectives.ops import Add, Copy, Decode, Encoding, Learn, Transfer, Transfers, Weigh, in_c
from gradwire.collectives.piece import Energies, Piece
from gradwire.collectives.route import Route
from gradwire.collectives.schemes import AllReduce, OneEncode, PlainTwoPhase, Scheme, ShardedSum, TwoPhase
from gradwire.renames import new_spelling

__all__ = [
    "Add", "AllReduce", "Copy", "Decode", "Encoding", "Energies", "Learn", "Memory", "OneEncode", "Piece", "PlainTwoPhase",
    "Route", "Scheme", "ShardedSum", "Transfer", "Transfers", "TwoPhase", "Weigh", "in_c", "share_scratch",
]  # fmt: skip

if not TYPE_CHECKING:  # or each misspelt name would pass

    def __getattr__(name: str) -> Any:
        if spelling := new_spelling(__name__, name):
            raise ImportError(f"{__name__} has no {name!r}.{spelling}")  # `from` hides the words of an AttributeError
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
