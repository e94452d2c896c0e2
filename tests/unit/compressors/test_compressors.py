"""Each compressor keeps the law it declares; its payloads have the promised size and stay readable by later releases.

The golden files are made once, by `python tests/unit/compressors/test_compressors.py`, which only ever adds files that are
missing.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from gradwire.compressors import compressor_for, register_compressor
from gradwire.compressors.base import Compressor, Context
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
    RandomK,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    Threshold,
    TopK,
    Truncate,
    TwoBit,
    register_spec,
    spec_from_dict,
)
from gradwire.core.payload import qsgd_bytes
from gradwire.core.specs import ElementRun, base, innermost, registered_specs
from gradwire.errors import PayloadError, SpecError
from gradwire.kernels import cpu, run_calls
from gradwire.kernels.segments import Segment, Segments, tensor_key

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 123, 4097, 2**20 + 1)
GOLDEN = Path(__file__).parents[2] / "golden"

SPECS: list[Spec] = [
    Identity(),
    Cast("float16"),
    Cast("bfloat16"),
    QSGD(),
    QSGD(bits=2),
    QSGD(bits=8, block=1024),
    QSGD(bits=3, block=32, scale="minmax"),
    QSGD(scale="minmax"),
    QSGD(scale="l2"),
    QSGD(rounding="nearest"),
    QSGD(bits=2, rounding="nearest"),
    QSGD(bits=5, block=256, rounding="nearest"),
    QSGD(scale="minmax", rounding="nearest"),
    QSGD(bits=8, scale="l2", rounding="nearest"),
    QSGD(blocks="bucket"),
    QSGD(bits=3, rounding="nearest", blocks="bucket"),
    ErrorFeedback(QSGD(bits=2, blocks="bucket")),
    ErrorFeedback(QSGD()),
    ErrorFeedback(QSGD(bits=2, rounding="nearest")),
    ErrorFeedback(QSGD(bits=3, scale="minmax", rounding="nearest")),
    ErrorFeedback(Cast("float16")),
    ErrorFeedback(Cast("bfloat16")),
]


class Codec:
    """A compressor with the buffers for one flat buffer of whole tensors, as an engine would hold them."""

    def __init__(
        self,
        spec: Spec,
        numels: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        shapes: list[tuple[int, ...]] | None = None,
    ) -> None:
        self.spec, self.dtype, self.numel = spec, dtype, sum(numels)
        self.compressor = compressor_for(spec)
        offsets, bits = itertools.accumulate(numels, initial=0), spec.element_bits
        rows = [Segment(at, n, tensor_key(f"t{i}"), 0, bits) for i, (at, n) in enumerate(zip(offsets, numels, strict=False))]
        self.segments = Segments(tuple(rows), torch.device("cpu"), (), tuple(shapes or ()))
        self.random = torch.zeros(4, dtype=torch.int64)
        self.random[0] = spec.random_seed
        self.context = Context(self.random)
        self.state = [torch.zeros(self.numel) for _ in self.compressor.state]
        self.payload = torch.empty(self.compressor.payload_bytes(self.segments, dtype), dtype=torch.uint8)
        self.flat = torch.empty(self.numel, dtype=dtype)
        self.program = None
        if spec.rounds:
            self.program = self.compressor.program(self.flat, self.state, self.segments)  # type: ignore[attr-defined]

    @property
    def residual(self) -> torch.Tensor | None:
        named = dict(zip(self.compressor.state, self.state, strict=True))
        return named.get("residual")

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.compressor.encode(x, self.state, self.segments, self.context, self.payload)
        return self.payload

    def decode(self, payload: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the payload holds; in float32 by adding to zeros, as a sum over ranks does."""
        payload = self.payload if payload is None else payload
        add = dtype == torch.float32
        dst = torch.zeros(self.numel, dtype=dtype) if add else torch.full((self.numel,), 5.0, dtype=dtype)
        self.compressor.decode(payload, self.segments, self.dtype, add, dst, self.context)
        return dst

    def __call__(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        self.random[1] = step
        if self.program is not None:  # summed over one rank
            self.flat.copy_(x)
            for number in range(self.spec.rounds):
                self.program.fill(number, self.context)
            self.program.finish(self.context)
            return self.flat.float()
        self.encode(x)
        return self.decode()


def gradient(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, as gradients are, and within float16's normal numbers except for a few."""
    generator = torch.Generator().manual_seed(seed)
    tails = torch.randn(numel, generator=generator).exp()
    return (torch.randn(numel, generator=generator) * tails * 0.01).to(dtype)


def blocks_of(x: torch.Tensor, block: int) -> torch.Tensor:
    """x cut into blocks, shape (blocks, block); the last is filled up with its own last element."""
    short = -x.numel() % block
    return torch.cat([x, x[-1:].expand(short)]).reshape(-1, block)


def steps_of(spec: QSGD, x: torch.Tensor) -> torch.Tensor:
    """For each element an upper bound of the distance between two neighbouring values of its block's grid, float64."""
    v = blocks_of(x.double(), spec.block)
    up = 1 + 2.0**-7  # a scale is rounded up to bfloat16
    if spec.scale == "minmax":
        low, high = v.amin(1), v.amax(1)
        step = (high - low + 2.0**-7 * (high.abs() + low.abs())) / (2**spec.bits - 1)
    else:
        bound = v.abs().amax(1) if spec.scale == "max" else blocks_norm(x, spec.block)
        step = bound * up / (2 ** (spec.bits - 1) - 1)
    return step.repeat_interleave(spec.block)[: x.numel()]


def blocks_norm(x: torch.Tensor, block: int) -> torch.Tensor:
    short = -x.numel() % block
    return torch.nn.functional.pad(x.double(), (0, short)).reshape(-1, block).norm(dim=1)


def squared(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


# ---- laws


def assert_exact(spec: Spec, x: torch.Tensor) -> None:
    codec = Codec(spec, (x.numel(),), x.dtype)
    codec.encode(x)
    assert torch.equal(codec.decode(dtype=x.dtype).view(torch.uint8), x.view(torch.uint8))
    assert torch.equal(codec.decode(), x.float())


def assert_unbiased(spec: QSGD, x: torch.Tensor) -> None:
    """The mean of what is sent is x: for each element by Hoeffding's bound, for all by their sum.

    A draw is x rounded to the grid value above or below, so it lies within one step of x, and its variance is at most a
    quarter of the step's square. Draws have 16 bits: a bias of 2^-16 of a step is allowed.
    """
    codec, draws = Codec(spec, (x.numel(),), x.dtype), 400 if x.numel() < 10_000 else 8
    step = steps_of(spec, x)
    total, total_squares = torch.zeros_like(step), 0.0
    for draw in range(draws):
        # seeds and steps alike are other draws
        codec.random[0] = spec.seed + draw // 2
        lost = codec(x, step=draw % 2).double() - x.double()
        assert bool((lost.abs() <= step * (1 + 1e-6) + 1e-44).all()), "a draw is no neighbour of x on the grid"
        total += lost
        total_squares += squared(lost)
    mean = total / draws
    if draws >= 100:
        # P(any |mean| > t steps) <= 2 n exp(-2 draws t^2) = 2e-9 at 4097 elements
        allowed = math.sqrt(math.log(2 * x.numel() / 2e-9) / (2 * draws))
        worst = float((mean.abs() / step.clamp(min=1e-44)).max())
        assert worst <= allowed + 2.0**-16, f"{spec!r}: an element's mean is {worst} steps away, allowed is {allowed}"
    # in aggregate: the errors of all elements in units of their steps; the variance of each is at most 1/4
    units = mean / step.clamp(min=1e-44)
    deviation = math.sqrt(0.25 / draws / x.numel())
    assert abs(float(units.mean())) <= 5.5 * deviation + 2.0**-16, f"{spec!r}: biased by {float(units.mean())} steps"
    # along x: no shrinking and no growing
    gain = float((mean * x.double()).sum()) / max(squared(x), 1e-300)
    spread = math.sqrt(float((0.25 * (step * x.double()).square()).sum()) / draws) / max(squared(x), 1e-300)
    assert abs(gain) <= 5.5 * spread + 2.0**-16 * 16, f"{spec!r}: scaled by {1 + gain}"
    # and the draws' own error obeys the variance that the grid has
    assert total_squares / draws <= 0.25 * squared(step) * 1.001 + 6 * squared(step.square()) ** 0.5 / math.sqrt(draws)


def contraction(spec: Spec, dtype: torch.dtype) -> float:
    """The stated delta: ||x - D(E(x))||^2 <= (1 - delta) ||x||^2 for every x."""
    if isinstance(spec, Cast):
        # unit roundoff u: |error| <= u |x|, where the wire has no subnormals among the data
        return 1 - (2.0**-11 if spec.dtype == "float16" else 2.0**-8) ** 2
    assert isinstance(spec, QSGD) and spec.rounding == "nearest"
    up, n = 1 + 2.0**-7, spec.block
    if spec.scale == "minmax":
        # |error| <= range / (2 top) each; ||x||^2 >= range^2 / 2
        return 1 - n * up**2 / (2 * (2**spec.bits - 1) ** 2)
    levels = 2 ** (spec.bits - 1) - 1
    # a value below half a step is lost, no other loses more than half of itself; the largest is kept to a 2^-7th if
    # it is above half a step, which under 'max' it always is
    always = (1 - 2.0**-14) / n if spec.scale == "max" or math.sqrt(n) * up < 2 * levels else 0.0
    if spec.scale == "l2":
        return max(1 - n * (up / levels) ** 2 / 4, 0.0)
    return max(1 - n * (up / levels) ** 2 / 4, always)


def assert_contractive(spec: Spec, x: torch.Tensor) -> None:
    delta, codec = contraction(spec, x.dtype), Codec(spec, (x.numel(),), x.dtype)
    lost = codec(x).double() - x.double()
    tiny = x.numel() * 2.0**-50 if spec == Cast("float16") else 1e-60  # float16's subnormals: at most 2^-25 each
    assert squared(lost) <= (1 - delta) * squared(x) * (1 + 1e-6) + tiny, f"{spec!r}: delta is not {delta}"
    if isinstance(spec, QSGD):
        half = steps_of(spec, x) / 2
        assert bool((lost.abs() <= half * (1 + 1e-4) + 1e-44).all()), "some value is not rounded to nearest"
    assert torch.equal(codec(x, step=1), codec(x, step=2)), "nearest rounding must not depend on the random stream"


def assert_telescopes(spec: ErrorFeedback, numel: int, dtype: torch.dtype) -> None:
    """What was sent, summed over steps, is what was given less the last residual, and the residual stays bounded."""
    codec, steps = Codec(spec, (numel,), dtype), 30 if numel < 10_000 else 6
    given = torch.zeros(numel, dtype=torch.float64)
    sent, largest, norms = torch.zeros_like(given), torch.zeros_like(given), []
    assert codec.residual is not None
    for step in range(steps):
        x = gradient(numel, dtype, seed=step % 5)
        given += x.double()
        sent += codec(x, step).double()
        largest = torch.maximum(largest, x.double().abs() + codec.residual.double().abs())
        norms.append(codec.residual.norm())
    # each step rounds twice in float32: the sum with the residual, and what is left of it
    rounding = steps * 2.0**-23 * blocks_of(largest, 8192).amax(1).repeat_interleave(8192)[:numel]
    assert bool(((given - sent - codec.residual.double()).abs() <= rounding + 1e-44).all())
    if numel >= 123 and not isinstance(spec.inner, Cast):
        assert max(norms) > 0
    assert norms[-1] <= 3 * max(norms[: max(steps // 3, 1)]) + 1e-30, "the residual grows"
    # without the residual what is lost adds up instead
    plain = Codec(spec.inner, (numel,), dtype)
    if isinstance(spec.inner, QSGD) and spec.inner.rounding == "nearest" and steps >= 30 and numel >= 123:
        lost = given - sum(plain(gradient(numel, dtype, seed=step % 5)).double() for step in range(steps))
        assert squared(lost) > 4 * squared(codec.residual)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_every_compressor_keeps_its_law(spec: Spec, dtype: torch.dtype, numel: int) -> None:
    x = gradient(numel, dtype)
    if isinstance(spec, Identity):
        assert_exact(spec, x)
    elif isinstance(spec, ErrorFeedback):
        assert_telescopes(spec, numel, dtype)
    elif isinstance(spec, QSGD) and spec.rounding != "nearest":
        assert_unbiased(spec, x)
    else:
        assert_contractive(spec, x)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("block", [32, 128, 1024])
def test_nearest_rounding_contracts_the_worst_blocks(bits: int, block: int) -> None:
    """One large value among values that just do not reach half a step, and all of them just above it."""
    spec = QSGD(bits=bits, block=block, rounding="nearest")
    half = 0.5 / (2 ** (bits - 1) - 1)
    for share in (0.99, 1.0, 1.01, 1.5):
        for largest in (1.0, 1.0 + 2.0**-8, 1.99):
            x = torch.full((4 * block,), half * share * largest)
            x[::block] = -largest
            assert_contractive(spec, x)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QSGD(), 0.166),
        (QSGD(rounding="nearest"), 0.118),
        (QSGD(scale="minmax"), 0.14),
        (QSGD(scale="l2"), 0.66),
    ],
    ids=repr,
)
def test_the_relative_error_of_gaussian_data_is_the_designs(spec: QSGD, expected: float) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    codec = Codec(spec, (x.numel(),))
    error = float((codec(x) - x).norm() / x.norm())
    assert error == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("bits", range(2, 9))
def test_each_bit_halves_the_error(bits: int) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    errors = [float((Codec(QSGD(bits=b, scale="minmax"), (x.numel(),))(x) - x).norm() / x.norm()) for b in (bits, 8)]
    # steps are the range over 2^bits - 1
    assert errors[0] / errors[1] == pytest.approx(255 / (2**bits - 1), rel=0.05)


# ---- the grid


@pytest.mark.parametrize("scale", ["max", "minmax", "l2"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_what_is_decoded_lies_on_the_grid(bits: int, rounding: str, scale: str) -> None:
    spec = QSGD(bits=bits, block=128, scale=scale, rounding=rounding)
    codec = Codec(spec, (4097,))
    x = gradient(4097)
    decoded = codec(x)
    scales = codec.payload.clone()[: 33 * (4 if scale == "minmax" else 2)].view(torch.bfloat16).double().reshape(33, -1)
    if scale == "minmax":
        base, step = scales[:, 0], (scales[:, 1] - scales[:, 0]) / (2**bits - 1)
        lowest, highest = 0, 2**bits - 1
    else:
        base, step = torch.zeros(33, dtype=torch.float64), scales[:, 0] / (2 ** (bits - 1) - 1)
        highest = 2 ** (bits - 1) - 1
        lowest = -highest
    place = (decoded.double() - base.repeat_interleave(128)[:4097]) / step.repeat_interleave(128)[:4097]
    # a value is rounded to float32, which in a narrow block far from zero is a visible part of a step
    rounding = 2.0**-23 * decoded.double().abs() / step.repeat_interleave(128)[:4097]
    assert bool(((place - place.round()).abs() <= 1e-4 + rounding).all())
    assert lowest <= int(place.round().min()) <= int(place.round().max()) <= highest
    if scale == "max":  # the largest value of a block is bounded by its scale, and the scale is tight
        largest = blocks_of(x.double(), 128).abs().amax(1)
        assert bool((scales[:, 0] >= largest).all())
        assert bool((scales[:, 0] <= largest * (1 + 2.0**-7)).all())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("scale", ["max", "minmax"])
def test_values_on_the_grid_are_sent_as_they_are(bits: int, scale: str) -> None:
    """Powers of two as scales, so that the grid is exact in float32. The largest number of levels hits every value."""
    if scale == "max":
        top = 2 ** (bits - 1) - 1
        grid = torch.arange(-top, top + 1) / top
    else:
        grid = torch.arange(0, 2**bits) / (2**bits - 1) * 2 - 1
    x = torch.cat([blocks_of(grid, 256).reshape(-1) * scale for scale in (2.0**-20, 1.0, 2.0**30)])
    decoded = Codec(QSGD(bits=bits, block=256, scale=scale, rounding="nearest"), (x.numel(),))(x)
    assert (
        torch.allclose(decoded, x, rtol=1e-5, atol=0)
        if scale == "max"
        else bool(((decoded - x).abs() <= 1e-6 * x.abs().reshape(3, -1).amax(1).repeat_interleave(256)).all())
    )
    # what was decoded is sent again as it is
    again = Codec(QSGD(bits=bits, block=256, scale=scale, rounding="nearest"), (x.numel(),))(decoded)
    assert torch.allclose(again, decoded, rtol=1e-6, atol=0)
    # stochastic rounding leaves them alone too, but for a chance of a few 65536ths each
    draws = [Codec(QSGD(bits=bits, block=256, scale=scale, seed=seed), (x.numel(),))(x) for seed in range(20)]
    moved = sum(float(((d - x).abs() > 1e-3 * x.abs().max()).float().mean()) for d in draws) / 20
    assert moved < 20 / 65536


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_zeros_are_sent_as_zeros(spec: Spec, dtype: torch.dtype) -> None:
    """Blocks of zeros beside others, and within a block where zero is a grid value."""
    x = gradient(123 + 4097, dtype)
    x[:123] = 0.0
    x[123 + 1024 : 123 + 2048] = 0.0
    decoded = Codec(spec, (123, 4097), dtype)(x)
    assert not decoded[:123].any()
    assert not decoded[123 + 1024 : 123 + 2048].any()
    assert decoded[-1000:].any()
    if getattr(spec, "scale", "") in ("max", "l2"):
        x[::3] = 0.0
        assert not Codec(spec, (123, 4097), dtype)(x)[::3].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_decoding_to_the_gradients_dtype_rounds_what_a_sum_gets(spec: Spec, dtype: torch.dtype) -> None:
    codec = Codec(spec, (1, 7, 300), dtype)
    codec.encode(gradient(308, dtype))
    assert torch.equal(codec.decode(dtype=dtype), codec.decode().to(dtype))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_nothing_that_is_not_finite_becomes_finite(spec: Spec) -> None:
    for bad, dtype in itertools.product((math.nan, math.inf, -math.inf), DTYPES):
        x = gradient(300, dtype)
        x[130] = bad
        codec = Codec(spec, (300,), dtype)
        decoded = codec(x)
        assert not decoded[130].isfinite()
        assert bool(decoded[:128].isfinite().all()) or getattr(getattr(spec, "inner", spec), "block", 128) > 128
        if codec.residual is not None:  # and one bad step does not spoil the next
            assert bool(codec.residual.isfinite().all())
            assert bool(codec(gradient(300, dtype), step=1).isfinite().all())


def test_float16_on_the_wire_overflows_to_inf_and_carries_nothing() -> None:
    codec = Codec(ErrorFeedback(Cast("float16")), (4,))
    decoded = codec(torch.tensor([70000.0, -70000.0, 1.0, 65504.0]))
    assert decoded.tolist() == [math.inf, -math.inf, 1.0, 65504.0]
    assert codec.residual is not None and codec.residual.tolist() == [0.0] * 4


@pytest.mark.parametrize("inner", [QSGD(bits=2), TopK(0.1), Cast("bfloat16")], ids=repr)
def test_a_residual_decays(inner: Spec) -> None:
    codec, plain = Codec(ErrorFeedback(inner, decay=0.5), (300,)), Codec(ErrorFeedback(inner), (300,))
    assert codec.residual is not None and plain.residual is not None
    for step in range(4):
        x = gradient(300, torch.float32, seed=step)
        plain.residual.copy_(codec.residual * 0.5)
        assert torch.equal(codec(x, step), plain(x, step))
        assert torch.equal(codec.residual, plain.residual)
    assert not torch.equal(codec.residual, torch.zeros(300))


# ---- sizes


def formula(spec: Spec, numels: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes on the wire, from the words of the specs."""
    inner = getattr(spec, "inner", spec)
    if isinstance(inner, Identity):
        return sum(numels) * dtype.itemsize
    if isinstance(inner, Cast):
        return sum(numels) * 2
    if inner.blocks == "bucket":
        numels = (sum(numels),)
    scales = sum(-(-n // inner.block) for n in numels) * (4 if inner.scale == "minmax" else 2)
    in_base_3 = inner.bits == 2 and inner.scale != "minmax" and inner.levels == "uniform" and inner.block % 64 == 0
    whole = inner.block * (13 / 64 if in_base_3 else inner.bits / 8)
    codes = sum(n // inner.block * int(whole) + -(-(n % inner.block) // 8) * inner.bits for n in numels)
    return -(-scales // 16) * 16 + codes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_exactly_the_payload_is_written(spec: Spec, dtype: torch.dtype) -> None:
    for numels in ((1,), (7,), (123,), (4097,), (1, 7, 123, 300, 4097), (128, 256)):
        x, seen = gradient(sum(numels), dtype), []
        for fill in (0x55, 0xAA):
            codec = Codec(spec, numels, dtype)
            size = codec.payload.numel()
            assert size == codec.compressor.payload_bytes(codec.segments, dtype) == formula(spec, numels, dtype)
            if isinstance(spec, QSGD):
                laid = numels if spec.blocks == "tensor" else (sum(numels),)
                assert size == sum(qsgd_bytes([(n, spec.bits) for n in laid], spec.block, spec.scale, spec.levels))
            around = torch.full((size + 128,), fill, dtype=torch.uint8)
            codec.payload = around[64 : 64 + size]
            codec.encode(x)
            assert set(around[:64].tolist()) == set(around[64 + size :].tolist()) == {fill}
            seen.append(codec.payload)
        assert torch.equal(*seen), "some bytes of the payload are not written"


def test_blocks_of_a_bucket_ignore_where_tensors_end() -> None:
    """The payload is that of one tensor with all elements. Blocks of tensors are others."""
    numels, spec = (1, 7, 123, 300, 4097), QSGD(bits=3, block=32, blocks="bucket")
    x = gradient(sum(numels))
    bucket, whole = Codec(spec, numels), Codec(QSGD(bits=3, block=32), (sum(numels),))
    assert torch.equal(bucket.encode(x), whole.encode(x))
    assert torch.equal(bucket.decode(), whole.decode())
    assert not torch.equal(bucket.decode(), Codec(QSGD(bits=3, block=32), numels)(x))


def test_blocks_of_a_bucket_go_on_where_the_bits_are_the_same() -> None:
    spec, keys = QSGD(block=32, blocks="bucket"), (tensor_key("a"), tensor_key("b"), tensor_key("c"))
    rows = [(0, 20, keys[0], 0, 4), (20, 30, keys[1], 0, 4), (50, 9, keys[2], 0, 2)]
    segments = Segments.of([Segment(*row) for row in rows])
    assert [row[:3] for row in segments.joined.rows] == [(0, 50, keys[0]), (50, 9, keys[2])]
    compressor = compressor_for(spec)
    assert compressor.payload_bytes(segments, torch.float32) == sum(qsgd_bytes([(50, 4), (9, 2)], 32, "max"))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_payload_may_begin_anywhere(spec: Spec) -> None:
    """In a receive buffer, payloads follow each other without padding."""
    codec = Codec(spec, (300,))
    x = gradient(300)
    payload, expected = codec.encode(x).clone(), codec.decode()
    for shift in (1, 2, 3, 5, 8):
        shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), payload])[shift:]
        assert torch.equal(codec.decode(shifted), expected)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_payload_of_another_size_is_refused_with_both_sizes(spec: Spec) -> None:
    for dtype in DTYPES:
        codec = Codec(spec, (1, 300), dtype)
        payload = codec.encode(gradient(301, dtype))
        size = payload.numel()
        wrong = [payload[:-1], payload[:0], payload[: size // 2], torch.cat([payload, payload[:1]]), payload.repeat(2)]
        for each in wrong:
            before = torch.full((301,), 5.0, dtype=dtype)
            dst = before.clone()
            with pytest.raises(PayloadError) as caught:
                codec.compressor.decode(each, codec.segments, dtype, False, dst, codec.context)
            message = str(caught.value)
            for word in (repr(getattr(spec, "inner", spec)), str(each.numel()), str(size), "301 elements"):
                assert word in message
            assert torch.equal(dst, before)
        with pytest.raises(PayloadError, match=r"torch\.int8"):
            codec.decode(payload.view(torch.int8))


@pytest.mark.skipif(cpu.available() is not None, reason="the reference kernels check no sizes")
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_encoding_into_another_size_is_refused(spec: Spec) -> None:
    codec = Codec(spec, (1, 300))
    for size in (codec.payload.numel() - 1, codec.payload.numel() + 1):
        codec.payload = torch.zeros(size, dtype=torch.uint8)
        with pytest.raises(RuntimeError):
            codec.encode(gradient(301))


# ---- state and purity


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_encode_reads_and_decode_reads(spec: Spec) -> None:
    """Neither changes what it was given to read, and one instance serves many buffers: nothing is kept in it."""
    codec, other = Codec(spec, (300,)), Codec(spec, (77,))
    other.compressor = codec.compressor
    x = gradient(300)
    kept = x.clone()
    first = codec.encode(x).clone()
    other.encode(gradient(77, seed=1))
    decoded = codec.decode()
    assert torch.equal(x, kept)
    assert torch.equal(codec.payload, first)
    assert torch.equal(codec.decode(), decoded)
    if codec.residual is not None:
        codec.residual.zero_()
    assert torch.equal(codec.encode(x), first)


def test_adding_sums_payloads() -> None:
    for spec in SPECS:
        codec = Codec(spec, (1, 7, 300))
        total, by_hand = torch.zeros(308), torch.zeros(308)
        for rank in range(3):
            codec.random[3] = rank
            payload = codec.encode(gradient(308, seed=rank))
            codec.compressor.decode(payload, codec.segments, codec.dtype, rank > 0, total, codec.context)
            by_hand = codec.decode() if rank == 0 else by_hand + codec.decode()
        assert torch.equal(total, by_hand), spec


def test_tensors_of_a_family_share_one_payload_with_their_own_bits() -> None:
    """Several bits in one bucket: each tensor is encoded as it would be alone."""
    numels, widths = (300, 7, 129, 1), (2, 8, 5, 3)
    offsets = list(itertools.accumulate(numels, initial=0))
    rows = [Segment(offsets[i], numels[i], tensor_key(f"t{i}"), 0, widths[i]) for i in range(4)]
    together, x = Codec(QSGD(), numels), gradient(sum(numels))
    together.segments = Segments.of(rows)
    together.payload = torch.empty(together.compressor.payload_bytes(together.segments, x.dtype), dtype=torch.uint8)
    decoded = together(x)
    for i, row in enumerate(rows):
        alone = Codec(QSGD(bits=widths[i]), (numels[i],))
        alone.segments = Segments.of([row._replace(offset=0)])
        run = slice(row.offset, row.offset + row.numel)
        assert torch.equal(alone(x[run].clone()), decoded[run])


# ---- a compressor of one's own


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is registered inside is forgotten afterwards."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    yield


class ScaledSign(Compressor):
    """One byte an element, 1 if it is negative, after the float32 mean of magnitudes."""

    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: Any) -> None:
        residual = state[0] if state else None
        v = src.float() if residual is None else src.float() + residual
        payload[:4] = v.abs().mean().reshape(1).view(torch.uint8)
        payload[4:] = (v < 0).to(torch.uint8)
        if residual is not None:
            residual.copy_(v - self._value(payload))

    def decode(self, payload: Any, segments: Any, dtype: Any, add: Any, dst: Any, context: Any) -> None:
        self.check(payload, segments, dtype)
        value = self._value(payload)
        dst.copy_((dst + value if add else value).to(dst.dtype))

    @staticmethod
    def _value(payload: torch.Tensor) -> torch.Tensor:
        return payload[:4].clone().view(torch.float32) * (1 - 2 * payload[4:].float())


def test_a_third_party_compressor_works_end_to_end(registries: None) -> None:
    class Sign(Spec, frozen=True):
        id: ClassVar[str] = "scaled_sign"

        def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
            return 4 + sum(run.numel for run in runs)

    register_spec(Sign)
    spec = spec_from_dict({"id": "scaled_sign"})
    assert spec == Sign()
    with pytest.raises(SpecError, match=r"Sign\(\) has no compressor: .*register_compressor"):
        compressor_for(spec)
    register_compressor(Sign, ScaledSign)

    x = gradient(300)
    codec = Codec(spec, (300,))
    decoded = codec(x)
    assert torch.equal(decoded.sign(), x.sign())
    assert torch.allclose(decoded.abs(), x.abs().mean())
    with pytest.raises(PayloadError, match=r"Sign\(\): 300 elements in 1 segments take 304 bytes"):
        codec.decode(codec.payload[:-1])

    # and composes with error feedback, which knows nothing of it
    nested = spec_from_dict({"id": "error_feedback", "inner": {"id": "scaled_sign"}})
    assert nested == ErrorFeedback(Sign())
    codec, given, sent = Codec(nested, (300,)), torch.zeros(300), torch.zeros(300)
    for step in range(50):
        given += gradient(300, seed=step)
        sent += codec(gradient(300, seed=step), step)
    assert codec.residual is not None
    assert torch.allclose(given - sent, codec.residual, atol=1e-5)


def test_a_compressor_without_its_methods_cannot_be_made() -> None:
    class Half(Compressor):
        def payload_bytes(self, segments: Segments, dtype: torch.dtype) -> int:
            return 0

    with pytest.raises(TypeError, match="abstract"):
        Half(Identity())  # type: ignore[abstract]


# ---- golden files: what one release encodes, the next decodes

GOLDEN_NUMELS = (1, 7, 123, 300)
GOLDEN_SPECS: dict[str, tuple[Spec, torch.dtype]] = {
    "identity": (Identity(), torch.float32),
    "identity-bfloat16": (Identity(), torch.bfloat16),
    "cast-float16": (Cast("float16"), torch.float32),
    "cast-bfloat16": (Cast("bfloat16"), torch.float32),
    **{f"qsgd-{bits}": (QSGD(bits=bits), torch.float32) for bits in range(2, 9)},
    "qsgd-4-bfloat16": (QSGD(), torch.bfloat16),
    "qsgd-4-block-32": (QSGD(block=32, seed=5), torch.float32),
    "qsgd-5-minmax": (QSGD(bits=5, scale="minmax"), torch.float32),
    "qsgd-6-l2-nearest": (QSGD(bits=6, scale="l2", rounding="nearest"), torch.float32),
    "qsgd-3-feedback": (ErrorFeedback(QSGD(bits=3, rounding="nearest")), torch.float32),
    "qsgd-4-exponential": (QSGD(levels="exponential", seed=3), torch.float32),
    "qsgd-2-ls-feedback": (ErrorFeedback(QSGD(bits=2, scale="ls")), torch.float32),
    "qsgd-3-ls": (QSGD(bits=3, scale="ls"), torch.float32),
    "qsgd-4-ls-feedback": (ErrorFeedback(QSGD(scale="ls")), torch.bfloat16),
    "qsgd-2-lloyd-feedback": (ErrorFeedback(QSGD(bits=2, scale="ls", levels="lloyd")), torch.float32),
    "qsgd-3-lloyd-feedback": (ErrorFeedback(QSGD(bits=3, scale="ls", levels="lloyd")), torch.float32),
    "qsgd-4-lloyd": (QSGD(scale="ls", levels="lloyd"), torch.float32),
    "qsgd-2-lloyd-weights": (ErrorFeedback(QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98), torch.float32),
    "qsgd-3-ls-weights": (ErrorFeedback(QSGD(bits=3, scale="ls"), weights=0.98), torch.bfloat16),
    "int8": (Int8(), torch.float32),
    "fp8-e4m3": (FP8("e4m3"), torch.float32),
    "fp8-e5m2-float16": (FP8("e5m2", block=32), torch.float16),
    "natural": (Natural(block=128), torch.float32),
    "terngrad": (TernGrad(block=128), torch.float32),
    "terngrad-clipped": (TernGrad(block=128, clip=2.5), torch.float32),
    "twobit": (TwoBit(block=128), torch.float32),
    "twobit-fixed": (TwoBit(threshold=0.5), torch.bfloat16),
    "signsgd": (SignSGD(), torch.float32),
    "signum": (Signum(), torch.float32),
    "ef-signsgd": (EFSignSGD(block=128), torch.float32),
    "onebit": (OneBit(), torch.float32),
    "topk": (TopK(0.05), torch.float32),
    "topk-dense-bfloat16": (TopK(0.4, per="bucket"), torch.bfloat16),
    "topk-feedback": (ErrorFeedback(TopK(0.1)), torch.float32),
    "topk-2-bits-feedback": (ErrorFeedback(TopK(0.1, values=QSGD(bits=2))), torch.float32),
    "block-topk": (BlockTopK(0.1, block=64), torch.float32),
    "threshold": (Threshold(0.5, capacity=0.1), torch.float32),
    "randomk-own": (RandomK(0.1, indices="own", seed=7), torch.float32),
    "dgc": (DGC(0.1, momentum=0.5), torch.float32),
}


def golden_gradient(dtype: torch.dtype) -> torch.Tensor:
    """Made of integers, so that it is the same everywhere; with zeros, a tiny value and a block that is not finite."""
    numel = sum(GOLDEN_NUMELS)
    i = torch.arange(numel)
    x = ((i * 7919 + 13) % 2003 - 1001).float() * torch.pow(2.0, -((i * 31) % 23).float())
    x[20:60] = 0.0
    x[60], x[61] = -0.0, 2.0**-130
    x[-1] = math.nan
    return x.to(dtype)


def golden_codec(name: str) -> tuple[Codec, torch.Tensor]:
    spec, dtype = GOLDEN_SPECS[name]
    if name in (index := golden_files()):
        spec = spec_from_dict(index[name]["spec"])  # with the values that were defaults when the payload was promised
    codec = Codec(spec, GOLDEN_NUMELS, dtype)
    codec.segments = golden_weights(spec, codec.segments)
    codec.random.copy_(torch.tensor([spec.random_seed, 11, 1, 3]))
    for number, remembered in enumerate(codec.state):
        remembered.copy_(torch.linspace(-4, 4 - number, codec.numel))
    return codec, golden_gradient(dtype)


def golden_weights(spec: Spec, segments: Segments) -> Segments:
    """The segments with the weights of energies that are powers of two, if the spec has weights."""
    if (how := spec.element_weights) is None:
        return segments
    numel = segments.numel
    energy, weights = torch.pow(2.0, (torch.arange(numel) * 37 % 23 - 11).float()), torch.zeros(numel, dtype=torch.uint8)
    run_calls([("weigh_elements", energy, segments, how.block, how.floor, weights)])
    return replace(segments, weights=weights)


OLD_DEFAULT = "if a default of the spec is another now, write the old value into its entry in tests/golden/index.json"


def golden_files() -> dict[str, Any]:
    index = GOLDEN / "index.json"
    return json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}


def make_golden() -> None:
    """Write what is missing; what is there was promised and stays."""
    index = golden_files()
    GOLDEN.mkdir(exist_ok=True)
    for name, (spec, dtype) in GOLDEN_SPECS.items():
        if name in index:
            continue
        codec, x = golden_codec(name)
        payload = codec.encode(x)
        decoded = codec.decode()
        (GOLDEN / f"{name}.bin").write_bytes(payload.numpy().tobytes() + decoded.numpy().tobytes())
        index[name] = {
            "spec": spec.to_dict(),
            "dtype": str(dtype).removeprefix("torch."),
            "segments": [list(row) for row in codec.segments.rows],
            "payload_bytes": payload.numel(),
            "input_crc32": zlib.crc32(x.view(torch.uint8).numpy().tobytes()),
        }
        print(f"made {name}.bin")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in index.items())
    (GOLDEN / "index.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def test_golden_files_are_complete_and_small() -> None:
    index = golden_files()
    missing = sorted(set(GOLDEN_SPECS) - set(index))
    assert not missing, f"`.venv/bin/python tests/unit/compressors/test_compressors.py` writes {', '.join(missing)}"
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(index)
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 200_000, "use fewer rows, or smaller tensors"


def test_every_compressor_has_golden_payloads() -> None:
    own = {cls for cls in registered_specs().values() if cls.__module__.startswith("gradwire.")}
    kept = {type(each) for spec, _ in GOLDEN_SPECS.values() for each in (spec, innermost(spec))}
    without = {Truncate, *(cls for cls in own if cls.rounds)}  # a fake, and sums on the wire
    missing = sorted(cls.__name__ for cls in own - kept - without)
    assert not missing, f"add a row to GOLDEN_SPECS for {', '.join(missing)}"


@pytest.mark.parametrize("name", golden_files())
def test_golden_payloads_decode_as_they_did(name: str) -> None:
    entry, content = golden_files()[name], (GOLDEN / f"{name}.bin").read_bytes()
    size = entry["payload_bytes"]
    payload = torch.frombuffer(bytearray(content[:size]), dtype=torch.uint8)
    expected = torch.frombuffer(bytearray(content[size:]), dtype=torch.float32)
    spec, dtype = spec_from_dict(entry["spec"]), getattr(torch, entry["dtype"])
    segments = Segments.of([Segment(*row) for row in entry["segments"]])
    segments = golden_weights(spec, segments)
    compressor, decoded = compressor_for(spec), torch.zeros(segments.numel)
    assert compressor.payload_bytes(segments, dtype) == size, OLD_DEFAULT
    compressor.decode(payload, segments, dtype, True, decoded, Context(torch.zeros(4, dtype=torch.int64)))
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("name", GOLDEN_SPECS)
def test_golden_payloads_are_encoded_again(name: str) -> None:
    """A resumed run repeats its random stream, also under a later release. If that is given up, say so in CHANGELOG."""
    codec, x = golden_codec(name)
    entry, content = golden_files()[name], (GOLDEN / f"{name}.bin").read_bytes()
    assert type(GOLDEN_SPECS[name][0]) is type(codec.spec)
    assert [Segment(*row) for row in entry["segments"]] == list(codec.segments.rows)
    assert zlib.crc32(x.view(torch.uint8).numpy().tobytes()) == entry["input_crc32"], "the input itself is another"
    assert codec.encode(x).numpy().tobytes() == content[: entry["payload_bytes"]], OLD_DEFAULT


if __name__ == "__main__":
    make_golden()
