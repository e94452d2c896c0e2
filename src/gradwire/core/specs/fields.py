"""Checks of fields that several specs have."""

from gradwire.core.checks import number, whole
from gradwire.errors import SpecError


def check_block(block: object, what: str = "the elements of a block", low: int = 32, high: int = 8192) -> None:
    """A power of two from `low` to `high`."""
    whole("block", block, what, low=low, high=high, error=SpecError)
    assert isinstance(block, int)
    if block & (block - 1):
        lower = 1 << (block.bit_length() - 1)
        raise SpecError(f"block is {block}: it must be a power of two. Use {lower} or {2 * lower}.")


def check_seed(seed: object) -> None:
    """A seed of a random stream."""
    whole("seed", seed, "a seed", low=0, high=2**63 - 1, error=SpecError)


def check_ratio(field: str, ratio: object) -> None:
    """A part of all elements."""
    number(field, ratio, "the part of the elements that is sent", positive=True, error=SpecError)
    assert isinstance(ratio, (int, float))
    if ratio > 1:
        raise SpecError(
            f"{field} is {ratio}: it is a part of the elements, at most 1. Write 0.01 for one in a hundred."
        )
