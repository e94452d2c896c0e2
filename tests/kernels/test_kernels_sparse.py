"""Sparsifiers: every SIMD level and the reference select, write, read and remember the same, and refuse what is damaged."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from test_kernels import DTYPES, INF, NAN, STREAM, Way, assert_all_alike, built, way, whole

from gradwire.core.payload import kept_of
from gradwire.core.specs import DGC, BlockTopK, ElementRun, RandomK, Spec, Threshold, TopK
from gradwire.kernels.segments import Segment, Segments, tensor_key

NUMELS = (0, 1, 7, 8, 9, 123, 127, 128, 129, 4097, 70001)
RATIOS = (1e-5, 0.02, 0.3, 1.0)
LEAST = 0.03  # Threshold's, in the tests below


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The reference's many small operations only wait for each other on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one_after_another(numels: tuple[int, ...]) -> Segments:
    offsets = itertools.accumulate(numels, initial=0)
    rows = zip(offsets, numels, strict=False)
    return Segments.of([Segment(at, n, tensor_key(f"t{i}"), 256 * i, 0) for i, (at, n) in enumerate(rows)])


def payload_of(spec: Spec, segments: Segments, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
    size = spec.payload_bytes([ElementRun(row.numel) for row in segments.rows], dtype.itemsize)
    return torch.full((size,), fill, dtype=torch.uint8)


def heavy(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()).to(dtype)


def encode_topk(w: Way, x: torch.Tensor, residual: torch.Tensor | None, segments: Segments, spec: Spec) -> torch.Tensor:
    """The payload of one of the four that select."""
    payload = payload_of(spec, segments, x.dtype, 170)
    with w.chosen():
        if isinstance(spec, TopK):
            w.kernels.topk_encode(x, residual, segments, spec.ratio, spec.per == "bucket", 0.0, payload)
        elif isinstance(spec, Threshold):
            w.kernels.topk_encode(x, residual, segments, spec.capacity, False, spec.threshold, payload)
        elif isinstance(spec, BlockTopK):
            w.kernels.block_topk_encode(x, residual, segments, spec.ratio, spec.block, payload)
        else:
            assert isinstance(spec, DGC)
            momentum = None if residual is None else torch.zeros_like(residual)
            w.kernels.dgc_encode(x, residual, momentum, segments, spec.ratio, 0.0, spec.clip, payload)
    return payload


def decode_topk(
    w: Way, payload: torch.Tensor, segments: Segments, spec: Spec, dtype: torch.dtype, add: bool, dst: torch.Tensor
) -> None:
    with w.chosen():
        if isinstance(spec, BlockTopK):
            w.kernels.block_topk_decode(payload, segments, dtype, spec.ratio, spec.block, add, dst)
        else:
            ratio = spec.capacity if isinstance(spec, Threshold) else getattr(spec, "ratio", 0)
            w.kernels.topk_decode(payload, segments, dtype, ratio, getattr(spec, "per", "") == "bucket", add, dst)


def run(w: Way, x: torch.Tensor, segments: Segments, spec: Spec) -> dict[str, torch.Tensor]:
    """Everything a selecting method makes of x, by name."""
    residual = torch.linspace(-1, 1, x.numel())
    out = {
        "payload": encode_topk(w, x, None, segments, spec),
        "payload with residual": encode_topk(w, x, residual, segments, spec),
        "residual": residual,
        "decoded": torch.ones_like(x),
        "decoded as float32": torch.ones(x.numel()),
        "decoded as float16": torch.ones(x.numel(), dtype=torch.float16),
        "decoded and added": torch.linspace(-2, 2, x.numel()),
    }
    for name in ("decoded", "decoded as float32", "decoded as float16"):
        decode_topk(w, out["payload"], segments, spec, x.dtype, False, out[name])
    decode_topk(w, out["payload with residual"], segments, spec, x.dtype, True, out["decoded and added"])
    return out


def run_random(w: Way, x: torch.Tensor, segments: Segments, ratio: float) -> dict[str, torch.Tensor]:
    """Everything Random-k makes of x, by name."""
    spec, common, k = RandomK(ratio, indices="own"), RandomK(ratio), w.kernels
    out = {
        "payload": payload_of(spec, segments, x.dtype, 170),
        "payload with residual": payload_of(spec, segments, x.dtype, 170),
        "residual": torch.linspace(-1, 1, x.numel()),
        "values": payload_of(common, segments, x.dtype, 170).view(torch.float32),
        "values with residual": payload_of(common, segments, x.dtype, 170).view(torch.float32),
        "residual of values": torch.linspace(-1, 1, x.numel()),
        "decoded": torch.ones_like(x),
        "decoded and added": torch.linspace(-2, 2, x.numel()),
        "scattered": torch.ones_like(x),
        "scattered and added": torch.linspace(-2, 2, x.numel()),
    }
    with w.chosen():
        k.randomk_encode(x, None, segments, STREAM, ratio, out["payload"])
        k.randomk_encode(x, out["residual"], segments, STREAM, ratio, out["payload with residual"])
        k.gather_random(x, None, segments, STREAM, ratio, out["values"])
        k.gather_random(x, out["residual of values"], segments, STREAM, ratio, out["values with residual"])
        k.randomk_decode(out["payload"], segments, x.dtype, ratio, False, out["decoded"])
        k.randomk_decode(out["payload with residual"], segments, x.dtype, ratio, True, out["decoded and added"])
        k.scatter_random(out["values"], segments, STREAM, ratio, False, out["scattered"])
        k.scatter_random(out["values with residual"], segments, STREAM, ratio, True, out["scattered and added"])
    return out


def selecting(ratio: float) -> list[Spec]:
    blocks = [BlockTopK(ratio, block) for block in (32, 256)]
    return [TopK(ratio), TopK(ratio, per="bucket"), Threshold(LEAST, ratio), DGC(ratio, clip=2.0), *blocks]


def awkward(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Many magnitudes and many equal ones, with all that is special among them."""
    x = heavy(numel, dtype)
    x[::5] = 0.25
    x[1::7] = -0.25
    specials = [NAN, -NAN, INF, -INF, 0.0, -0.0, torch.finfo(dtype).max, -torch.finfo(dtype).max, LEAST]
    specials += [torch.finfo(dtype).tiny / 4, torch.finfo(dtype).smallest_normal]
    for i, value in enumerate(specials):
        x[131 * i + 17 :: 3989] = value
    return x


