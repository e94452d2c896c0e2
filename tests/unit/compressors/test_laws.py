"""Every registered spec keeps the law that it declares, for all dtypes and odd sizes, and its payloads are as large as it says.

What is measured here is what an engine relies on: bias, contraction, and that feedback loses nothing over the steps.
"""

import math

import msgspec
import pytest
import torch
from test_compressors import Codec, gradient, squared

from gradwire.compressors import compressor_for, roundtrip
from gradwire.core import (
    DGC,
    FP8,
    QSGD,
    BlockTopK,
    Cast,
    EFSignSGD,
    ErrorFeedback,
    Identity,
    Int8,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    Threshold,
    TopK,
    Truncate,
    TwoBit,
)
from gradwire.core.specs import innermost, registered_specs
from gradwire.errors import PayloadError, SpecError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 123, 4097, 70_001)
UNIT_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

SPECS: list[Spec] = [
    Identity(),
    Cast("float16"),
    Cast("bfloat16"),
    FP8("e4m3"),
    FP8("e5m2", block=1024),
    Natural(),
    Int8(),
    *(QSGD(bits=bits) for bits in range(2, 9)),
    QSGD(bits=8, rounding="nearest"),
    QSGD(bits=3, scale="minmax"),
    QSGD(scale="l2"),
    QSGD(bits=3, block=32, scale="l2"),
    QSGD(levels="exponential"),
    QSGD(bits=3, levels="exponential", rounding="nearest"),
    *(QSGD(bits=bits, scale="ls") for bits in (2, 3, 4)),
    *(QSGD(bits=bits, scale="ls", levels="lloyd") for bits in (2, 3, 4)),
    TernGrad(),
    TernGrad(clip=2.5),
    TwoBit(),
    TwoBit(threshold=0.01),
    SignSGD(),
    Signum(),
    EFSignSGD(),
    EFSignSGD(block=0),
    OneBit(),
    OneBit(block=0),
    OneBit(block=128),
    TopK(0.01),
    TopK(0.3),
    TopK(0.01, selection="sampled"),
    TopK(0.05, per="bucket"),
    TopK(0.3, values=QSGD(bits=2)),
    TopK(0.05, per="bucket", values=FP8("e4m3")),
    BlockTopK(0.02),
    Threshold(0.02),
    RandomK(0.1),
    RandomK(0.1, indices="own"),
    DGC(),
    DGC(0.1, momentum=0.0),
    PowerSGD(),
    PowerSGD(rank=1),
    Truncate(4, unsafe=True),
]
FEEDBACK = [
    *(spec for spec in SPECS if spec.feedback and not spec.owns_momentum),
    *(
        ErrorFeedback(spec)
        for spec in SPECS
        if not spec.state and not isinstance(spec, (Identity, SignSGD)) and spec != Truncate(4, unsafe=True)
    ),
]


