"""Which options can carry what a spec encodes."""

from gradwire.core.specs import Spec

__all__ = ["GATHERED", "TWO_PHASE", "carries", "codes_own_gradient"]

GATHERED = ("comp", "allgather:inter", "decomp")
TWO_PHASE = ("comp", "alltoall:inter", "decomp", "comp", "allgather:inter", "decomp")
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
    tasks = tuple(task.removesuffix(f":{device}") for task in option)
    if spec.rounds and tasks == ("comp", "allreduce:inter") * spec.rounds + ("decomp",):
        return True
    if tasks == GATHERED:
        return "allgather" in spec.schemes
    if tasks == TWO_PHASE:
        return "alltoall" in spec.schemes
    return set(spec.schemes) >= _ANY_WAY and (not set(spec.state) - {"residual"} or codes_own_gradient(option))
