"""Writes a recorded run as scalars for TensorBoard."""

import os
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from gradwire.core import make_folder, write_whole
from gradwire.errors import GradwireError
from gradwire.record.run import Run


@contextmanager
def folder_for(folder: Path) -> Iterator[None]:
    """Make the folder of an export, before the work that comes first. After an error inside, the folders that were made are gone.

    Raises GradwireError if the package tensorboard is not installed, WriteError if the folder cannot be made.
    """
    _tensorboard(folder)
    missing = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        make_folder(folder)
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise


def export(run: Run, folder: Path) -> None:
    """Write an event file with step times, loss, and the bits and errors of each tensor: the whole file, or none.

    Raises GradwireError if the package tensorboard is not installed, WriteError if the file cannot be written.
    """
    with folder_for(folder):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        write_whole(folder / name, _events(run, *_tensorboard(folder)))


def _tensorboard(folder: Path) -> tuple[Any, Any, Any]:
    """The classes of TensorBoard that its own writer uses too. That one writes on a thread, whose errors nobody catches."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise GradwireError(
            f"--tensorboard {folder} needs tensorboard, which cannot be imported ({error}). Run: pip install tensorboard"
        ) from error
    return Event, Summary, RecordWriter


def _events(run: Run, event: Any, summary: Any, record_writer: Any) -> bytes:
    """The bytes of an event file."""
    written, now = BytesIO(), time.time()
    writer = record_writer(written)
    writer.write(event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    for name, value, step in scalars(run):
        values = summary(value=[summary.Value(tag=name, simple_value=value)])
        writer.write(event(wall_time=now, step=step, summary=values).SerializeToString())
    return written.getvalue()


def scalars(run: Run) -> Iterator[tuple[str, float, int]]:
    """The name, the value and the optimizer step of each scalar."""
    for step, at, local_steps in zip(run.steps, run.optimizer_steps, run.local_steps, strict=True):
        for name in ("step_us", "exposed_us", "codec_us"):
            yield name, getattr(step, name) / local_steps, round(at)
        if step.loss is not None:
            yield "loss", step.loss, round(at)
    exchanges, last_steps, local = [step.step for step in run.steps], run.optimizer_steps, run.local_steps

    def optimizer_step(exchange: int) -> int:
        """The last optimizer step of an exchange, of which a long record may have no step."""
        if not exchanges:
            return exchange
        place = min(bisect_left(exchanges, exchange), len(exchanges) - 1)
        return round(last_steps[place] + local[place] * (exchange - exchanges[place]))

    for tensor in run.tensors:
        for name in ("bits", "error"):
            for exchange, value in getattr(tensor, name):
                yield f"{name}/{tensor.name}", value, optimizer_step(exchange)