def shapes_of(numels: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A matrix of each, where the number has a divisor."""
    found = []
    for numel in numels:
        rows = next((d for d in range(math.isqrt(numel), 1, -1) if numel % d == 0), 1)
        found.append((rows, numel // rows) if rows > 1 else (numel,))
    return found


def codec_of(spec: Spec, numels: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Codec:
    return Codec(spec, numels, dtype, shapes_of(numels))


def test_every_registered_spec_is_measured() -> None:
    own = {cls for cls in registered_specs().values() if cls.__module__.startswith("gradwire.")}
    missing = own - {type(spec) for spec in [*SPECS, *FEEDBACK]}
    assert not missing, f"add a row to SPECS in {__file__} for {', '.join(sorted(cls.__name__ for cls in missing))}"
    assert {spec.law.kind for spec in SPECS} == {"exact", "unbiased", "contractive", "none"}


def test_specs_take_batches_where_their_compressors_do() -> None:
    """Prices ask specs, collectives ask compressors. Elements with weights have no batches (`collectives.ops.in_batches`)."""
    alike = [spec for spec in [*SPECS, *FEEDBACK] if spec.element_weights is None]
    assert [spec.batches for spec in alike] == [compressor_for(spec).batches for spec in alike]
    assert not any(spec.batches for spec in [*SPECS, *FEEDBACK] if spec.element_weights is not None)
    assert {spec.batches for spec in alike} == {True, False}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.law.kind == "exact"], ids=repr)
def test_exact(spec: Spec, dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = gradient(numel, dtype)
        assert torch.equal(codec_of(spec, (numel,), dtype)(x), x.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.law.kind == "unbiased"], ids=repr)
def test_unbiased(spec: Spec, dtype: torch.dtype) -> None:
    """The error has mean zero along any direction: at random, along the gradient (values shrink), along its signs, along
    its largest and its smallest elements. 300 draws; Student's t beyond 5.5 comes once in ten million."""
    for numel in SIZES[:4]:
        copies = max(1, 500 // numel)  # of small tensors many, so that what is rare is seen too
        x, numels = gradient(numel, dtype).repeat(copies), (numel,) * copies
        codec, draws = codec_of(spec, numels, dtype), 300
        order = x.float().abs().argsort()
        largest, smallest = torch.zeros(2, x.numel())
        tenth, half = x.numel() // 10 + 1, x.numel() // 2 + 1
        largest[order[-tenth:]] = x.float().sign()[order[-tenth:]]
        smallest[order[:half]] = x.float().sign()[order[:half]]
        chance = torch.randn(x.numel(), generator=torch.Generator().manual_seed(1))
        along = torch.stack([chance, x.float(), x.float().sign(), largest, smallest]).double()
        errors = []
        for draw in range(draws):
            codec.random[0] = 1000 + draw // 2
            errors.append(along @ (codec(x, step=draw % 2).double() - x.double()))
        found = torch.stack(errors)
        spread = found.std(0) / math.sqrt(draws)
        # values are sent in the gradient's own dtype, and random numbers have 16 bits
        allowed = (2.0**-15 + UNIT_ROUNDING[dtype]) * (along.abs() @ x.double().abs())
        assert bool((found.mean(0).abs() <= 5.5 * spread + allowed).all()), (numel, found.mean(0) / spread)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.law.kind == "contractive"], ids=repr)
