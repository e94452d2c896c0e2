"""Sparsifiers: every SIMD level and the reference select, write, read and remember the same, and refuse what is damaged."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from test_kernels import DTYPES, INF, LEVELS, NAN, REFERENCE, STREAM, Way, assert_all_alike, built, same, way, whole

from gradwire.core.payload import index_bytes, index_low_bits, kept_of
from gradwire.core.specs import DGC, BlockTopK, RandomK, Run, Spec, Threshold, TopK
from gradwire.kernels import Segment, Segments, cpu, tensor_key
from gradwire.kernels.reference.indices import DAMAGED, read_indices, write_indices

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
    size = spec.payload_bytes([Run(row.numel) for row in segments.rows], dtype.itemsize)
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
            assert_all_alike(
                lambda w, s=spec, d=dtype: run(w, x.to(d), one_after_another(numels), s), f"{spec} {dtype}"
            )
    assert_all_alike(lambda w: run_random(w, x, one_after_another(numels), 0.01), "Random-k")


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_where_a_misleading_sample_meets_what_cannot_be_carried(dtype: torch.dtype) -> None:
    """The second search, below the sampled bound, reads the residual, which is not the sum where that is not finite."""
    x, old = ORDERS["misleading"](20011).clamp(max=1e4).to(dtype), torch.zeros(20011)
    x[5:400:11], old[5:400:11] = NAN, 100.0

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


# ---- what is drawn


def drawn(
    way: Way, numel: int, ratio: float, stream: torch.Tensor = STREAM, segments: Segments | None = None
) -> list[int]:
    segments = segments or whole(numel, 0)
    payload, decoded = payload_of(RandomK(ratio, indices="own"), segments, torch.float32), torch.zeros(numel)
    with way.chosen():
        way.kernels.randomk_encode(torch.ones(numel), torch.zeros(numel), segments, stream, ratio, payload)
        way.kernels.randomk_decode(payload, segments, torch.float32, ratio, False, decoded)
    return decoded.nonzero().flatten().tolist()


@way
def test_one_element_of_each_stretch_is_drawn(way: Way) -> None:
    for numel, ratio in ((1, 0.5), (7, 0.3), (129, 0.5), (4097, 0.01), (4097, 0.7), (4097, 1.0), (70001, 0.003)):
        k = kept_of(numel, ratio)
        stretches = (
            [max(i for i in range(k) if i * numel // k <= at) for at in drawn(way, numel, ratio)] if k < 99 else None
        )
        assert stretches in (None, list(range(k)))
        assert len(drawn(way, numel, ratio)) == k


def test_draws_are_uniform_and_differ_by_rank_step_seed_encode_tensor_and_start() -> None:
    """Stretches of 10: each place is drawn as often as any other; draws of two streams agree one time in ten."""
    numel, best = 100_000, Way("reference", REFERENCE.kernels) if not LEVELS else Way(LEVELS[-1], cpu)
    first = torch.tensor(drawn(best, numel, 0.1)) % 10
    counts = torch.bincount(first, minlength=10).double()
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 33.7, "chi-square with 9 degrees of freedom: p < 1e-4"
    others = [STREAM + (torch.arange(4) == i) for i in range(4)]
    runs = [(stream, whole(numel, 0)) for stream in others]
    runs += [(STREAM, whole(numel, 0, key=2)), (STREAM, whole(numel, 0, first=numel))]
    for stream, segments in runs:
        again = torch.tensor(drawn(best, numel, 0.1, stream, segments)) % 10
        assert abs(float((again == first).double().mean()) - 0.1) < 0.015


@way
def test_common_draws_are_the_same_on_all_ranks_and_own_ones_travel_with_their_key(way: Way) -> None:
    x, segments = heavy(4097), one_after_another((4000, 97))
    values = [torch.zeros(kept_of(4000, 0.01) + 1) for _ in range(3)]
    streams = [STREAM, STREAM + torch.tensor([0, 0, 5, 9]), STREAM + torch.tensor([0, 1, 0, 0])]
    with way.chosen():
        for stream, value in zip(streams, values, strict=True):
            way.kernels.gather_random(x, None, segments, stream, 0.01, value)
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


@way
def test_a_mean_of_draws_is_what_was_given(way: Way) -> None:
    x, total, draws = torch.linspace(1, 2, 41), torch.zeros(41), 600
    payload = payload_of(RandomK(0.2, indices="own"), whole(41, 0), torch.float32)
    with way.chosen():
        for step in range(draws):
            way.kernels.randomk_encode(x, None, whole(41, 0), torch.tensor([0, step, 0, 0]), 0.2, payload)
            way.kernels.randomk_decode(payload, whole(41, 0), torch.float32, 0.2, True, total)
    # an element is drawn with probability 1/5 at least: deviation of its mean sqrt(4 / draws) of itself
    assert bool(((total / draws - x).abs() < 5.5 * x * (4 / draws) ** 0.5).all())


# ---- indices


@pytest.mark.parametrize(
    ("k", "n"), [(0, 0), (1, 1), (1, 9), (3, 1000), (10, 1000), (333, 1000), (1000, 1000), (7, 70001)]
)
def test_indices_come_back_and_take_their_bytes(k: int, n: int) -> None:
    for seed in range(5):
        index = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values
        data = write_indices(index, n)
        assert data.numel() == index_bytes(k, n)
        assert torch.equal(read_indices(data, k, n), index)
    last = torch.arange(n - k, n)
    assert torch.equal(read_indices(write_indices(last, n), k, n), last)


def damaged(spec: Spec, numel: int) -> dict[str, torch.Tensor]:
    """Payloads of spec with wrong indices, by what is wrong."""
    k, n = kept_of(numel, getattr(spec, "ratio", 0)), numel
    good = encode_topk(REFERENCE, heavy(n), None, whole(n, 0), spec)
    start = good.numel() - index_bytes(k, n)
    out = {}
    for name, fill in (("none", 0), ("all", 255)):
        out[name] = good.clone()
        out[name][start:] = fill
    low = index_low_bits(k, n)
    unary = start + (0 if low < 0 else (k * low + 7) // 8)
    one = next(i for i in range(unary, good.numel()) if good[i])
    out["one too few"], out["one too many"] = good.clone(), good.clone()
    out["one too few"][one] &= good[one] - 1
    free = next(i for i in range(unary, good.numel()) if good[i] != 255)
    out["one too many"][free] |= ~good[free] & (good[free] + 1)
    if low >= 0:
        # one index moved as far up as the unary part reaches
        out["past the end"] = out["one too few"].clone()
        out["past the end"][-1] |= 128
        out["past the end"][start:unary] = 255
        # two indices in one place
        out["twice"] = good.clone()
        out["twice"][unary:] = 0
        out["twice"][start:unary] = 0
        row = torch.zeros((good.numel() - unary) * 8, dtype=torch.int64)
        row[:k] = 1
        out["twice"][unary:] = (row.reshape(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)
    elif n % 8:
        out["past the end"] = out["one too few"].clone()
        out["past the end"][-1] |= 128
    return out


@way
@pytest.mark.parametrize("spec", [TopK(0.01), TopK(0.4), DGC(0.1)], ids=repr)
def test_damaged_indices_are_refused_and_nothing_is_written(way: Way, spec: Spec) -> None:
    segments = one_after_another((4097, 4097))
    good = encode_topk(REFERENCE, heavy(2 * 4097), None, segments, spec)
    for what, bad in damaged(spec, 4097).items():
        size = index_bytes(kept_of(4097, getattr(spec, "ratio", 0)), 4097)
        payload = good.clone()
        payload[-size:] = bad[-size:]  # of the second tensor, when the first is right
        for add in (False, True):
            dst = torch.ones(2 * 4097)
            with pytest.raises(RuntimeError, match=DAMAGED):
                decode_topk(way, payload, segments, spec, torch.float32, add, dst)
            assert torch.equal(dst, torch.ones(2 * 4097)), what


@way
def test_damaged_places_are_refused_and_nothing_is_written(way: Way) -> None:
    spec, segments = BlockTopK(0.1, 64), whole(64 + 33, 0)  # 7 of 64, 4 of 33
    good = encode_topk(REFERENCE, heavy(97), None, segments, spec)
    for place, value in ((-1, 33), (-1, 255), (-5, 64), (-11, int(good[-10])), (-4, int(good[-3]))):
        payload, dst = good.clone(), torch.ones(97)
        payload[place] = value
        with pytest.raises(RuntimeError, match=DAMAGED):
            decode_topk(way, payload, segments, spec, torch.float32, True, dst)
        assert torch.equal(dst, torch.ones(97))


@built
@pytest.mark.parametrize("level", LEVELS)
def test_random_bytes_never_reach_outside(level: str) -> None:
    """Pure noise, good payloads with a few bytes changed, and noise with about as many indices as there should be."""
    generator, numels = torch.Generator().manual_seed(7), (1, 130, 999)
    segments, refused, taken = one_after_another(numels), 0, 0
    inside = Segments.of([row._replace(offset=row.offset + 64) for row in segments.rows])
    for spec in (TopK(0.02), TopK(0.02, per="bucket"), TopK(0.4), BlockTopK(0.05, 32)):
        good = encode_topk(REFERENCE, heavy(1130), None, segments, spec)
        for trial in range(400):
            noise = torch.randint(0, 256, good.shape, generator=generator).to(torch.uint8)
            if trial % 3:
                where = torch.rand(good.shape, generator=generator) < (0.003 if trial % 3 == 1 else 0.1)
                noise = torch.where(where, noise, good)
            guarded = torch.full((1130 + 128,), 5.0)
            try:
                decode_topk(Way(level, cpu), noise, inside, spec, torch.float32, trial % 2 == 0, guarded)
                taken += 1
            except RuntimeError as error:
                assert DAMAGED in str(error)
                assert bool((guarded == 5.0).all())
                refused += 1
            assert bool((guarded[:64] == 5.0).all()) and bool((guarded[-64:] == 5.0).all())
    assert min(refused, taken) > 200
    for _ in range(400):
        payload = torch.randint(0, 256, (8 + 4 * (1 + 3 + 20),), generator=generator).to(torch.uint8)
        guarded = torch.full((1130 + 128,), 5.0)
        with cpu.use_level(level):
            cpu.randomk_decode(payload, inside, torch.float32, 0.02, False, guarded)
        assert bool((guarded[:64] == 5.0).all()) and bool((guarded[-64:] == 5.0).all())


# ---- segments


@way
def test_blocks_are_those_of_the_tensor_however_it_is_cut(way: Way) -> None:
    x, cuts = heavy(4097), [0, 64, 64, 640, 4096, 4097]
    rows = [Segment(a, b - a, 1, a, 0) for a, b in itertools.pairwise(cuts)]
    one, parts = (run(way, x, segments, BlockTopK(0.05, 64)) for segments in (whole(4097, 0), Segments.of(rows)))
    assert all(same(one[name], parts[name]) for name in one)


@way
def test_what_no_segment_names_is_left_alone(way: Way) -> None:
    segments = Segments.of([Segment(40, 100, 1, 0, 0), Segment(200, 60, 2, 0, 0)])
    x, named = torch.full((300,), NAN), torch.zeros(300, dtype=torch.bool)
    for row in segments.rows:
        named[row.offset : row.offset + row.numel] = True
    x[named] = heavy(160)
    outs = [run(way, x, segments, spec) for spec in selecting(0.1)] + [run_random(way, x, segments, 0.1)]
    for out in outs:
        assert out["decoded"][named].isfinite().all() and not out["decoded"][named].all()
        assert torch.equal(out["decoded"][~named], torch.ones(140))
        assert torch.equal(out["residual"][~named], torch.linspace(-1, 1, 300)[~named])
        assert torch.equal(out["decoded and added"][~named], torch.linspace(-2, 2, 300)[~named])


@way
def test_a_payload_may_begin_anywhere(way: Way) -> None:
    x, segments = heavy(1000), whole(1000, 0)
    for spec in selecting(0.1):
        payload, dst = encode_topk(way, x, None, segments, spec), torch.zeros(1000)
        moved = torch.zeros(payload.numel() + 1, dtype=torch.uint8)[1:]
        moved.copy_(payload)
        decode_topk(way, moved, segments, spec, torch.float32, False, dst)
        assert dst.count_nonzero() >= 50


# ---- what is refused


def topk(
    x: torch.Tensor, size: int, ratio: float = 0.1, residual: torch.Tensor | None = None, numel: int = 300
) -> None:
    cpu.topk_encode(x, residual, whole(numel, 0), ratio, False, 0.0, torch.zeros(size, dtype=torch.uint8))


def untopk(dst: torch.Tensor, size: int, add: bool = False) -> None:
    cpu.topk_decode(torch.zeros(size, dtype=torch.uint8), whole(300, 0), torch.float32, 0.1, False, add, dst)


def dgc(residual: torch.Tensor | None, momentum: torch.Tensor | None) -> None:
    cpu.dgc_encode(
        torch.ones(300), residual, momentum, whole(300, 0), 0.1, 0.9, 0.0, torch.zeros(RIGHT, dtype=torch.uint8)
    )


def block(size: int, block: int = 64, first: int = 0) -> None:
    payload = torch.zeros(size, dtype=torch.uint8)
    cpu.block_topk_encode(torch.ones(300), None, whole(300, 0, first=first), 0.1, block, payload)


def randomk(size: int, stream: torch.Tensor = STREAM, ratio: float = 0.1) -> None:
    cpu.randomk_encode(torch.ones(300), None, whole(300, 0), stream, ratio, torch.zeros(size, dtype=torch.uint8))


ONES, RIGHT, BLOCKS, DRAWN = torch.ones(300), 30 * 4 + index_bytes(30, 300), 5 * (4 * 7 + 5), 8 + 30 * 4
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "payload too short": (lambda: topk(ONES, RIGHT - 1), f"has {RIGHT - 1} bytes where the segments take {RIGHT}"),
    "payload too long": (lambda: topk(ONES, RIGHT + 1), f"has {RIGHT + 1} bytes"),
    "payload too short to decode": (lambda: untopk(ONES, RIGHT - 1), f"has {RIGHT - 1} bytes"),
    "flat buffer too short": (lambda: topk(ONES, RIGHT, numel=301), "segment 0 reaches past the flat buffer of 300"),
    "float64": (lambda: topk(ONES.double(), RIGHT), "float32, bfloat16 and float16"),
    "ratio of 0": (lambda: topk(ONES, RIGHT, 0.0), "ratio of 0"),
    "ratio of NaN": (lambda: topk(ONES, RIGHT, NAN), "ratio of nan"),
    "ratio above 1": (lambda: topk(ONES, RIGHT, 1.5), "ratio of 1.5"),
    "residual too short": (lambda: topk(ONES, RIGHT, residual=torch.ones(299)), "residual"),
    "add to bfloat16": (lambda: untopk(ONES.bfloat16(), RIGHT, add=True), "sums in float32"),
    "momentum alone": (lambda: dgc(None, torch.zeros(300)), "given together"),
    "residual alone": (lambda: dgc(torch.zeros(300), None), "given together"),
    "blocks too short": (lambda: block(BLOCKS - 1), f"has {BLOCKS - 1} bytes where the segments take {BLOCKS}"),
    "block of 48": (lambda: block(BLOCKS, 48), "block of 48"),
    "block of 512": (lambda: block(BLOCKS, 512), "block of 512"),
    "begins inside a block": (lambda: block(BLOCKS, first=32), "impossible start"),
    "draws too short": (lambda: randomk(DRAWN - 1), f"has {DRAWN - 1} bytes where the segments take {DRAWN}"),
    "stream too short": (lambda: randomk(DRAWN, STREAM[:3].clone()), "stream is four int64"),
    "ratio below 0": (lambda: randomk(DRAWN, ratio=-0.1), "ratio of -0.1"),
}


@built
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_sizes_and_dtypes_are_refused_in_words(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        call()


@built
def test_the_sizes_that_are_refused_one_off_are_right() -> None:
    topk(ONES, RIGHT)
    dgc(torch.zeros(300), torch.zeros(300))
    block(BLOCKS)
    randomk(DRAWN)
