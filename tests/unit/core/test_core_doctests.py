"""The examples in the docstrings of the pure half run."""

import doctest
import importlib
import pkgutil

import pytest

import gradwire.core
import gradwire.costs
import gradwire.planner
import gradwire.report
import gradwire.sim

MODULES = [
    info.name
    for package in (gradwire.core, gradwire.costs, gradwire.planner, gradwire.report, gradwire.sim)
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
]
MODULES += ["gradwire.record.timeline", "gradwire.bench.recorded", "benchmarks.papers.closed_forms"]
MODULES += [f"benchmarks.campaigns.{name}" for name in ("matrix_cells", "parts", "schemes_runner")]
MODULES += ["benchmarks.papers.strawmen", "gradwire.cli.app"]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    failed = doctest.testmod(importlib.import_module(module)).failed
    assert failed == 0, "the output below shows the examples in docstrings, and what they give now"
