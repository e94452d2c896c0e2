"""The functions and classes that training scripts call: `parallelize` and the handle that it returns."""

from gradwire.api.handle import Handle
from gradwire.api.parallelize import parallelize

__all__ = ["Handle", "parallelize"]
