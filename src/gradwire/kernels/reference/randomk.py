"""Random-k: a run of n elements has k stretches. Stretch i reaches from i * n // k to (i + 1) * n // k. The element drawn from a
stretch is its start + (word * length >> 32), where word is the i-th word of the random stream keyed by the run.

Without a residual, each value is multiplied by the length of its stretch. If a stretch holds a value that cannot be sent, NaN is
sent for the stretch, and its residual does not change.
"""

import torch
from torch import Tensor

from gradwire.core import kept_of
from gradwire.kernels.reference.numbers import given, narrow
from gradwire.kernels.reference.random import random_words, stream_key
from gradwire.kernels.reference.sparse import write_sparse
from gradwire.kernels.segments import Segment, Segments, State

STREAM_BYTES = 8


def randomk_encode(src: Tensor, residual: State, segments: Segments, stream: Tensor, ratio: float, payload: Tensor) -> None:
    """Encode src (float32, bfloat16 or float16, flat) into payload (uint8): 8 bytes with the key of the stream of (seed, step,
    encode, rank), then the drawn values in the dtype of src.

    With a residual (float32, as long as src) values are drawn from src + residual, and the residual keeps the unsent part.
    """
    base = stream_key(stream.tolist())
    payload[:STREAM_BYTES] = torch.tensor(list(base.to_bytes(STREAM_BYTES, "little")), dtype=torch.uint8)
    values = _gather(src, residual, segments, base, ratio, src.dtype)
    payload[STREAM_BYTES:] = values.view(torch.uint8)


def randomk_decode(payload: Tensor, segments: Segments, dtype: torch.dtype, ratio: float, add: bool, dst: Tensor) -> None:
    """Write the values of payload to dst (flat), with zeros for unsent elements, or add the values. dtype: the values' dtype."""
    base = int.from_bytes(bytes(payload[:STREAM_BYTES].tolist()), "little")
    _scatter(payload[STREAM_BYTES:].clone().view(dtype).to(torch.float32), segments, base, ratio, add, dst)


def gather_random(src: Tensor, residual: State, segments: Segments, stream: Tensor, ratio: float, values: Tensor) -> None:
    """Draw values as `randomk_encode` does, without a key and as float32. All ranks and all encodes of a step draw the same
    elements."""
    values.copy_(_gather(src, residual, segments, _common(stream), ratio, torch.float32))


def scatter_random(values: Tensor, segments: Segments, stream: Tensor, ratio: float, add: bool, dst: Tensor) -> None:
    """Write values (float32) to the elements that `gather_random` drew, and zeros elsewhere, or add the values."""
    _scatter(values, segments, _common(stream), ratio, add, dst)


def _gather(src: Tensor, residual: State, segments: Segments, base: int, ratio: float, dtype: torch.dtype) -> Tensor:
    out = [torch.empty(0, dtype=dtype, device=src.device)]
    for row in segments.rows:
        where = slice(row.offset, row.offset + row.numel)
        v = given(src, residual, where)
        start, place = _draw(row, base, ratio, src.device)
        if not place.numel():
            continue
        stretch = torch.repeat_interleave(start.diff())
        bad = torch.zeros_like(place).index_add_(0, stretch, (~narrow(v, dtype).isfinite()).to(torch.int64)) > 0
        value = v[place] if residual is not None else v[place] * start.diff().to(torch.float32)
        sent = narrow(torch.where(bad | value.isnan(), float("nan"), value), dtype)
        if residual is not None:
            v[place] = value - torch.where(bad, 0.0, sent.to(torch.float32))
            residual[where] = torch.where(bad[stretch], residual[where], v)
        out.append(sent)
    return torch.cat(out)


def _scatter(values: Tensor, segments: Segments, base: int, ratio: float, add: bool, dst: Tensor) -> None:
    at = 0
    for row in segments.rows:
        _, place = _draw(row, base, ratio, dst.device)
        where = torch.arange(row.offset, row.offset + row.numel, device=dst.device)
        write_sparse(dst, where, place, values[at : at + place.numel()], add)
        at += place.numel()


def _draw(row: Segment, base: int, ratio: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The begins of the k stretches of a run and the end of the last one, k + 1 elements; and the element drawn from each."""
    k = kept_of(row.numel, ratio)
    i = torch.arange(k + 1, device=device)
    start = i * row.numel // k if k else i * 0
    key = stream_key([row.key, row.first], base)
    return start, start[:-1] + (random_words(i[:-1], key) * start.diff() >> 32)


def _common(stream: Tensor) -> int:
    return stream_key([*stream.tolist()[:2], 0, 0])
