"""The memory that a set of buckets holds from step to step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gradwire.core.memory import MemoryRecord
from gradwire.exchange.layout import BucketBuffers

__all__ = ["memory_of"]


def memory_of(buckets: Iterable[BucketBuffers]) -> MemoryRecord:
    """Bytes of the buckets' gradients, of what their compressors remember, and of all other values that their schemes hold."""
    chunks = [chunk for each in buckets for chunk in each.chunks]
    flat = _sizes(each.flat for each in buckets)
    remembered = [tensor for chunk in chunks for memory in chunk.memory for tensor in memory.held]
    held = _sizes([*remembered, *(tensor for chunk in chunks for tensor in chunk.shared.values())])
    others = _sizes(tensor for tensor in _tensors_in(chunks, set()) if tensor.dtype is not torch.int64)
    return MemoryRecord(
        gradient_bytes=sum(flat.values()),
        residual_bytes=sum(held.values()),
        payload_bytes=sum(size for place, size in others.items() if place not in flat and place not in held),
    )


def _sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each piece of memory that the tensors lie in, by where it begins."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that can be reached through containers and gradwire's own objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each, seen)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each, seen)
    elif type(value).__module__.startswith("gradwire.") and hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value), seen)
