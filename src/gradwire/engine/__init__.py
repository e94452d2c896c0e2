"""The engine: executes plans and decides nothing."""

from gradwire.engine.handle import BucketStats, Handle, Stats
from gradwire.engine.parallelize import parallelize

__all__ = ["BucketStats", "Handle", "Stats", "parallelize"]
