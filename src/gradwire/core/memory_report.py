"""The memory that gradwire uses in addition to the training itself."""

import msgspec

from gradwire.core.checks import wholes


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one rank that gradwire holds from step to step."""

    gradient_bytes: int
    """Flat buffers of gradients. Compressed gradients need none in the `backward` schedule on the CPU."""
    residual_bytes: int
    """State of compressors: residuals, momentum, factors."""
    payload_bytes: int
    """Payloads and partial sums."""
    weight_bytes: int = 0
    """Copies of weights, and the momentum of the outer optimizer. 0 in schedules with one set of weights."""

    def __post_init__(self) -> None:
        wholes(self, "a number of bytes", *self.__struct_fields__)
