"""Which options can carry what a spec encodes."""

from gradwire.core.collectives import collective_of
from gradwire.core.specs import Spec

__all__ = ["carries", "codes_own_gradient"]

_ANY_WAY = {"alltoall", "allgather"}


def codes_own_gradient(option: tuple[str, ...]) -> bool:
    """Whether the first encode is of a rank's own gradient alone: before any sum."""
    return option[0].startswith("comp")


def carries(option: tuple[str, ...], spec: Spec, device: str) -> bool:
    """Whether an option that compresses can carry what this spec encodes, of tensors on this device.

    Sums on the wire (PowerSGD, Random-k with common indices) travel by all-reduce, in as many rounds as the spec has. What each
    rank keeps of its own gradient beside a residual, as momentum, wants an encode before any sum.

    >>> from gradwire.core import PowerSGD, QSGD
    >>> two_phase = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")
    >>> carries(two_phase, QSGD(bits=4), "cpu"), carries(two_phase, PowerSGD(rank=4), "cpu")
    (True, False)
    """
    named = collective_of(option)
    if named is not None and option == named.on(device, spec.rounds):
        return named.carries(spec)
    return set(spec.schemes) >= _ANY_WAY and (not set(spec.state) - {"residual"} or codes_own_gradient(option))
