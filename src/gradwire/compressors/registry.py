"""Which compressor runs a spec: the class of the spec decides."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gradwire.compressors.base import KernelCompressor
from gradwire.core import Spec, entry_points, named, show
from gradwire.errors import SpecError
from gradwire.kernels import Compressor

_OWN = "gradwire.core.specs"
"""Where gradwire's own specs are."""


def register_compressor(spec_class: type[Spec], make: Callable[[Any], Compressor]) -> None:
    """Register the compressor of a spec class. `make` takes the spec and returns the compressor. Raises SpecError if not."""
    if not callable(make):
        raise SpecError(f"{show(make)} cannot be the compressor of {spec_class.__name__}: it must be a subclass of Compressor.")
    spec_class.compressor = make


def compressor_for(spec: Spec) -> Compressor:
    """The compressor that runs a spec. Raises SpecError if its class has none.

    >>> from gradwire.core.specs import QSGD
    >>> compressor_for(QSGD(bits=4)).spec
    QSGD(bits=4, block=128)
    """
    cls = type(spec)
    # to list other packages takes milliseconds, in every process: those have compressors for specs of their own
    comes_along = "compressor" in vars(cls) or cls.__module__.startswith(_OWN)
    if not comes_along and spec.id in entry_points.names(entry_points.COMPRESSORS):
        entry_points.load(entry_points.COMPRESSORS, spec.id, partial(register_compressor, cls), SpecError)
    if cls.compressor is None and spec.kernels() is None:
        raise SpecError(
            f"{spec!r} has no compressor: its class {cls.__name__} is registered as a spec only. "
            "Register a compressor with gradwire.compressors.register_compressor, or in the entry points of "
            f"{entry_points.COMPRESSORS}."
        )
    made: Compressor = (named(cls.compressor) or KernelCompressor)(spec)
    return made
