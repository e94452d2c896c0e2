"""Timings, kept apart from the tests: `python -m benchmarks` (= `make bench`), results in benchmarks/results/."""
