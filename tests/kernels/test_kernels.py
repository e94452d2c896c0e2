"""Every SIMD level and the plain-torch reference give the same bytes from the same random stream."""

import copy
import ctypes
import inspect
import itertools
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.levels import kernels_of, set_level, use_level
from gradwire.core import native
from gradwire.core.payload import qsgd_bytes
from gradwire.kernels import cpu, kernels_for, reference
from gradwire.kernels.segments import Segment, Segments, tensor_key

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (2, 3, 4, 5, 6, 7, 8)
NUMELS = (1, 7, 123, 300, 4097, 129)
STREAM = torch.tensor([3, 7, 1, 2])  # seed, step, encode, rank
NAN, INF = float("nan"), float("inf")

built = pytest.mark.skipif(cpu.available() is not None, reason=f"no C++ kernels here: {cpu.available()}")
LEVELS = cpu.levels() if cpu.available() is None else ()


@dataclass(frozen=True)
class Way:
    """One implementation: a module of kernels, at one SIMD level if it has any."""

    name: str
    kernels: ModuleType

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.kernels is reference else use_level(self.name)


REFERENCE = Way("reference", reference)
FASTER = [Way(level, cpu) for level in LEVELS]
WAYS = [REFERENCE, *FASTER]
way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


def segments_of(bits: tuple[int, ...], numels: tuple[int, ...] = NUMELS, block: int = 128) -> Segments:
    """Tensors one after another; each begins somewhere inside its tensor, and bits are dealt out in turn."""
    offsets = itertools.accumulate(numels, initial=0)
    rows = zip(offsets, numels, itertools.cycle(bits), strict=False)
    return Segments.of([Segment(at, n, tensor_key(f"t{i}"), i * block, b) for i, (at, n, b) in enumerate(rows)])


def whole(numel: int, bits: int, first: int = 0, key: int = 1) -> Segments:
    return Segments.of([Segment(0, numel, key, first, bits)])


def payload_bytes(segments: Segments, block: int, scale: str) -> int:
    return sum(qsgd_bytes([(row.numel, row.bits) for row in segments.rows], block, scale))


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes for NUMELS, with the special ones each in blocks of their own and in mixed company."""
    numel = sum(NUMELS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
    x[140:180] = 0.0
    x[180:182] = -0.0
    big = torch.finfo(dtype).max / 2.1  # beyond half of it: HUGE, below
    at = 131 + 300  # where the tensor of 4097 elements begins
    specials = [
        torch.zeros(128),
        torch.full((128,), -0.0),
        torch.tensor([0.0, -0.0]).repeat(64),
        torch.full((128,), 0.1),
        torch.full((128,), -3.0),
        torch.full((128,), torch.finfo(dtype).tiny / 3),  # subnormal
        torch.linspace(-1, 1, 128) * torch.finfo(dtype).tiny,
        torch.linspace(-1, 1, 128) * 2.0**-99,  # about where a range counts as zero
        torch.linspace(-1, 1, 128) * 2.0**-100,
        torch.linspace(-1, 1, 128) * 2.0**-119,
        torch.linspace(-1, 1, 128) * big,
        torch.linspace(0.9, 1, 128) * big,
        torch.linspace(-1, 1, 128) * big / 16,
        torch.full((128,), big),
        torch.linspace(-1, 1, 128).index_fill(0, torch.tensor([77]), NAN),
        torch.linspace(-1, 1, 128).index_fill(0, torch.tensor([3]), INF),
        torch.linspace(-1, 1, 128).index_fill(0, torch.tensor([127]), -INF),
        torch.full((128,), NAN),
    ]
    x[at : at + 128 * len(specials)] = torch.cat(specials)
    x[8] = NAN  # the last partial block of a tensor of 123 elements
    x[at - 3] = INF  # and of one of 300
    return x.to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; in float32 any NaN equals any other, since IEEE leaves open which of two a sum returns."""
    if torch.equal(raw(a), raw(b)):
        return True
    if a.dtype != torch.float32:
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(raw(a[~a.isnan()]), raw(b[~b.isnan()]))


