"""From what is known of a model, to the plan of its exchanges. Pure: no torch."""

from gradwire.planner.policy import Policy, Uniform
from gradwire.planner.rules import Where

__all__ = ["Policy", "Uniform", "Where"]
