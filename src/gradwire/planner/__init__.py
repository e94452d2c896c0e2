"""From what is known of a model, to the plan of its exchanges. Pure: no torch."""

from gradwire.planner.options import Option, option_of
from gradwire.planner.policy import Policy, Uniform
from gradwire.planner.rules import Where

__all__ = ["Option", "Policy", "Uniform", "Where", "option_of"]
