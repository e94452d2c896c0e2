"""Measures a model, the links between its ranks and the codecs: profile.json, cluster.json and costs.json."""

from gradwire.profiler.clock import Clock
from gradwire.profiler.codecs import cached_codecs, measure_codecs
from gradwire.profiler.links import measure_links, measure_processors, measured_links
from gradwire.profiler.profiling import Profiling, described, profile_from
from gradwire.profiler.recorder import WARMUP_STEPS, Recorder

__all__ = [
    "WARMUP_STEPS", "Clock", "Profiling", "Recorder", "cached_codecs", "described", "measure_codecs", "measure_links",
    "measure_processors", "measured_links", "profile_from",
]  # fmt: skip
