"""Compressors that send some of the elements: what each promises beside its law, with buffers as an engine holds them."""

import math

import pytest
import torch
from test_compressors import DTYPES, Codec, gradient, squared

from gradwire.compressors import compressor_for
from gradwire.compressors.dgc import DGCCompressor
from gradwire.compressors.randomk import CommonRandomKCompressor
from gradwire.core.specs import DGC, QSGD, BlockTopK, ErrorFeedback, RandomK, Spec, Threshold, TopK, Truncate
from gradwire.errors import PayloadError, PlanError, SpecError
from gradwire.kernels.segments import Segment, Segments

NUMELS = (1, 7, 0, 123, 4097)
NUMEL = sum(NUMELS)
PLAIN: list[Spec] = [
    TopK(0.01),
    TopK(0.4),
    TopK(0.01, selection="sampled"),
    TopK(0.02, per="bucket"),
    Threshold(0.02),
    Threshold(0.5, 0.1),
    TopK(0.02, values=QSGD(bits=4)),
    BlockTopK(0.01),
    BlockTopK(0.3, 32),
    RandomK(0.05),
    RandomK(0.05, indices="own"),
    Truncate(4.0, unsafe=True),
]
SPECS: list[Spec] = [*PLAIN, *(ErrorFeedback(spec) for spec in PLAIN), DGC(), DGC(clip=1.0, selection="sampled")]
each = pytest.mark.parametrize("spec", SPECS, ids=repr)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_payloads_have_the_declared_size_and_decode_alike_in_every_way(spec: Spec, dtype: torch.dtype) -> None:
    codec = Codec(spec, NUMELS, dtype)
    codec.encode(gradient(NUMEL, dtype))
    assert codec.decode().count_nonzero() > 0
    assert torch.equal(codec.decode(dtype=dtype), codec.decode().to(dtype))
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), codec.payload])[1:]
    assert torch.equal(codec.decode(moved), codec.decode())
    for wrong in (codec.payload[:-1], torch.cat([codec.payload, codec.payload[:1]])):
        with pytest.raises(PayloadError, match="is not one of"):
            codec.decode(wrong)


@each
def test_nothing_at_all(spec: Spec) -> None:
    for numels in ((), (0,), (0, 0)):
        codec = Codec(spec, numels)
        assert codec.payload.numel() == (8 if RandomK(0.05, indices="own") in (spec, getattr(spec, "inner", spec)) else 0)
        assert codec(torch.empty(0)).numel() == 0


FED_BACK = [
    TopK(0.01),
    TopK(0.05, values=QSGD(bits=2)),
    TopK(0.4),
    BlockTopK(0.1),
    RandomK(0.1, indices="own"),
    Threshold(0.01),
]


