"""What the benchmark of bits makes of its measurements, and what all benchmarks of learning share."""

import json
import operator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from benchmarks import bits, paired
from benchmarks.common import write_between
from benchmarks.papers.bayes import bayes
from gradwire.auto.adaptive_bits import sensitivities
from gradwire.auto.bit_errors import WIDTHS, measured
from gradwire.core.tensors import TensorInfo
from gradwire.errors import PlanError
from gradwire.planner.bits import Sensitivity, error_budget, exact


def tensors(**fields: Any) -> list[Sensitivity]:
    """Three of other sizes and scales, as AdaptiveBits measures them."""
    adaptive = gw.AdaptiveBits(**fields)
    generator = torch.Generator().manual_seed(0)
    infos = [TensorInfo(f"w{i}", (60, 64 << i), "float32") for i in range(3)]
    rows = [
        measured(adaptive, info.name, 10.0**i * torch.randn(info.numel, generator=generator), 0, 0)
        for i, info in enumerate(infos)
    ]
    return sensitivities(adaptive, infos, rows)


def test_errors_fall_with_bits_and_sizes_rise() -> None:
    for tensor in tensors():
        assert len(tensor.sizes) == len(WIDTHS) and list(tensor.sizes) == sorted(tensor.sizes)
        assert all(3 < more / less < 14 for more, less in pairwise(tensor.errors))
        assert tensor.top_norm < tensor.norm


def test_smaller_blocks_lose_less_and_send_more() -> None:
    for tensor in tensors(block=256, blocks=(64,)):
        (large, small), (large_errors, small_errors) = (
            (values[: len(WIDTHS)], values[len(WIDTHS) :]) for values in (tensor.sizes, tensor.errors)
        )
        assert all(map(operator.lt, large, small)) and all(map(operator.gt, large_errors, small_errors))


def test_bytes_are_compared_at_a_rules_own_error() -> None:
    found = bits.compare(tensors(blocks=bits.OTHER_BLOCKS))
    assert found["proven"] == 4
    assert 0.4 < found["size"] < 1 and max(found[name] for name in (*bits.RULES, "blocks")) <= 1
    alike = [t._replace(sizes=t.sizes * 6, errors=t.errors * 6) for t in tensors()]
    assert bits.compare(alike)["blocks"] == 1


def test_bayesian_search_keeps_the_budget_and_is_no_smaller_than_the_exact_choice() -> None:
    for seed in range(5):
        found, budget = tensors(), error_budget(tensors(), WIDTHS.index(4), 2.0)
        searched = bayes(found, budget, looks=40, seed=seed)
        assert searched.error <= budget and searched.nbytes >= exact(found, budget).nbytes
        assert searched.nbytes < sum(tensor.sizes[WIDTHS.index(4)] for tensor in found)
        assert searched == bayes(found, budget, looks=40, seed=seed)
    with pytest.raises(PlanError, match="the squared error is at least"):
        bayes(found, 0.0, looks=10)


def test_a_rule_that_was_not_measured_has_no_number() -> None:
    lines = bits.sizes_table({"mlp": {"10": {"size": 0.5, "blocks": 1.0, "kmeans": 0.9, "linear": 0.8}}})
    assert "| mlp | median | 0.500 | 0.900 | - | 0.800 | 1.000 | - |" in lines


def test_the_verdict_wants_less_on_the_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"10": {"kmeans": 0.97, "bayes": 0.9, "linear": 0.90}, "30": {"kmeans": 0.98, "bayes": 0.9, "linear": 0.91}}
    assert bits.too_large({"resnet": steps}) == 0
    assert bits.too_large({"transformer": steps}) == 1
    assert "0.975 of the bytes of kmeans" in capsys.readouterr().out
    assert bits.too_large({"resnet": {**steps, "60": {"kmeans": 1.001, "bayes": 0.9, "linear": 0.9}}}) == 1


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    path, trained = tmp_path / "results.json", []

    def train(job: str, seed: int, steps: int, names: list[str]) -> dict[str, float]:
        trained.append((job, seed, *names))
        return dict.fromkeys(names, seed + 0.5)

    def measure(*more: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
        options = paired.parser_of("bits", seeds=2).parse_args(["--jobs", "mlp", *more])
        return paired.measure(path, options, ["a", "b", "c"], train, {"why": "test"}, together=2, given=given)

    finals = measure(given={"mlp": {"a": {"0": 7.0}, "z": {"0": 1.0}}})
    assert finals == {"mlp": {"a": {"0": 7.0, "1": 1.5}, "b": {"0": 0.5, "1": 1.5}, "c": {"0": 0.5, "1": 1.5}}}
    assert trained == [("mlp", 0, "b"), ("mlp", 1, "a", "b"), ("mlp", 0, "c"), ("mlp", 1, "c")]
    assert measure() == finals and len(trained) == 4
    assert json.loads(path.read_text())["finals"] == finals
    with pytest.raises(SystemExit, match="holds runs of 300 steps"):
        measure("--steps", "20")
    assert len(measure("--again")["mlp"]["a"]) == 2 and len(trained) == 8


def test_pages_keep_what_stands_around_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x -->\nold\n<!-- y -->\nafter\n")
    write_between(page, "<!-- x -->", "<!-- y -->", ["new"])
    assert page.read_text() == "before\n<!-- x -->\n\nnew\n\n<!-- y -->\nafter\n"
    assert bits.PAGE.read_text().index(bits.BEGIN) < bits.PAGE.read_text().index(bits.END)
