"""Int8, FP8, natural compression and QSGD with exponential levels keep their laws as compressors."""

import itertools
import math

import pytest
import torch
from test_compressors import DTYPES, Codec, blocks_of, gradient, squared

from gradwire.core import QSGD, ErrorFeedback, Spec
from gradwire.core.specs import FP8, Int8, Natural, spec_from_dict
from gradwire.errors import PayloadError

STOCHASTIC: list[Spec] = [
    Natural(),
    Natural(block=32),
    QSGD(levels="exponential"),
    QSGD(bits=3, block=32, levels="exponential", scale="l2"),
]
NEAREST: list[Spec] = [
    Int8(),
    Int8(block=1024),
    FP8("e4m3"),
    FP8("e5m2", block=32),
    QSGD(levels="exponential", rounding="nearest"),
]
specs = pytest.mark.parametrize("spec", [*STOCHASTIC, *NEAREST], ids=repr)


def test_int8_is_qsgd_with_eight_bits_and_nearest_rounding() -> None:
    x = gradient(4097)
    for block in (128, 1024):
        by_name, by_bits = (
            Codec(Int8(block=block), (4097,)),
            Codec(QSGD(bits=8, block=block, rounding="nearest"), (4097,)),
        )
        assert torch.equal(by_name.encode(x), by_bits.encode(x))
        assert torch.equal(by_name.decode(), by_bits.decode())


def test_int8_is_off_by_half_a_step_at_most() -> None:
    x = gradient(4097)
    step = blocks_of(x.double().abs(), 128).amax(1).repeat_interleave(128)[:4097] * (1 + 2.0**-7) / 127
    assert bool(((Codec(Int8(), (4097,))(x).double() - x.double()).abs() <= step / 2 * (1 + 1e-4)).all())


@pytest.mark.parametrize(("spec", "error"), [(FP8("e4m3"), 2.0**-4), (FP8("e5m2"), 2.0**-3)], ids=repr)
def test_fp8_is_off_by_a_part_of_each_value(spec: FP8, error: float) -> None:
    x = gradient(4097)
    largest = blocks_of(x.double().abs(), 128).amax(1).repeat_interleave(128)[:4097] * (1 + 2.0**-7)
    lost = (Codec(spec, (4097,))(x).double() - x.double()).abs()
    smallest = {"e4m3": 2.0**-9 / 448, "e5m2": 2.0**-16 / 57344}[spec.format]
    assert bool((lost <= torch.maximum(error * x.double().abs(), largest * smallest / 2) * (1 + 1e-6)).all())


@pytest.mark.parametrize("spec", [spec for spec in NEAREST if spec.law.delta], ids=repr)
def test_the_declared_contraction_holds_on_gradients_and_on_the_worst_blocks(spec: Spec) -> None:
    block = getattr(spec, "block", 0)
    worst = torch.full((4 * block,), 0.0)
    for share in (0.001, 0.0039, 0.00395, 0.01, 1.0):  # about half a step of 255 levels
        worst[:] = share
        worst[::block] = 1.0
        for x in (worst, gradient(4097)):
            assert squared(Codec(spec, (x.numel(),))(x) - x) <= (1 - spec.law.delta) * squared(x)


def test_natural_compression_has_an_eighth_of_the_squares_as_variance_at_most() -> None:
    x, draws = gradient(4097), 200
    codec, total, squares = Codec(Natural(), (4097,)), torch.zeros(4097, dtype=torch.float64), 0.0
    for step in range(draws):
        lost = codec(x, step).double() - x.double()
        total += lost
        squares += squared(lost)
    assert squares / draws <= squared(x) / 8
    # the mean of an element deviates by a third of its square root of an eighth, by Chebyshev's bound for the sum of all
    assert squared(total / draws) <= 1.3 * squared(x) / 8 / draws


def test_exponential_levels_are_the_better_ones_for_long_tails() -> None:
    x = gradient(1 << 16) ** 3
    errors = [squared(Codec(QSGD(bits=4, block=1024, levels=levels), (1 << 16,))(x) - x) for levels in ("uniform", "exponential")]
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@specs
def test_exactly_the_promised_payload_is_written(spec: Spec, dtype: torch.dtype) -> None:
    for numels in ((1,), (7,), (123,), (1, 7, 123, 300, 4097), (128, 256)):
        x, seen = gradient(sum(numels), dtype), []
        for fill in (0x55, 0xAA):
            codec = Codec(spec, numels, dtype)
            around = torch.full((codec.payload.numel() + 128,), fill, dtype=torch.uint8)
            codec.payload = around[64:-64]
            codec.encode(x)
            assert set(around[:64].tolist()) == set(around[-64:].tolist()) == {fill}
            assert torch.equal(codec.decode(dtype=dtype), codec.decode().to(dtype))
            seen.append(codec.payload)
        assert torch.equal(*seen), "some bytes of the payload are not written"


@specs
def test_a_payload_of_another_size_is_refused(spec: Spec) -> None:
    codec = Codec(spec, (1, 300))
    payload = codec.encode(gradient(301))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]])):
        with pytest.raises(PayloadError, match=f"of {wrong.numel()} elements .* take {payload.numel()} bytes"):
            codec.decode(wrong)


@specs
def test_nothing_that_is_not_finite_becomes_finite(spec: Spec) -> None:
    for bad, dtype in itertools.product((math.nan, math.inf, -math.inf), DTYPES):
        x = gradient(300, dtype)
        x[130] = bad
        codec = Codec(ErrorFeedback(spec), (300,), dtype)
        assert codec(x)[130].isnan()
        assert codec.residual is not None and bool(codec.residual.isfinite().all())
        assert bool(codec(gradient(300, dtype), step=1).isfinite().all())


@specs
def test_error_feedback_telescopes(spec: Spec) -> None:
    codec, given, sent = Codec(ErrorFeedback(spec), (300,)), torch.zeros(300), torch.zeros(300)
    for step in range(30):
        given += gradient(300, seed=step)
        sent += codec(gradient(300, seed=step), step)
    assert codec.residual is not None
    assert torch.allclose(given - sent, codec.residual, atol=1e-5)
    assert codec.residual.norm() > 0


@pytest.mark.parametrize("spec", STOCHASTIC, ids=repr)
def test_seeds_steps_and_ranks_draw_otherwise_and_repeat(spec: Spec) -> None:
    codec, x = Codec(spec, (300,)), gradient(300)
    first = codec.encode(x).clone()
    assert torch.equal(codec.encode(x), first)
    for word in range(4):
        codec.random.zero_()
        codec.random[word] = 1
        assert not torch.equal(codec.encode(x), first)


@specs
def test_the_spec_is_read_back_from_json(spec: Spec) -> None:
    assert spec_from_dict(spec.to_dict()) == spec
