"""Measurements for those who work on gradwire: parts of `python -m benchmarks` that train jobs over emulated links."""
