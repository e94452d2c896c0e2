"""The norm of the mean gradients before anything is gathered: that of the shards which ranks own."""

from collections.abc import Iterable
from functools import partial

import torch

from gradwire.collectives import Lane, Link, TwoPhase, transfer
from gradwire.core.specs import Identity
from gradwire.exchange import Exchange

__all__ = ["clip_coefficient", "exact_shards", "norm_over_ranks"]


def exact_shards(exchange: Exchange) -> list[torch.Tensor]:
    """This rank's shards of all mean gradients, once the reduce phases are done. Empty where what is gathered may differ from
    them: where a bucket is compressed, has no shards, or sums in another dtype than its gradients'. So on all ranks alike."""
    shards = []
    for buffers in exchange.buckets:
        plain = isinstance(buffers.bucket.spec_of(buffers.bucket.tensors[0]), Identity)
        for chunk in buffers.chunks:
            if not (plain and isinstance(chunk, TwoPhase) and chunk.total.dtype == buffers.flat.dtype):
                return []
            shards.append(chunk.total)
    return shards


def norm_over_ranks(control: Lane, shards: Iterable[torch.Tensor] | None, power: float) -> float | None:
    """The norm of all ranks' shards as one vector; None on all ranks where one of them passed None. `power`, above 0 and maybe
    inf, says which norm. Collective; raises LinkError."""
    own = None
    if shards is not None:
        own = float(_joined([torch.linalg.vector_norm(shard, power, dtype=torch.float64) for shard in shards], power))
    return control.submit(partial(_norm, own=own, power=power)).result()


def _norm(link: Link, own: float | None, power: float) -> float | None:
    # the norm of each rank's shards, and last whether a rank passed none
    told = torch.zeros(link.world_size + 1, dtype=torch.float64)
    if own is None:
        told[-1] = 1.0
    else:
        told[link.rank] = own
    with transfer():
        link.all_reduce(told).wait()
    return None if told[-1] else float(_joined(list(told[:-1]), power))


def _joined(norms: list[torch.Tensor], power: float) -> torch.Tensor:
    """The norm of parts that have these norms."""
    return torch.linalg.vector_norm(torch.stack(norms), power) if norms else torch.zeros((), dtype=torch.float64)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied with, as by torch.nn.utils.clip_grad_norm_: at most 1, and NaN for NaN."""
    return float((max_norm / (torch.tensor(norm, dtype=torch.float64) + 1e-6)).clamp(max=1.0))