# ---- the same bytes


@built
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_reference(dtype: torch.dtype, ratio: float) -> None:
    segments, x = one_after_another(NUMELS), awkward(sum(NUMELS), dtype)
    for spec in selecting(ratio):
        assert_all_alike(lambda w, s=spec: run(w, x, segments, s), f"{spec}")
    assert_all_alike(lambda w: run_random(w, x, segments, ratio), f"Random-k {ratio}")


@built
@pytest.mark.parametrize("numel", NUMELS)
def test_bytes_of_one_tensor_alone(numel: int) -> None:
    x, segments = heavy(numel), whole(numel, 0)
    for spec in selecting(0.02):
        assert_all_alike(lambda w, s=spec: run(w, x, segments, s), f"{spec}")
    assert_all_alike(lambda w: run_random(w, x, segments, 0.02), "Random-k")


ORDERS: dict[str, Callable[[int], torch.Tensor]] = {
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n, 0, -1).float(),
    "zeros": torch.zeros,
    "negative zeros": lambda n: -torch.zeros(n),
    "all equal": lambda n: torch.full((n,), -3.0),
    "all NaN": lambda n: torch.full((n,), NAN),
    "all Inf": lambda n: torch.full((n,), INF),
    "two values": lambda n: torch.where(torch.arange(n) % 3 == 0, 2.0, -1.0),
    "denormals": lambda n: torch.arange(n).to(torch.int32).view(torch.float32),
    # large only where samples may be taken: the bound found on a sample is far too high
    "misleading": lambda n: heavy(n).index_fill(0, torch.arange(0, n, 19)[:90], 1e6),
    "misleading and not finite": lambda n: misleading_and_not_finite(n),
    "hardly larger, at the end": lambda n: torch.ones(n).index_fill(0, torch.arange(n - 50, n), 1 + 2.0**-23),
    "NaN of many patterns": lambda n: (0x7F800001 + torch.arange(n)).to(torch.int32).view(torch.float32),
    "huge": lambda n: heavy(n) * 1e38,
}


def misleading_and_not_finite(n: int) -> torch.Tensor:
    x = ORDERS["misleading"](n)
    x[5:400:11], x[6:400:22] = NAN, INF
    return x


@built
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_whatever_the_order(order: str) -> None:
    """Long ones, so that candidates are dropped on the way and bounds from samples are too low or too high."""
    numels = (20011, 9973)
    x = ORDERS[order](sum(numels))
    for dtype in DTYPES:
        for spec in (TopK(0.01), TopK(0.02, per="bucket"), DGC(0.001), BlockTopK(0.02)):
            assert_all_alike(lambda w, s=spec, d=dtype: run(w, x.to(d), one_after_another(numels), s), f"{spec} {dtype}")
    assert_all_alike(lambda w: run_random(w, x, one_after_another(numels), 0.01), "Random-k")


