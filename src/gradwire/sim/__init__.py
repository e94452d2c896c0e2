"""What a step takes, from what its parts take. Pure: no torch."""

from gradwire.sim import closed_forms

__all__ = ["closed_forms"]
