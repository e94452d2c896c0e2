"""The codec work of one step, timed when nothing else runs."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.collectives import Group, Meter, SilentLink
from gradwire.engine.executor import Executor
from gradwire.engine.memory import Remembered

__all__ = ["codec_seconds"]


def codec_seconds(executor: Executor, memory: Remembered, group: Group, repeats: int) -> float:
    """CPU seconds of one step's encodes and decodes: the median of `repeats`. Sends nothing; all is as before afterwards."""
    link: Any = SilentLink(group)
    seconds = []
    with memory.kept(), _kept([buffers.flat for buffers in executor.buckets]):
        for _ in range(repeats):
            meter = Meter()
            for task in sorted((t for tasks in executor.tasks for t in tasks), key=lambda t: t.phase):
                scheme = executor.buckets[task.bucket].chunks[task.chunk]
                scheme.post(link, 0)
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
