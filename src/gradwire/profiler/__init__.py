"""Measures a model, the links between its ranks and the codecs: profile.json, cluster.json and costs.json."""

from gradwire.profiler.profiling import Profiling

__all__ = ["Profiling"]
