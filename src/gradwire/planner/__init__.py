"""From what is known of a model, to the plan of its exchanges. Pure: no torch."""

from gradwire.planner.adaptive import AdaptiveBits, Tuned
from gradwire.planner.options import Option, option_of
from gradwire.planner.policy import Policy, Uniform, Where

__all__ = ["AdaptiveBits", "Option", "Policy", "Tuned", "Uniform", "Where", "option_of"]
