"""docs/figures.md is what its benchmark makes of its results, and the parts of that benchmark do what they say."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import Bed, fitted, run, speedup
from benchmarks.figures_page import PICTURES, page
from benchmarks.testbeds import SYSTEMS_OF, Papers, alone_ms, scaling
from gradwire.errors import FormatError

ROOT = Path(__file__).parents[3]


def test_the_page_is_made_from_the_results():
    result = json.loads((ROOT / "benchmarks" / "results" / "figures.json").read_text())
    assert (ROOT / "docs" / "figures.md").read_text() == page(result)
    for name in PICTURES:
        picture = ROOT / "docs" / "pictures" / f"{name}.png"
        assert picture.stat().st_size < 100_000
        assert f"](pictures/{name}.png)" in page(result)


def test_fits_find_the_rate():
    assert fitted(lambda gbps: gbps**2, 400.0) == pytest.approx(20.0, rel=1e-3)


def test_dear_says_what_its_table_says():
    """BERT-large, 407 ms of computation: 12.1 at 10 Gb/s, and as good as perfect at 100."""
    assert speedup(407.0, 336.2, 10.0) == pytest.approx(12.1, abs=0.05)
    assert speedup(407.0, 336.2, 1e6) == pytest.approx(64.0)


@pytest.fixture
def papers(tmp_path):
    """Two layers in the form in which the profiles were published."""
    (tmp_path / "profiles").mkdir()
    tensors = [["fc", 4_000_000, 4000], ["bias", 1000, 0], ["conv", 9_000_000, 6000]]
    (tmp_path / "profiles" / "small.json").write_text(json.dumps({"model": "small", "tensors": tensors}))
    times = {f"{name}_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]] for name in ("dgc", "random")}
    (tmp_path / "v100-compressor-overheads.json").write_text(json.dumps(times))
    return Papers(tmp_path)


@pytest.mark.parametrize("bed", [Bed(1, 10.0, 10.0), Bed(8, 100.0, 10.0)])
def test_systems_are_compared_fairly(papers, bed):
    profile = papers.profile("small", alone_ms=30.0)
    job = papers.job(profile, bed, "DGC")
    assert alone_ms(job) == pytest.approx(30.0)
    found = {system: scaling(job, system) for system in SYSTEMS_OF}
    assert all(0 < value <= 1 for value in found.values())
    assert found["HiPress"] > found["FP32"]  # a slow link and large tensors
    assert found["gradwire"] >= max(found["FP32"], found["GRACE"])
    free = papers.job(profile, bed, "DGC", free=True)
    assert scaling(free, "GRACE") >= found["GRACE"]


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(FormatError, match="GRADWIRE_DATA"):
        run(["--data", str(tmp_path)])
