"""docs/search_times.md is what its benchmark makes of its results, and the parts of that benchmark do what they say."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.papers.scaled import gpt2, resnet101
from benchmarks.papers.searches import PRUNINGS, fusion_searches, offload_search, option_search
from benchmarks.search_times import EXPERIMENTS, duration, run, share_within, with_cpus
from benchmarks.search_times_page import PARTS, PICTURES, search_times_page
from benchmarks.testbeds import Bed, Papers, gathered
from gradwire.core import Profile, TensorProfile
from gradwire.errors import FormatError, PlanError
from gradwire.planner.drafts import Choice, PlanningJob

ROOT = Path(__file__).parents[3]


def test_the_page_is_made_from_the_results():
    result = json.loads((ROOT / "benchmarks" / "results" / "search_times.json").read_text())
    page = search_times_page(result)
    assert (ROOT / "docs" / "search_times.md").read_text() == page
    assert [make.__name__ for make in EXPERIMENTS] == list(PARTS)
    for name in PICTURES.values():
        assert (ROOT / "docs" / "pictures" / f"{name}.png").stat().st_size < 100_000
        assert f"](pictures/{name}.png)" in page


# ---- jobs made by scaling


def profile_of(*rows: tuple[str, int, float]) -> Profile:
    tensors = [
        TensorProfile(name=name, shape=(numel,), dtype="float32", backward_us=us, forward_us=us / 2) for name, numel, us in rows
    ]
    return Profile(model="published", batch=32, device="V100", tensors=tuple(tensors))


def test_resnet_101_repeats_a_block_of_resnet_50():
    block = [(f"layer3.1.part{number}", 100 + number, 10.0 + number) for number in range(9)]
    small = profile_of(("fc", 5, 1.0), ("layer3.2.conv", 7, 2.0), *block, ("layer3.0.conv", 9, 3.0))
    found = resnet101(small)
    assert len(found.tensors) == len(small.tensors) + 17 * 9
    assert len({tensor.name for tensor in found.tensors}) == len(found.tensors)
    more = [tensor for tensor in found.tensors if tensor not in small.tensors]
    assert {tensor.name.split(".")[1] for tensor in more} == {str(number) for number in range(6, 23)}
    assert [(t.numel, t.backward_us, t.forward_us) for t in more] == 17 * [(n, us, us / 2) for _, n, us in block]
    assert "scaling" in found.model
    with pytest.raises(PlanError, match="has 8 tensors"):
        resnet101(profile_of(*block[1:]))


def test_gpt_2_has_its_own_shapes_and_the_time_that_is_asked_for():
    bert = profile_of(("bert.layer.0.weight", 768 * 768, 300.0), ("bert.word_embeddings.weight", 23_000_000, 700.0))
    found = gpt2(bert, 50_000.0)
    assert len(found.tensors) == 148
    assert sum(tensor.numel for tensor in found.tensors) == 124_439_808
    assert sum(tensor.backward_us for tensor in found.tensors) == pytest.approx(50_000.0)
    assert sum(tensor.forward_us or 0.0 for tensor in found.tensors) == pytest.approx(25_000.0)
    by_name = {tensor.name: tensor for tensor in found.tensors}
    dense, lookup = by_name["h.3.mlp.c_fc.weight"], by_name["wte.weight"]
    ratio = (dense.backward_us / dense.numel) / (lookup.backward_us / lookup.numel)
    assert ratio == pytest.approx(300.0 / (768 * 768) / (700.0 / 23_000_000))
    with pytest.raises(PlanError, match="no word embeddings"):
        gpt2(profile_of(("bert.layer.0.weight", 768 * 768, 300.0)), 1.0)


# ---- searches


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    """Twelve layers of three sizes in the form in which the profiles were published."""
    (tmp_path / "profiles").mkdir()
    tensors = [[f"layer{number}", (40_000, 900_000, 4_000_000)[number % 3], 1500] for number in range(12)]
    (tmp_path / "profiles" / "small.json").write_text(json.dumps({"model": "small", "tensors": tensors}))
    times = {f"{name}_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]] for name in ("dgc", "random")}
    (tmp_path / "v100-compressor-overheads.json").write_text(json.dumps(times))
    return Papers(tmp_path)


@pytest.fixture
def job(papers: Papers) -> PlanningJob:
    return papers.job(papers.profile("small"), Bed(8, 100.0, 10.0), "DGC")


def test_cupcakes_search_finds_the_best_with_any_pruning(papers: Papers):
    job = papers.job(papers.profile("small"), Bed(1, 10.0, 10.0), "DGC")
    exact, *others = fusion_searches(job, Choice(job.specs[0], gathered(job)), seconds=60.0)
    assert [search.name for search in others] == list(PRUNINGS)
    assert exact.calls is None and exact.over_best == 1.0
    for search in others:
        assert search.finished and search.over_best == pytest.approx(1.0)
    calls = [search.calls for search in others]
    assert calls[0] == min(calls) and calls[-1] == 2**11, "without pruning each fusion of a first part is one call"


def test_cupcakes_search_stops_in_time(papers: Papers):
    job = papers.job(papers.profile("small"), Bed(1, 10.0, 10.0), "DGC")
    exact, *others = fusion_searches(job, Choice(job.specs[0], gathered(job)), seconds=0.0)
    assert exact.finished and not others[-1].finished
    assert all(search.over_best >= 1.0 - 1e-9 for search in others)


def test_the_selection_is_described(job: PlanningJob):
    found = option_search(job)
    assert (found.tensors, found.options) == (12, len(job.options))
    assert 0 < found.compressed <= 12
    step = job.step(found.draft)
    assert step is not None and found.step_ms == pytest.approx(step / 1e12)
    # both are greedy, so more looks may end with a longer step
    assert found.short_over_whole == pytest.approx(1.0, abs=0.1)
    per_step = found.brute_force_log10_s - 12 * math.log10(found.options)
    assert -9 <= per_step < 1, "the logarithm of the seconds of one step"
    assert found.step_ms > 0 and found.ms > 0


def test_the_offload_tries_all_products_up_to_a_limit(job: PlanningJob):
    both = with_cpus(job)
    assert {codec.device for codec in both.simulator.prices.costs.codecs} == {"gpu", "cpu"}
    draft = option_search(both).draft
    whole, short = offload_search(both, draft), offload_search(both, draft, most=1)
    assert whole.exhaustive and not short.exhaustive
    assert whole.tensors == sum(part.choice.encodes for part in draft.parts)
    assert whole.groups + 1 <= whole.products <= 2**whole.tensors
    assert whole.gain >= short.gain >= 1.0
    assert 0 <= whole.moved <= whole.tensors


def test_values_are_shown_in_the_unit_that_fits():
    seconds = (0.002, 5.0, 7200.0, 1234 * 365.25 * 86400)
    assert [duration(math.log10(each)) for each in seconds] == ["2 ms", "5 s", "2 h", "1.2e+03 years"]
    assert duration(400.0) == "10^393 years"
    assert share_within([1.0, 2.0, 30.0, 40.0], 2.0) == 0.5


def test_data_that_is_not_there(tmp_path: Path):
    with pytest.raises(FormatError, match="GRADWIRE_DATA"):
        run(["--data", str(tmp_path)])
