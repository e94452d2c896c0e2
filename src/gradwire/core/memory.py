"""The memory that gradwire holds beside the training itself."""

import msgspec

from gradwire.core.checks import whole


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one rank that gradwire holds from step to step."""

    gradient_bytes: int
    """Flat buffers, in which the gradients lie: what training takes anyway."""
    residual_bytes: int
    """What compressors remember: residuals, momentum, factors."""
    payload_bytes: int
    """Payloads and partial sums."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            whole(field, getattr(self, field), "a number of bytes")
