"""The reduce phase alone, and the gather phase alone: what lies where on a rank."""

from collections.abc import Iterator, Sequence

import torch

from gradwire.collectives import ShardedSum, TwoPhase
from gradwire.collectives.streams import Streams
from gradwire.errors import PlanError
from gradwire.exchange.layout import BucketBuffers, Slot


def check_two_phases(buckets: Sequence[BucketBuffers], what: str) -> None:
    """Raises PlanError unless every bucket has a reduce and a gather phase, and a shard for each rank between the two."""
    for buffers in buckets:
        if not all(isinstance(chunk, (TwoPhase, ShardedSum)) for chunk in buffers.chunks):
            raise PlanError(
                f"{what!r} needs two phases, and bucket {buffers.index} has option {list(buffers.bucket.option)}. Use a plan "
                'with scheme="alltoall".'
            )


def own_runs(buckets: Sequence[BucketBuffers]) -> dict[str, list[tuple[int, int]]]:
    """See `Exchange.own_shards`."""
    runs: dict[str, list[tuple[int, int]]] = {slot.name: [] for buffers in buckets for slot in buffers.slots}
    for buffers in buckets:
        for slot, low, high, _ in shards_of(buffers):
            runs[slot.name].append((low - slot.offset, high - slot.offset))
    return runs


def put_back_shards(buffers: BucketBuffers, slot: Slot, tensor: torch.Tensor) -> None:
    """Give a tensor this rank's part of the mean, after a reduce phase alone."""
    own = torch.empty_strided(slot.view.shape, slot.view.stride(), dtype=tensor.dtype, device=tensor.device)
    flat = own.copy_(tensor).as_strided((own.numel(),), (1,))
    for of, low, high, values in shards_of(buffers):
        if of is slot:
            flat[low - slot.offset : high - slot.offset] = values
    tensor.detach().copy_(own)


def take_shards(buffers: BucketBuffers, streams: Streams) -> None:
    """Before a gather phase alone: this rank gives its shards of the flat buffer as they are."""
    for chunk in buffers.chunks:
        assert isinstance(chunk, (TwoPhase, ShardedSum))
        chunk.take_shard(streams)


def shards_of(buffers: BucketBuffers) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
    """The tensors' parts in this rank's shards: where they begin and end in the bucket, and the sums."""
    for begin, chunk in zip(buffers.bounds, buffers.chunks, strict=False):
        assert isinstance(chunk, (TwoPhase, ShardedSum))
        start = begin + chunk.start
        end = start + chunk.total.numel()
        for slot in buffers.slots:
            low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
            if low < high:
                yield slot, low, high, chunk.total[low - start : high - start]
