"""Sparsifiers' payloads: what is drawn is random, indices take few bytes, and what is damaged or of a wrong size is refused."""

import itertools
from collections.abc import Callable

import pytest
import torch
from test_kernels import LEVELS, NAN, REFERENCE, STREAM, Way, built, same, way, whole
from test_kernels_sparse import (
    decode_topk,
    encode_topk,
    heavy,
    one_after_another,
    one_thread,
    payload_of,
    run,
    run_random,
    selecting,
)

from benchmarks.levels import use_level
from gradwire.core.payload import index_bytes, index_low_bits, kept_of
from gradwire.core.specs import DGC, BlockTopK, RandomK, Spec, TopK
from gradwire.kernels import cpu
from gradwire.kernels.reference.indices import DAMAGED, read_indices, write_indices
from gradwire.kernels.segments import Segment, Segments

__all__ = ["one_thread"]  # a fixture that every test here uses

# ---- what is drawn


def drawn(way: Way, numel: int, ratio: float, stream: torch.Tensor = STREAM, segments: Segments | None = None) -> list[int]:
    segments = segments or whole(numel, 0)
    payload, decoded = payload_of(RandomK(ratio, indices="own"), segments, torch.float32), torch.zeros(numel)
    with way.chosen():
        way.kernels.randomk_encode(torch.ones(numel), torch.zeros(numel), segments, stream, ratio, payload)
        way.kernels.randomk_decode(payload, segments, torch.float32, ratio, False, decoded)
    return decoded.nonzero().flatten().tolist()


@way
def test_one_element_of_each_stretch_is_drawn(way: Way) -> None:
    for numel, ratio in ((1, 0.5), (7, 0.3), (129, 0.5), (4097, 0.01), (4097, 0.7), (4097, 1.0), (70001, 0.003)):
        k, places = kept_of(numel, ratio), torch.tensor(drawn(way, numel, ratio))
        borders = torch.arange(k + 1) * numel // k
        assert places.numel() == k
        assert bool(((borders[:-1] <= places) & (places < borders[1:])).all())


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


@pytest.mark.parametrize(("k", "n"), [(0, 0), (1, 1), (1, 9), (3, 1000), (10, 1000), (333, 1000), (1000, 1000), (7, 70001)])
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
    size = index_bytes(kept_of(4097, getattr(spec, "ratio", 0)), 4097)
    for (what, bad), start, add in itertools.product(damaged(spec, 4097).items(), (-2 * size, -size), (False, True)):
        payload, dst = good.clone(), torch.ones(2 * 4097)
        payload[start : start + size or None] = bad[-size:]  # of one tensor, when the other is right
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
        with use_level(level):
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


def topk(x: torch.Tensor, size: int, ratio: float = 0.1, residual: torch.Tensor | None = None, numel: int = 300) -> None:
    cpu.topk_encode(x, residual, whole(numel, 0), ratio, False, 0.0, torch.zeros(size, dtype=torch.uint8))


def untopk(dst: torch.Tensor, size: int, add: bool = False) -> None:
    cpu.topk_decode(torch.zeros(size, dtype=torch.uint8), whole(300, 0), torch.float32, 0.1, False, add, dst)


def dgc(residual: torch.Tensor | None, momentum: torch.Tensor | None) -> None:
    cpu.dgc_encode(torch.ones(300), residual, momentum, whole(300, 0), 0.1, 0.9, 0.0, torch.zeros(RIGHT, dtype=torch.uint8))


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
