"""Levels with a scale by least squares: every SIMD level and the reference give the same bytes, those of the formula."""

import itertools
import math

import pytest
import torch
from test_kernels import (
    DTYPES,
    NAN,
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
from gradwire.kernels.reference.numbers import pack
from gradwire.kernels.reference.weights import ONE
from gradwire.kernels.segments import Segment, Segments

FORMS = list(itertools.product(("uniform", "lloyd"), (2, 3, 4)))
forms = pytest.mark.parametrize(("levels", "bits"), FORMS)
FIRST = {"uniform": {2: 1.7, 3: 0.227, 4: 0.124}, "lloyd": {2: 1.375, 3: 0.351, 4: 0.34}}
"""The first unit over the mean (2 bits) or the largest magnitude of a block."""


def size_of(levels: str, segments: Segments, block: int) -> int:
    return sum(coded_bytes([(row.numel, row.bits) for row in segments.rows], block, 1, levels == "uniform"))


def run(way: Way, levels: str, x: torch.Tensor, segments: Segments, block: int = 128) -> dict[str, torch.Tensor]:
    """Everything the kernels make of x, by name."""
    k, size = way.kernels, size_of(levels, segments, block)
    out = {
        "payload": torch.full((size,), 255, dtype=torch.uint8),
        "payload with residual": torch.full((size,), 170, dtype=torch.uint8),
        "payload with tiny residual": torch.full((size,), 170, dtype=torch.uint8),
        "residual": torch.linspace(-1, 1, x.numel()),
        "tiny residual": torch.linspace(-1, 1, x.numel()) * 2.0**-98,
        "decoded": torch.ones_like(x),
        "decoded and added": torch.linspace(-2, 2, x.numel()),
        "payload with weights": torch.full((size,), 170, dtype=torch.uint8),
        "residual with weights": torch.linspace(-1, 1, x.numel()),
        "decoded with weights": torch.ones_like(x),
        "decoded with weights and added": torch.linspace(-2, 2, x.numel()),
    }
    weights = (torch.arange(x.numel()) * 7 % 19 + ONE - 9).to(torch.uint8)
    with way.chosen():
        k.fitted_encode(x, None, segments, None, block, levels, out["payload"])
        k.fitted_encode(x, out["residual"], segments, None, block, levels, out["payload with residual"])
        k.fitted_encode(x * 0, out["tiny residual"], segments, None, block, levels, out["payload with tiny residual"])
        k.fitted_encode(x, out["residual with weights"], segments, weights, block, levels, out["payload with weights"])
        k.fitted_decode(out["payload"], segments, None, block, levels, False, out["decoded"])
        k.fitted_decode(out["payload with residual"], segments, None, block, levels, True, out["decoded and added"])
        k.fitted_decode(out["payload with weights"], segments, weights, block, levels, False, out["decoded with weights"])
        added = out["decoded with weights and added"]
        k.fitted_decode(out["payload with weights"], segments, weights, block, levels, True, added)
    return out


# ---- the same bytes


@built
@pytest.mark.parametrize("levels", ["uniform", "lloyd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_reference(dtype: torch.dtype, levels: str) -> None:
    x = awkward(dtype)
    for block, bits in itertools.product((32, 64, 128, 1024), ((2,), (3,), (4,), (2, 3, 4))):
        segments = segments_of(bits, block=block)
        assert_all_alike(lambda w, s=segments, n=block: run(w, levels, x, s, n), f"{bits=} {block=}")


@built
@forms
def test_bytes_at_odd_sizes_and_other_blocks(levels: str, bits: int) -> None:
    x = torch.randn(70001, generator=torch.Generator().manual_seed(1)).mul(3).exp()
    x = x * torch.randn(70001, generator=torch.Generator().manual_seed(2)).sign()
    for numel in (1, 7, 8, 9, 127, 128, 129, 2048, 2049, 70001):
        assert_all_alike(lambda w, n=numel: run(w, levels, x[:n].clone(), whole(n, bits)), f"{numel=}")
    for block in (32, 256, 2048, 4096, 8192):
        segments = segments_of((bits,), (8193, 1, 8191, 2049, 17), block)
        y = x[: segments.numel].clone()
        assert_all_alike(lambda w, s=segments, v=y, n=block: run(w, levels, v, s, n), f"{block=}")


@built
@forms
def test_elements_on_a_bound_and_equal_magnitudes(levels: str, bits: int) -> None:
    x = torch.cat([torch.arange(-64.0, 64), torch.ones(128), torch.tensor([1.0, -1.0]).repeat(64), torch.zeros(128)])
    assert_all_alike(lambda w: run(w, levels, x, whole(x.numel(), bits)), levels)
    for at_once in (1, 2, 15, 16, 17, 33):  # batches of each size
        y = x.repeat(9)[: 128 * at_once]
        assert_all_alike(lambda w, v=y: run(w, levels, v, whole(v.numel(), bits)), levels)


@way
@pytest.mark.parametrize("levels", ["uniform", "lloyd"])
def test_nothing_at_all_encodes_to_nothing(way: Way, levels: str) -> None:
    for rows in ([], [Segment(0, 0, 1, 0, 4)]):
        assert all(value.numel() == 0 for value in run(way, levels, torch.empty(0), Segments.of(rows)).values())


@way
@forms
def test_cutting_a_tensor_at_block_borders_changes_nothing(way: Way, levels: str, bits: int) -> None:
    x, cuts = torch.randn(4097, generator=torch.Generator().manual_seed(5)), [0, 32, 224, 4096, 4097]
    pieces = Segments.of([Segment(a, b - a, 1, a, bits) for a, b in itertools.pairwise(cuts)])
    at_once, cut = (run(way, levels, x, segments, 32) for segments in (whole(4097, bits), pieces))
    for name in ("decoded", "residual"):
        assert torch.equal(at_once[name], cut[name])


# ---- the formula


def levels_of(way: Way, levels: str, bits: int) -> torch.Tensor:
    """The levels of one sign for a unit of one, float64. Those of lloyd are decoded from a payload of one block."""
    count = 2 ** (bits - 1)
    if levels == "uniform":
        return torch.arange(float(count), dtype=torch.float64)
    scales, codes = coded_bytes([(128, bits)], 128)
    payload, decoded = torch.zeros(scales + codes, dtype=torch.uint8), torch.zeros(128)
    payload[:2] = torch.tensor([1.0]).bfloat16().view(torch.uint8)
    payload[scales:] = pack((torch.arange(128) % count).reshape(1, -1), bits).reshape(-1)
    with way.chosen():
        way.kernels.fitted_decode(payload, whole(128, bits), None, 128, "lloyd", False, decoded)
    assert torch.equal(decoded, decoded[:count].repeat(128 // count))
    return decoded[:count].double()


def formula(x: torch.Tensor, m: torch.Tensor, first: float, top: float) -> torch.Tensor:
    """The decoded values of blocks of 128 elements, in float64. m: levels; first: the first unit over the mean of levels with one
    bound, else over the largest magnitude; top: units of a scale."""
    a = x.double().abs().reshape(-1, 128)
    unit = first * (a.mean(1, True) if len(m) == 2 else a.amax(1, True))
    nearest = m[(a.unsqueeze(2) / unit.unsqueeze(2) - m).abs().argmin(2)]
    scale = (a * nearest).sum(1, True) / nearest.square().sum(1, True) * top
    return (nearest * scale.float().bfloat16().double() / top).reshape(-1) * x.sign()


@way
@forms
def test_a_block_decodes_to_levels_of_the_fitted_scale(way: Way, levels: str, bits: int) -> None:
    x = torch.randn(128 * 50, generator=torch.Generator().manual_seed(3))
    decoded = run(way, levels, x, whole(x.numel(), bits))["decoded"]
    m = levels_of(way, levels, bits)
    expected = formula(x, m, FIRST[levels][bits], float(m[-1]) if levels == "uniform" else 1.0)
    assert torch.allclose(decoded.double(), expected, rtol=1e-6)


@way
def test_levels_are_those_of_lloyd_and_max(way: Way) -> None:
    """Each level is the mean of the normal elements that it stands for."""
    x = torch.linspace(0, 1, 400_003).double()[1:-1].erfinv() * math.sqrt(2)
    for bits in (2, 3, 4):
        m = levels_of(way, "lloyd", bits)
        nearest = torch.bucketize(x, (m[1:] + m[:-1]) / 2)
        means = torch.stack([x[nearest == k].mean() for k in range(len(m))])
        assert torch.allclose(means, m, atol=2e-3), bits


# ---- blocks of zeros, and what is not finite


@way
@forms
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 2.0**126])
def test_a_block_with_something_not_finite_decodes_to_nan_and_keeps_its_residual(
    way: Way, levels: str, bits: int, bad: float
) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(4))
    x[130] = bad
    out = run(way, levels, x, whole(300, bits))
    assert out["decoded"].isnan().nonzero().flatten().tolist() == list(range(128, 256))
    assert out["decoded and added"].isnan().nonzero().flatten().tolist() == list(range(128, 256))
    before = torch.linspace(-1, 1, 300)
    assert torch.equal(out["residual"][128:256], before[128:256])
    assert not torch.equal(out["residual"][:128], before[:128])


@way
@forms
def test_zeros_and_tiny_blocks_decode_to_zeros_and_stay_in_the_residual(way: Way, levels: str, bits: int) -> None:
    size = torch.pow(2.0, torch.arange(-126, 102)).repeat_interleave(128)
    x = torch.cat([torch.zeros(128), torch.linspace(-0.99, 1, 128).repeat(228) * size])
    out = run(way, levels, x, whole(x.numel(), bits))
    given = x.double().reshape(-1, 128).norm(dim=1)
    lost = (out["decoded"] - x).double().reshape(-1, 128).norm(dim=1) / given.clamp(min=2.0**-150)
    assert not out["decoded"][:128].any()
    assert bool((lost <= 1.0).all()) and bool((lost[30:] < 0.45).all())
    assert bool(out["tiny residual"].isfinite().all())


@built
def test_wrong_arguments_are_refused_in_words() -> None:
    for bits in (1, 5):
        with pytest.raises(RuntimeError, match="impossible bits"):
            cpu.fitted_encode(torch.ones(300), None, whole(300, bits), None, 128, "lloyd", torch.zeros(999).byte())
    with pytest.raises(RuntimeError, match="has 10 bytes"):
        cpu.fitted_decode(torch.zeros(10).byte(), whole(300, 2), None, 128, "lloyd", False, torch.zeros(300))
    with pytest.raises(RuntimeError, match="sum"):
        cpu.fitted_decode(torch.zeros(92).byte(), whole(300, 2), None, 128, "lloyd", True, torch.zeros(300).half())
    ones = torch.full((300,), ONE, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="need a residual"):
        cpu.fitted_encode(torch.ones(300), None, whole(300, 2), ones, 128, "lloyd", torch.zeros(92).byte())
    with pytest.raises(RuntimeError, match="as long as the flat buffer"):
        cpu.fitted_decode(torch.zeros(92).byte(), whole(300, 2), ones[1:], 128, "lloyd", False, torch.zeros(300))
