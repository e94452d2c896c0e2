"""Signs and ternary codes: every SIMD level gives the bytes, values and memory of the reference, and they mean what is
declared."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_kernels import DTYPES, FASTER, INF, NAN, REFERENCE, STREAM, WAYS, Way, assert_all_alike, built, same, way

from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.core.specs import EFSignSGD, ElementRun, OneBit, SignSGD, Signum, Spec, TernGrad, TwoBit
from gradwire.kernels.segments import Segment, Segments, tensor_key

NUMELS = (0, 1, 7, 8, 9, 123, 127, 128, 129, 511, 512, 513, 4097, 1)
SPECS: list[Spec] = [
    SignSGD(),
    Signum(),
    *(EFSignSGD(block=block) for block in (0, 32, 128, 512, 1024, 8192)),
    *(OneBit(block=block) for block in (0, 32, 256, 512, 1024)),
    *(TwoBit(block=block) for block in (32, 128, 256, 1024)),
    TwoBit(threshold=0.4),
    TwoBit(threshold=0.4, block=64),
    TwoBit(multiple=0.3),
    *(TernGrad(block=block, clip=2.5) for block in (32, 128, 256, 1024)),
    TernGrad(clip=1.0, block=8192),
]
CONTRACTIVE = [spec for spec in SPECS if isinstance(spec, EFSignSGD | OneBit | TwoBit)]
BEST = WAYS[-1]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The reference's many small operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


every = pytest.mark.parametrize("spec", SPECS, ids=repr)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def encode(way: Way, spec: Any, x: torch.Tensor, state: torch.Tensor | None, segments: Segments) -> torch.Tensor:
    """The payload that one implementation makes of x."""
    size = spec.payload_bytes([ElementRun(row.numel, row.bits) for row in segments.rows], x.itemsize)
    payload, k = torch.full((size,), 255, dtype=torch.uint8), way.kernels
    with way.chosen():
        if isinstance(spec, SignSGD | Signum):
            k.sign_encode(x, state, getattr(spec, "momentum", 0.0), segments, payload)
        elif isinstance(spec, TwoBit):
            k.threshold_encode(x, state, segments, spec.block, spec.threshold, spec.multiple, payload)
        elif isinstance(spec, TernGrad):
            k.terngrad_encode(x, state, segments, STREAM, spec.block, spec.clip, payload)
        else:
            k.mean_sign_encode(x, state, segments, spec.block, 2 if isinstance(spec, OneBit) else 1, payload)
    return payload


def decode(way: Way, spec: Any, payload: torch.Tensor, segments: Segments, add: bool, dst: torch.Tensor) -> torch.Tensor:
    """dst, with what the payload holds."""
    with way.chosen():
        if isinstance(spec, SignSGD | Signum):
            way.kernels.sign_decode(payload, segments, 0, 0, add, dst)
        elif isinstance(spec, TwoBit):
            way.kernels.threshold_decode(payload, segments, spec.block, spec.threshold, add, dst)
        elif isinstance(spec, TernGrad):
            way.kernels.qsgd_decode(payload, segments, spec.block, "max", add, dst)
        else:
            way.kernels.sign_decode(payload, segments, spec.block, 2 if isinstance(spec, OneBit) else 1, add, dst)
    return dst


def segments_of(spec: Spec, numels: tuple[int, ...], first: int = 0) -> Segments:
    """Tensors one after another."""
    offsets, bits = itertools.accumulate(numels, initial=0), spec.element_bits
    rows = zip(offsets, numels, strict=False)
    return Segments.of([Segment(at, n, tensor_key(f"t{i}"), first, bits) for i, (at, n) in enumerate(rows)])


def run(way: Way, spec: Spec, x: torch.Tensor, segments: Segments) -> dict[str, torch.Tensor]:
    """Everything the kernels make of x, by name."""
    state = torch.linspace(-1, 1, x.numel())
    plain = encode(way, spec, x, None, segments)
    with_state = encode(way, spec, x, state, segments)
    return {
        "payload": plain,
        "payload with state": with_state,
        "state": state,
        "decoded": decode(way, spec, plain, segments, False, torch.ones_like(x)),
        "decoded and added": decode(way, spec, with_state, segments, True, torch.linspace(-2, 2, x.numel())),
    }


def once(way: Way, spec: Spec, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
    """What one tensor comes back as, in float32."""
    segments = segments_of(spec, (x.numel(),))
    return decode(way, spec, encode(way, spec, x, state, segments), segments, True, torch.zeros(x.numel()))


def awkward(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Values of many magnitudes, and stretches of special ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
    tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    shapes = [
        torch.zeros(60),
        torch.full((60,), -0.0),
        torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(15),
        torch.full((60,), 0.1),
        torch.full((60,), -3.0),
        torch.linspace(-1, 1, 60) * tiny,
        torch.full((60,), -tiny / 3),
        torch.linspace(-1, 1, 60) * 2.0**-120,
        torch.linspace(-1, 1, 60) * largest / 2**12,
    ]
    specials = torch.cat(shapes)
    x[-2 * specials.numel() : -specials.numel()] = specials
    return x.to(dtype)


def with_bad(x: torch.Tensor) -> torch.Tensor:
    """Some of x is not finite, or as good as not."""
    x = x.clone()
    for place, value in enumerate((NAN, INF, -INF, -NAN, torch.finfo(x.dtype).max, -torch.finfo(x.dtype).max)):
        x[(place * 397 + 131) % x.numel()] = value
    return x


# ---- the same everywhere


@built
@dtypes
@every
def test_bytes_values_and_memory_are_those_of_the_reference(spec: Spec, dtype: torch.dtype) -> None:
    segments, x = segments_of(spec, NUMELS), awkward(dtype, sum(NUMELS))
    assert_all_alike(lambda w: run(w, spec, x, segments), "finite")
    assert_all_alike(lambda w: run(w, spec, with_bad(x), segments), "not finite")


@built
@every
def test_a_long_run_is_encoded_as_the_reference_does(spec: Spec) -> None:
    numels = (8191, 8192, 70001)
    segments, x = segments_of(spec, numels), torch.randn(sum(numels), generator=torch.Generator().manual_seed(1))
    assert_all_alike(lambda w: run(w, spec, x, segments), "long")


@way
@every
def test_nothing_at_all_encodes_to_nothing(way: Way, spec: Spec) -> None:
    for segments in (Segments.of([]), segments_of(spec, (0, 0))):
        assert all(value.numel() == 0 for value in run(way, spec, torch.empty(0), segments).values())


@built
@every
def test_any_bytes_decode_to_the_same_and_nothing_else_is_written(spec: Spec) -> None:
    """Payloads come from a network: hundreds of random ones, between guards that must stay."""
    if isinstance(spec, TernGrad):
        return  # decoded as QSGD
    generator = torch.Generator().manual_seed(2)
    for numel in (1, 9, 129, 1500, 8300):
        rows = [row._replace(offset=row.offset + 64) for row in segments_of(spec, (numel, 3)).rows]
        segments = Segments.of(rows)
        size = spec.payload_bytes([ElementRun(row.numel, row.bits) for row in rows], 4)
        for _ in range(20):
            payload = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
            expected = decode(REFERENCE, spec, payload, segments, False, torch.full((numel + 131,), 7.0))
            assert bool((expected[:64] == 7.0).all()) and bool((expected[-64:] == 7.0).all())
            for faster in FASTER:
                got = decode(faster, spec, payload, segments, False, torch.full((numel + 131,), 7.0))
                assert same(got, expected), faster.name


@way
@every
def test_a_tensor_may_be_cut_at_its_granularity(way: Way, spec: Spec) -> None:
    """Cut or not, decoded values and memory are the same, where a block is not what is encoded at once."""
    if getattr(spec, "block", 1) == 0:
        return
    numel, step = 9000, spec.granularity
    x, state = torch.randn(numel, generator=torch.Generator().manual_seed(3)), torch.linspace(-1, 1, numel)
    borders = sorted({0, *(min(3000 // step * step, numel), 8192), numel})
    pieces = list(itertools.pairwise(borders))
    rows = [Segment(a, b - a, 1, a, spec.element_bits) for a, b in pieces]
    whole = Segments.of([Segment(0, numel, 1, 0, spec.element_bits)])
    results = []
    for segments in (whole, Segments.of(rows)):
        kept = state.clone()
        payload = encode(way, spec, x, kept, segments)
        results.append((decode(way, spec, payload, segments, False, torch.zeros(numel)), kept))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@way
@every
def test_what_no_segment_names_is_left_alone(way: Way, spec: Spec) -> None:
    segments = Segments.of([Segment(40, 100, 1, 0, spec.element_bits), Segment(700, 520, 2, 0, spec.element_bits)])
    x, named = torch.full((1300,), NAN), torch.zeros(1300, dtype=torch.bool)
    for row in segments.rows:
        named[row.offset : row.offset + row.numel] = True
        x[row.offset : row.offset + row.numel] = 1.0
    out = run(way, spec, x, segments)
    assert torch.equal(out["decoded"][~named], torch.ones(int((~named).sum())))
    assert torch.equal(out["state"][~named], torch.linspace(-1, 1, 1300)[~named])
    assert torch.equal(out["decoded and added"][~named], torch.linspace(-2, 2, 1300)[~named])
    assert bool(out["decoded"].isfinite().all())


@way
def test_sizes_are_those_of_the_spec(way: Way) -> None:
    """The reference writes all of a payload of the declared size; the C++ kernels refuse any other."""
    for spec, numel in itertools.product(SPECS, (0, 1, 7, 8, 9, 123, 127, 128, 129, 4097)):
        encode(way, spec, torch.ones(numel), None, segments_of(spec, (numel, 0)))


# ---- what they mean


@way
@dtypes
def test_a_bit_is_one_below_zero_and_stands_where_it_is_said_to(way: Way, dtype: torch.dtype) -> None:
    x = torch.ones(1100, dtype=dtype)
    x[64 * 5 + 3] = -1e-7  # unit 0, byte 3, bit 5
    x[512 + 64 * 7 + 63] = -INF  # unit 1, byte 63, bit 7
    x[1024 + 10 * 2 + 1] = -2.0  # unit 2 of 76 elements, 80 with padding: byte 1, bit 2
    x[:2] = torch.tensor([0.0, -0.0])
    expected = torch.zeros(64 + 64 + 10, dtype=torch.uint8)
    expected[3], expected[64 + 63], expected[128 + 1] = 1 << 5, 1 << 7, 1 << 2
    assert torch.equal(encode(way, SignSGD(), x, None, segments_of(SignSGD(), (1100,))), expected)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    nans = torch.tensor([-1, torch.iinfo(whole).max], dtype=whole).view(dtype)
    assert nans.isnan().all() and once(way, SignSGD(), nans).tolist() == [-1.0, 1.0]


@way
def test_signum_votes_with_its_running_mean(way: Way) -> None:
    momentum = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 0.25])
    x = torch.tensor([-1.0, -1.0, 1.0, NAN, INF, -INF])
    assert once(way, Signum(momentum=0.75), x, momentum).tolist() == [-1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
    # what was not finite changed nothing
    assert momentum.tolist() == [-0.25, 0.5, -0.5, 0.5, -0.5, 0.25]


@way
def test_means_are_those_of_a_block(way: Way) -> None:
    x = torch.cat([torch.tensor([3.0, -1.0, 0.0, -0.0]), torch.zeros(28), torch.full((32,), -2.0), torch.tensor([5.0])])
    assert once(way, EFSignSGD(block=32), x).tolist() == [
        0.125,
        -0.125,
        0.125,
        -0.125,
        *[0.125] * 28,
        *[-2.0] * 32,
        5.0,
    ]
    mean = torch.tensor(3 / 30).bfloat16().item()
    assert once(way, OneBit(block=32), x).tolist() == [mean, -0.5, mean, -0.5, *[mean] * 28, *[-2.0] * 32, 5.0]
    both = torch.tensor([8 / 31, 65 / 34]).bfloat16().tolist()
    assert once(way, OneBit(block=0), x).unique().tolist() == [-both[1], both[0]]


@way
def test_what_reaches_the_threshold_is_sent(way: Way) -> None:
    x = torch.tensor([0.5, -0.5, 0.49, -0.49, 2.0, -0.0, NAN, INF, -INF, 2.0**126])
    residual = torch.zeros(10)
    decoded = once(way, TwoBit(threshold=0.5), x, residual).tolist()
    assert decoded[:6] == [0.5, -0.5, 0.0, 0.0, 0.5, 0.0]
    assert all(map(math.isnan, decoded[6:]))
    assert residual.tolist() == [0.0, 0.0, *x[2:4].tolist(), 1.5, 0.0, *[0.0] * 4]
    x = torch.tensor([4.0, -2.0, 1.9, 0.1]).repeat(64)  # 256 elements of mean magnitude 2
    assert once(way, TwoBit(), x).reshape(-1, 4).unique(dim=0).tolist() == [[2.0, -2.0, 0.0, 0.0]]
    assert once(way, TwoBit(multiple=2.0), x).reshape(-1, 4).unique(dim=0).tolist() == [[4.0, 0.0, 0.0, 0.0]]
    assert not once(way, TwoBit(), torch.zeros(300)).any()


@way
@every
def test_a_block_with_something_not_finite_is_nan_and_keeps_its_memory(way: Way, spec: Spec) -> None:
    if isinstance(spec, SignSGD | Signum):
        return
    block, numel = getattr(spec, "block", 0) or 700, 700
    for bad in (NAN, INF, -INF, 2.0**126, -(2.0**127)):
        x, state = torch.ones(numel), torch.linspace(-1, 1, numel)
        x[300] = bad
        low, high = (300 // block * block, min((300 // block + 1) * block, numel))
        if getattr(spec, "threshold", 0):
            low, high = 300, 301
        decoded = once(way, spec, x, state)
        assert decoded.isnan().nonzero().flatten().tolist() == list(range(low, high))
        assert torch.equal(state[low:high], torch.linspace(-1, 1, numel)[low:high])
        assert bool(state.isfinite().all())


@pytest.mark.parametrize("spec", CONTRACTIVE, ids=repr)
def test_the_error_never_exceeds_what_was_to_be_sent(spec: Spec) -> None:
    generator = torch.Generator().manual_seed(4)
    normal = torch.randn(3000, generator=generator)
    spike = torch.full((3000,), 1e-6)
    spike[::500] = -1.0
    kinds = {
        "normal": normal,
        "heavy": normal * torch.randn(3000, generator=generator).mul(3).exp(),
        "of one sign": normal.abs() + 5,
        "equal": torch.full((3000,), -1.00390625),  # halfway between two numbers of bfloat16
        "spikes": spike,
        "subnormal": normal * 1e-40,
        "zero": torch.zeros(3000),
    }
    for name, x in kinds.items():
        v, lost = x.double(), once(BEST, spec, x).double() - x.double()
        assert float(lost.square().sum()) <= float(v.square().sum()) * (1 + 1e-7), name


@every
def test_what_is_left_is_what_was_not_sent(spec: Spec) -> None:
    if isinstance(spec, SignSGD | Signum):
        return
    residual, given, sent = torch.zeros(2500), torch.zeros(2500).double(), torch.zeros(2500).double()
    for step in range(30):
        x = torch.randn(2500, generator=torch.Generator().manual_seed(step))
        given += x
        sent += once(BEST, spec, x, residual)
    assert torch.allclose(given - sent, residual.double(), atol=1e-4)
    assert float(residual.norm()) > 0


# ---- TernGrad


@way
@dtypes
def test_terngrad_that_cuts_nothing_is_qsgd_with_two_bits(way: Way, dtype: torch.dtype) -> None:
    x = with_bad(awkward(dtype, sum(NUMELS)))
    for block in (32, 256, 1024):
        spec = TernGrad(block=block, clip=1000.0)
        segments = segments_of(spec, NUMELS, first=3 * block)
        residuals = [torch.linspace(-1, 1, x.numel()) for _ in range(2)]
        payload = encode(way, spec, x, residuals[0], segments)
        other = torch.zeros_like(payload)
        with way.chosen():
            way.kernels.qsgd_encode(x, residuals[1], segments, STREAM, block, "max", "stochastic", other)
        assert torch.equal(payload, other)
        assert same(*residuals)


def test_terngrad_clips_at_root_mean_squares_and_is_unbiased_below() -> None:
    x, spec = torch.randn(1024, generator=torch.Generator().manual_seed(5)), TernGrad(clip=1.5)
    x[7], bound = 40.0, 0.0
    segments, mean = segments_of(spec, (1024,)), torch.zeros(1024)
    for step in range(400):
        payload = torch.zeros(224, dtype=torch.uint8)
        with BEST.chosen():
            BEST.kernels.terngrad_encode(x, None, segments, torch.tensor([0, step, 0, 0]), 1024, 1.5, payload)
        decoded = decode(BEST, spec, payload, segments, False, torch.zeros(1024))
        bound = float(decoded.max())
        mean += decoded / 400
    assert bound == pytest.approx(1.5 * float(x.square().mean().sqrt()), rel=2**-7)
    assert mean[7] == pytest.approx(bound)
    # the variance of a draw is at most bound^2 / 4: five deviations of a mean of 400, and of that of all
    error = (mean - x.clamp(-bound, bound)).abs()
    assert float(error.max()) < 5.5 * bound / 2 / 20
    assert abs(float((mean - x.clamp(-bound, bound)).mean())) < 5 * bound / 2 / 20 / 32


def test_terngrad_without_clipping_is_unclipped() -> None:
    x, spec = torch.ones(64), TernGrad()
    x[3] = 50.0
    compressor, segments = compressor_for(spec), segments_of(spec, (64,))
    payload = torch.zeros(compressor.payload_bytes(segments, x.dtype), dtype=torch.uint8)
    compressor.encode(x, [], segments, Context(STREAM), payload)
    out = torch.zeros(64)
    compressor.decode(payload, segments, x.dtype, False, out, Context(STREAM))
    assert out[3] == 50.0
    assert set(out.tolist()) <= {0.0, 50.0}


# ---- compressors


@dtypes
@every
def test_compressors_hand_on_what_they_are_given(spec: Spec, dtype: torch.dtype) -> None:
    x, compressor, segments = awkward(dtype, 1300), compressor_for(spec), segments_of(spec, (1000, 300))
    state = [torch.linspace(-1, 1, 1300) for _ in compressor.state]
    kept = state[0].clone() if state else None
    expected = encode(REFERENCE, spec, x, kept, segments)
    payload = torch.zeros(compressor.payload_bytes(segments, dtype), dtype=torch.uint8)
    compressor.encode(x, state, segments, Context(STREAM), payload)
    assert torch.equal(payload, expected)
    assert kept is None or torch.equal(state[0], kept)
    for add, out in ((False, torch.zeros(1300, dtype=dtype)), (True, torch.ones(1300))):
        compressor.decode(payload, segments, dtype, add, out, Context(STREAM))
        begun = torch.ones(1300) if add else torch.zeros(1300, dtype=dtype)
        assert same(out, decode(REFERENCE, spec, expected, segments, add, begun))


@pytest.mark.parametrize("spec", [SignSGD(), Signum()], ids=repr)
def test_ranks_vote(spec: Spec) -> None:
    """As the two-phase exchange does it: decoded signs of all ranks are summed, and the sum's signs come back."""
    votes = torch.tensor([[1.0, -1.0, -3.0, 0.5], [9.0, -1.0, 2.0, -0.5], [-2.0, -1.0, 1.0, -0.1], [-2.0, 1.0, 1.0, 0.0]])
    compressor, segments, total = compressor_for(spec), segments_of(spec, (4,)), torch.zeros(4)
    assert compressor.encodes_own_part
    payload, context = torch.zeros(1, dtype=torch.uint8), Context(STREAM)
    for vote in votes:
        compressor.encode(vote, [torch.zeros(4) for _ in compressor.state], segments, context, payload)
        compressor.decode(payload, segments, torch.float32, True, total, context)
    again = compressor.for_sum()
    assert again.state == ()
    again.encode(total, [], segments, context, payload)
    again.decode(payload, segments, torch.float32, False, total, context)
    assert total.tolist() == [1.0, -1.0, 1.0, 1.0]
