"""Uncompressed tensors in the payloads of others: exact, and the others have the bytes that they have alone."""

import pytest
import torch

from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.compressors.mixed_precision import BesideCompressor
from gradwire.core.payload import RAW, SCALE_ALIGN
from gradwire.core.specs import QSGD, Spec, TopK, Truncate, example_specs
from gradwire.errors import FormatError
from gradwire.kernels.segments import Segment, Segments, tensor_key

NUMELS = (1, 300, 7, 4097, 128)
UNCOMPRESSED = (0, 2, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CARRIERS = [spec for spec in (*example_specs(), Truncate(4.0, True)) if spec.carries_uncompressed and spec != Truncate(4.0)]


def segments_of(numels: tuple[int, ...], bits: int, uncompressed: tuple[int, ...] = ()) -> Segments:
    rows, at = [], 0
    for index, numel in enumerate(numels):
        of_row = RAW if index in uncompressed else bits
        rows.append(Segment(at, numel, tensor_key(f"tensor {index}"), 0, of_row))
        at += numel
    return Segments.of(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", CARRIERS, ids=repr)
def test_both_kinds_are_as_they_are_alone(spec: Spec, dtype: torch.dtype) -> None:
    inner = compressor_for(spec)
    codec, context = BesideCompressor(inner), Context(torch.tensor([0, 3, 0, 1]))
    mixed = segments_of(NUMELS, spec.element_bits, UNCOMPRESSED)
    coded = Segments.of([row for row in mixed.rows if row.bits != RAW])
    raw = torch.cat([torch.arange(row.offset, row.offset + row.numel) for row in mixed.rows if row.bits == RAW])
    src = torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(1)).to(dtype)
    states = [[torch.full((src.numel(),), 0.25) for _ in spec.state] for _ in range(2)]

    alone = torch.empty(inner.payload_bytes(coded, dtype), dtype=torch.uint8)
    inner.encode(src, states[0], coded, context, alone)
    payload = torch.full((codec.payload_bytes(mixed, dtype),), 255, dtype=torch.uint8)
    codec.encode(src, states[1], mixed, context, payload)
    assert torch.equal(payload[: alone.numel()], alone)
    assert payload.numel() == -(-alone.numel() // SCALE_ALIGN) * SCALE_ALIGN + raw.numel() * dtype.itemsize

    wanted, found = torch.zeros(src.numel()), torch.full((src.numel(),), torch.nan)
    inner.decode(alone, coded, dtype, False, wanted, context)
    wanted[raw] = src[raw].float()
    codec.decode(payload, mixed, dtype, False, found, context)
    assert torch.equal(found, wanted)
    codec.decode(payload, mixed, dtype, True, found, context)
    assert torch.equal(found[raw], 2 * wanted[raw])
    for own, other in zip(*states, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("spec", CARRIERS, ids=repr)
@pytest.mark.parametrize("uncompressed", [(), (0, 1)])
def test_a_shard_may_have_one_kind_alone(spec: Spec, uncompressed: tuple[int, ...]) -> None:
    codec, src = BesideCompressor(compressor_for(spec)), torch.randn(130)
    segments = segments_of((2, 128), spec.element_bits, uncompressed)
    payload = torch.empty(codec.payload_bytes(segments, src.dtype), dtype=torch.uint8)
    context = Context(torch.tensor([0, 3, 0, 1]))
    codec.encode(src, [torch.zeros(130) for _ in spec.state], segments, context, payload)
    found = torch.empty(130)
    codec.decode(payload, segments, src.dtype, False, found, context)
    assert torch.equal(found, src) == bool(uncompressed)


def test_a_payload_that_begins_anywhere_is_decoded() -> None:
    codec, src = BesideCompressor(compressor_for(QSGD(bits=8))), torch.randn(10)
    segments = segments_of((2, 8), 0, (0, 1))
    memory = torch.empty(41, dtype=torch.uint8)
    context, found = Context(torch.tensor([0, 0, 0, 0])), torch.empty(10)
    codec.encode(src, [], segments, context, payload := memory[1:].clone())
    memory[1:] = payload
    codec.decode(memory[1:], segments, src.dtype, False, found, context)
    assert torch.equal(found, src)


def test_a_bucket_of_a_compressor_that_takes_whole_buckets_is_refused() -> None:
    from gradwire.core import Identity, TensorInfo
    from gradwire.core.plan import Bucket
    from gradwire.plan import Uniform

    option = Uniform(TopK(0.1)).plan([TensorInfo("a", (3,), "float32")]).buckets[0].option
    with pytest.raises(FormatError, match="whole buckets"):
        Bucket(tensors=("a", "b"), spec={"a": TopK(0.1, per="bucket"), "b": Identity()}, option=option)
    Bucket(tensors=("a", "b"), spec={"a": Identity(), "b": TopK(0.1)}, option=option)
