"""The frontier of loss and bytes, and the systems that are rebuilt for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.accuracy.frontier import Point, below, over_exact, points_of
from benchmarks.accuracy.rivals import RIVALS, DeMo, SignDescent, cosines, tiles_of
from gradwire.core import ElementRun


def trainings(job: str = "tied", **losses: float) -> list[dict[str, Any]]:
    """Three seeds of each form, with the same loss."""
    base = {"job": job, "ranks": 4, "steps": 200}
    return [base | {"form": form, "seed": seed, "loss": loss} for form, loss in losses.items() for seed in range(3)]


def test_points_are_over_exact_sums_of_the_same_seed() -> None:
    found = trainings(exact=2.0, today4=2.02)
    for each in found:
        each["loss"] *= 1 + each["seed"]
    (job,) = points_of(found)
    (form,) = points_of(found)[job]
    point = points_of(found)[job][form]
    assert (job, form, point.seeds) == ("tied", "today4", 3)
    assert point.loss == pytest.approx(1.0) and point.width == pytest.approx(0.0, abs=1e-6)
    assert 0.5 < point.bytes_an_element < 0.52
    assert points_of([each for each in found if each["seed"] < 2]) == {}
    assert over_exact([each for each in found if each["form"] != "exact"], "today4") == []


def test_factors_of_matrices_have_the_bytes_of_the_job() -> None:
    """At rank 16 PowerSGD's factors of small matrices are no small part of them."""
    found = points_of(trainings(**{"exact": 2.0, "PowerSGD(rank=1)": 2.0, "PowerSGD(rank=16)": 2.0}))["tied"]
    assert 0.02 < found["PowerSGD(rank=1)"].bytes_an_element < found["PowerSGD(rank=16)"].bytes_an_element < 4


def test_demo_has_the_bytes_of_its_tiles() -> None:
    """On four ranks a rank receives three payloads, as much as from two encodes of twice the size. A component has 6 bytes."""
    whole = ElementRun(128 * 64, 0, (128, 64))
    assert RIVALS["demo32"][1]([whole]) == 2 * 2 * 32 * 6
    assert RIVALS["demo4096"][1]([whole, ElementRun(36 * 72, 0, (72, 36))]) == 2 * 6 * (whole.numel + 36 * 72)


def test_embeddings_count_with_the_bits_that_they_are_sent_with() -> None:
    plain, weighted = (points_of(trainings(**{"exact": 2.0, form: 2.0}))["tied"][form] for form in ("today2", "weighted4"))
    assert plain.bytes_an_element == pytest.approx(0.219, abs=1e-3)
    assert 0.266 < weighted.bytes_an_element < 0.35
    for form, least in (("weighted8", 0.391), ("EFSignSGD()", 0.127)):
        (point,) = points_of(trainings("transformer", **{"exact": 2.0, form: 2.0}))["transformer"].values()
        assert least < point.bytes_an_element < least + 0.1


def test_steps_by_signs_have_one_size() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    weight.grad = torch.tensor([5.0, -0.1, 0.0])
    SignDescent(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)).step()
    assert torch.allclose(weight, torch.tensor([0.85, 1.05, 0.95]))


@pytest.mark.parametrize(
    ("rival", "is_below"),
    [
        ((0.3, 0.1, 0.1), True),
        ((0.3, 0.85, 0.1), False),
        ((0.3, 1.1, 0.1), False),
        ((0.55, 0.5, 0.1), False),
        ((0.2, 9.0, 0.1), True),
    ],
    ids=["less loss", "within both intervals", "more loss", "more bytes than a spec as good", "fewer bytes than all specs"],
)
def test_a_rival_is_below_the_curve(rival: tuple[float, float, float], is_below: bool) -> None:
    own = {"weighted4": Point(0.27, 1.0, 0.1, 3), "today4": Point(0.52, 0.3, 0.1, 3)}
    assert below(own | {"loco": Point(*rival, 3)}, "loco") == is_below


@pytest.mark.parametrize("shape", [(384, 97), (128, 64), (7, 3, 5)])
@pytest.mark.parametrize("components", [1, 32, 4096])
def test_demo_sends_the_largest_components_and_keeps_the_others(shape: tuple[int, ...], components: int) -> None:
    torch.manual_seed(0)
    gradient, before = torch.randn(shape), torch.randn(shape)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    training = SimpleNamespace(optimizer=optimizer, encoded=["w"], exchanges=[None])
    demo = DeMo(training, components)  # type: ignore[arg-type]
    demo._momenta = [{"w": before.clone()}]
    whole = demo.fade * before + gradient
    sent = demo.means(0, [{"w": gradient, "bias": torch.ones(3)}])["w"]
    assert torch.allclose(sent + demo._momenta[0]["w"], whole, atol=1e-5)
    kept = float(sent.norm() / whole.norm())
    edges = [tiles_of(size, 64)[1] for size in (shape[0], whole.numel() // shape[0])]
    if components >= edges[0] * edges[1]:
        assert kept == pytest.approx(1, abs=1e-5)
    else:
        assert (components / (edges[0] * edges[1])) ** 0.5 < kept < 1, "the largest hold more than their share"


def test_cosines_make_a_smooth_tile_one_component() -> None:
    tile = torch.full((8, 8), 3.0)
    components = cosines(8) @ tile @ cosines(8).T
    assert components[0, 0] == pytest.approx(24.0) and components.abs().sum() == pytest.approx(24.0, abs=1e-4)
