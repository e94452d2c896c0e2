"""Kernels of a few torch operations each, which serve every device. C++ has its own of the names in `cpu.ROWS`."""

import torch
from torch import Tensor

from gradwire.kernels.segments import Segments, State

__all__ = [
    "add_into", "copy_into", "gather_rows", "multiply", "scatter_rows", "truncate_decode", "truncate_encode", "zero_nonfinite",
]  # fmt: skip


def copy_into(into: Tensor, source: Tensor) -> None:
    """Copy values, in the dtype of `into`."""
    into.copy_(source)


def add_into(into: Tensor, source: Tensor) -> None:
    into.add_(source)


def multiply(values: Tensor, factor: float) -> None:
    values.mul_(factor)


def zero_nonfinite(values: Tensor) -> None:
    """Replace NaN and Inf by zero in place."""
    values.nan_to_num_(0.0, 0.0, 0.0)


def gather_rows(flat: Tensor, segments: Segments, add: bool, packed: Tensor) -> None:
    """Copy the elements of the segments to `packed`, one after another, or add them."""
    values = flat.index_select(0, _elements_of(segments))
    if add:
        packed.add_(values)
    else:
        packed.copy_(values)


def scatter_rows(packed: Tensor, segments: Segments, add: bool, flat: Tensor) -> None:
    """Copy packed values to the elements of the segments, or add them."""
    if add:
        flat.index_add_(0, _elements_of(segments), packed.to(flat.dtype))
    else:
        flat.index_copy_(0, _elements_of(segments), packed.to(flat.dtype))


def _elements_of(segments: Segments) -> Tensor:
    """int64 indices of the elements of the segments in the flat buffer, made once."""
    if (found := segments.launches.get("elements")) is None:
        ranges = [torch.arange(row.offset, row.offset + row.numel) for row in segments.rows]
        found = segments.launches["elements"] = torch.cat(ranges).to(segments.device)
    assert isinstance(found, Tensor)
    return found


def truncate_encode(src: Tensor, residual: State, segments: Segments, kept: int, payload: Tensor) -> None:
    """Send the first `kept` elements of all segments, in their order and in the dtype of src."""
    for where, sent, to in _sent_runs(segments, kept, src.element_size()):
        v = src[where] if residual is None else src[where].to(torch.float32) + residual[where]
        value = v.to(src.dtype)
        payload[to].copy_(value[:sent].view(torch.uint8))
        if residual is not None:
            rest = torch.cat([v[:sent] - value[:sent].to(torch.float32), v[sent:]])
            residual[where] = torch.where(value.isfinite(), rest, residual[where])


def truncate_decode(payload: Tensor, segments: Segments, dtype: torch.dtype, kept: int, add: bool, dst: Tensor) -> None:
    """Write or add the sent elements; the others are zero."""
    for where, sent, run in _sent_runs(segments, kept, dtype.itemsize):
        value, to = payload[run].clone().view(dtype), dst[where]
        if add:
            to[:sent].add_(value)
        else:
            to[:sent].copy_(value)
            to[sent:].zero_()


def _sent_runs(segments: Segments, kept: int, itemsize: int) -> list[tuple[slice, int, slice]]:
    """For each segment: its place in the flat buffer, the number of sent elements, and their place in the payload."""
    runs, at = [], 0
    for row in segments.rows:
        sent = min(kept - at // itemsize, row.numel)
        runs.append((slice(row.offset, row.offset + row.numel), sent, slice(at, at + sent * itemsize)))
        at += sent * itemsize
    return runs
