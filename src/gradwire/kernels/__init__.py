"""Kernels: the reference in plain torch, and faster kernels with the same bytes. This module chooses, once."""

import functools
import importlib
import warnings
from types import ModuleType

import torch

from gradwire.kernels import cpu, reference
from gradwire.kernels.checksum import crc32c
from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.scattered import Addresses, Scattered
from gradwire.kernels.segments import Segment, Segments, tensor_key

__all__ = [
    "Addresses",
    "LocalUpdate",
    "Scattered",
    "Segment",
    "Segments",
    "crc32c",
    "is_float",
    "kernels_for",
    "tensor_key",
]


@functools.cache
def kernels_for(device_type: str) -> ModuleType:
    """The fastest module of kernels for a device type that runs here, else the reference.

    Warns once if only the reference runs. Loads Triton only for CUDA.
    """
    cure = "Install a wheel of gradwire, or g++ and run `pip install --force-reinstall --no-deps` from its source"
    if device_type == "cpu":
        why = cpu.available()
        if why is None:
            return cpu
    elif device_type == "cuda":
        try:
            return importlib.import_module("gradwire.kernels.triton")
        except ImportError as error:
            why, cure = f"Triton does not load: {error}", "Run `pip install triton`"
    else:
        why = f"there are no {device_type} kernels in this version"
    warnings.warn(
        f"gradwire runs its plain-torch reference kernels on {device_type}: {why}. Results are the same; encoding and "
        f"decoding take about 300 times as long, so compression may cost more than it saves. {cure}, or "
        "plan=gw.Uniform(gw.Identity()).",
        stacklevel=2,
    )
    return reference


def is_float(dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors of this dtype."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16)
