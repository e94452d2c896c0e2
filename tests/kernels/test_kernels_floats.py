"""FP8, natural compression and exponential levels: every SIMD level and the reference give the same bytes, and keep the laws."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from test_kernels import (
    DTYPES,
    LEVELS,
    NAN,
    STREAM,
    WAYS,
    Way,
    assert_all_alike,
    awkward,
    built,
    segments_of,
    way,
    whole,
)

from gradwire.core.payload import coded_bytes
from gradwire.kernels import cpu
from gradwire.kernels.segments import Segment, Segments

SIZES = (0, 1, 7, 8, 9, 123, 127, 128, 129, 4097)


@dataclass(frozen=True)
class Method:
    """One of the codes with its options, as functions of a way to run it."""

    name: str
    scale: str = "max"
    rounding: str = "stochastic"

    def encode(
        self, way: Way, x: torch.Tensor, residual: torch.Tensor | None, segments: Segments, block: int, seed: int = 3
    ) -> torch.Tensor:
        payload = torch.full((self.size(segments, block),), 255, dtype=torch.uint8)
        stream, k = torch.cat([torch.tensor([seed]), STREAM[1:]]), way.kernels
        with way.chosen():
            if self.name == "natural":
                k.natural_encode(x, residual, segments, stream, block, payload)
            elif self.name == "exponential":
                k.exponential_encode(x, residual, segments, stream, block, self.scale, self.rounding, payload)
            else:
                k.fp8_encode(x, residual, segments, block, self.name, payload)
        return payload

    def decode(self, way: Way, payload: torch.Tensor, segments: Segments, block: int, add: bool, dst: torch.Tensor) -> None:
        with way.chosen():
            if self.name == "natural":
                way.kernels.natural_decode(payload, segments, block, add, dst)
            elif self.name == "exponential":
                way.kernels.exponential_decode(payload, segments, block, add, dst)
            else:
                way.kernels.fp8_decode(payload, segments, block, self.name, add, dst)

    def size(self, segments: Segments, block: int) -> int:
        bits = [row.bits if self.name == "exponential" else 8 for row in segments.rows]
        return sum(coded_bytes(zip((row.numel for row in segments.rows), bits, strict=True), block))

    def run(self, way: Way, x: torch.Tensor, segments: Segments, block: int) -> dict[str, torch.Tensor]:
        """Everything the kernels make of x, by name."""
        out = {
            "residual": torch.linspace(-1, 1, x.numel()),
            "tiny residual": torch.linspace(-1, 1, x.numel()) * 2.0**-115,
            "decoded": torch.ones_like(x),
            "decoded and added": torch.linspace(-2, 2, x.numel()),
        }
        out["payload"] = self.encode(way, x, None, segments, block)
        out["payload with residual"] = self.encode(way, x, out["residual"], segments, block)
        out["payload with tiny residual"] = self.encode(way, x * 0, out["tiny residual"], segments, block)
        self.decode(way, out["payload"], segments, block, False, out["decoded"])
        self.decode(way, out["payload with residual"], segments, block, True, out["decoded and added"])
        return out

    def __call__(self, x: torch.Tensor, bits: int = 8, block: int = 128, seed: int = 3, way: Way = WAYS[-1]) -> torch.Tensor:
        """x encoded and decoded as one tensor."""
        segments, decoded = whole(x.numel(), bits), torch.zeros(x.numel())
        self.decode(way, self.encode(way, x, None, segments, block, seed), segments, block, True, decoded)
        return decoded


METHODS = [
    Method("e4m3"),
    Method("e5m2"),
    Method("natural"),
    Method("exponential"),
    Method("exponential", "l2"),
    Method("exponential", "max", "nearest"),
    Method("exponential", "l2", "nearest"),
]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{m.scale}-{m.rounding}")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- the same bytes


@built
@dtypes
@methods
def test_bytes_are_those_of_the_reference(method: Method, dtype: torch.dtype) -> None:
    x = awkward(dtype)
    several = [(b,) for b in (2, 3, 4, 7, 8)] + [(2, 5, 8)] if method.name == "exponential" else [(8,)]
    for block, bits in itertools.product((32, 128, 1024), several):
        segments = segments_of(bits, block=block)
        assert_all_alike(lambda w, s=segments, n=block: method.run(w, x, s, n), f"{bits=} {block=}")


@built
@methods
def test_bytes_at_odd_sizes_and_other_blocks(method: Method) -> None:
    x = torch.randn(70001, generator=torch.Generator().manual_seed(1)).mul(6).exp()
    x = x * torch.randn(70001, generator=torch.Generator().manual_seed(2)).sign()
    for numel in (*SIZES, 70001):
        assert_all_alike(lambda w, n=numel: method.run(w, x[:n].clone(), whole(n, 8), 128), f"{numel=}")
    for block in (64, 256, 8192):
        segments = segments_of((8, 3), (8193, 1, 8191, 2049, 17), block)
        y = x[: segments.numel].clone()
        assert_all_alike(lambda w, s=segments, v=y, n=block: method.run(w, v, s, n), f"{block=}")


@way
@methods
def test_nothing_at_all_encodes_to_nothing(method: Method, way: Way) -> None:
    for rows in ([], [Segment(0, 0, 1, 0, 4)]):
        assert all(value.numel() == 0 for value in method.run(way, torch.empty(0), Segments.of(rows), 128).values())


@way
@methods
def test_cutting_a_tensor_at_block_borders_changes_nothing(method: Method, way: Way) -> None:
    x, block = torch.randn(4097, generator=torch.Generator().manual_seed(5)), 32
    cuts = [0, 32, 224, 4096, 4097]
    at_once, pieces = torch.zeros(4097), torch.zeros(4097)
    segments = whole(4097, 6)
    method.decode(way, method.encode(way, x, None, segments, block), segments, block, True, at_once)
    segments = Segments.of([Segment(a, b - a, 1, a, 6) for a, b in itertools.pairwise(cuts)])
    method.decode(way, method.encode(way, x, None, segments, block), segments, block, True, pieces)
    assert torch.equal(at_once, pieces)


# ---- special blocks


@way
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 2.0**126, -3e38])
@methods
def test_a_bad_block_decodes_to_nan_and_keeps_its_residual(method: Method, bad: float, way: Way) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(4))
    x[130] = bad
    out = method.run(way, x, whole(300, 4), 128)
    before = torch.linspace(-1, 1, 300)
    for name in ("decoded", "decoded and added"):
        assert out[name].isnan().nonzero().flatten().tolist() == list(range(128, 256))
    assert torch.equal(out["residual"][128:256], before[128:256])
    assert not torch.equal(out["residual"][:128], before[:128])
    assert bool(out["residual"].isfinite().all())


@way
@methods
def test_zeros_are_sent_as_zeros_and_tiny_blocks_stay_in_the_residual(method: Method, way: Way) -> None:
    x = torch.zeros(256)
    x[128:] = torch.linspace(-1, 1, 128) * 2.0**-130
    residual, segments, decoded = torch.zeros(256), whole(256, 8), torch.ones(256)
    payload = method.encode(way, x, residual, segments, 128)
    method.decode(way, payload, segments, 128, False, decoded)
    assert not payload.any()
    assert not decoded.any()
    assert torch.equal(residual, x)


@way
@methods
def test_what_is_lost_is_the_residual(method: Method, way: Way) -> None:
    x = torch.randn(4097, generator=torch.Generator().manual_seed(6)).mul(3).exp()
    residual, segments = torch.zeros(4097), whole(4097, 5)
    payload, decoded = method.encode(way, x, residual, segments, 128), torch.zeros(4097)
    method.decode(way, payload, segments, 128, True, decoded)
    assert torch.equal(residual, x - decoded)


# ---- laws


def spread(numel: int, octaves: float) -> torch.Tensor:
    """Magnitudes from 2^-octaves to 1, evenly on a logarithmic scale, with both signs."""
    generator = torch.Generator().manual_seed(7)
    signs = torch.randint(0, 2, (numel,), generator=generator) * 2.0 - 1
    return signs * torch.exp2(-octaves * torch.rand(numel, generator=generator))


def neighbours_of(x: torch.Tensor, top: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels top, top/2, .., `levels` of them, and zero, next below and above the magnitudes x, in float64."""
    halvings = -torch.floor(torch.log2(x / top))  # 1 for the upper half, 0 for top itself
    below = torch.where(halvings < levels, top * torch.exp2(-halvings), 0.0)
    above = torch.where(halvings < levels, 2 * below, top * 2.0 ** (1 - levels))
    return below, torch.where(x == top, top, above)


