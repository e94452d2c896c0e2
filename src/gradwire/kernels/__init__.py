"""Kernels: the reference in plain torch, and faster kernels with the same bytes. This module chooses, once, and runs lists."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from gradwire.core import Spec
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, everywhere, reference
from gradwire.kernels.checksum import crc32c
from gradwire.kernels.compressor import Compressor, Context, KernelCall, Program, WrappingCompressor, runs_of
from gradwire.kernels.cpu import in_memory
from gradwire.kernels.reference.indices import DAMAGED
from gradwire.kernels.reference.local_update import LocalUpdate
from gradwire.kernels.scattered import Addresses, Scattered
from gradwire.kernels.second_moment import Noise, lower_second_moments
from gradwire.kernels.segments import Batch, BatchPart, Segment, Segments, tensor_key

__all__ = [
    "Addresses", "Batch", "BatchPart", "Compressor", "Context", "KernelCall", "LocalUpdate", "Noise", "Program",
    "Scattered", "Segment", "Segments", "WrappingCompressor", "crc32c", "in_memory", "is_float", "kernels_for",
    "lower_second_moments", "refused", "run_calls", "runs_of", "tensor_key",
]  # fmt: skip


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


def run_calls(calls: Iterable[KernelCall]) -> None:
    """Run a list of kernel calls, one after another, each on the device of its tensors.

    Raises RuntimeError where a kernel refuses its arguments.

    >>> run_calls([("add_into", total := torch.ones(2), torch.ones(2)), ("multiply", total, 3.0)])
    >>> total
    tensor([6., 6.])
    """
    for kernel, *arguments in calls:
        if not isinstance(kernel, str):
            kernel(*arguments)
            continue
        kinds = set(map(type, arguments))  # microseconds count here: small payloads take no more
        if Scattered in kinds:  # only C++ reads these
            cpu.run([cpu.call(kernel, *arguments)])
        elif kernel == "decode_sum":
            terms, payloads, *others = arguments
            kernels = kernels_for(payloads.device.type)
            if hasattr(kernels, "TAKES_BATCHES"):
                kernels.decode_sum(terms, payloads, *others)
            else:
                run_calls(terms)
        elif kernel in _EVERYWHERE:
            getattr(everywhere, kernel)(*arguments)
        else:
            first = next(each for each in arguments if isinstance(each, torch.Tensor))
            kernels = kernels_for("cpu" if first.is_cpu else first.device.type)
            if Batch in kinds and not hasattr(kernels, "TAKES_BATCHES"):
                for each in _parts_of(kernel, arguments):
                    getattr(kernels, kernel)(*each)
            else:
                getattr(kernels, kernel)(*arguments)


_EVERYWHERE = frozenset(everywhere.__all__)


def _parts_of(kernel: str, arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of a call for each payload of a batch."""
    names = list(inspect.signature(getattr(reference, kernel)).parameters)
    batch = next(each for each in arguments if isinstance(each, Batch))
    for part in batch.parts:
        elements, of_payload = slice(part.first, part.end), slice(part.byte, part.end_byte)
        cut = {"src": elements, "dst": elements, "residual": elements, "payload": of_payload}
        yield [
            part.segments if each is batch else each[cut[name]] if name in cut and each is not None else each
            for name, each in zip(names, arguments, strict=True)
        ]


class refused:
    """Context that raises PayloadError where a kernel finds bytes that no encode of this spec writes. No generator: it is entered
    in each decode that Python runs."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and DAMAGED in str(error):
            raise PayloadError(
                f"{DAMAGED}: no encode of {self._spec!r} writes these bytes, and nothing was decoded. Ranks run different plans "
                "or versions, or the bytes were changed. Run the same plan and version on all ranks."
            ) from error


def is_float(dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors of this dtype."""
    return dtype in cpu.FLOATS
