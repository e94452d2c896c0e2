"""The device of gradients, as plans and profiles name it, and accelerators that stand in for a GPU.

An accelerator may stand in for a GPU: then gradients in the host's memory count as the accelerator's. So plans with codecs on
GPUs, and with codecs on CPUs for gradients of a GPU, run where there is no GPU. Only measurements and tests do that
(docs/decisions/042-the-sleeping-accelerator.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from gradwire.errors import StepStateError

OFFLOAD_LANES = 1
"""The number of lanes for buckets with codecs on CPUs, in addition to the lanes of all other buckets."""


class StandIn(Protocol):
    """An accelerator that stands in for a GPU."""

    @property
    def name(self) -> str:
        """The name in a profile. It must not contain the word cpu, by which profiles tell CPUs from accelerators."""
        ...

    def codec(self, codec: Any) -> Any:
        """Return a codec that encodes and decodes on the accelerator like this codec."""
        ...


_standing_in: StandIn | None = None


@contextmanager
def stand_in(accelerator: StandIn) -> Iterator[None]:
    """Inside, tensors in the host's memory are gradients of this accelerator. For handles and exchanges that are made inside.

    Raises StepStateError if another one stands in already.
    """
    global _standing_in
    if _standing_in is not None:
        raise StepStateError(
            f"{_standing_in.name} stands in for a GPU already, so {accelerator.name} cannot: a tensor is on one device. Leave "
            "the first one's `with` before the second begins."
        )
    _standing_in = accelerator
    try:
        yield
    finally:
        _standing_in = None


def kind_of(device: torch.device) -> str:
    """The device as plans name it: cpu or gpu."""
    return "cpu" if device.type == "cpu" and _standing_in is None else "gpu"


def device_name(device: torch.device) -> str:
    """The device as profiles name it."""
    if device.type == "cpu":
        return "cpu" if _standing_in is None else _standing_in.name
    return torch.cuda.get_device_name(device)


def offload_lanes(device: torch.device) -> int:
    """How many lanes take the buckets with codecs on CPUs. 0 on CPUs, where all buckets are so; and on CUDA, where lanes that use
    communicators at the same time were never tried."""
    return OFFLOAD_LANES if device.type == "cpu" and _standing_in is not None else 0


def standing_in() -> StandIn | None:
    """The accelerator that stands in for a GPU now; None where none does."""
    return _standing_in
