"""Writes a recorded run as scalars for TensorBoard."""

from pathlib import Path
from typing import Any

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
        _write(run, SummaryWriter(str(folder)))
    except OSError as error:
        raise WriteError(
            f"{folder}: the files for TensorBoard cannot be written: {error.strerror or error}. Choose another folder."
        ) from error


def _write(run: Run, summary: Any) -> None:
    with summary as writer:
        for step, at, local_steps in zip(run.steps, run.optimizer_steps, run.local_steps, strict=True):
            for name in ("step_us", "exposed_us", "codec_us"):
                writer.add_scalar(name, getattr(step, name) / local_steps, round(at))
            if step.loss is not None:
                writer.add_scalar("loss", step.loss, round(at))
        for tensor in run.tensors:
            for name in ("bits", "error"):
                for at, value in getattr(tensor, name):
                    writer.add_scalar(f"{name}/{tensor.name}", value, at)