def test_contractive(spec: Spec, dtype: torch.dtype) -> None:
    """||x - D(E(x))||^2 <= (1 - delta) ||x||^2, for heavy tails, for equal magnitudes, for one large element."""
    for numel in SIZES:
        spike = torch.full((numel,), 1e-3)
        spike[numel // 2] = -1.0
        signs = torch.arange(numel).remainder(3).sub(1.0) * 0.02
        for x in (gradient(numel, dtype), spike.to(dtype), signs.to(dtype), torch.full((numel,), 0.03, dtype=dtype)):
            lost = codec_of(spec, (numel,), dtype)(x) - x.float()
            left = (1 - spec.law.delta) * squared(x.float())
            assert squared(lost) <= left * (1 + 1e-5) + 4 * UNIT_ROUNDING[dtype] ** 2 * squared(x.float()), numel


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("levels", ["uniform", "exponential"])
def test_norms_as_scales_are_fed_back_where_a_part_of_every_block_is_sent(levels: str, bits: int) -> None:
    """Like elements are the worst of all blocks: each is 1/sqrt(n) of the norm, and what all lose is the whole block."""
    for block in (2**power for power in range(5, 14)):
        spec = QSGD(bits=bits, block=block, scale="l2", levels=levels)
        alike = torch.linspace(0.9, 1.1, 32).repeat_interleave(block)  # each block another size, so scales round up otherwise
        nearest, drawn = (roundtrip(alike, msgspec.structs.replace(spec, rounding=r))[0] for r in ("nearest", "stochastic"))
        try:
            ErrorFeedback(spec)
        except SpecError:
            assert not nearest.view(32, -1).any(dim=1).all(), "some block is zeros"
            assert squared(drawn - alike) > 0.95 * squared(alike)
        else:
            lost = (nearest - alike).view(32, -1).square().sum(1) / alike.view(32, -1).square().sum(1)
            assert float(lost.max()) < 0.95
            assert squared(drawn - alike) < 0.95 * squared(alike)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", FEEDBACK, ids=repr)
def test_what_was_sent_and_what_is_left_is_what_was_given(spec: Spec, dtype: torch.dtype) -> None:
    for numels in ((1,), (123,), (7, 4096, 300)):
        codec, total = codec_of(spec, numels, dtype), sum(numels)
        given, sent, largest = torch.zeros(3, total, dtype=torch.float64)
        for step in range(12):
            x = gradient(total, dtype, seed=step)
            assert codec.residual is not None
            largest = torch.maximum(largest, x.double().abs() + codec.residual.double().abs())
            given += x.double()
            sent += codec(x, step=step).double()
        assert codec.residual is not None
        off = (given - sent - codec.residual.double()).abs()
        # each step rounds a few times; matrices add up their products in float32, and sums arrive in the gradient's dtype
        rounding = 4 * 2.0**-24 * largest
        if isinstance(innermost(spec), PowerSGD):
            rounding = rounding + 256 * 2.0**-24 * largest.max()
        if spec.rounds:
            rounding = rounding + 2 * UNIT_ROUNDING[dtype] * largest.max()
        assert bool((off <= 12 * rounding + 1e-30).all()), float(off.max())


LATE = (EFSignSGD, RandomK, TwoBit)
"""Specs whose residual takes more than a thousand steps to its steady state."""


@pytest.mark.parametrize("spec", FEEDBACK, ids=repr)
def test_what_is_left_does_not_grow(spec: Spec) -> None:
    """A gradient that stays the same is sent in the mean: the residual is bounded."""
    x = gradient(512)
    if isinstance(innermost(spec), (Threshold, TwoBit)) and getattr(innermost(spec), "threshold", 0):
        x = x.clamp(-0.005, 0.005)  # no more than a fixed threshold sends at a time
    codec = codec_of(spec, (512,))
    steps, norms = 3000 if isinstance(innermost(spec), LATE) else 1000, []
    for step in range(steps):
        codec(x, step=step)
        assert codec.residual is not None
        norms.append(float(codec.residual.norm()))
    most = max(norms[: steps // 2])
    assert max(norms[steps // 2 :]) <= 1.2 * most + 1e-6, "it grows: some part of a gradient that stays the same is never sent"


FITTED = [spec for spec in SPECS if isinstance(spec, QSGD) and spec.scale == "ls"]


def error_along_sent(spec: Spec, x: torch.Tensor) -> float:
    """The part of what is sent that the error holds too: 0 where they are orthogonal, below 0 where too much is sent."""
    sent = codec_of(spec, (x.numel(),))(x)
    return float(((x - sent).double() @ sent.double()) / squared(sent))


@pytest.mark.parametrize("spec", FITTED, ids=repr)
def test_the_error_of_a_fitted_scale_is_orthogonal_to_what_is_sent(spec: QSGD) -> None:
    generator = torch.Generator().manual_seed(0)
    normal, uniform = torch.randn(2**16, generator=generator), torch.rand(2**16, generator=generator) - 0.5
    for x in (normal, -uniform.sign() * torch.log1p(-2 * uniform.abs()), gradient(2**16)):
        assert abs(error_along_sent(spec, x)) < 0.05
    assert error_along_sent(QSGD(bits=2, rounding="nearest"), normal) < -0.3


def energy_sent(spec: Spec, x: torch.Tensor) -> float:
    """Energy of what feedback sends, over that of the gradients, in the steady state. x: gradients by step."""
    codec, sent, given = codec_of(ErrorFeedback(spec), (x.shape[1],)), 0.0, 0.0
    for step, each in enumerate(x):
        decoded = codec(each, step=step)
        if step >= 40:
            sent, given = sent + squared(decoded), given + squared(each)
    return sent / given


@pytest.mark.parametrize("spec", FITTED, ids=repr)
def test_feedback_with_a_fitted_scale_sends_as_much_energy_as_it_is_given(spec: QSGD) -> None:
    x = torch.randn(120, 64 * 128, generator=torch.Generator().manual_seed(1))
    assert 0.9 < energy_sent(spec, x) < 1.1


def test_feedback_with_the_largest_magnitude_as_scale_sends_too_much() -> None:
    x = torch.randn(120, 64 * 128, generator=torch.Generator().manual_seed(1))
    assert energy_sent(QSGD(bits=2), x) > 2.5


def test_dgc_is_momentum_before_selection_with_both_cleared() -> None:
    """Against the method as its paper states it, element by element."""
    codec, numel = codec_of(DGC(0.1, momentum=0.9), (500,)), 500
    u, v = torch.zeros(2, numel)
    for step in range(20):
        x = gradient(numel, seed=step)
        u = 0.9 * u + x
        v = v + u
        chosen = v.abs() >= v.abs().topk(50).values[-1]
        expected = torch.where(chosen, v, 0.0)
        u, v = torch.where(chosen, 0.0, u), torch.where(chosen, 0.0, v)
        assert torch.allclose(codec(x, step=step), expected, rtol=1e-5, atol=1e-8)
    residual, momentum = codec.state
    assert torch.allclose(residual, v, rtol=1e-5, atol=1e-7) and torch.allclose(momentum, u, rtol=1e-5, atol=1e-7)


def test_dgc_clips_each_tensor_to_its_part_of_the_bound() -> None:
    x = gradient(500)
    codec = codec_of(DGC(1.0, momentum=0.0, clip=0.5), (500,))
    codec.compressor = codec.compressor.summing(1, 4)
    # src is a quarter of the rank's gradient, whose norm is brought to 0.5 / sqrt(4)
    assert float(codec(x).norm()) == pytest.approx(min(float(x.norm()), 0.25 / 4), rel=1e-4)
    small = codec_of(DGC(1.0, momentum=0.0, clip=1e6), (500,))
    small.compressor = small.compressor.summing(1, 4)
    assert torch.allclose(small(x), x)


def test_signum_sends_the_signs_of_its_own_mean() -> None:
    codec, mean = codec_of(Signum(0.8), (300,)), torch.zeros(300)
    for step in range(10):
        x = gradient(300, seed=step)
        mean = 0.8 * mean + (1 - 0.8) * x
        assert torch.equal(codec(x, step=step), torch.where(mean < 0, -1.0, 1.0))


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_recovers_what_has_its_rank(count: int, rank: int) -> None:
    """In a bucket of so many matrices of one shape, and beside others."""
    generator = torch.Generator().manual_seed(0)
    shape, other = (48, 80), (30, 64)
    matrices = [
        torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        for rows, columns in [shape] * count + [other]
    ]
    x = torch.cat([m.reshape(-1) for m in matrices])
    numels, shapes = tuple(m.numel() for m in matrices), [tuple(m.shape) for m in matrices]
    codec = Codec(PowerSGD(rank=rank), numels, torch.float32, shapes)
    for step in range(3):  # the first step's random factor may be ill-conditioned, which costs digits of float32
        codec.state[0].zero_()
        assert float((codec(x, step=step) - x).norm() / x.norm()) < (1e-5 if step else 1e-3)


def test_powersgd_stays_right_where_the_gradient_has_less_rank_or_none() -> None:
    codec = Codec(PowerSGD(rank=4), (40 * 60,), torch.float32, [(40, 60)])
    assert not codec(torch.zeros(2400)).any()
    column = torch.randn(40, 1) @ torch.randn(1, 60)
    for step in range(1, 4):
        assert torch.allclose(codec(column.reshape(-1), step=step).view(40, 60), column, atol=1e-5)
    full = torch.randn(40, 60)
    codec.state[0].zero_()
    best = torch.linalg.svdvals(full)[4:].square().sum()
    for step in range(4, 40):  # it goes on learning after steps that said nothing
        codec.state[0].zero_()
        decoded = codec(full.reshape(-1), step=step).view(40, 60)
    assert float((decoded - full).square().sum()) < 1.02 * float(best)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*SPECS, *FEEDBACK], ids=repr)
def test_payloads_are_as_large_as_declared_and_wholly_written(spec: Spec, dtype: torch.dtype) -> None:
    if spec.rounds and not hasattr(spec, "indices"):
        codec = codec_of(spec, (48 * 80, 7), dtype)
        assert codec.program is not None
        assert sum(4 * p.numel() for p in codec.program.payloads) == codec.compressor.payload_bytes(codec.segments, dtype)
        return
    for numels in ((1,), (7,), (123,), (4097,), (1, 7, 123, 300, 4097), (128, 256)):
        x, seen = gradient(sum(numels), dtype), []
        for fill in (0x55, 0xAA):
            codec = codec_of(spec, numels, dtype)
            size = codec.payload.numel()
            around = torch.full((size + 128,), fill, dtype=torch.uint8)
            codec.payload = around[64 : 64 + size]
            codec.encode(x)
            assert set(around[:64].tolist()) == set(around[64 + size :].tolist()) == {fill}
            seen.append(codec.payload)
        assert torch.equal(*seen), "some bytes of the payload are not written"


@pytest.mark.parametrize("spec", [s for s in SPECS if not isinstance(s, PowerSGD)], ids=repr)
def test_a_payload_that_was_cut_or_grew_is_refused(spec: Spec) -> None:
    for dtype in DTYPES:
        codec = codec_of(spec, (1, 300), dtype)
        payload = codec.encode(gradient(301, dtype))
        for wrong in (payload[:-1], payload[:0], torch.cat([payload, payload[:1]])):
            before = torch.full((301,), 5.0, dtype=dtype)
            dst = before.clone()
            with pytest.raises(PayloadError) as caught:
                codec.compressor.decode(wrong, codec.segments, dtype, False, dst, codec.context)
            for word in (repr(spec), str(wrong.numel()), str(payload.numel())):
                assert word in str(caught.value)
            assert torch.equal(dst, before)


@pytest.mark.parametrize("spec", [s for s in SPECS if not isinstance(s, PowerSGD)], ids=repr)
def test_a_payload_of_any_bytes_is_decoded_or_refused(spec: Spec) -> None:
    """Never a crash, never a write elsewhere; `make fuzz` does the same a million times under a sanitizer."""
    generator = torch.Generator().manual_seed(0)
    codec = codec_of(spec, (1, 300, 77))
    good = codec.encode(gradient(378)).clone()
    around = torch.full((378 + 64,), 5.0)
    for trial in range(200):
        payload = good.clone()
        if trial % 2:
            payload.random_(0, 256, generator=generator)
        else:
            at = torch.randint(0, payload.numel(), (3,), generator=generator)
            payload[at] = torch.randint(0, 256, (3,), generator=generator, dtype=torch.uint8)
        try:
            codec.compressor.decode(payload, codec.segments, torch.float32, True, around[32:-32], codec.context)
        except PayloadError as error:
            assert repr(spec) in str(error)
        around[32:-32] = 5.0
        assert bool((around == 5.0).all())


def test_a_fake_is_refused_where_a_model_might_be_trained() -> None:
    with pytest.raises(SpecError, match=r"Truncate\(4.*unsafe=True"):
        compressor_for(Truncate(4))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_spec_says_whether_what_it_sends_follows_a_scale(spec: Spec) -> None:
    sent, scaled = (roundtrip(factor * gradient(4096, seed=3).reshape(64, 64), spec)[0] for factor in (2.0**-7, 2.0))
    assert torch.allclose(256.0 * sent, scaled, rtol=1e-4, atol=1e-4) == spec.follows_scale
