"""The codec work of one step, timed when nothing else runs."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.collectives import Meter, SilentLink
from gradwire.exchange.exchange import Exchange

__all__ = ["codec_seconds"]


def codec_seconds(exchange: Exchange, repeats: int) -> float:
    """CPU seconds of one step's encodes and decodes: the median of `repeats`. Sends nothing; all is as before afterwards."""
    link: Any = SilentLink(exchange.group)
    seconds = []
    with exchange.memory.kept(), _kept(exchange.flats):
        for _ in range(repeats):
            meter = Meter()
            for task in sorted((t for tasks in exchange.executor.tasks for t in tasks), key=lambda t: t.phase):
                scheme = exchange.buckets[task.bucket].chunks[task.chunk]
                scheme.post(link, 0, (task.phase,))
                scheme.run(task.phase, link, meter, None)
            seconds.append(meter.codec_seconds)
    return statistics.median(seconds)


@contextmanager
def _kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