@pytest.mark.parametrize(("name", "bits", "scale"), [("natural", 8, "max")] + [
    ("exponential", bits, scale) for bits in (2, 3, 4, 8) for scale in ("max", "l2")
])  # fmt: skip
def test_powers_of_two_are_unbiased_and_neighbours(name: str, bits: int, scale: str) -> None:
    """Each draw is one of the two neighbours; the mean of all draws is x, by Hoeffding's bound for each element."""
    method, block, draws = Method(name, scale), 128, 300
    x = spread(2048, 12)
    v = x.double().abs().reshape(-1, block)
    if name == "natural":
        top = torch.exp2(torch.ceil(torch.log2(v.amax(1))))
    else:
        payload = method.encode(WAYS[-1], x, None, whole(2048, bits), block)
        top = payload[: 2 * v.shape[0]].view(torch.bfloat16).double()
        least = v.amax(1) if scale == "max" else v.norm(dim=1)
        assert bool(((top >= least * (1 - 1e-7)) & (top <= least * (1 + 2.0**-7))).all())
    below, above = neighbours_of(v, top.unsqueeze(1), 2 ** (bits - 1) - 1)
    below, above, total = below.reshape(-1), above.reshape(-1), torch.zeros(2048, dtype=torch.float64)
    for seed in range(draws):
        sent = method(x, bits, block, seed).double()
        assert bool(((sent == 0) | (sent.sign() == x.sign())).all())
        assert bool((((sent.abs() - below).abs() <= 1e-6 * below) | ((sent.abs() - above).abs() <= 1e-6 * above)).all())
        total += sent
    step = above - below
    mean = (total / draws - x.double()) / step
    allowed = math.sqrt(math.log(2 * 2048 / 1e-9) / (2 * draws)) + 2.0**-15
    assert float(mean.abs().max()) <= allowed
    # all together: the variance of each is at most a quarter of its step squared
    assert abs(float((mean * x.sign()).mean())) <= 5 * math.sqrt(0.25 / draws / 2048) + 2.0**-15


