"""Top-k, Threshold, DGC and Block Top-k. A payload holds the values of the sent elements in the gradient's dtype, group after
group, then the indices of each group (see `indices`).

The k elements of largest magnitude are sent; of equal elements, the first ones. All NaN count as one magnitude above Inf. A value
that rounds to Inf or NaN in the gradient's dtype is sent as such, and its residual and momentum do not change.
"""

import torch
from torch import Tensor

from gradwire.core import index_bytes, kept_of
from gradwire.kernels.reference.indices import DAMAGED, read_indices, write_indices
from gradwire.kernels.reference.numbers import bits_of, equal_blocks, given, narrow, norms
from gradwire.kernels.segments import Segments, State

NAN_KEY = 0x7F800001


def topk_encode(
    src: Tensor, residual: State, segments: Segments, ratio: float, together: bool, threshold: float, payload: Tensor
) -> None:
    """Encode src (float32, bfloat16 or float16, flat) into payload (uint8).

    together: all segments, in their order, are one group; else each segment is a group. Of each group `kept_of(numel, ratio)`
    elements are sent, those below the threshold (0 for none) as zeros. With a residual (float32, as long as src)
    src + residual is encoded, and the residual keeps the unsent part.
    """
    values, indices = [], []
    least = torch.tensor(threshold, dtype=torch.float32)
    for where in _groups(segments, together):
        v = given(src, residual, where)
        index = largest(v.unsqueeze(0), kept_of(v.numel(), ratio))[0]
        sent = narrow(_one_nan(torch.where(v[index].abs() < least.to(v.device), 0.0, v[index])), src.dtype)
        if residual is not None:
            residual[where] = _unsent(v, residual[where], index, sent)
        values.append(sent)
        indices.append(write_indices(index, v.numel()))
    _join(payload, values, indices)


def dgc_encode(
    src: Tensor, residual: State, momentum: State, segments: Segments, ratio: float, decay: float, bound: float, payload: Tensor
) -> None:
    """Encode each segment as DGC does: momentum = decay * momentum + gradient, residual = residual + momentum. The largest
    elements of the residual are sent, and cleared in momentum and residual.

    The gradient of a segment with a norm above `bound` (0 for none) is first scaled to the norm `bound`.
    """
    values, indices = [], []
    factor = torch.tensor(decay, dtype=torch.float32, device=src.device)
    for where in _groups(segments, together=False):
        v = src[where].to(torch.float32) * _clipping(src[where], bound)
        if residual is not None and momentum is not None:
            velocity = factor * momentum[where] + v
            v = residual[where] + velocity
        index = largest(v.unsqueeze(0), kept_of(v.numel(), ratio))[0]
        sent = narrow(_one_nan(v[index]), src.dtype)
        if residual is not None and momentum is not None:
            carried = narrow(v, src.dtype).isfinite()
            velocity[index] = 0.0
            momentum[where] = torch.where(carried, velocity, momentum[where])
            residual[where] = _unsent(v, residual[where], index, sent)
        values.append(sent)
        indices.append(write_indices(index, v.numel()))
    _join(payload, values, indices)


def topk_decode(
    payload: Tensor, segments: Segments, dtype: torch.dtype, ratio: float, together: bool, add: bool, dst: Tensor
) -> None:
    """Write the values of payload to dst (flat), with zeros for unsent elements, or add the values. dtype: the values' dtype.

    Raises RuntimeError, and leaves dst unchanged, if a group has not exactly its number of ascending indices.
    """
    groups = _groups(segments, together)
    kept = [kept_of(where.numel(), ratio) for where in groups]
    at = sum(kept) * dtype.itemsize
    values = payload[:at].clone().view(dtype).to(torch.float32).split(kept)
    indices = []
    for k, where in zip(kept, groups, strict=True):
        size = index_bytes(k, where.numel())
        indices.append(read_indices(payload[at : at + size], k, where.numel()))
        at += size
    for value, index, where in zip(values, indices, groups, strict=True):
        write_sparse(dst, where, index, value, add)