def run_qsgd(way: Way, x: torch.Tensor, segments: Segments, block: int, scale: str, rounding: str) -> dict[str, torch.Tensor]:
    """Everything the kernels make of x, by name."""
    size, k = payload_bytes(segments, block, scale), way.kernels
    out = {
        "payload": torch.full((size,), 255, dtype=torch.uint8),
        "payload with residual": torch.full((size,), 170, dtype=torch.uint8),
        "residual": torch.linspace(-1, 1, x.numel()),
        "decoded": torch.ones_like(x),
        "decoded and added": torch.linspace(-2, 2, x.numel()),
    }
    with way.chosen():
        k.qsgd_encode(x, None, segments, STREAM, block, scale, rounding, out["payload"])
        k.qsgd_encode(x, out["residual"], segments, STREAM, block, scale, rounding, out["payload with residual"])
        k.qsgd_decode(out["payload"], segments, block, scale, False, out["decoded"])
        k.qsgd_decode(out["payload with residual"], segments, block, scale, True, out["decoded and added"])
    return out


def run_cast(way: Way, x: torch.Tensor, wire: torch.dtype) -> dict[str, torch.Tensor]:
    k = way.kernels
    out = {
        "payload": torch.full((2 * x.numel(),), 255, dtype=torch.uint8),
        "payload with residual": torch.full((2 * x.numel(),), 170, dtype=torch.uint8),
        "residual": torch.linspace(-1, 1, x.numel()),
        "decoded": torch.ones_like(x),
        "decoded and added": torch.linspace(-2, 2, x.numel()),
        "decoded and added in its own dtype": torch.linspace(-2, 2, x.numel()).to(x.dtype),
    }
    with way.chosen():
        k.cast_encode(x, None, wire, out["payload"])
        k.cast_encode(x, out["residual"], wire, out["payload with residual"])
        k.cast_decode(out["payload"], wire, False, out["decoded"])
        k.cast_decode(out["payload with residual"], wire, True, out["decoded and added"])
        k.cast_decode(out["payload"], wire, True, out["decoded and added in its own dtype"])
    return out


def assert_all_alike(run: Callable[[Way], dict[str, torch.Tensor]], case: str) -> None:
    expected = run(REFERENCE)
    for faster in FASTER:
        for name, value in run(faster).items():
            if not same(expected[name], value):
                differ = (raw(expected[name]) != raw(value)).nonzero().flatten() // value.element_size()
                raise AssertionError(f"{case}: {name} at level {faster.name} differs at {differ.unique()[:8].tolist()}")


# ---- the same bytes


