"""From what is known of a model, to the plan of its exchanges. Pure: no torch."""

from gradwire.planner.adaptive import AdaptiveBits
from gradwire.planner.options import Option, option_of
from gradwire.planner.policy import Policy, Uniform
from gradwire.planner.rules import Where
from gradwire.planner.tuned import Tuned

__all__ = ["AdaptiveBits", "Option", "Policy", "Tuned", "Uniform", "Where", "option_of"]