def block_topk_encode(src: Tensor, residual: State, segments: Segments, ratio: float, block: int, payload: Tensor) -> None:
    """Encode the largest elements of each block, with a byte for each element's place in its block; else as `topk_encode`."""
    values, places = [], []
    for where in _groups(segments, together=False):
        for at, count, n in equal_blocks(where.numel(), block):
            run = where[at : at + count * n]
            v = given(src, residual, run)
            place = largest(v.reshape(count, n), kept_of(n, ratio))
            index = (place + n * torch.arange(count, device=src.device).unsqueeze(1)).reshape(-1)
            sent = narrow(_one_nan(v[index]), src.dtype)
            if residual is not None:
                residual[run] = _unsent(v, residual[run], index, sent)
            values.append(sent)
            places.append(place.reshape(-1).to(torch.uint8))
    _join(payload, values, places)


def block_topk_decode(
    payload: Tensor, segments: Segments, dtype: torch.dtype, ratio: float, block: int, add: bool, dst: Tensor
) -> None:
    """Decode as `topk_decode` does."""
    numel = payload.numel() // (dtype.itemsize + 1)
    values = payload[: numel * dtype.itemsize].clone().view(dtype).to(torch.float32)
    places, start, writes = payload[numel * dtype.itemsize :].to(torch.int64), 0, []
    for where in _groups(segments, together=False):
        for at, count, n in equal_blocks(where.numel(), block):
            k = kept_of(n, ratio)
            place = places[start : start + count * k].reshape(count, k)
            if bool((place[:, -1] >= n).any()) or not bool((place.diff(dim=1) > 0).all()):
                raise RuntimeError(DAMAGED)
            index = (place + n * torch.arange(count, device=dst.device).unsqueeze(1)).reshape(-1)
            writes.append((where[at : at + count * n], index, values[start : start + count * k]))
            start += count * k
    for where, index, value in writes:
        write_sparse(dst, where, index, value, add)


def largest(v: Tensor, k: int) -> Tensor:
    """The ascending indices, shape (rows, k), of the k largest magnitudes in each row of v, shape (rows, n)."""
    key = (bits_of(v) & 0x7FFFFFFF).clamp(max=NAN_KEY)
    return key.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values


def write_sparse(dst: Tensor, where: Tensor, index: Tensor, value: Tensor, add: bool) -> None:
    """Write the values to dst[where] at the indices, with zeros elsewhere, or add them there."""
    at = where[index]
    if add:
        dst[at] = dst[at] + value
    else:
        dst[where] = 0
        dst[at] = narrow(value, dst.dtype)


def _groups(segments: Segments, together: bool) -> list[Tensor]:
    """The places in the flat buffer of the elements of each group."""
    device = segments.device
    runs = [torch.arange(row.offset, row.offset + row.numel, device=device) for row in segments.rows]
    return [torch.cat(runs) if runs else torch.arange(0, device=device)] if together else runs


def _unsent(v: Tensor, old: Tensor, index: Tensor, sent: Tensor) -> Tensor:
    """The new residual: v minus the values `sent` at the indices; the old residual for elements that the dtype of `sent` cannot
    hold."""
    rest = v.clone()
    rest[index] = v[index] - torch.where(v[index].isfinite(), sent.to(torch.float32), 0.0)
    return torch.where(narrow(v, sent.dtype).isfinite(), rest, old)


def _one_nan(v: Tensor) -> Tensor:
    return torch.where(v.isnan(), torch.full_like(v, float("nan")), v)


def _clipping(src: Tensor, bound: float) -> Tensor:
    """The factor that brings the norm back to the bound, if the norm is larger and finite."""
    one = torch.ones((), dtype=torch.float32, device=src.device)
    if not bound or not src.numel():
        return one
    norm = norms(src.unsqueeze(0))[0]
    return torch.where((norm > bound) & (norm < float("inf")), (bound / norm).to(torch.float32), one)


def _join(payload: Tensor, values: list[Tensor], indices: list[Tensor]) -> None:
    parts = [part.contiguous().view(torch.uint8) for part in (*values, *indices)]
    payload.copy_(torch.cat(parts) if parts else payload[:0])
