"""Some of PyTorch's own tests with gradwire in gloo's place; all of them: `python -m benchmarks torch_tests`."""

import pytest

from benchmarks import torch_tests

SOME = (
    "test_all_reduce_sum_async",
    "test_monitored_barrier_gloo_subgroup",
    "test_ddp_comparison",
    "CPU_grad_is_view",
)


@pytest.mark.slow
@pytest.mark.thorough
def test_what_passes_with_gloo_passes_with_gradwire() -> None:
    found = torch_tests.outcomes(2, SOME)
    if failed_of(found["gloo"]):  # a busy machine kept torch's own ranks beyond their timeouts
        found = torch_tests.outcomes(2, SOME)
    assert not failed_of(found["gloo"]), "gloo alone fails"
    kinds = {place: torch_tests.beside(found["gloo"], found[place]) for place in torch_tests.PLACES}
    assert {place: each["lost"] for place, each in kinds.items()} == {place: [] for place in torch_tests.PLACES}
    assert len(kinds["backend"]["also pass"]) >= 4 and len(kinds["hook"]["also pass"]) >= 2
    assert kinds["auto hook"]["also pass"] == kinds["hook"]["also pass"]
    assert kinds["backend"]["ask for gloo by name"] == ["test_monitored_barrier_gloo_subgroup"]


def failed_of(outcomes: torch_tests.Outcomes) -> dict[str, str]:
    """The tests that failed, and why."""
    return {name: why for name, (how, why) in outcomes.items() if how == "failed"}


@pytest.mark.parametrize("test", torch_tests.ASK_FOR_GLOO)
def test_torch_still_asks_for_gloo(test: str) -> None:
    assert torch_tests.line_of(*torch_tests.ASK_FOR_GLOO[test]).startswith("torch/")
