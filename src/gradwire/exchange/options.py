"""Which scheme runs a bucket's option: that of the collective it is, and a route for everything else in the tree."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradwire.collectives import Piece, PlainTwoPhase, Route, Scheme, ShardedSum
from gradwire.compressors import Compressor
from gradwire.core import ALL_REDUCE, COLLECTIVES, Bucket, Collective, collective_of, named
from gradwire.errors import PlanError
from gradwire.exchange.host_codec import codec_on
from gradwire.kernels import is_float
from gradwire.plan import codes_own_gradient, option_of
from gradwire.transport import Group, kind_of

Make = Callable[[Any, Piece, Group, int], Scheme]
"""Makes a scheme of a codec, a piece, the ranks, and the bucket's index."""


def scheme_of(index: int, bucket: Bucket, device: str, sharded: bool = False) -> Make | None:
    """The scheme that runs the bucket's option on tensors of a device, 'cpu' or 'gpu'; None is all-reduce, which codes nothing.
    `sharded`: between the phases each rank steps its shard.

    Raises PlanError for an option that does not exist or that the spec cannot travel by.
    """
    for task in bucket.option:
        if task.endswith(":gpu") and device == "cpu":
            raise PlanError(
                f"bucket {index} has task {task!r}, but its tensors are on the cpu, where no gpu encodes: write "
                f"{task.partition(':')[0]}:cpu."
            )
    spec = bucket.main_spec
    if sharded:
        check_sharded(index, bucket)
        return _sharded
    if bucket.option == ALL_REDUCE and not spec.encodes:
        return None
    collective = collective_of(bucket.option)
    if collective is not None:
        options = [collective.on(device, spec.rounds), *([] if spec.encodes else [collective.link_tasks])]
        if bucket.option in options:
            if spec.encodes and not collective.carries(spec):
                _check(index, bucket, True, collective.encodes_sums, collective.needs)
            return _of(collective, device, plain=not spec.encodes)
        if collective.own_words:
            raise PlanError(
                f"bucket {index} has spec {spec!r} and option {list(bucket.option)}, of which its tensors on the {device} run "
                f"{list(options[-1])} alone. Write that."
            )
    option = option_of(bucket.option)
    _check(index, bucket, option.compresses, all_alike=not codes_own_gradient(bucket.option))
    return partial(_routed, option.tasks, device)


def works_apart(bucket: Bucket, codec: Compressor, like: torch.Tensor) -> bool:
    """Whether kernels encode the bucket's gradients, which are like this one, where they lie, and decode the mean to there. May
    differ between ranks: they send the same bytes."""
    collective = collective_of(bucket.option)
    # what all-gather decodes is added where it lies, and sums are float32
    sums_elsewhere = collective is not None and collective.divisible
    return (
        collective is not None
        and collective.in_place
        and kind_of(like.device) == "cpu"
        and is_float(like.dtype)
        and (sums_elsewhere or like.dtype is torch.float32)
        and codec.spec.carries_uncompressed
        and codec.runs_in_c
        and codec.for_sum().runs_in_c
    )


def check_sharded(index: int, bucket: Bucket) -> None:
    """Raises PlanError unless ranks can step a shard each between the two phases of this bucket."""
    has = f"bucket {index} has spec {bucket.main_spec!r} and option {list(bucket.option)}, and the schedule has shard_optimizer"
    if any(spec.encodes for spec in bucket.specs):
        raise PlanError(
            f"{has}: then parameters are gathered, which must be exact and the same on all ranks. Use gw.Identity(), or "
            "gw.Pipelined() without shard_optimizer."
        )
    if bucket.option != COLLECTIVES["alltoall"].uncompressed:
        raise PlanError(
            f"{has}: then each rank must own one shard between the two phases. Use scheme='alltoall', or leave it out."
        )


def _check(
    index: int, bucket: Bucket, compresses: bool, all_alike: bool, needs: Sequence[str] = ("alltoall", "allgather")
) -> None:
    """`all_alike`: no encode is of a rank's own gradient alone. `needs`: what the spec must name among its schemes."""
    spec = bucket.main_spec
    has = f"bucket {index} has spec {bucket.main_spec!r} and option {list(bucket.option)}"
    if not compresses and spec.encodes:
        raise PlanError(f"{has}, which encodes nothing: the spec would silently do nothing. Write gw.Identity().")
    if compresses and not set(needs) <= set(spec.schemes):
        raise PlanError(
            f"{has}. What this spec encodes cannot be added as often as that takes: it travels by "
            f"{' or '.join(spec.schemes)} alone. Choose that scheme, or another spec."
        )
    if set(spec.state) - {"residual"} and all_alike:
        raise PlanError(
            f"{has}. The spec keeps {', '.join(spec.state)} of each rank's own gradient, and this option encodes sums of "
            "several. Choose one whose first encode comes before any sum, as alltoall, or another spec."
        )


def _sharded(codec: Any, piece: Piece, group: Group, index: int) -> Scheme:
    return ShardedSum(piece, group.rank, group.world_size)


def _of(collective: Collective, device: str, plain: bool) -> Make:
    """A collective, whose root is another rank for every bucket, so that no rank is the bottleneck of all."""
    runs = PlainTwoPhase if plain and collective is COLLECTIVES["alltoall"] else named(collective.runs)

    def make(codec: Any, piece: Piece, group: Group, index: int) -> Scheme:
        made: Scheme = runs(codec_on(device, codec, device), piece, group, index % group.world_size)
        return made

    return make


def _routed(tasks: tuple[str, ...], device: str, codec: Any, piece: Piece, group: Group, index: int) -> Scheme:
    codecs = {where: codec_on(where, codec, device) for where in {"cpu", device}}
    return Route(tasks, codecs, piece, group.grid, root=index % group.world_size)