@pytest.mark.parametrize("bits", range(2, 9))
def test_nearest_exponential_levels_are_the_nearer_ones(bits: int) -> None:
    levels, x = 2 ** (bits - 1) - 1, spread(4096, 10)
    x[::128] = 1.0
    x[5], x[6], x[7] = 0.75, -0.75, 0.75 - 2.0**-20  # half way between two levels, where there are two
    below, above = neighbours_of(x.double().abs(), torch.tensor(1.0), levels)
    nearer = torch.where(x.double().abs() - below >= above - x.double().abs(), above, below)
    assert torch.equal(Method("exponential", "max", "nearest")(x, bits).double(), nearer * x.double().sign())


def test_levels_that_float32_lacks_count_as_zero() -> None:
    """Of a small block the lowest levels would not be normal numbers; what is there goes to the last one left or to zero."""
    x = torch.full((128,), 2.0**-122)
    x[0] = 2.0**-99
    draws = torch.stack([Method("exponential")(x, 8, seed=seed) for seed in range(200)])[:, 1:]
    assert set(draws.unique().tolist()) == {0.0, 2.0**-120}
    assert abs(float(draws.double().mean()) / 2.0**-122 - 1) < 5 * math.sqrt(3 / draws.numel())


@pytest.mark.parametrize(("name", "dtype", "error"), [
    ("e4m3", torch.float8_e4m3fn, 2.0**-4), ("e5m2", torch.float8_e5m2, 2.0**-3),
])  # fmt: skip
def test_fp8_is_torchs_cast_of_the_scaled_block(name: str, dtype: torch.dtype, error: float) -> None:
    largest = torch.finfo(dtype).max
    x = torch.cat([spread(4096, 24), spread(1024, 24).bfloat16().float(), torch.linspace(-1, 1, 4096)])
    segments = whole(x.numel(), 0)
    payload = Method(name).encode(WAYS[-1], x, None, segments, 128)
    blocks = x.numel() // 128
    scale = payload[: 2 * blocks].view(torch.bfloat16).float().repeat_interleave(128)
    assert bool((scale >= x.abs()).all())
    scaled = x * (torch.tensor(largest) / scale)
    cast = scaled.clamp(-largest, largest).to(dtype)
    assert torch.equal(payload[2 * blocks :].view(dtype).float(), cast.float())
    decoded = Method(name)(x)
    assert torch.equal(decoded, cast.float() * (scale / largest))
    # half a unit of the last place: of normal numbers relative to them, of subnormal ones to the smallest
    normal = scaled.abs() >= torch.finfo(dtype).smallest_normal
    lost = (decoded - x).abs()
    assert bool((lost[normal] <= error * x.abs()[normal] * (1 + 1e-6)).all())
    smallest = torch.finfo(dtype).smallest_normal * error  # half of the smallest subnormal: 2^-mantissa / 2 of the normal
    assert bool((lost[~normal] <= smallest * (scale / largest)[~normal] * (1 + 1e-6)).all())


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_fp8_number_comes_back(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    largest = torch.finfo(dtype).max
    scale = 2.0 ** math.ceil(math.log2(largest))
    # beside the largest number, whose scale is not itself a bfloat16 power of two: 448 and 57344 are bfloat16 numbers
    x = torch.nn.functional.pad(codes, (0, -codes.numel() % 256), value=largest)
    assert scale > largest
    assert torch.equal(Method(name)(x, block=256), x)


# ---- what is refused, and what is not believed


@built
def test_wrong_sizes_are_refused_in_words() -> None:
    x, segments = torch.ones(300), whole(300, 4)
    right = Method("natural").size(segments, 128)

    def encode(size: int = right, segments: Segments = segments, block: int = 128, x: torch.Tensor = x) -> None:
        cpu.natural_encode(x, None, segments, STREAM, block, torch.zeros(size, dtype=torch.uint8))

    def exponential(bits: int) -> None:
        cpu.exponential_encode(x, None, whole(300, bits), STREAM, 128, "max", "nearest", torch.zeros(9).byte())

    refused: dict[str, Callable[[], None]] = {
        rf"has {right - 1} bytes where the segments take {right}": lambda: encode(right - 1),
        rf"has {right + 1} bytes": lambda: encode(right + 1),
        "segment 0 reaches past the flat buffer of 299": lambda: encode(x=torch.ones(299)),
        "segment 0 has an impossible start": lambda: encode(segments=whole(300, 4, first=64)),
        "block of 48": lambda: encode(block=48),
        "block of 16384": lambda: encode(block=16384),
        "impossible bits": lambda: exponential(1),
        "residual must be": lambda: cpu.fp8_encode(x, torch.ones(299), segments, 128, "e4m3", torch.zeros(right).byte()),
        "sums in float32": lambda: cpu.fp8_decode(
            torch.zeros(right).byte(), segments, 128, "e5m2", True, torch.ones(300).bfloat16()
        ),
    }
    encode()
    for words, call in refused.items():
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(RuntimeError, match="impossible bits"):
        exponential(9)


@built
@methods
def test_corrupted_payloads_decode_to_something_and_alike(method: Method) -> None:
    generator, segments = torch.Generator().manual_seed(8), whole(300, 5)
    size = method.size(segments, 64)
    for _ in range(300):
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        decoded = []
        for level in LEVELS:
            out = torch.full((300 + 128,), 7.0)
            method.decode(Way(level, cpu), payload, segments, 64, False, out[64:364])
            assert out[:64].eq(7.0).all() and out[364:].eq(7.0).all()
            decoded.append(out.nan_to_num(1.0))
        assert all(torch.equal(decoded[0], other) for other in decoded[1:])