@built
@pytest.mark.parametrize(("sampled", "bad"), [(1e4, NAN), (1e4, INF), (NAN, INF), (NAN, NAN)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_where_a_misleading_sample_meets_what_cannot_be_carried(dtype: torch.dtype, sampled: float, bad: float) -> None:
    """The second search, below the sampled bound, reads the residual, which is not the sum where that is not finite."""
    x, old = heavy(20011, dtype), torch.zeros(20011)
    x[torch.arange(0, 20011, 19)[:90]] = sampled
    x[5:400:11], old[5:400:11] = bad, 100.0

    def run_with_large_residual(w: Way) -> dict[str, torch.Tensor]:
        residual = old.clone()
        return {"payload": encode_topk(w, x, residual, whole(20011, 0), TopK(0.01)), "residual": residual}

    assert_all_alike(run_with_large_residual, str(dtype))


# ---- what is selected


@way
@pytest.mark.parametrize("numel", [1, 9, 129, 4097, 70001])
def test_the_largest_are_sent_and_of_equal_ones_the_first(way: Way, numel: int) -> None:
    x = heavy(numel).mul(4).round().div(4)  # many equal
    k = kept_of(numel, 0.05)
    decoded = run(way, x, whole(numel, 0), TopK(0.05))["decoded"]
    by_hand = sorted(range(numel), key=lambda i: (-abs(float(x[i])), i))[:k]
    expected = torch.zeros(numel)
    expected[by_hand] = x[by_hand]
    assert torch.equal(decoded, expected)


@way
def test_all_together_are_one_group(way: Way) -> None:
    x = torch.cat([heavy(300) * 100, heavy(4097)])
    decoded = run(way, x, one_after_another((300, 4097)), TopK(0.01, per="bucket"))["decoded"]
    assert decoded.count_nonzero() == kept_of(4397, 0.01)
    assert torch.equal(decoded, run(way, x, whole(4397, 0), TopK(0.01))["decoded"])
    apart = run(way, x, one_after_another((300, 4097)), TopK(0.01))["decoded"]
    assert (apart[:300].count_nonzero(), apart[300:].count_nonzero()) == (3, 41)


@way
def test_below_the_threshold_nothing_is_sent_and_it_stays(way: Way) -> None:
    x, residual, spec = heavy(4097), torch.zeros(4097), Threshold(4.0, 0.2)
    decoded = run(way, x, whole(4097, 0), spec)["decoded"]
    assert torch.equal(decoded, torch.where(x.abs() >= 4.0, x, 0.0))
    assert 0 < int(decoded.count_nonzero()) < kept_of(4097, 0.2)
    encode_topk(way, x, residual, whole(4097, 0), spec)
    assert torch.equal(residual, torch.where(x.abs() >= 4.0, 0.0, x))


@way
def test_blocks_keep_their_largest(way: Way) -> None:
    x = heavy(70 * 64 + 33)
    decoded = run(way, x, whole(x.numel(), 0), BlockTopK(0.1, 64))["decoded"]
    for a in range(0, x.numel(), 64):
        block = x[a : a + 64].abs()
        kept = block.topk(kept_of(block.numel(), 0.1)).values
        assert torch.equal(decoded[a : a + 64].abs(), torch.where(block >= kept.min(), block, 0.0))


@way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_and_what_is_left_make_what_was_given(way: Way, dtype: torch.dtype) -> None:
    x, residual = heavy(4097, dtype), torch.linspace(-1, 1, 4097) / 3
    given = x.float() + residual
    for spec in (*selecting(0.05), TopK(1.0)):
        if isinstance(spec, DGC):
            continue
        left, decoded = residual.clone(), torch.zeros(4097)
        decode_topk(way, encode_topk(way, x, left, whole(4097, 0), spec), whole(4097, 0), spec, dtype, True, decoded)
        assert torch.equal(decoded + left, given)
        if dtype == torch.float32:
            assert not left[decoded != 0].any()
    for name in ("payload with residual", "values with residual"):
        out = run_random(way, x, whole(4097, 0), 0.05)
        decoded, left = torch.zeros(4097), out["residual" if name[0] == "p" else "residual of values"]
        with way.chosen():
            if name[0] == "p":
                way.kernels.randomk_decode(out[name], whole(4097, 0), dtype, 0.05, True, decoded)
            else:
                way.kernels.scatter_random(out[name], whole(4097, 0), STREAM, 0.05, True, decoded)
        assert torch.equal(decoded + left, x.float() + torch.linspace(-1, 1, 4097))


@way
def test_dgc_is_its_recurrence(way: Way) -> None:
    """Three steps, by hand, with clipping of the second of two tensors."""
    numels, spec = (300, 500), DGC(0.02, momentum=0.9, clip=25.0)
    segments, cut = one_after_another(numels), slice(300, 800)
    v, u, residual, momentum = (torch.zeros(800) for _ in range(4))
    for step in range(3):
        x, sent = heavy(800, seed=step), torch.zeros(800)
        x[cut] *= 5
        assert float(x[:300].norm()) > 25 < float(x[cut].norm())
        payload = payload_of(spec, segments, torch.float32)
        with way.chosen():
            way.kernels.dgc_encode(x, residual, momentum, segments, 0.02, 0.9, 25.0, payload)
        decode_topk(way, payload, segments, spec, torch.float32, False, sent)
        clipped = torch.cat([part * (25.0 / part.double().norm()).float() for part in x.split(numels)])
        u = torch.tensor(0.9) * u + clipped
        v = v + u
        for part in (slice(0, 300), cut):
            top = v[part].abs().topk(kept_of(part.stop - part.start, 0.02)).indices + part.start
            assert torch.allclose(sent[top], v[top])
            assert sent[part].count_nonzero() == top.numel()
            v[top] = u[top] = 0.0
        assert torch.allclose(residual, v) and torch.allclose(momentum, u)
        assert torch.equal(residual == 0, momentum == 0)


# ---- what is not finite


@way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_travels_and_leaves_memory_as_it_was(way: Way, bad: float, dtype: torch.dtype) -> None:
    x, before = heavy(4097, dtype), torch.linspace(-1, 1, 4097)
    x[[5, 130, 4096]] = bad
    for spec in selecting(0.02):
        out = run(way, x, whole(4097, 0), spec)
        for name in ("decoded", "decoded and added", "decoded as float16"):
            assert not out[name][[5, 130, 4096]].isfinite().any(), spec
            assert int((~out[name].isfinite()).sum()) == 3 or name == "decoded as float16"
        assert torch.equal(out["residual"][[5, 130, 4096]], before[[5, 130, 4096]])
        assert out["residual"].isfinite().all()
    residual, momentum = before.clone(), before.clone()
    with way.chosen():
        payload = payload_of(DGC(0.02), whole(4097, 0), dtype)
        way.kernels.dgc_encode(x, residual, momentum, whole(4097, 0), 0.02, 0.9, 0.0, payload)
    assert torch.equal(momentum[[5, 130, 4096]], before[[5, 130, 4096]])
    assert torch.equal(residual[[5, 130, 4096]], before[[5, 130, 4096]])
    assert momentum.isfinite().all() and residual.isfinite().all()


@way
def test_more_that_is_not_finite_than_is_sent_stays_out_of_memory_too(way: Way) -> None:
    for x in (torch.full((4097,), NAN), torch.full((4097,), INF)):
        for spec in selecting(0.02):
            out = run(way, x, whole(4097, 0), spec)
            assert torch.equal(out["residual"], torch.linspace(-1, 1, 4097)), spec


@way
def test_what_the_dtype_cannot_hold_is_sent_as_inf_and_not_carried(way: Way) -> None:
    x, before = torch.full((40,), 60000.0, dtype=torch.float16), torch.zeros(40)
    before[7] = 7000.0
    for spec in selecting(0.02):
        residual, decoded = before.clone(), torch.zeros(40)
        payload = encode_topk(way, x, residual, whole(40, 0), spec)
        decode_topk(way, payload, whole(40, 0), spec, torch.float16, True, decoded)
        if not isinstance(spec, DGC):
            assert decoded[7] == INF and residual[7] == 7000.0


@way
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_stretch_with_something_not_finite_is_sent_as_nan(way: Way, bad: float) -> None:
    """Whichever of its elements was drawn: a loss scaler sees it."""
    x = heavy(4100)
    x[1234] = bad
    out = run_random(way, x, whole(4100, 0), 0.01)  # 41 stretches of 100
    for name in ("decoded", "decoded and added", "scattered", "scattered and added"):
        wrong = (~out[name].isfinite()).nonzero().flatten()
        assert wrong.numel() == 1 and 1200 <= int(wrong[0]) < 1300
    for name in ("residual", "residual of values"):
        assert torch.equal(out[name][1200:1300], torch.linspace(-1, 1, 4100)[1200:1300])
        assert out[name].isfinite().all()
