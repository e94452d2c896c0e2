"""Writes a recorded run as scalars for TensorBoard."""

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

from gradwire.core import make_folder
from gradwire.errors import GradwireError, WriteError
from gradwire.record.run import Run


def export(run: Run, folder: Path) -> None:
    """Write event files with step times, loss, and the bits and errors of each tensor.

    Raises GradwireError if the package tensorboard is not installed, WriteError if the files cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise GradwireError(
            f"--tensorboard {folder} needs tensorboard, which cannot be imported ({error}). Run: pip install tensorboard"
        ) from error
    make_folder(folder)
    try:
        with SummaryWriter(str(folder)) as writer:
            for name, value, step in scalars(run):
                writer.add_scalar(name, value, step)
    except OSError as error:
        raise WriteError(
            f"{folder}: the files for TensorBoard cannot be written: {error.strerror or error}. Choose another folder."
        ) from error


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
