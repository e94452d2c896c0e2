"""The parameters in DDP's buckets: those that were trainable when DDP was made. Scripts may freeze some before the first step."""

from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

__all__ = ["HeldBuckets", "check_order", "future_for", "in_buckets"]

_Means = torch.futures.Future[torch.Tensor]


class HeldBuckets:
    """The buckets of the first step, held until the last one is there: in backward nothing else tells what DDP averages."""

    def __init__(self) -> None:
        self._held: list[tuple[GradBucket, _Means]] = []

    def add(
        self,
        bucket: GradBucket,
        learn: Callable[[Sequence[torch.Tensor]], object],
        average: Callable[[GradBucket], _Means],
    ) -> _Means:
        """Hold the bucket. With the last one call `learn` with the parameters of all buckets, and `average` for each of them."""
        if bucket.index() == 0:
            self._held = []  # of a backward that was left
        if not bucket.is_last():
            self._held.append((bucket, future_for(bucket.buffer())))
            return self._held[-1][1]
        held, self._held = self._held, []
        learn([parameter for each in (*(each for each, _ in held), bucket) for parameter in each.parameters()])
        found, last = [average(each) for each, _ in held], average(bucket)
        for (_, done), means in zip(held, found, strict=True):
            done.set_result(means.wait())
        return last


def check_order(order: Sequence[int], tensors: int) -> None:
    """Raises ValueError for a saved order that is not one of so many tensors."""
    if order and sorted(order) != list(range(tensors)):
        raise ValueError(
            f"the state has {len(order)} tensors, and DDP averages {tensors}: it was saved with another model, or other "
            "parameters were frozen when DDP was made. Load it into that model."
        )


def future_for(buffer: torch.Tensor) -> _Means:
    """A future for the means in a bucket's buffer."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


def in_buckets(model: DistributedDataParallel) -> list[torch.Tensor]:
    """The parameters in all buckets of DDP. Not in its hooks, which hold a lock."""
    buckets: list[GradBucket] = model.reducer._get_zeros_like_grad_buckets()
    return [parameter for bucket in buckets for parameter in bucket.parameters()]
