"""Decides what a handle runs: measures the live job, tries plans on it, keeps the fastest, and looks again when times change."""

__all__: list[str] = []  # `gradwire.parallelize` is the interface
