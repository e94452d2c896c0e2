"""The phases of an exchange on a rank: what pieces share, and what lies where before and after a phase alone."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch

from gradwire.collectives import Scheme, ShardedSum, TwoPhase, share_scratch
from gradwire.errors import PlanError
from gradwire.exchange.executor import PhaseTask
from gradwire.exchange.layout import BucketBuffers, Slot
from gradwire.transport import Streams


def check_two_phases(buckets: Sequence[BucketBuffers], what: str) -> None:
    """Raises PlanError unless every bucket has a reduce and a gather phase, and a shard for each rank between the two."""
    for buffers in buckets:
        if not all(isinstance(chunk, (TwoPhase, ShardedSum)) for chunk in buffers.chunks):
            raise PlanError(
                f"{what!r} needs two phases, and bucket {buffers.index} has option {list(buffers.bucket.option)}. Use a plan "
                'with scheme="alltoall".'
            )


def share_memory(tasks_of_lanes: Sequence[Sequence[PhaseTask]], buckets: Sequence[BucketBuffers]) -> None:
    """The pieces of a lane use the same memory for what they hold no longer than the lane works on them: residuals that are
    stored narrow, and the sums of pieces that lie apart."""
    for tasks in tasks_of_lanes:
        _share_on_lane(tasks, buckets)


def _share_on_lane(tasks: Sequence[PhaseTask], buckets: Sequence[BucketBuffers]) -> None:
    pieces = [buckets[task.bucket].chunks[task.chunk] for task in tasks if task.phase == 0]
    share_scratch(memory for piece in pieces for memory in piece.memory)
    at_once = [task for task, following in pairwise(tasks) if task[:2] == following[:2]]
    sums = _sums_apart(buckets[task.bucket].chunks[task.chunk] for task in at_once)
    if sums:
        memory = torch.empty(max(each.total.numel() for each in sums), dtype=sums[0].total.dtype)
        for each in sums:
            each.share_total(memory)


def part_totals(buckets: Sequence[BucketBuffers]) -> None:
    """Give each sum memory of its own: a step ends with the sums, or begins with them."""
    for each in _sums_apart(chunk for buffers in buckets for chunk in buffers.chunks):
        each.share_total(None)


def _sums_apart(schemes: Iterable[Scheme]) -> list[TwoPhase]:
    """The schemes whose gradients lie apart and whose own sum is not part of them."""
    two_phase = [each for each in schemes if isinstance(each, TwoPhase)]
    return [each for each in two_phase if each.piece.apart is not None and not each.in_place]


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
        if of is slot and values.numel():
            flat[low - slot.offset : high - slot.offset] = values
    tensor.detach().copy_(own)


def take_shards(buffers: BucketBuffers, streams: Streams) -> None:
    """Before a gather phase alone: this rank gives its shards of the flat buffer as they are."""
    for chunk in buffers.chunks:
        assert isinstance(chunk, (TwoPhase, ShardedSum))
        chunk.take_shard(streams)


def exact_totals(buckets: Sequence[BucketBuffers]) -> list[torch.Tensor]:
    """See `Exchange.exact_sums`."""
    shards = []
    for buffers in buckets:
        plain = not buffers.bucket.main_spec.encodes
        for chunk in buffers.chunks:
            if not (plain and isinstance(chunk, TwoPhase) and chunk.total.dtype == buffers.flat.dtype):
                return []
            shards.append(chunk.total)
    return shards


def shards_of(buffers: BucketBuffers) -> Iterator[tuple[Slot, int, int, torch.Tensor]]:
    """The tensors' parts in this rank's shards: where they begin and end in the bucket, and the sums; empty where these are part
    of what was lent."""
    for begin, chunk in zip(buffers.bounds, buffers.chunks, strict=False):
        assert isinstance(chunk, (TwoPhase, ShardedSum))
        start, end = begin + chunk.start, begin + chunk.end
        for slot in buffers.slots:
            low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
            if low < high:
                yield slot, low, high, chunk.total[low - start : high - start]