@pytest.mark.parametrize("spec", FED_BACK, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_feedback_loses_nothing(spec: Spec, dtype: torch.dtype) -> None:
    codec, given = Codec(ErrorFeedback(spec), NUMELS, dtype), torch.zeros(NUMEL, dtype=torch.float64)
    sent = torch.zeros_like(given)
    assert codec.residual is not None
    for step in range(30):
        x = gradient(NUMEL, dtype, seed=step)
        given += x.double()
        sent += codec(x, step).double()
    assert torch.allclose(given - sent, codec.residual.double(), atol=1e-5)
    assert squared(codec.residual) > 0


@pytest.mark.parametrize("spec", [TopK(0.05), TopK(0.05, "sampled"), BlockTopK(0.05)], ids=repr)
def test_at_least_the_ratio_of_the_norm_is_kept(spec: Spec) -> None:
    for x in (gradient(4097), torch.ones(4097), torch.full((4097,), -2.0)):
        lost = Codec(spec, (4097,))(x) - x
        assert squared(lost) <= (1 - spec.law.delta) * squared(x) * (1 + 1e-9)


def test_a_sampled_selection_sends_the_largest_too() -> None:
    x = gradient(70001)
    assert torch.equal(Codec(TopK(0.01, "sampled"), (70001,))(x), Codec(TopK(0.01), (70001,))(x))


@pytest.mark.parametrize("spec", [TopK(0.01), Threshold(0.5, 0.1), DGC(), BlockTopK(0.05)], ids=repr)
def test_damaged_indices_name_the_spec_and_leave_the_sum_alone(spec: Spec) -> None:
    codec, total = Codec(spec, (4097,)), torch.ones(4097)
    payload = codec.encode(gradient(4097)).clone()
    payload[-40:] = 255
    with pytest.raises(PayloadError, match=r"indices are damaged: no encode of \w+\("):
        codec.compressor.decode(payload, codec.segments, torch.float32, True, total, codec.context)
    assert torch.equal(total, torch.ones(4097))


# ---- DGC


def test_dgc_gathers_momentum_until_an_element_is_sent() -> None:
    """A constant gradient: u of an unsent element is a geometric series, v their sum; what is sent starts anew."""
    codec, x = Codec(DGC(ratio=0.1, momentum=0.5), (10,)), torch.arange(1, 11).float()
    assert codec.compressor.state == ("residual", "momentum")
    residual, momentum = codec.state
    assert codec(x).nonzero().flatten().tolist() == [9]
    assert codec(x, 1)[8] == 9 + 9 * 1.5
    assert momentum[:8].tolist() == [1.5 * i for i in range(1, 9)]
    assert residual[:8].tolist() == [2.5 * i for i in range(1, 9)]
    assert (momentum[8], residual[8], momentum[9], residual[9]) == (0, 0, 10, 10)


def test_dgc_without_memory_is_top_k() -> None:
    x, codec = gradient(NUMEL), Codec(DGC(ratio=0.05), NUMELS)
    codec.state = []
    assert torch.equal(codec(x), Codec(TopK(0.05), NUMELS)(x))


def test_dgc_clips_each_tensor_by_the_norm_of_the_raw_gradient() -> None:
    """Gradients were divided by the ranks: a raw norm of 40 on 4 ranks is cut back to clip / sqrt(4)."""
    compressor = compressor_for(DGC(ratio=1.0, clip=3.0))
    assert isinstance(compressor, DGCCompressor) and compressor.bound == 3.0
    codec, raw = (
        Codec(DGC(ratio=1.0, clip=3.0), (100, 100)),
        torch.cat([torch.full((100,), 4.0), torch.full((100,), 0.01)]),
    )
    codec.compressor = compressor.summing(1, 4)
    sent = codec(raw / 4)
    assert float(sent[:100].norm()) * 4 == pytest.approx(3.0 / math.sqrt(4))
    assert torch.equal(sent[100:], raw[100:] / 4)


def test_dgc_encodes_sums_as_top_k_with_feedback() -> None:
    compressor = compressor_for(DGC(ratio=0.02, clip=1.0, selection="sampled"))
    again = compressor.for_sum()
    assert compressor.encodes_own_part and not again.encodes_own_part
    assert again.spec == ErrorFeedback(TopK(0.02, "sampled"))
    assert again.state == ("residual",)


# ---- Random-k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feedback", [False, True])
def test_common_draws_are_summed_on_the_wire(dtype: torch.dtype, feedback: bool) -> None:
    """Two ranks' programs, their payloads added up as a backend does; each ends with the sum of what both decode to."""
    codecs = [Codec(ErrorFeedback(RandomK(0.1)) if feedback else RandomK(0.1), NUMELS, dtype) for _ in range(2)]
    programs, expected = [], torch.zeros(NUMEL)
    for rank, codec in enumerate(codecs):
        codec.random.copy_(torch.tensor([0, 5, 3 * rank, rank]))
        x = gradient(NUMEL, dtype, seed=rank)
        codec.encode(x)
        expected += codec.decode()
        inner = getattr(codec.compressor, "inner", codec.compressor)
        assert isinstance(inner, CommonRandomKCompressor)
        program = inner.program(x, [torch.zeros(NUMEL)] if feedback else [], codec.segments)
        program.fill(0, codec.context)
        assert torch.equal(program.payloads[0].view(torch.uint8), codec.payload)
        programs.append((program, codec))
    total = programs[0][0].payloads[0] + programs[1][0].payloads[0]
    for program, codec in programs:
        program.payloads[0].copy_(total)
        program.finish(codec.context)
        assert program.shared == {}
        assert torch.equal(program.flat, expected.to(dtype))
        if feedback:
            assert torch.equal(program.residual, codec.state[0])


def test_own_draws_are_decoded_by_anybody() -> None:
    codec, x = Codec(RandomK(0.1, indices="own"), NUMELS), gradient(NUMEL)
    codec.random.copy_(torch.tensor([1, 2, 3, 4]))
    sent = codec(x, step=2)
    codec.random.zero_()
    assert torch.equal(codec.decode(), sent)


# ---- Truncate


def test_truncate_refuses_to_train() -> None:
    with pytest.raises(SpecError, match=r"cannot be trained.*Truncate\(4.0, unsafe=True\)"):
        compressor_for(Truncate(4.0))
    with pytest.raises(SpecError, match="unsafe=True"):
        compressor_for(ErrorFeedback(Truncate(4.0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_truncate_sends_the_first_of_all_segments_in_their_order(dtype: torch.dtype) -> None:
    codec, x = Codec(ErrorFeedback(Truncate(4.0, unsafe=True)), (12,), dtype), gradient(20, dtype)
    codec.segments = Segments.of([Segment(15, 2, 1, 0, 0), Segment(2, 10, 2, 0, 0)])  # 12 elements, of which 3 are sent
    codec.state = [torch.full((20,), 0.5)]
    codec.encode(x)
    given = x.float() + 0.5
    assert torch.equal(codec.payload.view(dtype), given[[15, 16, 2]].to(dtype))
    added, written = torch.ones(20), torch.full((20,), 7.0)
    for add, dst in ((True, added), (False, written)):
        codec.compressor.decode(codec.payload, codec.segments, dtype, add, dst, codec.context)
    sent = torch.zeros(20)
    sent[[15, 16, 2]] = codec.payload.view(dtype).float()
    named = torch.zeros(20, dtype=torch.bool)
    named[2:12] = named[15:17] = True
    assert torch.equal(added, 1 + sent)
    assert torch.equal(written, torch.where(named, sent, 7.0))
    assert torch.equal(codec.state[0], torch.where(named, given - sent, 0.5))


INDEXED = [TopK(0.01), TopK(0.01, per="bucket"), Threshold(0.1), DGC(), RandomK(0.01), RandomK(0.01, indices="own")]


@pytest.mark.parametrize("spec", [*INDEXED, ErrorFeedback(TopK(0.01))], ids=repr)
def test_more_elements_than_indices_reach_are_refused_before_the_first_step(spec: Spec) -> None:
    compressor, cpu = compressor_for(spec), torch.device("cpu")
    rows = Segment(0, 2**31 - 1, 0, 0, 0), Segment(2**31 - 1, 1, 0, 0, 0)
    assert compressor.payload_bytes(Segments(rows[:1], cpu), torch.float32) > 0
    together = [Segments(rows, cpu)] if spec == TopK(0.01, per="bucket") else []
    for segments in (Segments((Segment(0, 2**31, 0, 0, 0),), cpu), *together):
        with pytest.raises(PlanError, match=r"encode 2147483648 elements .*chunk_bytes=2\*\*30"):
            compressor.payload_bytes(segments, torch.float32)
    assert together or compressor.payload_bytes(Segments(rows, cpu), torch.float32) > 0