@built
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("scale", ["max", "minmax", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qsgd_bytes_are_those_of_the_reference(dtype: torch.dtype, scale: str, rounding: str) -> None:
    x = awkward(dtype)
    for block in (32, 128, 1024):
        for bits in [(b,) for b in BITS] + [BITS]:  # the last: other bits for every tensor of one call
            segments = segments_of(bits, block=block)
            assert_all_alike(lambda w, s=segments, n=block: run_qsgd(w, x, s, n, scale, rounding), f"{bits=} {block=}")


@built
@pytest.mark.parametrize("block", [64, 256, 2048, 4096, 8192])
def test_qsgd_bytes_at_other_block_sizes(block: int) -> None:
    numels = (8192, 1, 8191, 8193, 2047, 2049, 15, 16, 17)
    x = torch.randn(sum(numels), generator=torch.Generator().manual_seed(1))
    segments = segments_of((4, 2, 7), numels, block)
    for scale, rounding in itertools.product(("max", "minmax", "l2"), ("stochastic", "nearest")):
        assert_all_alike(lambda w, s=scale, r=rounding: run_qsgd(w, x, segments, block, s, r), f"{scale} {rounding}")


@built
def test_nothing_at_all_encodes_to_nothing() -> None:
    for rows in ([], [Segment(0, 0, 1, 0, 4)]):
        for each in WAYS:
            out = run_qsgd(each, torch.empty(0), Segments.of(rows), 128, "max", "stochastic")
            assert all(value.numel() == 0 for value in out.values())


@built
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_bytes_are_those_of_the_reference(dtype: torch.dtype, wire: torch.dtype) -> None:
    edges = [65504.0, 65519.99, 65520.0, 65536.0, 3.4e38, 6.1e-5, 6.097e-5, 5.96e-8, 2.98e-8, 2.99e-8, 1e-8, 1e-45]
    edges += [0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.3961e38, 1e-38, INF, NAN]
    scattered = torch.randn(4097, generator=torch.Generator().manual_seed(2)).mul(8).exp()
    x = torch.cat([awkward(dtype).float(), scattered, -scattered, torch.tensor(edges), -torch.tensor(edges)]).to(dtype)
    assert_all_alike(lambda w: run_cast(w, x, wire), f"{dtype} as {wire}")


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_read_every_sixteen_bit_number(dtype: torch.dtype) -> None:
    x = torch.arange(65536).to(torch.uint16).view(dtype)
    for wire in (torch.bfloat16, torch.float16):
        assert_all_alike(lambda w, to=wire: run_cast(w, x, to), f"{dtype} as {wire}")


@way
@pytest.mark.parametrize(("wire", "pattern"), [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)], ids=str)
def test_casts_overflow_to_inf_and_know_one_nan(way: Way, wire: torch.dtype, pattern: int) -> None:
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    big = torch.tensor([3.4e38, -3.4e38])
    x = torch.cat([nans, big, torch.tensor([INF, -INF])])
    out = run_cast(way, x, wire)
    sent = out["payload"].view(torch.int16)
    assert sent[:5].tolist() == [pattern] * 5
    assert out["payload"].view(wire)[5:].tolist() == [INF, -INF, INF, -INF]
    # what could not be sent leaves the residual as it was
    assert torch.equal(out["residual"], torch.linspace(-1, 1, x.numel()))


@way
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_is_torchs_own(way: Way, wire: torch.dtype) -> None:
    x = torch.randn(4097, generator=torch.Generator().manual_seed(3)).mul(4).exp()
    assert torch.equal(run_cast(way, x, wire)["payload"].view(wire), x.to(wire))


# ---- what non-finite blocks become


@way
@pytest.mark.parametrize("scale", ["max", "minmax", "l2"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_block_with_something_not_finite_decodes_to_nan_and_keeps_its_residual(way: Way, scale: str, bad: float) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(4))
    x[130] = bad
    out = run_qsgd(way, x, whole(300, 4), 128, scale, "stochastic")
    assert out["decoded"].isnan().nonzero().flatten().tolist() == list(range(128, 256))
    assert out["decoded and added"].isnan().nonzero().flatten().tolist() == list(range(128, 256))
    before = torch.linspace(-1, 1, 300)
    assert torch.equal(out["residual"][128:256], before[128:256])
    assert not torch.equal(out["residual"][:128], before[:128])


@way
def test_the_residual_alone_can_spoil_a_block(way: Way) -> None:
    x, residual, payload = torch.ones(300), torch.zeros(300), torch.zeros(payload_bytes(whole(300, 4), 128, "max"))
    payload = payload.to(torch.uint8)
    residual[299] = INF
    decoded = torch.zeros(300)
    with way.chosen():
        way.kernels.qsgd_encode(x, residual, whole(300, 4), STREAM, 128, "max", "nearest", payload)
        way.kernels.qsgd_decode(payload, whole(300, 4), 128, "max", False, decoded)
    assert decoded.isnan().nonzero().flatten().tolist() == list(range(256, 300))


HUGE = {
    "both signs": torch.linspace(-1, 1, 128),
    "half the range": torch.linspace(-0.6, 0.6, 128),
    "one sign": torch.linspace(0, 1, 128),
    "the largest": torch.ones(128),
}


@way
@pytest.mark.parametrize("scale", ["max", "minmax", "l2"])
def test_huge_blocks_never_poison_the_residual(way: Way, scale: str) -> None:
    """Near float32's largest number a block may be given up as NaN, but whole, and the residual stays finite."""
    problems = []
    for (name, shape), bits, rounding in itertools.product(HUGE.items(), BITS, ("stochastic", "nearest")):
        out = run_qsgd(way, shape * torch.finfo(torch.float32).max, whole(128, bits), 128, scale, rounding)
        if not out["residual"].isfinite().all():
            problems.append(f"{name} {bits=} {rounding}: residual")
        if not (out["decoded"].isfinite().all() or out["decoded"].isnan().all()):
            problems.append(f"{name} {bits=} {rounding}: decoded")
    assert problems == []


@built
@pytest.mark.parametrize(
    "scale",
    [
        "max",
        "minmax",
        "l2",
    ],
)
def test_huge_blocks_have_the_bytes_of_the_reference(scale: str) -> None:
    x = torch.cat([shape * torch.finfo(torch.float32).max for shape in HUGE.values()])
    for bits, rounding in itertools.product(BITS, ("stochastic", "nearest")):
        segments = whole(x.numel(), bits)
        assert_all_alike(lambda w, s=segments, r=rounding: run_qsgd(w, x, s, 128, scale, r), f"{bits=} {rounding}")


@way
@pytest.mark.parametrize("scale", ["max", "minmax", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_of_any_magnitude_decode_within_a_level_but_for_tiny_ones(way: Way, scale: str, bits: int) -> None:
    size = torch.pow(2.0, torch.arange(-126, 126)).repeat_interleave(128)
    x = torch.linspace(-0.99, 1, 128).repeat(252) * size
    decoded = run_qsgd(way, x, whole(x.numel(), bits), 128, scale, "stochastic")["decoded"]
    level = size * {"max": 2, "minmax": 2, "l2": 2 * math.sqrt(128)}[scale] / (2**bits - 2)
    right = (decoded - x).abs() <= 1.02 * level
    small = decoded.abs() <= (1.02 * size if scale == "minmax" else 0.0)  # to the minimum, or to zero
    right |= small & (size < 2.0**-99)
    assert bool(right.all()), size[~right].unique().log2()


# ---- segments


@way
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("scale", ["max", "minmax"])
def test_cutting_a_tensor_at_block_borders_changes_no_code(way: Way, scale: str, block: int) -> None:
    """However a tensor is cut, its blocks and random numbers are its own: decoded values and residuals are the same."""
    numel, bits = 4097, 5
    x = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    cuts = [0, block, 7 * block, 7 * block, 4096 // block * block, numel]
    pieces = list(itertools.pairwise(cuts))

    def encode_decode(x: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        payload = torch.empty(payload_bytes(segments, block, scale), dtype=torch.uint8)
        residual, decoded = torch.zeros_like(x), torch.zeros_like(x)
        with way.chosen():
            way.kernels.qsgd_encode(x, residual, segments, STREAM, block, scale, "stochastic", payload)
            way.kernels.qsgd_decode(payload, segments, block, scale, False, decoded)
        codes = payload[qsgd_bytes([(row.numel, row.bits) for row in segments.rows], block, scale)[0] :]
        return decoded, residual, codes

    at_once = encode_decode(x, whole(numel, bits))
    separately = [encode_decode(x[a:b].clone(), whole(b - a, bits, first=a)) for a, b in pieces]
    for one, parts in zip(at_once, zip(*separately, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts))

    # and as segments of one flat buffer, in another order
    order = [2, 0, 4, 1, 3]
    flat = torch.cat([x[slice(*pieces[i])] for i in order])
    offsets = itertools.accumulate((pieces[i][1] - pieces[i][0] for i in order), initial=0)
    rows = [Segment(at, pieces[i][1] - pieces[i][0], 1, pieces[i][0], bits) for at, i in zip(offsets, order, strict=False)]
    decoded, residual, _ = encode_decode(flat, Segments.of(rows))
    back = dict(zip(order, rows, strict=True))
    for whole_one, mixed in ((at_once[0], decoded), (at_once[1], residual)):
        parts = [mixed[back[i].offset : back[i].offset + back[i].numel] for i in range(len(pieces))]
        assert torch.equal(whole_one, torch.cat(parts))


@way
def test_what_no_segment_names_is_left_alone(way: Way) -> None:
    """A flat buffer may hold more than is encoded: padding, or tensors of another family."""
    segments = Segments.of([Segment(40, 100, 1, 0, 4), Segment(200, 60, 2, 0, 2)])
    x, named = torch.full((300,), NAN), torch.zeros(300, dtype=torch.bool)
    for row in segments.rows:
        named[row.offset : row.offset + row.numel] = True
        x[row.offset : row.offset + row.numel] = 1.0
    out = run_qsgd(way, x, segments, 32, "max", "stochastic")
    assert torch.equal(out["decoded"][~named], torch.ones(int((~named).sum())).to(x.dtype))
    assert torch.equal(out["residual"][~named], torch.linspace(-1, 1, 300)[~named])
    assert torch.equal(out["decoded and added"][~named], torch.linspace(-2, 2, 300)[~named])
    assert torch.equal(out["decoded"][named], torch.ones(int(named.sum())))


# ---- the random stream


def draws(way: Way, stream: Sequence[int] = (0, 0, 0, 0), key: int = 1, numel: int = 1 << 17) -> torch.Tensor:
    """The top four bits of the random number of each element, read off what the kernel rounds up and down.

    Every 128th element pins its block's scale and is left out.
    """
    segments, fixed = whole(numel, 8, key=key), torch.arange(numel) % 128 == 0
    payload, decoded = torch.empty(payload_bytes(segments, 128, "max"), dtype=torch.uint8), torch.empty(numel)
    level = torch.zeros(numel)
    for sixteenth in range(1, 16):
        x = torch.where(fixed, 127.0, (sixteenth - 1 / 128) / 16)
        with way.chosen():
            way.kernels.qsgd_encode(x, None, segments, torch.tensor(stream), 128, "max", "stochastic", payload)
            way.kernels.qsgd_decode(payload, segments, 128, "max", False, decoded)
        assert set(decoded[~fixed].unique().tolist()) <= {0.0, 1.0}
        level += decoded
    return level[~fixed]


BEST = WAYS[-1]  # the levels are equal bit for bit by the tests above, so the stream need be measured once only


def test_the_random_stream_is_uniform() -> None:
    level = draws(BEST)
    n = level.numel()
    counts = torch.bincount(level.long(), minlength=16).double()
    # 1/128 of a bin was shaved off, so that no value sits on a bin's border: bins 0 and 15 differ by that much
    expected = torch.full((16,), n / 16, dtype=torch.double)
    expected[0] += n / 16 / 128
    expected[15] -= n / 16 / 128
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 44.3, f"chi-square {chi_square} with 15 degrees of freedom: p < 1e-4"
    mean, variance = float(level.mean()), float(level.var())
    assert abs(mean - 7.5) < 5 * math.sqrt(255 / 12 / n) + 1 / 128, mean
    assert abs(variance / (255 / 12) - 1) < 0.02, variance


def test_neighbours_in_the_random_stream_are_uncorrelated() -> None:
    level = draws(BEST) - 7.5
    for lag in (1, 2, 3, 4, 7, 8, 16, 32, 63, 64, 127, 254):
        r = float((level[:-lag] * level[lag:]).mean() / level.var())
        assert abs(r) < 5 / math.sqrt(level.numel()), f"lag {lag}: {r}"


def test_streams_differ_by_seed_step_encode_rank_and_tensor_and_are_uncorrelated() -> None:
    ones: dict[str, tuple[Sequence[int], int]] = {"none": ((0, 0, 0, 0), 1)}
    for place, name in enumerate(("seed", "step", "encode", "rank")):
        for value in (1, 2):
            words = [0, 0, 0, 0]
            words[place] = value
            ones[f"{name} {value}"] = (words, 1)
    ones["seed and step"] = ((1, 1, 0, 0), 1)
    ones["large seed"] = ((2**63 - 1, 0, 0, 0), 1)
    ones["tensor 2"] = ((0, 0, 0, 0), 2)
    ones["tensor by name"] = ((0, 0, 0, 0), tensor_key("fc.weight"))
    level = torch.stack([draws(BEST, words, key, numel=1 << 14) for words, key in ones.values()])
    r = torch.corrcoef(level) - torch.eye(len(ones))
    worst = divmod(int(r.abs().argmax()), len(ones))
    assert float(r.abs().max()) < 5 / math.sqrt(level.shape[1]), [list(ones)[i] for i in worst]


@way
@pytest.mark.parametrize("with_residual", [False, True])
def test_repeated_calls_repeat(way: Way, with_residual: bool) -> None:
    x = torch.randn(4097, generator=torch.Generator().manual_seed(6))
    payloads = []
    for fill in (0, 255):
        payload = torch.full((payload_bytes(whole(4097, 4), 128, "max"),), fill, dtype=torch.uint8)
        residual = torch.zeros(4097) if with_residual else None
        with way.chosen():
            way.kernels.qsgd_encode(x, residual, whole(4097, 4), STREAM, 128, "max", "stochastic", payload)
        payloads.append(payload)
    assert torch.equal(*payloads)


def test_the_stream_is_read_when_the_call_is_made() -> None:
    """A step counter is advanced in place: what is encoded next uses the new one."""
    x, stream, out = torch.randn(300), torch.tensor([0, 0, 0, 0]), []
    for _ in range(2):
        payload = torch.empty(payload_bytes(whole(300, 4), 128, "max"), dtype=torch.uint8)
        kernels_for("cpu").qsgd_encode(x, None, whole(300, 4), stream, 128, "max", "stochastic", payload)
        out.append(payload)
        stream[1] += 1
    assert not torch.equal(*out)


# ---- what is refused


def encode(
    x: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    segments: Segments | None = None,
    stream: torch.Tensor = STREAM,
    block: int = 128,
    size: int | None = None,
    dtype: torch.dtype = torch.uint8,
) -> None:
    x, segments = torch.ones(300) if x is None else x, segments or whole(300, 4)
    size = payload_bytes(segments, 128, "max") if size is None else size
    cpu.qsgd_encode(x, residual, segments, stream, block, "max", "nearest", torch.zeros(size, dtype=dtype))


def decode(dst: torch.Tensor, segments: Segments, size: int | None = None, add: bool = False) -> None:
    size = payload_bytes(segments, 128, "max") if size is None else size
    cpu.qsgd_decode(torch.zeros(size, dtype=torch.uint8), segments, 128, "max", add, dst)


def cast(x: torch.Tensor, size: int, residual: torch.Tensor | None = None) -> None:
    cpu.cast_encode(x, residual, torch.float16, torch.zeros(size, dtype=torch.uint8))


def uncast(dst: torch.Tensor, size: int) -> None:
    cpu.cast_decode(torch.zeros(size, dtype=torch.uint8), torch.float16, False, dst)


RIGHT = 16 + 2 * 64 + 24  # bytes of 300 elements at 4 bits: 3 scales, two blocks of 128 and one of 44
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "payload too short": (lambda: encode(size=RIGHT - 1), rf"has {RIGHT - 1} bytes where the segments take {RIGHT}"),
    "payload too long": (lambda: encode(size=RIGHT + 1), rf"has {RIGHT + 1} bytes"),
    "payload not bytes": (lambda: encode(dtype=torch.int16), "uint8 payload"),
    "payload too short to decode": (lambda: decode(torch.ones(300), whole(300, 4), RIGHT - 1), f"{RIGHT - 1} bytes"),
    "flat buffer too short": (lambda: encode(torch.ones(299)), "segment 0 reaches past the flat buffer of 299"),
    "flat buffer too short to decode": (lambda: decode(torch.ones(299), whole(300, 4)), "reaches past"),
    "offset before the start": (lambda: encode(segments=Segments.of([Segment(-1, 9, 1, 0, 4)]), size=20), "segment 0"),
    "offset past the end": (lambda: encode(segments=Segments.of([Segment(301, 0, 1, 0, 4)]), size=0), "segment 0"),
    "offset that overflows": (
        lambda: encode(segments=Segments.of([Segment(2**63 - 1, 8, 1, 0, 4)]), size=20),
        "segment 0 reaches past",
    ),
    "negative length": (lambda: encode(segments=Segments.of([Segment(8, -8, 1, 0, 4)]), size=0), "segment 0"),
    "huge length": (lambda: encode(segments=Segments.of([Segment(0, 2**62, 1, 0, 4)]), size=0), "reaches past"),
    "one bit": (lambda: encode(segments=whole(300, 1)), "impossible bits"),
    "nine bits": (lambda: encode(segments=whole(300, 9)), "impossible bits"),
    "begins inside a block": (lambda: encode(segments=whole(300, 4, first=64)), "impossible (bits|start)"),
    "begins before its tensor": (lambda: encode(segments=whole(300, 4, first=-128)), "impossible (bits|start)"),
    "block of 0": (lambda: encode(block=0), "block of 0"),
    "block of 48": (lambda: encode(block=48), "block of 48|has .* bytes"),
    "block of 16384": (lambda: encode(block=16384), "block of 16384"),
    "float64": (lambda: encode(torch.ones(300).double()), "float32, bfloat16 and float16"),
    "int32": (lambda: encode(torch.ones(300).int()), "float32, bfloat16 and float16"),
    "strided": (lambda: encode(torch.ones(600)[::2]), "contiguous"),
    "residual too short": (lambda: encode(residual=torch.zeros(299)), "residual"),
    "residual in bfloat16": (lambda: encode(residual=torch.zeros(300).bfloat16()), "residual"),
    "stream too short": (lambda: encode(stream=torch.tensor([1, 2, 3])), "stream is four int64"),
    "stream in int32": (lambda: encode(stream=torch.tensor([1, 2, 3, 4]).int()), "stream is four int64"),
    "add to bfloat16": (lambda: decode(torch.ones(300).bfloat16(), whole(300, 4), add=True), "sums in float32"),
    "cast payload too short": (lambda: cast(torch.ones(8), 15), "has 15 bytes where 8 elements take 16"),
    "cast payload too long": (lambda: uncast(torch.ones(8), 18), "has 18 bytes where 8 elements take 16"),
    "cast of float64": (lambda: cast(torch.ones(8).double(), 16), "float32, bfloat16 and float16"),
    "cast with a short residual": (lambda: cast(torch.ones(8), 16, torch.ones(7)), "residual"),
}


@built
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_sizes_and_dtypes_are_refused_in_words(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        call()


NO_TENSORS = {"none": None, "a list": [1.0], "on another device": torch.ones(300, device="meta")}


@built
@pytest.mark.parametrize("what", NO_TENSORS)
def test_what_is_no_tensor_of_the_cpu_never_reaches_the_library(what: str) -> None:
    for place in (0, 3, 7):  # source, stream, payload
        arguments = [torch.ones(300), None, whole(300, 4), STREAM, 128, "max", "nearest", torch.zeros(RIGHT).byte()]
        arguments[place] = NO_TENSORS[what]
        with pytest.raises(ctypes.ArgumentError, match=r"a kernel takes a tensor here|tensors on the CPU"):
            cpu.qsgd_encode(*arguments)


@built
def test_segments_can_be_copied_and_pickled_after_kernels_used_them() -> None:
    segments = whole(300, 4)
    cpu.qsgd_encode(torch.ones(300), None, segments, STREAM, 128, "max", "nearest", torch.zeros(RIGHT).byte())
    assert copy.deepcopy(segments) == segments == pickle.loads(pickle.dumps(segments))


@built
def test_every_kernel_takes_as_many_arguments_as_the_reference() -> None:
    for name, kernel in kernels_of(native.library()).items():
        assert len(kernel.argtypes) == len(inspect.signature(getattr(reference, name)).parameters), name


@built
def test_the_size_that_is_refused_one_off_is_right() -> None:
    encode(size=RIGHT)
    decode(torch.ones(300), whole(300, 4), RIGHT)


# ---- levels, the fallback, the GIL


@built
def test_levels_are_named_and_the_last_is_the_default() -> None:
    assert LEVELS[0] == "baseline"
    assert len(set(LEVELS)) == len(LEVELS)
    assert set(LEVELS) <= {"baseline", "avx2", "avx512"}
    with pytest.raises(ValueError):
        with use_level("avx9"):
            pass
    with pytest.raises(RuntimeError, match="does not run here"):
        set_level(native.library(), len(LEVELS))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """The choice of kernels is made anew inside, and once more afterwards."""
    caches = (kernels_for, cpu.available, native.library)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@built
def test_the_kernels_are_chosen_without_a_word_where_they_load(forgetful: None, recwarn: pytest.WarningsRecorder) -> None:
    assert kernels_for("cpu") is cpu
    assert list(recwarn) == []


def test_without_the_library_the_reference_runs_and_says_how_slow_it_is(
    forgetful: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    with pytest.warns(UserWarning, match=r"_native\.so was not built.*300 times as long.*Install a wheel"):
        assert kernels_for("cpu") is reference
    out = run_qsgd(REFERENCE, torch.ones(300), whole(300, 4), 128, "max", "stochastic")
    assert torch.equal(out["decoded"], torch.ones(300))


def test_a_library_that_does_not_load_is_not_an_error(forgetful: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    with pytest.warns(UserWarning, match=r"_native\.so does not load: "):
        assert kernels_for("cpu") is reference


def test_another_device_gets_the_reference_with_a_warning(forgetful: None) -> None:
    with pytest.warns(UserWarning, match="there are no mps kernels in this version"):
        assert kernels_for("mps") is reference


def others_run_during(work: Callable[[], object], attempts: int) -> bool:
    """Whether another Python thread gets the GIL while `work` runs here; Python itself hands it over to nobody."""
    interval, waiting, ran = sys.getswitchinterval(), threading.Lock(), []

    def other() -> None:
        with waiting:
            ran.append(True)

    waiting.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        waiting.release()
        for _ in range(attempts):
            work()
            if ran:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@built
def test_the_gil_is_released_while_kernels_run() -> None:
    numel = 1 << 22
    x, residual, dst, segments = torch.ones(numel), torch.zeros(numel), torch.zeros(numel), whole(numel, 4)
    payload = torch.zeros(payload_bytes(segments, 128, "max"), dtype=torch.uint8)
    half = torch.zeros(2 * numel, dtype=torch.uint8)
    work: dict[str, Callable[[], None]] = {
        "encode": lambda: cpu.qsgd_encode(x, None, segments, STREAM, 128, "max", "stochastic", payload),
        "encode with residual": lambda: cpu.qsgd_encode(x, residual, segments, STREAM, 128, "max", "nearest", payload),
        "decode": lambda: cpu.qsgd_decode(payload, segments, 128, "max", True, dst),
        "cast": lambda: cpu.cast_encode(x, None, torch.float16, half),
        "cast back": lambda: cpu.cast_decode(half, torch.float16, True, dst),
    }
    assert not others_run_during(lambda: sum(range(100_000)), 3), "the test itself does not work"
    for name, call in work.items():
        assert others_run_during(call, 500), f"{name} holds the GIL"
