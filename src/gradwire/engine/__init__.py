"""The engine: executes plans and decides nothing."""

from gradwire.engine.handle import Handle
from gradwire.engine.parallelize import parallelize
from gradwire.engine.stats import BucketStats, Stats

__all__ = ["BucketStats", "Handle", "Stats", "parallelize"]
