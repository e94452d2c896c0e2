"""Every method of planning: the planner's, and the papers' own, which the fixture `papers_methods` adds during a test."""

from benchmarks.papers.methods import METHODS as OF_PAPERS
from gradwire.planner.methods import METHODS

EVERY_METHOD = (*METHODS, *OF_PAPERS)
