"""Weights of elements: every SIMD level and the reference give the same bytes, those of the formula."""

import itertools
import math

import pytest
import torch
from test_kernels import DTYPES, NUMELS, Way, assert_all_alike, awkward, built, segments_of, way, whole

from gradwire.kernels import cpu, reference
from gradwire.kernels.reference.weights import ONE, forget_energy, scale_energy, values_of
from gradwire.kernels.segments import Segments


def energies(numel: int) -> torch.Tensor:
    """Energies of many sizes; some are zero, some blocks are."""
    generator = torch.Generator().manual_seed(6)
    found = torch.randn(numel, generator=generator).mul(6).exp()
    found[torch.rand(numel, generator=generator) < 0.1] = 0.0
    found[512:768] = 0.0
    found[1024:1152] *= 2.0**-90
    found[1152:1280] *= 2.0**80
    return torch.where(found < 2.0**-100, 0.0, found).clamp(max=2.0**100)


def run(way: Way, mean: torch.Tensor, segments: Segments, block: int = 128, floor: float = 0.01) -> dict[str, torch.Tensor]:
    """Everything the kernels make of a mean, by name."""
    energy, weights = energies(mean.numel()), torch.zeros(mean.numel(), dtype=torch.uint8)
    out = {"energy": energy, "weights": weights}
    with way.chosen():
        way.kernels.learn_energy(mean, segments, 0.98, energy)
        way.kernels.weigh_elements(energy, segments, block, floor, weights)
    return out


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_reference(dtype: torch.dtype) -> None:
    x = awkward(dtype)
    for block, floor in itertools.product((32, 64, 128, 1024), (1e-6, 0.01, 1.0)):
        assert_all_alike(lambda w, n=block, f=floor: run(w, x, segments_of((4,), block=n), n, f), f"{block=} {floor=}")
    for numel in (1, 7, 63, 64, 65, 8193, 70001):
        mean = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        assert_all_alike(lambda w, m=mean: run(w, m, whole(m.numel(), 2), 8192), f"{numel=}")


@way
def test_a_weight_is_the_power_of_two_next_to_the_root(way: Way) -> None:
    energy = energies(128 * 50)
    weights = torch.zeros(energy.numel(), dtype=torch.uint8)
    with way.chosen():
        way.kernels.weigh_elements(energy, whole(energy.numel(), 2), 128, 0.01, weights)
    found = values_of(weights).double().reshape(-1, 128)
    blocks = energy.double().reshape(-1, 128)
    mean = blocks.mean(1, True)
    exact = ((blocks + 0.01 * mean) / (1.01 * mean)).sqrt()
    some = (mean > 0).squeeze()
    ratio = (found / exact)[some].log2()
    assert bool((ratio.abs() <= 1 + 1e-6).all())  # the block's root is rounded too
    spread = (ratio - ratio.mean(1, True)).abs().amax()
    assert 0.4 < float(spread) < 1.0
    assert bool((found[~some] == 1).all()) and int((~some).sum()) == 2
    assert bool((found.log2() == found.log2().round()).all())


@way
def test_energies_are_means_of_squares_that_fade(way: Way) -> None:
    energy, expected = torch.zeros(300), torch.zeros(300, dtype=torch.float64)
    with way.chosen():
        for step in range(50):
            mean = torch.randn(300, generator=torch.Generator().manual_seed(step))
            way.kernels.learn_energy(mean, whole(300, 2), 0.9, energy)
            expected = 0.9 * expected + 0.1 * mean.double() ** 2
    assert torch.allclose(energy.double(), expected, rtol=1e-5)


@way
def test_means_that_are_not_finite_leave_the_energy(way: Way) -> None:
    mean = torch.ones(300)
    mean[torch.tensor([3, 130, 299, 7])] = torch.tensor([math.nan, math.inf, -math.inf, 2.0**60])
    energy = torch.full((300,), 5.0)
    with way.chosen():
        way.kernels.learn_energy(mean, whole(300, 2), 0.5, energy)
    kept = energy == 5.0
    assert kept.nonzero().flatten().tolist() == [3, 7, 130, 299] and bool((energy[~kept] == 3.0).all())


@way
def test_what_is_too_small_counts_as_zero(way: Way) -> None:
    energy, weights = torch.full((128,), 2.0**-100), torch.zeros(128, dtype=torch.uint8)
    with way.chosen():
        way.kernels.learn_energy(torch.full((128,), 2.0**-60), whole(128, 2), 0.5, energy)
        assert not energy.any()
        way.kernels.weigh_elements(energy, whole(128, 2), 128, 0.01, weights)
    assert bool((weights == ONE).all())


def test_an_energy_is_forgotten_and_scaled() -> None:
    energy, mean = torch.rand(sum(NUMELS)) + 0.1, torch.randn(sum(NUMELS))
    mean[5] = math.inf
    before = energy.clone()
    reference.learn_energy(mean, whole(mean.numel(), 2), 0.98, energy)
    forget_energy(mean, 0.98, energy)
    assert torch.allclose(energy, before, rtol=1e-5) and float(energy[5]) == float(before[5])
    scale_energy(energy, 8.0)
    assert torch.allclose(energy, 64 * before, rtol=1e-5)
    scale_energy(energy, 2.0**-60)
    assert not energy.any()


@built
def test_wrong_arguments_are_refused_in_words() -> None:
    weights = torch.zeros(300, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="as long as the flat buffer"):
        cpu.learn_energy(torch.zeros(300), whole(300, 2), 0.98, torch.zeros(299))
    with pytest.raises(RuntimeError, match="weights must be uint8"):
        cpu.weigh_elements(torch.zeros(300), whole(300, 2), 128, 0.01, weights[1:])
    with pytest.raises(RuntimeError, match="reaches past"):
        cpu.weigh_elements(torch.zeros(300), whole(301, 2), 128, 0.01, weights)
    with pytest.raises(RuntimeError, match="block of 3"):
        cpu.weigh_elements(torch.zeros(300), whole(300, 2), 3, 0.01, weights)
