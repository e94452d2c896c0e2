"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from gradwire.collectives.codec_state import Memory, share_scratch
from gradwire.collectives.ops import Add, Copy, Decode, Encoding, Learn, Transfer, Transfers, Weigh, in_c
from gradwire.collectives.piece import Energies, Piece
from gradwire.collectives.route import Route
from gradwire.collectives.schemes import AllReduce, OneEncode, PlainTwoPhase, Scheme, ShardedSum, TwoPhase

__all__ = [
    "Add", "AllReduce", "Copy", "Decode", "Encoding", "Energies", "Learn", "Memory", "OneEncode", "Piece", "PlainTwoPhase",
    "Route", "Scheme", "ShardedSum", "Transfer", "Transfers", "TwoPhase", "Weigh", "in_c", "share_scratch",
]  # fmt: skip
