"""Compressors: one method a file, or the kernels that the spec names. The class of a spec says which."""

from gradwire.compressors.base import KernelCompressor, ListCompressor
from gradwire.compressors.mixed_precision import BesideCompressor
from gradwire.compressors.registry import compressor_for, register_compressor
from gradwire.compressors.roundtrip import SoleRank, roundtrip
from gradwire.compressors.stores import store_for
from gradwire.kernels import Compressor, Context

__all__ = [
    "BesideCompressor", "Compressor", "Context", "KernelCompressor", "ListCompressor", "SoleRank", "compressor_for",
    "register_compressor", "roundtrip", "store_for",
]  # fmt: skip
