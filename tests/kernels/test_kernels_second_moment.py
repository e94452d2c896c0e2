"""Second moments without noise: every SIMD level gives what torch gives, on all its threads, for every layout."""

from typing import Any
from unittest import mock

import pytest
import torch
from test_kernels import DTYPES, FASTER, awkward, built, others_run_during

from gradwire.kernels import Noise, cpu, lower_second_moments

NOISE = [Noise(0.9, 0.999, 4), Noise(0.8, 0.5, 2), Noise(0.5, 0.95, 1000)]


def tensors_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Second moments, first moments, and gradients with all that is special."""
    gradient = awkward(dtype)
    generator = torch.Generator().manual_seed(8)
    second, first = (torch.randn(gradient.numel(), generator=generator).to(dtype) for _ in range(2))
    return [second * second, first, gradient]


def lowered(tensors: list[torch.Tensor], noise: Noise, steps: int = 3) -> torch.Tensor:
    second, first, gradient = (each.clone(memory_format=torch.preserve_format) for each in tensors)
    lower_second_moments([second], [first], [gradient], [torch.tensor(float(steps))], noise)
    return second


def by_torch(tensors: list[torch.Tensor], noise: Noise) -> torch.Tensor:
    with mock.patch.object(cpu, "available", lambda: "not here"):
        return lowered(tensors, noise)


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noise", NOISE, ids=str)
def test_levels_give_what_torch_gives(noise: Noise, dtype: torch.dtype) -> None:
    tensors = tensors_of(dtype)
    expected = by_torch([each.float() for each in tensors], noise)
    finite = tensors[2].isfinite()
    assert torch.equal(expected[~finite], tensors[0].float()[~finite])
    assert bool((expected[finite] >= 0).all())
    for way in FASTER:
        with way.chosen():
            close(lowered(tensors, noise), expected.to(dtype))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the rounding of differences of numbers that are alike."""
    digits = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=digits, atol=1e-5)


@pytest.mark.parametrize("overflows", [0.0, 1.0, 2.0])
def test_a_step_that_was_left_out_on_a_device_changes_nothing(overflows: float) -> None:
    second, first, gradient = tensors_of(torch.float32)
    found = second.clone()
    lower_second_moments([found], [first], [gradient], [torch.tensor(3.0)], NOISE[0], torch.tensor([overflows]))
    close(found, second if overflows else by_torch([second, first, gradient], NOISE[0]))


@built
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_a_large_tensor(threads: int) -> None:
    generator = torch.Generator().manual_seed(9)
    tensors = [torch.rand(5 * 2**16 + 13, generator=generator) for _ in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        close(lowered(tensors, NOISE[0]), by_torch(tensors, NOISE[0]))
    finally:
        torch.set_num_threads(before)


LAYOUTS: dict[str, Any] = {
    "channels last": lambda each: each.reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with holes": lambda each: each.repeat_interleave(2)[::2],
    "transposed": lambda each: each.reshape(12, 10).t(),
    "of no dimension": lambda each: each[0],
    "empty": lambda each: each[:0],
    "float64": lambda each: each.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same(layout: str) -> None:
    generator = torch.Generator().manual_seed(9)
    plain = [torch.rand(120, generator=generator) for _ in range(3)]
    given, expected = LAYOUTS[layout], by_torch(plain, NOISE[0])
    moved = [given(each) for each in plain]
    lower_second_moments(*([each] for each in moved), [torch.tensor(3.0)], NOISE[0])
    close(moved[0].float(), given(expected).float())


def test_tensors_of_different_layouts_are_not_mixed_up() -> None:
    """The gradient of a transposed layer may lie in memory otherwise than the moments."""
    generator = torch.Generator().manual_seed(9)
    plain = [torch.rand(12, 10, generator=generator) for _ in range(3)]
    moved = [*plain[:2], plain[2].t().contiguous().t()]
    close(lowered(moved, NOISE[0]), by_torch(plain, NOISE[0]))


@built
def test_the_gil_is_released_meanwhile() -> None:
    tensors = [torch.ones(1 << 22) for _ in range(3)]
    assert others_run_during(lambda: lowered(tensors, NOISE[0]), 500)
